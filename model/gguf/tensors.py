"""Where a checkpoint's tensors come from in a GGUF file: other names, experts in stacks, rows in another order.

Most tensors are the file's own, row by row, so that rows in a block format can be taken without decoding them. Where
the numbers themselves were changed there is a `turn`.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ..errors import ModelError
from . import hybrids
from .contents import Config, Shapes
from .origin import Change, Origin, Part, halves_apart

ENDS = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias", "token_embd_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight", "output.bias": "lm_head.bias",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}  # fmt: skip
LAYER = {  # of a layer, as most architectures have them
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{E}.gate_proj", "ffn_up_exps": "mlp.experts.{E}.up_proj",
    "ffn_down_exps": "mlp.experts.{E}.down_proj", "ffn_gate_up_exps": "mlp.experts.{E}.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
POST = {
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
SANDWICH = POST | {"ffn_norm": "pre_feedforward_layernorm"}
NUMBERED = {  # experts whose products go by numbers
    "ffn_gate_exps": "mlp.experts.{E}.w1", "ffn_up_exps": "mlp.experts.{E}.w3", "ffn_down_exps": "mlp.experts.{E}.w2",
}  # fmt: skip
SHARED = {
    f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")
} | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}  # fmt: skip
FUSED = {"ffn_up": "mlp.gate_up_proj"}
GRANITE = {
    "ffn_gate_inp": "moe.gate", "ffn_gate_shexp": "mlp.gate_up_proj", "ffn_up_shexp": "mlp.gate_up_proj",
    "ffn_down_shexp": "mlp.down_proj",
} | {f"ffn_{part}_exps": f"moe.experts.{{E}}.{part}_proj" for part in ("gate", "up", "down")}  # fmt: skip
LFM2 = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
OWN: dict[str, dict[str, str]] = {  # what an architecture calls otherwise
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.kv_b_proj", "attn_v_b": "self_attn.kv_b_proj",
    },
    "ernie4_5-moe": {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    "exaone4": POST,
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "gemma4": SANDWICH | {
        "layer_output_scale.weight": "layer_scalar", "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "ffn_gate_inp.weight": "router.proj.weight", "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale", "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    } | {f"ffn_{part}_exps": f"experts.{{E}}.{part}_proj" for part in ("gate", "up", "down", "gate_up")},
    "glm4": FUSED | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    "glm4moe": POST,
    "gpt-oss": POST | {
        "attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps.weight": "mlp.experts.gate_up_proj", "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
        "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias", "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
        "ffn_down_exps.weight": "mlp.experts.down_proj", "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
    "granitehybrid": GRANITE | hybrids.MAMBA | {"ffn_gate": "mlp.gate_up_proj", "ffn_up": "mlp.gate_up_proj"},
    "granitemoe": GRANITE,
    "hunyuan-moe": {f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
    "lfm2": LFM2,
    "lfm2moe": LFM2 | NUMBERED | {"exp_probs_b.bias": "mlp.expert_bias"},
    "llama": NUMBERED,
    "llama4": {
        "ffn_gate_inp": "feed_forward.router", "ffn_gate_exps.weight": "feed_forward.experts.gate_up_proj",
        "ffn_up_exps.weight": "feed_forward.experts.gate_up_proj",
        "ffn_down_exps.weight": "feed_forward.experts.down_proj",
    } | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
    | {f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "minimax-m2": NUMBERED | {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    "olmo2": POST,
    "phi3": FUSED,
    "phimoe": NUMBERED,
    "qwen2moe": SHARED,
    "seed_oss": POST,
} | hybrids.names(SHARED | POST)  # fmt: skip
# Heads whose halves llama.cpp lays side by side, as it rotates them.
PAIRED = {
    "granite", "granitehybrid", "granitemoe", "llama", "mistral3", "nemotron_h", "nemotron_h_moe", "smollm3",
}  # fmt: skip
LESS_ONE = {"gemma2", "gemma3", *hybrids.DELTA}  # checkpoints have the scales of norms less one
# Tensors that are part of the configuration, and what llama.cpp never used.
CONFIGURATION = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
UNUSED = ("attn_rot_embd.weight",)
BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)")


def name_of(architecture: str, name: str) -> str | None:
    """The tensor of the checkpoint that one of the file is, or is a part of; None for those that are of no checkpoint.

    A stack of experts is many tensors: the name has {E} in the place of the expert's number.
    """
    if name in ENDS:
        return ENDS[name]
    if (found := BLOCK.fullmatch(name)) is None:
        return None
    number, rest = found.groups()
    names = LAYER | OWN.get(architecture, {})
    if rest in names:  # the ending is part of it
        return f"model.layers.{number}.{names[rest]}"
    stem, _, ending = rest.rpartition(".")
    if stem not in names or ending not in ("weight", "bias"):
        return None
    return f"model.layers.{number}.{names[stem]}.{ending}"


def file_name(architecture: str, name: str) -> str | None:
    """The inverse of `name_of`: the file's tensor that has one of the checkpoint; None where there is none."""
    ends = {target: own for own, target in reversed(ENDS.items())}
    if name in ends:
        return ends[name]
    if (found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)) is None:
        return None
    number, rest = found.groups()
    names = {target: own for own, target in (LAYER | OWN.get(architecture, {})).items()}
    rest = re.sub(r"\.experts\.\d+\.", ".experts.{E}.", rest)
    if rest in names:
        return f"blk.{number}.{names[rest]}"
    stem, _, ending = rest.rpartition(".")
    return f"blk.{number}.{names[stem]}.{ending}" if stem in names else None


