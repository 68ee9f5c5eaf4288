"""Architectures with layers that keep a state: Qwen3-Next and Qwen3.5, Granite 4, Nemotron-H, Falcon-H1, Mamba 2."""

from collections.abc import Mapping

import numpy as np

from ..errors import ModelError
from .contents import Config, Contents, Shapes
from .metadata import FLAG
from .origin import MOST_ROWS, Change, Origin, Part

DELTA = ("qwen35", "qwen35moe", "qwen3next")
MAMBA = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_a": "mamba.A_log", "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj",
}  # fmt: skip
MIXER = {  # of models whose layers are one block each
    name: place.replace("mamba.", "mixer.") for name, place in MAMBA.items()
} | {"attn_norm": "norm"}
BLOCKS = MIXER | {
    **{f"attn_{x}": f"mixer.{x}_proj" for x in "qkv"}, "attn_output": "mixer.o_proj", "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    **{f"ffn_{x}": f"mixer.{x}_proj" for x in ("up", "down")},
    **{f"ffn_{x}_exps": f"mixer.experts.{{E}}.{x}_proj" for x in ("up", "down")},
    **{f"ffn_{x}_shexp": f"mixer.shared_experts.{x}_proj" for x in ("up", "down")},
}  # fmt: skip
FALCON = MAMBA | {"ffn_norm": "pre_ff_layernorm.weight", "ffn_norm.weight": "pre_ff_layernorm.weight"}
NET = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d", "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
WHOLE_NET = NET | {
    "attn_qkv": "linear_attn.in_proj_qkvz", "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}  # fmt: skip


def names(shared: dict[str, str]) -> dict[str, dict[str, str]]:
    """What these architectures call otherwise, beside what is `shared` with others."""
    return {
        "falcon-h1": FALCON, "mamba2": MIXER, "nemotron_h": BLOCKS, "nemotron_h_moe": BLOCKS, "qwen35": shared | NET,
        "qwen35moe": shared | NET, "qwen3next": shared | WHOLE_NET,
    }  # fmt: skip


def qwen35(file: Contents) -> Config:
    return delta_net(file, file.dense("qwen3_5_text"))


def qwen35moe(file: Contents) -> Config:
    return delta_net(file, with_experts(file, "qwen3_5_moe_text"))


def qwen3next(file: Contents) -> Config:
    config = delta_net(file, with_experts(file, "qwen3_next")) | {"norm_topk_prob": True}
    if dense := file.without("ffn_gate_inp.weight"):
        width = file.size(f"blk.{dense[0]}.ffn_down.weight", 1)
        config |= {"mlp_only_layers": dense, "intermediate_size": width}
    return config


def with_experts(file: Contents, kind: str) -> Config:
    count, used, width = file.experts()
    config = file.common(kind)
    return config | file.heads(config) | {
        "num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": width, "hidden_act": "silu",
        "shared_expert_intermediate_size": file.size(file.first_with("ffn_down_shexp.weight"), 1),
    }  # fmt: skip


def delta_net(file: Contents, config: Config) -> Config:
    """The sizes of a gated delta net, and which layers have it."""
    heads, inner = file.meta.count(".ssm.time_step_rank"), file.meta.count(".ssm.inner_size")
    keys = file.meta.count(".ssm.group_count")
    if inner % heads or heads % keys:
        name = file.meta.name(".ssm.inner_size")
        raise ModelError(f"GGUF: {name} = {inner}; {heads} heads of values must share it, and {keys} of keys them")
    config.setdefault("partial_rotary_factor", 1.0)
    return config | {
        "linear_num_value_heads": heads, "linear_num_key_heads": keys, "linear_value_head_dim": inner // heads,
        "linear_key_head_dim": file.meta.count(".ssm.state_size"),
        "linear_conv_kernel_dim": file.meta.count(".ssm.conv_kernel"),
        "layer_types": ["linear_attention" if keeps else "full_attention" for keeps in recurrent(file)],
    }  # fmt: skip


def recurrent(file: Contents) -> list[bool]:
    """Which layers keep a state: of so many the last does not, unless the file says otherwise."""
    key, every = ".attention.recurrent_layers", file.meta.count(".full_attention_interval", 4)
    if not file.meta.is_array(key):
        return [bool((number + 1) % every) for number in range(file.layers)]
    found = file.meta.array(key, FLAG)
    if len(found) < file.layers:
        raise ModelError(f"GGUF: {file.meta.name(key)} has {len(found)} entries for {file.layers} layers")
    return found[: file.layers]


def granitehybrid(file: Contents, multipliers: Config) -> Config:
    """Granite 4; the smallest have attention in all layers."""
    config, meta = file.common("granitemoehybrid"), file.meta
    inner, heads = inner_and_heads(file)
    if inner % config["hidden_size"]:
        name = meta.name(".ssm.inner_size")
        raise ModelError(f"GGUF: {name} = {inner}; it must be a multiple of {config['hidden_size']}")
    kept = meta.of_layers(".attention.head_count_kv", file.layers)
    attention = [number for number, count in enumerate(kept) if count]
    states = [number for number, count in enumerate(kept) if not count]
    if meta.count(".expert_count", 0, least=0):
        count, used, width = file.experts()
        experts = {"num_local_experts": count, "num_experts_per_tok": used, "intermediate_size": width}
        beside = file.size(file.first_with("ffn_down_shexp.weight"), 1)
    else:
        experts = {"num_local_experts": 0, "num_experts_per_tok": 0}
        beside = file.size(file.first_with("ffn_down.weight"), 1)
    sizes = {"mamba_n_groups": "group_count", "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel"}
    return config | file.heads(config) | multipliers | experts | {
        "hidden_act": "silu", "shared_intermediate_size": beside, "mamba_n_heads": heads,
        "layer_types": ["attention" if count else "mamba" for count in kept],
        "mamba_d_head": inner // heads, "mamba_expand": inner // config["hidden_size"],
        "mamba_conv_bias": in_all(file, "ssm_conv1d.bias", states),
        "mamba_proj_bias": in_all(file, "ssm_in.bias", states),
        "attention_bias": in_all(file, "attn_q.bias", attention),
        "position_embedding_type": "rope" if meta.flag(".rope.scaling.finetuned", True) else "nope",
    } | {key: meta.count(f".ssm.{name}") for key, name in sizes.items()}  # fmt: skip


def mamba2(file: Contents) -> Config:
    """Mamba 2 alone; its context has no end."""
    meta, (inner, heads) = file.meta, inner_and_heads(file)
    width, states = meta.count(".embedding_length"), [*range(file.layers)]
    if inner % width:
        raise ModelError(f"GGUF: {meta.name('.ssm.inner_size')} = {inner}; it must be a multiple of {width}")
    return {
        "model_type": "mamba2", "torch_dtype": file.dtype, "vocab_size": file.size("token_embd.weight", 0),
        "hidden_size": width, "num_hidden_layers": file.layers, "num_heads": heads, "head_dim": inner // heads,
        "expand": inner // width, "n_groups": meta.count(".ssm.group_count"),
        "state_size": meta.count(".ssm.state_size"), "conv_kernel": meta.count(".ssm.conv_kernel"),
        "use_bias": in_all(file, "ssm_in.bias", states), "use_conv_bias": in_all(file, "ssm_conv1d.bias", states),
        "layer_norm_epsilon": meta.positive(".attention.layer_norm_rms_epsilon"), "hidden_act": "silu",
        "tie_word_embeddings": not file.has("output.weight"),
    }  # fmt: skip


def inner_and_heads(file: Contents) -> tuple[int, int]:
    """How wide Mamba 2 is, and in how many heads."""
    inner, heads = file.meta.count(".ssm.inner_size"), file.meta.count(".ssm.time_step_rank")
    if inner % heads:
        raise ModelError(f"GGUF: {file.meta.name('.ssm.inner_size')} = {inner}; it must be a multiple of {heads} heads")
    return inner, heads


def falcon_h1(file: Contents) -> Config:
    """Attention and Mamba 2 side by side; the multipliers are in the numbers of the weights."""
    inner, heads = inner_and_heads(file)
    sizes = {"mamba_n_groups": "group_count", "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel"}
    return file.dense("falcon_h1", attention_bias=file.everywhere("attn_q.bias")) | {
        "mamba_d_ssm": inner, "mamba_n_heads": heads, "mamba_d_head": inner // heads,
        "mamba_rms_norm": file.everywhere("ssm_norm.weight"), "mamba_norm_before_gate": False,
        "mamba_conv_bias": file.everywhere("ssm_conv1d.bias"),
    } | {key: file.meta.count(f".ssm.{name}") for key, name in sizes.items()}  # fmt: skip


def nemotron_h(file: Contents) -> Config:
    """Each layer is one block: its tensors say which."""
    file.meta.refuse(".moe_latent_size", 0)
    inner, heads = inner_and_heads(file)
    config, marks = file.common("nemotron_h", "layer_norm_epsilon"), {"ssm_in": "M", "attn_q": "*"}
    marks |= {"ffn_gate_inp": "E", "ffn_up": "-"}
    kinds = []
    for number in range(file.layers):
        found = [mark for name, mark in marks.items() if file.has(f"blk.{number}.{name}.weight")]
        if len(found) != 1:
            raise ModelError(f"GGUF: layer {number} must be one of {', '.join(marks)}; it is {len(found)} of them")
        kinds += found
    config |= file.heads(config)
    del config["rope_theta"]  # nothing turns
    config.pop("partial_rotary_factor", None)
    sizes = {"n_groups": "group_count", "ssm_state_size": "state_size", "conv_kernel": "conv_kernel"}
    config |= {key: file.meta.count(f".ssm.{name}") for key, name in sizes.items()} | {
        "hybrid_override_pattern": "".join(kinds), "mamba_num_heads": heads, "mamba_head_dim": inner // heads,
        "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu",
        "use_bias": in_all(file, "ssm_in.bias", [i for i, kind in enumerate(kinds) if kind == "M"]),
        "use_conv_bias": in_all(file, "ssm_conv1d.bias", [i for i, kind in enumerate(kinds) if kind == "M"]),
    }  # fmt: skip
    if "-" in kinds:
        config["intermediate_size"] = file.size(file.first_with("ffn_down.weight"), 1)
    if "E" in kinds:
        count, used, width = file.experts()
        config |= {
            "n_routed_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": width,
            "n_shared_experts": 1, "n_group": file.meta.count(".expert_group_count", 1, least=0) or 1,
            "topk_group": file.meta.count(".expert_group_used_count", 1, least=0) or 1,
            "moe_shared_expert_intermediate_size": file.size(file.first_with("ffn_down_shexp.weight"), 1),
            "norm_topk_prob": file.meta.flag(".expert_weights_norm", False),
            "routed_scaling_factor": file.meta.number(".expert_weights_scale", 0.0) or 1.0,
        }  # fmt: skip
    return config


def in_all(file: Contents, name: str, layers: list[int]) -> bool:
    """Whether all of these layers have such a tensor, or none."""
    found = [file.has(f"blk.{number}.{name}") for number in layers]
    if any(found) and not all(found):
        raise ModelError(f"GGUF: layer {layers[found.index(False)]} has no tensor {name}, which others have")
    return any(found)


def change_of(architecture: str, stem: str, config: Config) -> Change | None:
    """What is to be undone in a layer that keeps a state."""
    if not stem.startswith("ssm_") and not (architecture in DELTA and stem in ("attn_qkv", "attn_gate")):
        return None
    tiled = architecture in ("qwen35", "qwen35moe")
    rows = values_grouped(stem, config) if tiled else None
    if stem == "ssm_a":
        return Change(rows, lambda x: np.log(-x))
    if stem == "ssm_out" and rows is not None:
        return Change(None, lambda x: x[:, rows] if x.ndim == 2 else x)  # columns
    return Change(rows)


def values_grouped(stem: str, config: Config) -> np.ndarray | None:
    """The order that puts the heads of values beside those that have the same keys, where the file lays them round."""
    N, K = config["linear_num_value_heads"], config["linear_num_key_heads"]
    H = config["linear_value_head_dim"] if stem in ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out") else 1
    if N == K or stem == "ssm_norm":
        return None
    before = 2 * K * config["linear_key_head_dim"] if stem in ("attn_qkv", "ssm_conv1d") else 0
    if before + N * H > MOST_ROWS:
        raise ModelError(f"GGUF: {N} heads of {H} numbers after {before}; there can be at most {MOST_ROWS} rows")
    rows = np.arange(N * H).reshape(N // K, K, H).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(before), before + rows])


def qkvz_origin(parts: Mapping[str, str], shapes: Shapes, config: Config) -> Origin:
    """Queries, keys, values and gates of each head of keys together, of those of all heads."""
    K, shared = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    keys, values = config["linear_key_head_dim"], shared * config["linear_value_head_dim"]
    qkv, z = shapes[parts["qkv"]], shapes[parts["z"]]
    if qkv[0] != K * (2 * keys + values) or z != (K * values, *qkv[1:]):
        raise ModelError(f"GGUF: {parts['qkv']} has shape {qkv} and {parts['z']} {z}; they do not fit together")
    ends = (("qkv", 0, keys), ("qkv", K * keys, keys), ("qkv", 2 * K * keys, values), ("z", 0, values))
    pieces = tuple(
        Part(parts[name], None, np.arange(start + head * size, start + (head + 1) * size))
        for head in range(K)
        for name, start, size in ends
    )
    return Origin((qkv[0] + z[0], *qkv[1:]), pieces)
