"""What drafting heads compute: frozen, hashable, read from the config.json of a published folder."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.folder import CONFIG, OLDER, read_json
from ..checkpoint.loader import check_fields, check_numbers, compute_dtype
from ..checkpoint.safetensors import find_tensors
from ..config import Attention, Layer, Mlp, ModelConfig, ModelError
from ..families.config_keys import Keys, shown

KINDS = ("medusa", "eagle", "eagle3", "mtp")
# Families whose checkpoints bring a layer for further tokens, and the tensor by which it is known.
PREDICTS = {"deepseek_v3": "eh_proj.weight", "qwen3_next": "mtp.fc.weight", "qwen3_5_text": "mtp.fc.weight"}
# Of the model that Medusa's heads were trained for, which some of their files repeat.
OF_THE_TARGET = (
    "hidden_act", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "tie_word_embeddings",
    "sliding_window", "attention_bias", "mlp_bias",
)  # fmt: skip

AS_MADE = {  # what an eagle_config may say that the makers' code does anyway
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "parallel_draft_step": 1,
}  # fmt: skip


@dataclass(frozen=True)
class DraftHeads:
    """Heads of one kind for one model, the target.

    The features that they draft from are the target's hidden states, after its final norm or before it (`normed`), or
    what some of its layers give, side by side (`features`).
    """

    kind: str  # one of KINDS
    model: ModelConfig  # their own layers, none of medusa's; the target's vocabulary
    count: int = 1  # medusa: heads, each for one place; the first is for the token after the next one
    depth: int = 1  # medusa: residual blocks of a head
    features: tuple[int, ...] = ()  # eagle3: the target's layers whose rows are features, by number, from 0
    normed: bool = True  # features are what norms give: the target's its final norm, the layers' own theirs, if any
    feature_dim: int = 0  # the width of the target's hidden states
    bias: bool = False  # of the product that joins token and feature; medusa: of the blocks
    vocab: int = 0  # tokens that can be drafted, where these are fewer than all; 0: all
    own_embedding: bool = False  # else the target's
    own_head: bool = False  # else the target's
    place: int = 0  # mtp: the number of its layer in the checkpoint
    normed_residual: bool = False  # eagle3: the first layer adds to the normed feature, not to the feature


def read_heads(folder: Path, target: ModelConfig, kind: str, dtype: str = "auto") -> DraftHeads:
    """The heads in a folder, for `target`; of kind mtp they are in the target's own folder."""
    hf = read_json(folder / CONFIG)
    check_numbers(hf)
    return heads_of(hf, tensor_names(folder, kind), target, kind, dtype)


def tensor_names(folder: Path, kind: str) -> frozenset[str]:
    """The names of a folder's tensors, by the one name that each has."""
    older = sorted(path.name for path in folder.iterdir() if path.suffix.removeprefix(".") in OLDER)
    if older and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} holds {older[0]} but no *.safetensors; weights are read from safetensors alone: older "
            "formats can run code. In that folder, with torch and safetensors.torch: "
            f"save_file({{k: v.clone() for k, v in torch.load({older[0]!r}, weights_only=True).items()}}, "
            "'model.safetensors')"
        )
    return frozenset(canonical(name, kind) for name in find_tensors(folder))


def canonical(name: str, kind: str) -> str:
    """The one name of a tensor: Medusa's heads and EAGLE's layer go by several."""
    if kind == "medusa":  # the makers' own names are numbers: head, then block or table
        name = re.sub(r"^medusa_heads?\.", "", name)
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)
    return name if kind == "mtp" else re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def heads_of(hf: dict[str, Any], names: Collection[str], target: ModelConfig, kind: str, dtype="auto") -> DraftHeads:
    """The heads that a config.json describes, whose tensors have these names."""
    read = {"medusa": medusa, "eagle": eagle, "eagle3": eagle3, "mtp": mtp}.get(kind)
    if read is None:
        raise ModelError(f"heads are of kind {kind!r}; they can be {', '.join(KINDS)}")
    try:
        heads = read(hf, names, target)
    except ModelError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"config.json of the {kind} heads holds a value of the wrong kind: {error}") from error
    dtype = target.dtype if dtype == "auto" else compute_dtype(dtype, target.dtype)
    model = replace(heads.model, dtype=dtype, kv_cache_dtype=target.kv_cache_dtype)
    heads = replace(heads, model=model, feature_dim=target.dim)
    check_fields(heads)
    return heads