def turn_of(architecture: str, name: str, config: Config) -> Change:
    """How a tensor that is one of the checkpoint's, or one of its stacks, becomes it again."""
    _, _, stem = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    if architecture in PAIRED and stem in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        return Change(rows=halves_apart(heads, config["head_dim"]))
    if (change := hybrids.change_of(architecture, stem, config)) is not None:
        return change
    if architecture in LESS_ONE and name.endswith("norm.weight"):
        return Change(numbers=lambda x: x.astype(np.float32) - 1, back=lambda x: x.astype(np.float32) + 1)
    if stem == "conv" and architecture in ("lfm2", "lfm2moe"):
        return Change(numbers=lambda x: x[:, None])
    return Change()


def origins(architecture: str, shapes: Shapes, config: Config) -> dict[str, Origin]:
    """Every tensor of the checkpoint that the file holds; `config` is that of `config_of`."""
    found: dict[str, Origin] = {}
    several: dict[str, dict[str, str]] = {}
    layers = config["num_hidden_layers"]
    for name, shape in shapes.items():
        block = BLOCK.fullmatch(name)
        if name in CONFIGURATION or (block and (int(block[1]) >= layers or block[2] in UNUSED)):
            continue
        if (target := name_of(architecture, name)) is None:
            raise ModelError(f"GGUF: the tensor {name} is not one that {architecture} models are known to have")
        stem = block[2] if block else name
        if not shape or 0 in shape:
            raise ModelError(f"GGUF: the tensor {name} has shape {shape}; it must hold numbers")
        kind = stem.rpartition(".")[0]
        if joined := JOINED.get(architecture, {}).get(stem):
            several.setdefault(target, {})[joined] = name
        elif kind == "attn_qkv" and architecture != "phi3" and "self_attn" in target:
            found |= parted_heads(architecture, name, shape, target, config)
        elif kind == "ffn_gate_up_exps":
            found |= parted_experts(architecture, name, shape, target)
        elif "{E}" in target:
            found |= {
                target.replace("{E}", str(expert)): Origin(shape[1:], (Part(name, expert),))
                for expert in range(shape[0])
            }
        else:
            change = turn_of(architecture, name, config)
            if change.rows is not None and shape[0] != len(change.rows):
                raise ModelError(f"GGUF: the tensor {name} has shape {shape}; it must have {len(change.rows)} rows")
            own = turned_shape(architecture, stem, shape)
            found[target] = Origin(own, (Part(name, None, change.rows),), change.numbers)
    for target, parts in several.items():
        found[target] = joined_origin(architecture, target, parts, shapes, config)
    return found


