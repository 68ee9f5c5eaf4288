"""The configuration of draft heads, read from a folder's config.json: frozen and hashable."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.folder import CONFIG, OTHER_SUFFIXES, read_json
from ..checkpoint.loader import check_fields, check_numbers, compute_dtype
from ..checkpoint.safetensors import find_tensors
from ..config import Attention, Layer, Mlp, ModelConfig, ModelError
from ..families.config_keys import Keys, format_value

KINDS = ("medusa", "eagle", "eagle3", "mtp")
# Families whose checkpoints can have MTP layers, and the ending of a tensor that indicates them.
MTP_TENSORS = {
    "deepseek_v3": "eh_proj.weight",
    "qwen3_next": "mtp.fc.weight",
    "qwen3_5_text": "mtp.fc.weight",
}
# Keys of the target's configuration, which some Medusa checkpoints repeat.
TARGET_KEYS = (
    "hidden_act",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "tie_word_embeddings",
    "sliding_window",
    "attention_bias",
    "mlp_bias",
)

REFERENCE_VALUES = {  # values of eagle_config that describe the reference implementation
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True)
class DraftHeads:
    """Draft heads of one kind for one model, the target.

    Their features are the target's hidden states, after (`normed`) or before its final norm, or the
    outputs of several layers concatenated (`features`).
    """

    kind: str  # one of KINDS
    model: ModelConfig  # their decoder layers (medusa: none) and the target's vocabulary
    count: int = 1  # medusa: heads; the first predicts the token after the next
    depth: int = 1  # medusa: residual blocks of a head
    features: tuple[int, ...] = ()  # eagle3: indices of the target's layers whose outputs are used
    normed: bool = True  # features are outputs of the target's final norm or of the layers' own
    feature_dim: int = 0  # the width of the target's hidden states
    bias: bool = False  # of the projection that joins token and feature; medusa: of the blocks
    vocab: int = 0  # size of a reduced draft vocabulary; 0: the target's
    own_embedding: bool = False  # otherwise the target's is used
    own_head: bool = False  # otherwise the target's is used
    place: int = 0  # mtp: the number of its layer in the checkpoint
    normed_residual: bool = False  # eagle3: the residual starts from the normed feature


def read_heads(folder: Path, target: ModelConfig, kind: str, dtype: str = "auto") -> DraftHeads:
    """Read the heads in a folder for `target`; MTP layers are in the target's own folder."""
    hf = read_json(folder / CONFIG)
    check_numbers(hf)
    return parse_heads(hf, tensor_names(folder, kind), target, kind, dtype)


def tensor_names(folder: Path, kind: str) -> frozenset[str]:
    """The canonical names of a folder's tensors."""
    older = sorted(
        path.name for path in folder.iterdir() if path.suffix.removeprefix(".") in OTHER_SUFFIXES
    )
    if older and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} holds {older[0]} but no *.safetensors; weights are read from safetensors "
            "alone: older formats can run code. In that folder, with torch and safetensors.torch: "
            f"save_file({{k: v.clone() for k, v in torch.load({older[0]!r}, "
            f"weights_only=True).items()}}, 'model.safetensors')"
        )
    return frozenset(canonical_name(name, kind) for name in find_tensors(folder))


def canonical_name(name: str, kind: str) -> str:
    """The canonical name of a tensor, which has several in Medusa and EAGLE checkpoints."""
    if kind == "medusa":  # original names are numbers: head, then block or output table
        name = re.sub(r"^medusa_heads?\.", "", name)
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)
    return (
        name if kind == "mtp" else re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
    )


def parse_heads(
    hf: dict[str, Any], names: Collection[str], target: ModelConfig, kind: str, dtype="auto"
) -> DraftHeads:
    """Parse the heads' config.json; `names` are their tensors' canonical names."""
    read = {
        "medusa": parse_medusa,
        "eagle": parse_eagle,
        "eagle3": parse_eagle3,
        "mtp": parse_mtp,
    }.get(kind)
    if read is None:
        raise ModelError(f"heads are of kind {kind!r}; they can be {', '.join(KINDS)}")
    try:
        heads = read(hf, names, target)
    except ModelError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"config.json of the {kind} heads holds a value of the wrong kind: {error}"
        ) from error
    dtype = target.dtype if dtype == "auto" else compute_dtype(dtype, target.dtype)
    model = replace(heads.model, dtype=dtype, kv_cache_dtype=target.kv_cache_dtype)
    heads = replace(heads, model=model, feature_dim=target.dim)
    check_fields(heads)
    return heads


