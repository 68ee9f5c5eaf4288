"""Maps the tensors of a GGUF file to those of the checkpoint: names, stacked experts, row order.

Most tensors are stored row by row as in the checkpoint, so rows in a block format can be used
without decoding. Where llama.cpp changed the values, the origin has a `transform`.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ..errors import ModelError
from . import hybrids
from .contents import Config, Shapes
from .origin import Change, Origin, TensorSlice, unpaired_rows

OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias", "token_embd_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight", "output.bias": "lm_head.bias",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}  # fmt: skip
LAYER = {  # tensors of a layer in most architectures
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{E}.gate_proj",
    "ffn_up_exps": "mlp.experts.{E}.up_proj",
    "ffn_down_exps": "mlp.experts.{E}.down_proj",
    "ffn_gate_up_exps": "mlp.experts.{E}.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
POST = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SANDWICH = POST | {"ffn_norm": "pre_feedforward_layernorm"}
NUMBERED = {  # experts with numbered projections
    "ffn_gate_exps": "mlp.experts.{E}.w1",
    "ffn_up_exps": "mlp.experts.{E}.w3",
    "ffn_down_exps": "mlp.experts.{E}.w2",
}
SHARED = {
    f"ffn_{projection}_shexp": f"mlp.shared_expert.{projection}_proj"
    for projection in ("gate", "up", "down")
} | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
FUSED = {"ffn_up": "mlp.gate_up_proj"}
GRANITE = {
    "ffn_gate_inp": "moe.gate",
    "ffn_gate_shexp": "mlp.gate_up_proj",
    "ffn_up_shexp": "mlp.gate_up_proj",
    "ffn_down_shexp": "mlp.down_proj",
} | {f"ffn_{x}_exps": f"moe.experts.{{E}}.{x}_proj" for x in ("gate", "up", "down")}
LFM2 = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
NAMES_BY_ARCHITECTURE: dict[str, dict[str, str]] = {  # names that differ from LAYER
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.kv_b_proj",
        "attn_v_b": "self_attn.kv_b_proj",
    },
    "ernie4_5-moe": {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    "exaone4": POST,
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "gemma4": SANDWICH
    | {
        "layer_output_scale.weight": "layer_scalar",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "ffn_gate_inp.weight": "router.proj.weight",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
    | {f"ffn_{x}_exps": f"experts.{{E}}.{x}_proj" for x in ("gate", "up", "down", "gate_up")},
    "glm4": FUSED
    | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    "glm4moe": POST,
    "gpt-oss": POST
    | {
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
        "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
        "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
        "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
    "granitehybrid": GRANITE
    | hybrids.MAMBA
    | {"ffn_gate": "mlp.gate_up_proj", "ffn_up": "mlp.gate_up_proj"},
    "granitemoe": GRANITE,
    "hunyuan-moe": {f"ffn_{x}_shexp": f"mlp.shared_mlp.{x}_proj" for x in ("gate", "up", "down")},
    "lfm2": LFM2,
    "lfm2moe": LFM2 | NUMBERED | {"exp_probs_b.bias": "mlp.expert_bias"},
    "llama": NUMBERED,
    "llama4": {
        "ffn_gate_inp": "feed_forward.router",
        "ffn_gate_exps.weight": "feed_forward.experts.gate_up_proj",
        "ffn_up_exps.weight": "feed_forward.experts.gate_up_proj",
        "ffn_down_exps.weight": "feed_forward.experts.down_proj",
    }
    | {f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")}
    | {f"ffn_{x}_shexp": f"feed_forward.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    "minimax-m2": NUMBERED | {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    "olmo2": POST,
    "phi3": FUSED,
    "phimoe": NUMBERED,
    "qwen2moe": SHARED,
    "seed_oss": POST,
} | hybrids.layer_names(SHARED | POST)
# Architectures whose query and key rows llama.cpp interleaves for its rotary embedding.
PAIRED = {
    "granite",
    "granitehybrid",
    "granitemoe",
    "llama",
    "mistral3",
    "nemotron_h",
    "nemotron_h_moe",
    "smollm3",
}
NORM_LESS_ONE = {"gemma2", "gemma3", *hybrids.DELTA}  # the file adds 1 to the norms' scales
# Tensors that are part of the configuration, and tensors that llama.cpp never used.
CONFIGURATION = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
UNUSED = ("attn_rot_embd.weight",)
BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)")


def checkpoint_name(architecture: str, name: str) -> str | None:
    """The checkpoint's tensor that the file's tensor becomes, or is a piece of; None if there is
    none.

    A stack of experts becomes many tensors: the name has {E} in place of the expert's number.
    """
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    if (match := BLOCK.fullmatch(name)) is None:
        return None
    number, layer_name = match.groups()
    names = LAYER | NAMES_BY_ARCHITECTURE.get(architecture, {})
    if layer_name in names:  # names with their ending
        return f"model.layers.{number}.{names[layer_name]}"
    stem, _, ending = layer_name.rpartition(".")
    if stem not in names or ending not in ("weight", "bias"):
        return None
    return f"model.layers.{number}.{names[stem]}.{ending}"


def gguf_name(architecture: str, name: str) -> str | None:
    """The inverse of `checkpoint_name`; None if the file has no such tensor."""
    names_outside_layers = {
        target: gguf_stem for gguf_stem, target in reversed(OUTSIDE_LAYERS.items())
    }
    if name in names_outside_layers:
        return names_outside_layers[name]
    if (match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)) is None:
        return None
    number, layer_name = match.groups()
    names = {
        target: gguf_stem
        for gguf_stem, target in (LAYER | NAMES_BY_ARCHITECTURE.get(architecture, {})).items()
    }
    layer_name = re.sub(r"\.experts\.\d+\.", ".experts.{E}.", layer_name)
    if layer_name in names:
        return f"blk.{number}.{names[layer_name]}"
    stem, _, ending = layer_name.rpartition(".")
    return f"blk.{number}.{names[stem]}.{ending}" if stem in names else None


def tensor_change(architecture: str, name: str, config: Config) -> Change:
    """How to undo llama.cpp's change to a tensor (or to a stack of experts)."""
    _, _, stem = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    if architecture in PAIRED and stem in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        return Change(rows=unpaired_rows(heads, config["head_dim"]))
    if (change := hybrids.tensor_change(architecture, stem, config)) is not None:
        return change
    if architecture in NORM_LESS_ONE and name.endswith("norm.weight"):
        return Change(
            transform=lambda x: x.astype(np.float32) - 1, inverse=lambda x: x.astype(np.float32) + 1
        )
    if stem == "conv" and architecture in ("lfm2", "lfm2moe"):
        return Change(transform=lambda x: x[:, None])
    return Change()