def medusa(hf: dict[str, Any], names: Collection[str], target: ModelConfig) -> DraftHeads:
    """The makers' keys, or vLLM's."""
    own = "medusa_num_heads" in hf
    keys = Keys(hf)
    keys.ignore("base_model_name_or_path", "version", "max_paths", "topk", "max_seq_len", "medusa_fc_bias")
    if own:
        keys.ignore(*OF_THE_TARGET)
    keys.refuse("logit_scale", 1.0)
    check_width(keys, target)
    depth = keys.count("medusa_num_layers" if own else "num_hidden_layers", 1)
    heads = DraftHeads(
        "medusa",
        model(target, (), target.dim, target.norm_eps, target.final_soft_cap),
        count=keys.count("medusa_num_heads" if own else "num_heads"),
        depth=depth,
        bias="blocks.0.layers.0.bias" in names,
        vocab=smaller(keys, "truncated_vocab_size", target),
        own_head=not keys("original_lm_head", False),
    )
    done(keys, "medusa")
    if heads.vocab and not heads.own_head:
        raise ModelError("config.json: truncated_vocab_size needs heads of their own: original_lm_head must be false")
    return heads


def eagle(hf: dict[str, Any], names: Collection[str], target: ModelConfig) -> DraftHeads:
    """EAGLE and EAGLE-2: embedding and head are copies of the target's, and those are used."""
    keys = Keys(hf)
    check_width(keys, target)
    made = decoder_of(keys, names, target, target.dim, target.final_soft_cap)
    done(keys, "eagle")
    return DraftHeads("eagle", made, bias="fc.bias" in names)


def eagle3(hf: dict[str, Any], names: Collection[str], target: ModelConfig) -> DraftHeads:
    """EAGLE-3, as its makers write it, or vLLM's speculators."""
    keys = Keys({**hf, **(hf.get("transformer_layer_config") or {})})
    keys.ignore(*(name for name in hf if name.startswith("speculators_")), "transformer_layer_config")
    keys.ignore("embed_requires_grad")
    keys.refuse("norm_before_fc", False)
    width = keys.count("target_hidden_size", None)
    dim = keys.count("hidden_size") if width else target.dim
    check_width(keys, target, "target_hidden_size" if width else "hidden_size")
    heads = DraftHeads(
        "eagle3",
        decoder_of(keys, names, target, dim, None),
        features=feature_layers(keys, len(target.layers)),
        normed=False,
        vocab=smaller(keys, "draft_vocab_size", target),
        own_embedding="embed_tokens.weight" in names,
        own_head=True,
        normed_residual=keys("norm_before_residual", False),
    )
    done(keys, "eagle3")
    if dim != target.dim and not heads.own_embedding:
        raise ModelError(
            f"the heads are {dim} wide and the target {target.dim}, so that they need an embedding of their own; the "
            "checkpoint lacks the tensor 'embed_tokens.weight'"
        )
    return heads