def parse_medusa(hf: dict[str, Any], names: Collection[str], target: ModelConfig) -> DraftHeads:
    """Parse the original or vLLM's keys."""
    is_original = "medusa_num_heads" in hf
    keys = Keys(hf)
    keys.ignore(
        "base_model_name_or_path", "version", "max_paths", "topk", "max_seq_len", "medusa_fc_bias"
    )
    if is_original:
        keys.ignore(*TARGET_KEYS)
    keys.refuse("logit_scale", 1.0)
    check_width(keys, target)
    depth = keys.count("medusa_num_layers" if is_original else "num_hidden_layers", 1)
    heads = DraftHeads(
        "medusa",
        make_model(target, (), target.dim, target.norm_eps, target.final_soft_cap),
        count=keys.count("medusa_num_heads" if is_original else "num_heads"),
        depth=depth,
        bias="blocks.0.layers.0.bias" in names,
        vocab=reduced_vocab(keys, "truncated_vocab_size", target),
        own_head=not keys("original_lm_head", False),
    )
    check_all_read(keys, "medusa")
    if heads.vocab and not heads.own_head:
        raise ModelError(
            "config.json: truncated_vocab_size needs heads of their own: original_lm_head "
            "must be false"
        )
    return heads


def parse_eagle(hf: dict[str, Any], names: Collection[str], target: ModelConfig) -> DraftHeads:
    """EAGLE and EAGLE-2, whose embedding and head are copies of the target's."""
    keys = Keys(hf)
    check_width(keys, target)
    draft_model = make_decoder(keys, names, target, target.dim, target.final_soft_cap)
    check_all_read(keys, "eagle")
    return DraftHeads("eagle", draft_model, bias="fc.bias" in names)


def parse_eagle3(hf: dict[str, Any], names: Collection[str], target: ModelConfig) -> DraftHeads:
    """EAGLE-3, in the original format or that of vLLM's speculators."""
    keys = Keys({**hf, **(hf.get("transformer_layer_config") or {})})
    keys.ignore(
        *(name for name in hf if name.startswith("speculators_")), "transformer_layer_config"
    )
    keys.ignore("embed_requires_grad")
    keys.refuse("norm_before_fc", False)
    width = keys.count("target_hidden_size", None)
    dim = keys.count("hidden_size") if width else target.dim
    check_width(keys, target, "target_hidden_size" if width else "hidden_size")
    heads = DraftHeads(
        "eagle3",
        make_decoder(keys, names, target, dim, None),
        features=feature_layers(keys, len(target.layers)),
        normed=False,
        vocab=reduced_vocab(keys, "draft_vocab_size", target),
        own_embedding="embed_tokens.weight" in names,
        own_head=True,
        normed_residual=keys("norm_before_residual", False),
    )
    check_all_read(keys, "eagle3")
    if dim != target.dim and not heads.own_embedding:
        raise ModelError(
            f"the heads are {dim} wide and the target {target.dim}, so that they need an embedding "
            "of their own; the checkpoint lacks the tensor 'embed_tokens.weight'"
        )
    return heads


def parse_mtp(hf: dict[str, Any], names: Collection[str], target: ModelConfig) -> DraftHeads:
    """The first multi-token prediction layer; embedding and head are the target's."""
    ending = MTP_TENSORS.get(target.family)
    if ending is None or not any(name.endswith(ending) for name in names):
        raise ModelError(
            f"this {target.family} model brings no layer that predicts further tokens. Checkpoints "
            f"of {', '.join(MTP_TENSORS)} can, where they have a tensor "
            f"{' or '.join(sorted({*MTP_TENSORS.values()}))}"
        )
    if (hf.get("text_config") or hf).get("mtp_use_dedicated_embeddings"):
        raise ModelError(
            "config.json: mtp_use_dedicated_embeddings = True; only the model's own is supported"
        )
    attention_layers = [layer for layer in target.layers if layer.attention.cached]
    draft_model = make_model(
        target, (attention_layers[-1],), target.dim, target.norm_eps, target.final_soft_cap
    )
    if target.family == "deepseek_v3":
        # The norm belongs to the output head (`shared_head`): drafted features are before it.
        return DraftHeads("mtp", draft_model, normed=False, place=len(target.layers))
    return DraftHeads("mtp", draft_model)