def origins(architecture: str, shapes: Shapes, config: Config) -> dict[str, Origin]:
    """The origin of every checkpoint tensor that the file holds; `config` is the result of
    `hf_config`.
    """
    origins_by_name: dict[str, Origin] = {}
    names_by_target: dict[str, dict[str, str]] = {}
    layers = config["num_hidden_layers"]
    for name, shape in shapes.items():
        block = BLOCK.fullmatch(name)
        if name in CONFIGURATION or (block and (int(block[1]) >= layers or block[2] in UNUSED)):
            continue
        if (target := checkpoint_name(architecture, name)) is None:
            raise ModelError(f"GGUF: the tensor {name} is not known in {architecture} models")
        stem = block[2] if block else name
        if not shape or 0 in shape:
            raise ModelError(f"GGUF: the tensor {name} has shape {shape}; it must hold numbers")
        kind = stem.rpartition(".")[0]
        if piece := JOINED_TENSORS.get(architecture, {}).get(stem):
            names_by_target.setdefault(target, {})[piece] = name
        elif kind == "attn_qkv" and architecture != "phi3" and "self_attn" in target:
            origins_by_name |= split_qkv(architecture, name, shape, target, config)
        elif kind == "ffn_gate_up_exps":
            origins_by_name |= split_gate_up_experts(architecture, name, shape, target)
        elif "{E}" in target:
            origins_by_name |= {
                target.replace("{E}", str(expert)): Origin(shape[1:], (TensorSlice(name, expert),))
                for expert in range(shape[0])
            }
        else:
            change = tensor_change(architecture, name, config)
            if change.rows is not None and shape[0] != len(change.rows):
                raise ModelError(
                    f"GGUF: the tensor {name} has shape {shape}; it must have "
                    f"{len(change.rows)} rows"
                )
            checkpoint_shape = checkpoint_shape_for(architecture, stem, shape)
            origins_by_name[target] = Origin(
                checkpoint_shape, (TensorSlice(name, None, change.rows),), change.transform
            )
    for target, piece_names in names_by_target.items():
        origins_by_name[target] = join_tensors(architecture, target, piece_names, shapes, config)
    return origins_by_name