def turned_shape(architecture: str, stem: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape in the checkpoint: llama.cpp leaves out what is one, or has it where the checkpoint has not."""
    if stem in ("shortconv.conv.weight", "ssm_conv1d.weight") and len(shape) == 2:
        return (shape[0], 1, shape[1])
    if stem == "ffn_gate_inp_shexp.weight" and len(shape) == 1:
        return (1, *shape)
    if architecture == "ernie4_5-moe" and stem == "exp_probs_b.bias" and len(shape) == 1:
        return (1, *shape)
    if stem in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        return (int(np.prod(shape)),)
    return shape


def parted_heads(
    architecture: str, name: str, shape: tuple[int, ...], target: str, config: Config
) -> dict[str, Origin]:
    """Queries, keys and values of a tensor that has the rows of all."""
    H, N, K = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    if shape[0] != (N + 2 * K) * H:
        raise ModelError(f"GGUF: the tensor {name} has shape {shape}; it must have {(N + 2 * K) * H} rows")
    found, at = {}, 0
    for part, heads in (("q", N), ("k", K), ("v", K)):
        whole = np.arange(heads * H)
        rows = halves_apart(heads, H) if architecture in PAIRED and part != "v" else whole
        found[target.replace("qkv_proj", f"{part}_proj")] = Origin(
            (heads * H, *shape[1:]), (Part(name, None, at + rows),)
        )
        at += heads * H
    return found


def parted_experts(architecture: str, name: str, shape: tuple[int, ...], target: str) -> dict[str, Origin]:
    """Gates and what they multiply, of a stack that has the rows of both."""
    if len(shape) < 2 or shape[1] % 2:
        raise ModelError(f"GGUF: the tensor {name} has shape {shape}; it must have two equal parts")
    F, names = shape[1] // 2, LAYER | OWN.get(architecture, {})
    number = target.split(".")[2]
    if "{E}" not in (first := names["ffn_gate_exps"]):
        raise ModelError(f"GGUF: the tensor {name} is not supported for {architecture}")
    return {
        f"model.layers.{number}.{product.replace('{E}', str(expert))}.weight": Origin(
            (F, *shape[2:]), (Part(name, expert, at + np.arange(F)),)
        )
        for product, at in ((first, 0), (names["ffn_up_exps"], F))
        for expert in range(shape[0])
    }


def joined_origin(architecture: str, target: str, parts: Mapping[str, str], shapes: Shapes, config: Config) -> Origin:
    """A tensor that is several in the file."""
    needed = next(pair for pair in PAIRS if {*pair} & {*parts})
    if missing := {*needed} - {*parts}:
        raise ModelError(f"GGUF: {target} needs a tensor for {min(missing)} beside {min(parts.values())}")
    if architecture == "qwen3next":
        return hybrids.qkvz_origin(parts, shapes, config)
    if architecture == "deepseek2":
        return latent_origin(parts, shapes)
    if "down" in parts:
        shape, tensor = shapes[parts["down"]], Part(parts["down"])
        if len(shape) != 3:
            return Origin(shape, (tensor,))
        return Origin((shape[0], shape[2], shape[1]), (tensor,), lambda x: x.swapaxes(1, 2))
    gate, up = (shapes[parts[part]] for part in ("gate", "up"))
    if gate != up or len(gate) < 2:
        raise ModelError(f"GGUF: {parts['gate']} has shape {gate} and {parts['up']} {up}; they must be the same")
    both = Part(parts["gate"]), Part(parts["up"])
    if architecture.startswith("granite"):  # rows after rows
        return Origin((2 * gate[0], *gate[1:]), both)
    alternate = architecture == "gpt-oss"
    shape = (gate[0], *gate[2:], 2 * gate[1])
    return Origin(shape, both, partial(gates_and_ups, alternate=alternate))


def gates_and_ups(gate: np.ndarray, up: np.ndarray, alternate: bool) -> np.ndarray:
    """From two [E, F, D] to [E, D, 2F], in turn or one after the other; and from two biases [E, F] to [E, 2F]."""
    gate, up = (np.moveaxis(x, 1, -1) for x in (gate, up))
    if not alternate:
        return np.concatenate([gate, up], axis=-1)
    both = np.stack([gate, up], axis=-1)
    return both.reshape(*both.shape[:-2], -1)


def latent_origin(parts: Mapping[str, str], shapes: Shapes) -> Origin:
    """What makes keys and values of all heads, of [N, A, nope] and [N, v, A]: head by head, as [nope + v, A]."""
    k, v = shapes[parts["k"]], shapes[parts["v"]]
    if len(k) != 3 or len(v) != 3 or (k[0], k[1]) != (v[0], v[2]):
        raise ModelError(f"GGUF: {parts['k']} has shape {k} and {parts['v']} {v}; they do not fit together")
    shape = (k[0] * (k[2] + v[1]), k[1])
    return Origin(
        shape,
        (Part(parts["k"]), Part(parts["v"])),
        lambda k, v: np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(shape),
    )


STACKS: dict[str, Any] = {
    f"ffn_{part}_exps.{ending}": part for part in ("gate", "up", "down") for ending in ("weight", "bias")
}
JOINED: dict[str, dict[str, str]] = {  # tensors of the file that make up one together, or stacks that are turned
    "deepseek2": {"attn_k_b.weight": "k", "attn_v_b.weight": "v"},
    "gpt-oss": STACKS,
    "granitehybrid": {
        "ffn_gate.weight": "gate", "ffn_up.weight": "up", "ffn_gate_shexp.weight": "gate", "ffn_up_shexp.weight": "up",
    },
    "granitemoe": {"ffn_gate_shexp.weight": "gate", "ffn_up_shexp.weight": "up"},
    "llama4": STACKS,
    "qwen3next": {"attn_qkv.weight": "qkv", "attn_gate.weight": "z"},
}  # fmt: skip
PAIRS = (("down",), ("gate", "up"), ("k", "v"), ("qkv", "z"))