def make_decoder(
    keys: Keys, names: Collection[str], target: ModelConfig, dim: int, soft_cap: float | None
):
    """Llama-like layers; biases and head norms are inferred from the tensors' names."""
    keys.refuse("mlp_bias", False)
    keys.ignore("bias", "qkv_bias", "attention_bias", "tie_word_embeddings")
    prefix = "layers.0.self_attn"
    heads = keys.heads()
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], target.max_len),
        bias=f"{prefix}.q_proj.bias" in names,
        out_bias=f"{prefix}.o_proj.bias" in names,
        qk_norm="head" if f"{prefix}.q_norm.weight" in names else None,
    )
    layer = Layer(attention, Mlp(keys.count("intermediate_size"), keys.activation("hidden_act")))
    layers = (layer,) * keys.count("num_hidden_layers", 1)
    return make_model(target, layers, dim, keys.positive("rms_norm_eps", 1e-6), soft_cap)


def make_model(
    target: ModelConfig,
    layers: tuple[Layer, ...],
    dim: int,
    norm_eps: float,
    soft_cap: float | None,
):
    return ModelConfig(
        family=target.family,
        vocab_size=target.vocab_size,
        dim=dim,
        layers=layers,
        max_len=target.max_len,
        norm_eps=norm_eps,
        dtype=target.dtype,
        final_soft_cap=soft_cap,
    )


def check_width(keys: Keys, target: ModelConfig, name: str = "hidden_size") -> None:
    """Reject heads that were made for another model."""
    for key, value, unit in (
        (name, target.dim, "wide"),
        ("vocab_size", target.vocab_size, "tokens large"),
    ):
        if (configured := keys.count(key, value)) != value:
            raise ModelError(
                f"config.json: {key} = {configured}; the target is {value} {unit}, so the heads "
                "were made for another model"
            )


def reduced_vocab(keys: Keys, name: str, target: ModelConfig) -> int:
    """The size of a reduced draft vocabulary; 0 if it is the target's."""
    count = keys.count(name, target.vocab_size)
    if count > target.vocab_size:
        raise ModelError(
            f"config.json: {name} = {count}; it can be at most the target's {target.vocab_size}"
        )
    return 0 if count == target.vocab_size else count


def feature_layers(keys: Keys, count: int) -> tuple[int, ...]:
    """The layers whose outputs are features; by default those of the reference implementation."""
    eagle_keys = Keys(keys("eagle_config", {}), "eagle_config")  # used by sglang and NVIDIA
    for name, value in REFERENCE_VALUES.items():
        eagle_keys.refuse(name, value)
    name = "eagle_aux_hidden_state_layer_ids"
    layer_ids = eagle_keys(name, [])
    next_layer_ids = keys(name, [])
    check_all_read(eagle_keys, "eagle3")
    if not layer_ids:  # vLLM counts the layers that receive them
        layer_ids = [number - 1 for number in next_layer_ids or (2, count // 2, count - 3)]
    if len(layer_ids) != 3 or not all(
        type(number) is int and 0 <= number < count for number in layer_ids
    ):
        raise ModelError(
            f"config.json: features are taken after the layers {layer_ids}; these must be three of "
            f"the target's, which are numbered from 0 to {count - 1}"
        )
    return tuple(layer_ids)


def check_all_read(keys: Keys, kind: str) -> None:
    """Reject unknown keys, which may change the drafts."""
    if unknown := keys.unknown():
        first = unknown[0]
        raise ModelError(
            f"config.json: {first} = {format_value(keys.hf[first])} is not understood for {kind} "
            "heads; it may change what they draft, so they are not loaded. If it does not, remove "
            "it from the file"
        )