def checkpoint_shape_for(architecture: str, stem: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape in the checkpoint: llama.cpp drops or adds axes of size 1."""
    if stem in ("shortconv.conv.weight", "ssm_conv1d.weight") and len(shape) == 2:
        return (shape[0], 1, shape[1])
    if stem == "ffn_gate_inp_shexp.weight" and len(shape) == 1:
        return (1, *shape)
    if architecture == "ernie4_5-moe" and stem == "exp_probs_b.bias" and len(shape) == 1:
        return (1, *shape)
    if stem in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        return (int(np.prod(shape)),)
    return shape


def split_qkv(
    architecture: str, name: str, shape: tuple[int, ...], target: str, config: Config
) -> dict[str, Origin]:
    """Split a fused QKV tensor by rows."""
    H = config["head_dim"]
    N = config["num_attention_heads"]
    K = config["num_key_value_heads"]
    if shape[0] != (N + 2 * K) * H:
        raise ModelError(
            f"GGUF: the tensor {name} has shape {shape}; it must have {(N + 2 * K) * H} rows"
        )
    origins_by_name = {}
    start = 0
    for projection, heads in (("q", N), ("k", K), ("v", K)):
        all_rows = np.arange(heads * H)
        rows = unpaired_rows(heads, H) if architecture in PAIRED and projection != "v" else all_rows
        origins_by_name[target.replace("qkv_proj", f"{projection}_proj")] = Origin(
            (heads * H, *shape[1:]), (TensorSlice(name, None, start + rows),)
        )
        start += heads * H
    return origins_by_name


def split_gate_up_experts(
    architecture: str, name: str, shape: tuple[int, ...], target: str
) -> dict[str, Origin]:
    """Split a stack of experts whose rows hold both gate and up projection."""
    if len(shape) < 2 or shape[1] % 2:
        raise ModelError(f"GGUF: the tensor {name} has shape {shape}; it must have two equal parts")
    F = shape[1] // 2
    layer_names = LAYER | NAMES_BY_ARCHITECTURE.get(architecture, {})
    number = target.split(".")[2]
    if "{E}" not in (gate_name := layer_names["ffn_gate_exps"]):
        raise ModelError(f"GGUF: the tensor {name} is not supported for {architecture}")
    return {
        f"model.layers.{number}.{product.replace('{E}', str(expert))}.weight": Origin(
            (F, *shape[2:]), (TensorSlice(name, expert, start + np.arange(F)),)
        )
        for product, start in ((gate_name, 0), (layer_names["ffn_up_exps"], F))
        for expert in range(shape[0])
    }


def join_tensors(
    architecture: str, target: str, names: Mapping[str, str], shapes: Shapes, config: Config
) -> Origin:
    """The origin of a checkpoint tensor that is several tensors in the file."""
    required = next(pair for pair in JOIN_GROUPS if {*pair} & {*names})
    if missing := {*required} - {*names}:
        raise ModelError(
            f"GGUF: {target} needs a tensor for {min(missing)} in addition to {min(names.values())}"
        )
    if architecture == "qwen3next":
        return hybrids.qkvz_origin(names, shapes, config)
    if architecture == "deepseek2":
        return join_latent_kv(names, shapes)
    if "down" in names:
        shape = shapes[names["down"]]
        tensor = TensorSlice(names["down"])
        if len(shape) != 3:
            return Origin(shape, (tensor,))
        return Origin((shape[0], shape[2], shape[1]), (tensor,), lambda x: x.swapaxes(1, 2))
    gate, up = (shapes[names[piece]] for piece in ("gate", "up"))
    if gate != up or len(gate) < 2:
        raise ModelError(
            f"GGUF: {names['gate']} has shape {gate} and {names['up']} {up}; they must be the same"
        )
    slices = TensorSlice(names["gate"]), TensorSlice(names["up"])
    if architecture.startswith("granite"):
        return Origin((2 * gate[0], *gate[1:]), slices)
    alternate = architecture == "gpt-oss"
    shape = (gate[0], *gate[2:], 2 * gate[1])
    return Origin(shape, slices, partial(fuse_gate_up, alternate=alternate))


def fuse_gate_up(gate: np.ndarray, up: np.ndarray, alternate: bool) -> np.ndarray:
    """Fuse two [E, F, D] to [E, D, 2F], or two biases [E, F] to [E, 2F]; `alternate` interleaves
    gate and up.
    """
    gate, up = (np.moveaxis(x, 1, -1) for x in (gate, up))
    if not alternate:
        return np.concatenate([gate, up], axis=-1)
    interleaved = np.stack([gate, up], axis=-1)
    return interleaved.reshape(*interleaved.shape[:-2], -1)


def join_latent_kv(names: Mapping[str, str], shapes: Shapes) -> Origin:
    """The KV up-projection of all heads from [N, A, nope] and [N, v, A]: head by head, as [nope +
    v, A].
    """
    k = shapes[names["k"]]
    v = shapes[names["v"]]
    if len(k) != 3 or len(v) != 3 or (k[0], k[1]) != (v[0], v[2]):
        raise ModelError(
            f"GGUF: {names['k']} has shape {k} and {names['v']} {v}; they do not fit together"
        )
    shape = (k[0] * (k[2] + v[1]), k[1])
    return Origin(
        shape,
        (TensorSlice(names["k"]), TensorSlice(names["v"])),
        lambda k, v: np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(shape),
    )


STACKS: dict[str, Any] = {
    f"ffn_{name}_exps.{ending}": name
    for name in ("gate", "up", "down")
    for ending in ("weight", "bias")
}
# Tensors that are joined to one, and transposed stacks.
JOINED_TENSORS: dict[str, dict[str, str]] = {
    "deepseek2": {"attn_k_b.weight": "k", "attn_v_b.weight": "v"},
    "gpt-oss": STACKS,
    "granitehybrid": {
        "ffn_gate.weight": "gate",
        "ffn_up.weight": "up",
        "ffn_gate_shexp.weight": "gate",
        "ffn_up_shexp.weight": "up",
    },
    "granitemoe": {"ffn_gate_shexp.weight": "gate", "ffn_up_shexp.weight": "up"},
    "llama4": STACKS,
    "qwen3next": {"attn_qkv.weight": "qkv", "attn_gate.weight": "z"},
}
JOIN_GROUPS = (("down",), ("gate", "up"), ("k", "v"), ("qkv", "z"))
