"""Architectures with recurrent layers: Qwen3-Next and Qwen3.5, Granite 4, Nemotron-H, Falcon-H1,
Mamba 2.
"""

from collections.abc import Mapping

import numpy as np

from ..errors import ModelError
from .contents import Config, Contents, Shapes
from .metadata import FLAG
from .origin import MAX_ROWS, Change, Origin, TensorSlice

DELTA = ("qwen35", "qwen35moe", "qwen3next")
MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MIXER = {  # models whose layers are one block each
    name: place.replace("mamba.", "mixer.") for name, place in MAMBA.items()
} | {"attn_norm": "norm"}
BLOCKS = MIXER | {
    **{f"attn_{x}": f"mixer.{x}_proj" for x in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    **{f"ffn_{x}": f"mixer.{x}_proj" for x in ("up", "down")},
    **{f"ffn_{x}_exps": f"mixer.experts.{{E}}.{x}_proj" for x in ("up", "down")},
    **{f"ffn_{x}_shexp": f"mixer.shared_experts.{x}_proj" for x in ("up", "down")},
}
FALCON = MAMBA | {
    "ffn_norm": "pre_ff_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
}
NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
WHOLE_NET = NET | {
    "attn_qkv": "linear_attn.in_proj_qkvz", "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}  # fmt: skip


def layer_names(shared: dict[str, str]) -> dict[str, dict[str, str]]:
    """The layer tensors of these architectures that are not named as usual, with the `shared`
    names.
    """
    return {
        "falcon-h1": FALCON,
        "mamba2": MIXER,
        "nemotron_h": BLOCKS,
        "nemotron_h_moe": BLOCKS,
        "qwen35": shared | NET,
        "qwen35moe": shared | NET,
        "qwen3next": shared | WHOLE_NET,
    }


def qwen35(file: Contents) -> Config:
    return delta_net(file, file.dense_config("qwen3_5_text"))


def qwen35moe(file: Contents) -> Config:
    return delta_net(file, with_experts(file, "qwen3_5_moe_text"))


def qwen3next(file: Contents) -> Config:
    config = delta_net(file, with_experts(file, "qwen3_next")) | {"norm_topk_prob": True}
    if dense := file.layers_without("ffn_gate_inp.weight"):
        width = file.size(f"blk.{dense[0]}.ffn_down.weight", 1)
        config |= {"mlp_only_layers": dense, "intermediate_size": width}
    return config


def with_experts(file: Contents, kind: str) -> Config:
    count, used, width = file.expert_sizes()
    config = file.common_config(kind)
    return (
        config
        | file.head_config(config)
        | {
            "num_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": width,
            "hidden_act": "silu",
            "shared_expert_intermediate_size": file.size(
                file.first_tensor("ffn_down_shexp.weight"), 1
            ),
        }
    )


def delta_net(file: Contents, config: Config) -> Config:
    """The sizes of the gated DeltaNet, and the layers that use it."""
    value_heads = file.meta.count(".ssm.time_step_rank")
    inner = file.meta.count(".ssm.inner_size")
    key_heads = file.meta.count(".ssm.group_count")
    if inner % value_heads or value_heads % key_heads:
        name = file.meta.full_key(".ssm.inner_size")
        raise ModelError(
            f"GGUF: {name} = {inner}; it must divide among {value_heads} value heads, "
            f"and those among {key_heads} key heads"
        )
    config.setdefault("partial_rotary_factor", 1.0)
    return config | {
        "linear_num_value_heads": value_heads,
        "linear_num_key_heads": key_heads,
        "linear_value_head_dim": inner // value_heads,
        "linear_key_head_dim": file.meta.count(".ssm.state_size"),
        "linear_conv_kernel_dim": file.meta.count(".ssm.conv_kernel"),
        "layer_types": [
            "linear_attention" if flag else "full_attention" for flag in recurrent_layers(file)
        ],
    }


def recurrent_layers(file: Contents) -> list[bool]:
    """Whether each layer is recurrent; by default every `full_attention_interval`-th layer is
    not.
    """
    key = ".attention.recurrent_layers"
    interval = file.meta.count(".full_attention_interval", 4)
    if not file.meta.is_array(key):
        return [bool((number + 1) % interval) for number in range(file.num_layers)]
    flags = file.meta.array(key, FLAG)
    if len(flags) < file.num_layers:
        raise ModelError(
            f"GGUF: {file.meta.full_key(key)} has {len(flags)} entries for {file.num_layers} layers"
        )
    return flags[: file.num_layers]


def granitehybrid(file: Contents, multipliers: Config) -> Config:
    """Granite 4; the smallest models have attention in all layers."""
    config = file.common_config("granitemoehybrid")
    meta = file.meta
    inner, heads = inner_and_heads(file)
    if inner % config["hidden_size"]:
        name = meta.full_key(".ssm.inner_size")
        raise ModelError(
            f"GGUF: {name} = {inner}; it must be a multiple of {config['hidden_size']}"
        )
    kv_heads = meta.per_layer_counts(".attention.head_count_kv", file.num_layers)
    attention_layers = [number for number, count in enumerate(kv_heads) if count]
    mamba_layers = [number for number, count in enumerate(kv_heads) if not count]
    if meta.count(".expert_count", 0, minimum=0):
        count, used, width = file.expert_sizes()
        experts = {
            "num_local_experts": count,
            "num_experts_per_tok": used,
            "intermediate_size": width,
        }
        shared_width = file.size(file.first_tensor("ffn_down_shexp.weight"), 1)
    else:
        experts = {"num_local_experts": 0, "num_experts_per_tok": 0}
        shared_width = file.size(file.first_tensor("ffn_down.weight"), 1)
    sizes = {
        "mamba_n_groups": "group_count",
        "mamba_d_state": "state_size",
        "mamba_d_conv": "conv_kernel",
    }
    return (
        config
        | file.head_config(config)
        | multipliers
        | experts
        | {
            "hidden_act": "silu",
            "shared_intermediate_size": shared_width,
            "mamba_n_heads": heads,
            "layer_types": ["attention" if count else "mamba" for count in kv_heads],
            "mamba_d_head": inner // heads,
            "mamba_expand": inner // config["hidden_size"],
            "mamba_conv_bias": in_all_layers(file, "ssm_conv1d.bias", mamba_layers),
            "mamba_proj_bias": in_all_layers(file, "ssm_in.bias", mamba_layers),
            "attention_bias": in_all_layers(file, "attn_q.bias", attention_layers),
            "position_embedding_type": "rope"
            if meta.flag(".rope.scaling.finetuned", True)
            else "nope",
        }
        | {key: meta.count(f".ssm.{name}") for key, name in sizes.items()}
    )


def mamba2(file: Contents) -> Config:
    """Pure Mamba 2; its context length is unlimited."""
    meta = file.meta
    inner, heads = inner_and_heads(file)
    width = meta.count(".embedding_length")
    layers = [*range(file.num_layers)]
    if inner % width:
        raise ModelError(
            f"GGUF: {meta.full_key('.ssm.inner_size')} = {inner}; it must be a multiple of {width}"
        )
    return {
        "model_type": "mamba2",
        "torch_dtype": file.dtype,
        "vocab_size": file.size("token_embd.weight", 0),
        "hidden_size": width,
        "num_hidden_layers": file.num_layers,
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner // width,
        "n_groups": meta.count(".ssm.group_count"),
        "state_size": meta.count(".ssm.state_size"),
        "conv_kernel": meta.count(".ssm.conv_kernel"),
        "use_bias": in_all_layers(file, "ssm_in.bias", layers),
        "use_conv_bias": in_all_layers(file, "ssm_conv1d.bias", layers),
        "layer_norm_epsilon": meta.positive(".attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": not file.has("output.weight"),
    }


def inner_and_heads(file: Contents) -> tuple[int, int]:
    """The inner size of Mamba 2 and its number of heads."""
    inner = file.meta.count(".ssm.inner_size")
    heads = file.meta.count(".ssm.time_step_rank")
    if inner % heads:
        raise ModelError(
            f"GGUF: {file.meta.full_key('.ssm.inner_size')} = {inner}; it must be a multiple of "
            f"{heads} heads"
        )
    return inner, heads


def falcon_h1(file: Contents) -> Config:
    """Attention and Mamba 2 side by side; the multipliers are folded into the weights."""
    inner, heads = inner_and_heads(file)
    sizes = {
        "mamba_n_groups": "group_count",
        "mamba_d_state": "state_size",
        "mamba_d_conv": "conv_kernel",
    }
    return (
        file.dense_config("falcon_h1", attention_bias=file.in_all_layers("attn_q.bias"))
        | {
            "mamba_d_ssm": inner,
            "mamba_n_heads": heads,
            "mamba_d_head": inner // heads,
            "mamba_rms_norm": file.in_all_layers("ssm_norm.weight"),
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": file.in_all_layers("ssm_conv1d.bias"),
        }
        | {key: file.meta.count(f".ssm.{name}") for key, name in sizes.items()}
    )


def nemotron_h(file: Contents) -> Config:
    """Each layer is one block, of a kind that its tensors show."""
    file.meta.reject(".moe_latent_size", 0)
    inner, heads = inner_and_heads(file)
    config = file.common_config("nemotron_h", "layer_norm_epsilon")
    marks = {"ssm_in": "M", "attn_q": "*"}
    marks |= {"ffn_gate_inp": "E", "ffn_up": "-"}
    kinds = []
    for number in range(file.num_layers):
        layer_marks = [
            mark for name, mark in marks.items() if file.has(f"blk.{number}.{name}.weight")
        ]
        if len(layer_marks) != 1:
            raise ModelError(
                f"GGUF: layer {number} must be one of {', '.join(marks)}; it is {len(layer_marks)} "
                "of them"
            )
        kinds += layer_marks
    config |= file.head_config(config)
    del config["rope_theta"]  # no rotary embedding
    config.pop("partial_rotary_factor", None)
    sizes = {
        "n_groups": "group_count",
        "ssm_state_size": "state_size",
        "conv_kernel": "conv_kernel",
    }
    config |= {key: file.meta.count(f".ssm.{name}") for key, name in sizes.items()} | {
        "hybrid_override_pattern": "".join(kinds),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_bias": in_all_layers(
            file, "ssm_in.bias", [i for i, kind in enumerate(kinds) if kind == "M"]
        ),
        "use_conv_bias": in_all_layers(
            file, "ssm_conv1d.bias", [i for i, kind in enumerate(kinds) if kind == "M"]
        ),
    }
    if "-" in kinds:
        config["intermediate_size"] = file.size(file.first_tensor("ffn_down.weight"), 1)
    if "E" in kinds:
        count, used, width = file.expert_sizes()
        config |= {
            "n_routed_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": width,
            "n_shared_experts": 1,
            "n_group": file.meta.count(".expert_group_count", 1, minimum=0) or 1,
            "topk_group": file.meta.count(".expert_group_used_count", 1, minimum=0) or 1,
            "moe_shared_expert_intermediate_size": file.size(
                file.first_tensor("ffn_down_shexp.weight"), 1
            ),
            "norm_topk_prob": file.meta.flag(".expert_weights_norm", False),
            "routed_scaling_factor": file.meta.number(".expert_weights_scale", 0.0) or 1.0,
        }
    return config


def in_all_layers(file: Contents, name: str, layers: list[int]) -> bool:
    """Whether all of these layers have such a tensor, or none; raises if only some have it."""
    is_present = [file.has(f"blk.{number}.{name}") for number in layers]
    if any(is_present) and not all(is_present):
        raise ModelError(
            f"GGUF: layer {layers[is_present.index(False)]} has no tensor {name}, which others have"
        )
    return any(is_present)


def tensor_change(architecture: str, stem: str, config: Config) -> Change | None:
    """How to undo llama.cpp's change to a tensor of a recurrent layer."""
    if not stem.startswith("ssm_") and not (
        architecture in DELTA and stem in ("attn_qkv", "attn_gate")
    ):
        return None
    tiled = architecture in ("qwen35", "qwen35moe")
    rows = grouped_value_rows(stem, config) if tiled else None
    if stem == "ssm_a":
        return Change(rows, lambda x: np.log(-x))
    if stem == "ssm_out" and rows is not None:
        return Change(None, lambda x: x[:, rows] if x.ndim == 2 else x)  # columns
    return Change(rows)


def grouped_value_rows(stem: str, config: Config) -> np.ndarray | None:
    """The row order that groups the value heads by key head; the file has them round-robin. None:
    no change.
    """
    N = config["linear_num_value_heads"]
    K = config["linear_num_key_heads"]
    H = (
        config["linear_value_head_dim"]
        if stem in ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out")
        else 1
    )
    if N == K or stem == "ssm_norm":
        return None
    num_leading_rows = (
        2 * K * config["linear_key_head_dim"] if stem in ("attn_qkv", "ssm_conv1d") else 0
    )
    if num_leading_rows + N * H > MAX_ROWS:
        raise ModelError(
            f"GGUF: {N} heads of {H} rows after {num_leading_rows}; there can be at most "
            f"{MAX_ROWS} rows"
        )
    rows = np.arange(N * H).reshape(N // K, K, H).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(num_leading_rows), num_leading_rows + rows])


def qkvz_origin(names: Mapping[str, str], shapes: Shapes, config: Config) -> Origin:
    """Queries, keys, values and gates grouped by key head, from tensors that have each for all
    heads.
    """
    K = config["linear_num_key_heads"]
    value_heads_per_key = config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key_size = config["linear_key_head_dim"]
    value_size = value_heads_per_key * config["linear_value_head_dim"]
    qkv = shapes[names["qkv"]]
    z = shapes[names["z"]]
    if qkv[0] != K * (2 * key_size + value_size) or z != (K * value_size, *qkv[1:]):
        raise ModelError(
            f"GGUF: {names['qkv']} has shape {qkv} and {names['z']} {z}; they do not fit together"
        )
    pieces_per_head = (
        ("qkv", 0, key_size),
        ("qkv", K * key_size, key_size),
        ("qkv", 2 * K * key_size, value_size),
        ("z", 0, value_size),
    )
    slices = tuple(
        TensorSlice(names[name], None, np.arange(start + head * size, start + (head + 1) * size))
        for head in range(K)
        for name, start, size in pieces_per_head
    )
    return Origin((qkv[0] + z[0], *qkv[1:]), slices)