def mtp(hf: dict[str, Any], names: Collection[str], target: ModelConfig) -> DraftHeads:
    """The first layer that a checkpoint brings to predict further tokens; embedding and head are the target's."""
    known = PREDICTS.get(target.family)
    if known is None or not any(name.endswith(known) for name in names):
        raise ModelError(
            f"this {target.family} model brings no layer that predicts further tokens. Checkpoints of "
            f"{', '.join(PREDICTS)} can, where they have a tensor {' or '.join(sorted({*PREDICTS.values()}))}"
        )
    if (hf.get("text_config") or hf).get("mtp_use_dedicated_embeddings"):
        raise ModelError("config.json: mtp_use_dedicated_embeddings = True; only the model's own is supported")
    attends = [layer for layer in target.layers if layer.attention.cached]
    made = model(target, (attends[-1],), target.dim, target.norm_eps, target.final_soft_cap)
    if target.family == "deepseek_v3":
        # Checkpoints count the norm to the head (`shared_head`): what goes from layer to layer has not passed it.
        return DraftHeads("mtp", made, normed=False, place=len(target.layers))
    return DraftHeads("mtp", made)


def decoder_of(keys: Keys, names: Collection[str], target: ModelConfig, dim: int, soft_cap: float | None):
    """A few layers like Llama's; biases and norms of heads are there if their tensors are."""
    keys.refuse("mlp_bias", False)
    keys.ignore("bias", "qkv_bias", "attention_bias", "tie_word_embeddings")
    here, heads = "layers.0.self_attn", keys.heads()
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], target.max_len),
        bias=f"{here}.q_proj.bias" in names,
        out_bias=f"{here}.o_proj.bias" in names,
        qk_norm="head" if f"{here}.q_norm.weight" in names else None,
    )
    layer = Layer(attention, Mlp(keys.count("intermediate_size"), keys.activation("hidden_act")))
    layers = (layer,) * keys.count("num_hidden_layers", 1)
    return model(target, layers, dim, keys.positive("rms_norm_eps", 1e-6), soft_cap)


def model(target: ModelConfig, layers: tuple[Layer, ...], dim: int, norm_eps: float, soft_cap: float | None):
    return ModelConfig(
        family=target.family, vocab_size=target.vocab_size, dim=dim, layers=layers, max_len=target.max_len,
        norm_eps=norm_eps, dtype=target.dtype, final_soft_cap=soft_cap,
    )  # fmt: skip


def check_width(keys: Keys, target: ModelConfig, name: str = "hidden_size") -> None:
    """Refuse heads that were made for another model."""
    for key, value, what in ((name, target.dim, "wide"), ("vocab_size", target.vocab_size, "tokens large")):
        if (found := keys.count(key, value)) != value:
            raise ModelError(
                f"config.json: {key} = {found}; the target is {value} {what}, so the heads were made for another model"
            )


def smaller(keys: Keys, name: str, target: ModelConfig) -> int:
    """The number of tokens that can be drafted; 0: all."""
    count = keys.count(name, target.vocab_size)
    if count > target.vocab_size:
        raise ModelError(f"config.json: {name} = {count}; it can be at most the target's {target.vocab_size}")
    return 0 if count == target.vocab_size else count


def feature_layers(keys: Keys, count: int) -> tuple[int, ...]:
    """The layers after which features are taken: those of the makers' code where the file names none."""
    inside = Keys(keys("eagle_config", {}), "eagle_config")  # sglang's and NVIDIA's
    for name, value in AS_MADE.items():
        inside.refuse(name, value)
    name = "eagle_aux_hidden_state_layer_ids"
    after, before = inside(name, []), keys(name, [])
    done(inside, "eagle3")
    if not after:  # vLLM's: numbers of the layers that get them
        after = [number - 1 for number in before or (2, count // 2, count - 3)]
    if len(after) != 3 or not all(type(number) is int and 0 <= number < count for number in after):
        raise ModelError(
            f"config.json: features are taken after the layers {after}; these must be three of the target's, which are "
            f"numbered from 0 to {count - 1}"
        )
    return tuple(after)


def done(keys: Keys, kind: str) -> None:
    """Refuse a config.json with keys that were not read and may change the drafts."""
    if unknown := keys.unknown():
        first = unknown[0]
        raise ModelError(
            f"config.json: {first} = {shown(keys.hf[first])} is not understood for {kind} heads; it may change "
            "what they draft, so they are not loaded. If it does not, remove it from the file"
        )
