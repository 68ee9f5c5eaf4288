"""Where a checkpoint's tensors come from in a GGUF file: other names, experts in stacks, rows in another order.

Most tensors are the file's own, row by row, so that rows in a block format can be taken without decoding them. Where
the numbers themselves were changed there is a `turn`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import ModelError
from .contents import Config, Shapes

Turn = Callable[..., np.ndarray]

ENDS = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias", "token_embd_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight", "output.bias": "lm_head.bias",
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
    "glm4": FUSED | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    "glm4moe": POST,
    "gpt-oss": POST | {
        "attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps.weight": "mlp.experts.gate_up_proj", "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
        "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias", "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
        "ffn_down_exps.weight": "mlp.experts.down_proj", "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
    "granitemoe": {
        "ffn_gate_inp": "moe.gate", "ffn_gate_shexp": "mlp.gate_up_proj", "ffn_up_shexp": "mlp.gate_up_proj",
        "ffn_down_shexp": "mlp.down_proj",
    } | {f"ffn_{part}_exps": f"moe.experts.{{E}}.{part}_proj" for part in ("gate", "up", "down")},
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
}  # fmt: skip
# Heads whose halves llama.cpp lays side by side, as it rotates them.
PAIRED = {"granite", "granitemoe", "llama", "mistral3", "smollm3"}
LESS_ONE = {"gemma2", "gemma3"}  # checkpoints have the scales of norms less one
# Tensors that are part of the configuration, and what llama.cpp never used.
CONFIGURATION = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
UNUSED = ("attn_rot_embd.weight",)
BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)")


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor of the file, or one expert of a stack, or some of its rows."""

    name: str
    expert: int | None = None
    rows: np.ndarray | None = None  # which, in this order; None: all as they come

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """The part of the whole tensor, in numbers."""
        found = numbers if self.expert is None else numbers[self.expert]
        return found if self.rows is None else found[self.rows]


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a tensor of a checkpoint comes from: its parts' rows follow one another, unless there is a `turn`."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    turn: Turn | None = None  # from the parts in numbers to the tensor; None: the rows can be taken as they are stored

    def made(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The tensor; `read` gives those of the file in numbers."""
        parts = [part.of(read(part.name)) for part in self.parts]
        made = self.turn(*parts) if self.turn else parts[0] if len(parts) == 1 else np.concatenate(parts)
        return made.reshape(self.shape)


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


@dataclass(frozen=True, eq=False)
class Change:
    """What is to be undone of what llama.cpp did to a tensor."""

    rows: np.ndarray | None = None  # take these rows, in this order
    numbers: Turn | None = None  # then, of the decoded numbers


def turn_of(architecture: str, name: str, config: Config) -> Change:
    """How a tensor that is one of the checkpoint's, or one of its stacks, becomes it again."""
    _, _, stem = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    if architecture in PAIRED and stem in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        return Change(rows=halves_apart(heads, config["head_dim"]))
    if architecture in LESS_ONE and name.endswith("norm.weight"):
        return Change(numbers=lambda x: x.astype(np.float32) - 1)
    if stem == "conv" and architecture in ("lfm2", "lfm2moe"):
        return Change(numbers=lambda x: x[:, None])
    return Change()


def halves_apart(heads: int, size: int) -> np.ndarray:
    """The order of rows that undoes llama.cpp's: in each head it has row 0, row size/2, row 1, and so on."""
    return np.arange(heads * size).reshape(heads, size // 2, 2).swapaxes(1, 2).reshape(-1)


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
        kind = stem.rpartition(".")[0]
        if joined := JOINED.get(architecture, {}).get(stem):
            several.setdefault(target, {})[joined] = name
        elif kind == "attn_qkv" and architecture != "phi3":
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
            own = turned_shape(architecture, kind, shape)
            found[target] = Origin(own, (Part(name, None, change.rows),), change.numbers)
    for target, parts in several.items():
        found[target] = joined_origin(architecture, target, parts, shapes)
    return found


def turned_shape(architecture: str, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape in the checkpoint: llama.cpp leaves out what is one."""
    if kind == "shortconv.conv" and len(shape) == 2:
        return (shape[0], 1, shape[1])
    if kind == "ffn_gate_inp_shexp" and len(shape) == 1:
        return (1, *shape)
    if architecture == "ernie4_5-moe" and kind == "exp_probs_b" and len(shape) == 1:
        return (1, *shape)
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


def joined_origin(architecture: str, target: str, parts: Mapping[str, str], shapes: Shapes) -> Origin:
    """A tensor that is several in the file."""
    needed = {"down"} if "down" in parts else {"k", "v"} if {"k", "v"} & {*parts} else {"gate", "up"}
    if missing := needed - {*parts}:
        raise ModelError(f"GGUF: {target} needs a tensor for {min(missing)} beside {min(parts.values())}")
    if architecture == "deepseek2":
        return latent_origin(parts, shapes)
    if "down" in parts:
        shape, tensor = shapes[parts["down"]], Part(parts["down"])
        if len(shape) == 2:
            return Origin(shape, (tensor,))
        return Origin((shape[0], shape[2], shape[1]), (tensor,), lambda x: x.swapaxes(1, 2))
    gate, up = (shapes[parts[part]] for part in ("gate", "up"))
    if gate != up:
        raise ModelError(f"GGUF: {parts['gate']} has shape {gate} and {parts['up']} {up}; they must be the same")
    both = Part(parts["gate"]), Part(parts["up"])
    if architecture == "granitemoe":  # rows after rows
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
    "granitemoe": {"ffn_gate_shexp.weight": "gate", "ffn_up_shexp.weight": "up"},
    "llama4": STACKS,
}
