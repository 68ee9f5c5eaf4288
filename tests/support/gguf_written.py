"""GGUF metadata and tensors of a tiny model, as llama.cpp's converter makes them from config.json
and a checkpoint.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

ARCHITECTURES = {
    "cohere": "command-r",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "llama": "llama",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "phimoe": "phimoe",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "falcon_h1": "falcon-h1",
    "gemma4_text": "gemma4",
    "granitemoehybrid": "granitehybrid",
    "kimi_k2": "deepseek2",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h_moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}
# keys of config.json -> keys of a GGUF file; several may have the same meaning
KEYS = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "logit_scale": "logit_scale",
    "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "conv_L_cache": "shortconv.l_cache",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "moe_layer_interval": "interleave_moe_layer_step",
    "rotary_dim": "rope.dimension_count",
    "qk_rope_head_dim": "rope.dimension_count",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "top_k_experts": "expert_used_count",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "mamba_d_conv": "ssm.conv_kernel",
    "conv_kernel": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "state_size": "ssm.state_size",
    "ssm_state_size": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "num_heads": "ssm.time_step_rank",
    "mamba_num_heads": "ssm.time_step_rank",
}
TENSOR_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
}
LAYER_TENSOR_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.expert_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.router": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks.weight",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
SHARED_EXPERTS = (
    "mlp.shared_experts",
    "mlp.shared_expert",
    "mlp.shared_mlp",
    "feed_forward.shared_expert",
)
LAYER_TENSOR_NAMES |= {
    f"{block}.{x}_proj": f"ffn_{x}_shexp"
    for block in SHARED_EXPERTS
    for x in ("gate", "up", "down")
}
LAYER_TENSOR_NAMES |= {  # recurrent layers, and models whose layers are one block each
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "norm": "attn_norm",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "pre_ff_layernorm.weight": "ffn_norm",
}
for block in ("linear_attn", "mamba", "mixer"):
    LAYER_TENSOR_NAMES |= {
        f"{block}.in_proj": "ssm_in",
        f"{block}.conv1d": "ssm_conv1d",
        f"{block}.A_log": "ssm_a",
    }
    LAYER_TENSOR_NAMES |= {
        f"{block}.D": "ssm_d",
        f"{block}.dt_bias": "ssm_dt.bias",
        f"{block}.norm": "ssm_norm",
    }
    LAYER_TENSOR_NAMES |= {f"{block}.out_proj": "ssm_out"}
LAYER_TENSOR_NAMES |= {f"mixer.{x}_proj": f"attn_{x}" for x in "qkv"}
LAYER_TENSOR_NAMES |= {f"mixer.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in ("up", "down")}
LAYER_TENSOR_NAMES |= {  # Gemma 4
    "layer_scalar": "layer_output_scale.weight",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
LAYER_TENSOR_NAMES |= {f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
# Elsewhere `post_attention_layernorm` is the norm before the MLP.
POST_NORM_ARCHITECTURES = (
    "gemma4",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "olmo2",
    "exaone4",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "glm4moe",
    "seed_oss",
)
PERMUTED_ARCHITECTURES = (
    "llama",
    "mistral3",
    "smollm3",
    "granite",
    "granitemoe",
    "granitehybrid",
    "nemotron_h_moe",
)
DELTA_NET_ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")
EXPERT_MATRICES = {
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


def as_float32(value: Any) -> Any:
    """Floats are stored as float32."""
    return float(np.float32(value)) if isinstance(value, float) else value


def metadata(hf: dict[str, Any], layers: int) -> dict[str, Any]:
    """The converter's metadata for a model of this config.json."""
    architecture = ARCHITECTURES[hf["model_type"]]
    keys = {"block_count": layers}
    for key, name in KEYS.items():
        if hf.get(key) is not None:
            keys[name] = as_float32(hf[key])
    head = hf.get("head_dim") or hf["hidden_size"] // hf.get("num_attention_heads", 1)
    if hf.get("head_dim") and "kv_lora_rank" not in hf:
        keys |= {"attention.key_length": head, "attention.value_length": head}
    if hf.get("partial_rotary_factor") and "kv_lora_rank" not in hf:
        keys["rope.dimension_count"] = int(head * hf["partial_rotary_factor"])
    keys |= rope_keys(hf) | KEYS_BY_ARCHITECTURE.get(architecture, lambda hf: {})(hf)
    keys = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": architecture, "general.file_type": 32} | keys


def rope_keys(hf: dict[str, Any]) -> dict[str, Any]:
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    rope_entries: dict[str, Any] = {}
    if "full_attention" in scaling:
        rope_entries["rope.freq_base_swa"] = as_float32(scaling["sliding_attention"]["rope_theta"])
        scaling = scaling["full_attention"]
    if "rope_theta" in scaling:
        rope_entries["rope.freq_base"] = as_float32(scaling["rope_theta"])
    if kind in ("linear", "yarn"):
        rope_entries |= {
            "rope.scaling.type": kind,
            "rope.scaling.factor": as_float32(scaling["factor"]),
        }
    if kind == "yarn":
        rope_entries["rope.scaling.original_context_length"] = scaling[
            "original_max_position_embeddings"
        ]
        keys = {
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        rope_entries |= {
            f"rope.scaling.{name}": as_float32(scaling[key])
            for key, name in keys.items()
            if key in scaling
        }
    if kind == "longrope":
        rope_entries["rope.scaling.type"] = "longrope"
    return rope_entries


def sliding_window_keys(full_every: int) -> Callable[[dict], dict]:
    def layer_pattern(hf: dict) -> dict:
        if not hf.get("sliding_window"):
            return {}
        layers = range(hf["num_hidden_layers"])
        kinds = hf.get("layer_types") or [
            "sliding_attention" if (i + 1) % full_every else "full_attention" for i in layers
        ]
        return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds]}

    return layer_pattern


def latent_attention_keys(hf: dict) -> dict:
    rank = hf["kv_lora_rank"]
    rotary = hf["qk_rope_head_dim"]
    gate = {"sigmoid": 2, "softmax": 1, None: None}[hf.get("scoring_func")]
    weight = (hf.get("rope_scaling") or {}).get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": hf["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": hf["v_head_dim"],
        "expert_gating_func": gate,
        "expert_weights_norm": True if hf.get("norm_topk_prob") else None,
        "rope.scaling.yarn_log_multiplier": None if weight is None else as_float32(0.1 * weight),
    }


def convolution_layers(hf: dict) -> dict:
    """KV heads of each layer: 0 in convolution layers."""
    full = hf.get("full_attn_idxs", [])
    kinds = hf.get("layer_types") or [
        "full_attention" if i in full else "conv" for i in range(hf["num_hidden_layers"])
    ]
    return {
        "attention.head_count_kv": [
            hf["num_key_value_heads"] * (kind == "full_attention") for kind in kinds
        ],
        "expert_gating_func": 2 if "num_experts" in hf else None,
        "feed_forward_length": hf["intermediate_size"]
        if "num_experts" in hf
        else 96,  # 2/3 of 96, times 1.5
    }


def longrope_keys(hf: dict) -> dict:
    window = hf.get("sliding_window") or 0
    trained = hf.get("original_max_position_embeddings")
    keys = {"attention.sliding_window": window, "rope.scaling.original_context_length": trained}
    if (hf.get("rope_scaling") or {}).get("long_factor"):
        scale = hf["max_position_embeddings"] / trained
        factor = np.sqrt(1 + np.log(scale) / np.log(trained)) if scale > 1 else 1.0
        keys["rope.scaling.attn_factor"] = as_float32(float(factor))
    return keys


def hunyuan_keys(hf: dict) -> dict:
    """The RoPE base of Hunyuan models, scaled by `alpha`."""
    alpha = (hf.get("rope_scaling") or {}).get("alpha")
    base = (
        hf["rope_theta"] * alpha ** (hf["head_dim"] / (hf["head_dim"] - 2))
        if alpha
        else hf["rope_theta"]
    )
    moe = (
        {
            "expert_used_count": hf["moe_topk"][0],
            "expert_feed_forward_length": hf["moe_intermediate_size"][0],
            "expert_shared_feed_forward_length": hf["intermediate_size"],
        }
        if "moe_topk" in hf
        else {}
    )
    return moe | {
        "rope.freq_base": as_float32(base),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
    }


def mistral_keys(hf: dict) -> dict:
    scaling = hf["rope_parameters"]
    return {
        "rope.scaling.yarn_log_multiplier": scaling["mscale_all_dim"],
        "attention.temperature_scale": as_float32(scaling["llama_4_scaling_beta"]),
    }


def delta_net_keys(hf: dict) -> dict:
    """Models with gated delta nets (and without layers for multi-token prediction)."""
    head = hf["head_dim"]
    share = (hf.get("rope_parameters") or hf)["partial_rotary_factor"]
    kinds = hf.get("layer_types")
    recurrent = None if kinds is None else [kind == "linear_attention" for kind in kinds]
    return {
        "ssm.inner_size": hf["linear_num_value_heads"] * hf["linear_value_head_dim"],
        "rope.dimension_count": int(head * share),
        "attention.recurrent_layers": recurrent,
        "full_attention_interval": hf["full_attention_interval"],
        "rope.dimension_sections": [2, 1, 1, 0],
        "nextn_predict_layers": 0,
    }


def mamba_keys(hf: dict) -> dict:
    heads = hf.get("mamba_n_heads") or hf.get("mamba_num_heads") or hf["num_heads"]
    size = hf.get("mamba_d_head") or hf.get("mamba_head_dim") or hf["head_dim"]
    keys: dict[str, Any] = {
        "ssm.inner_size": heads * size,
        "context_length": hf.get("max_position_embeddings", 1 << 20),
    }
    if hf["model_type"] == "mamba2":
        return keys | {
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": as_float32(hf["layer_norm_epsilon"]),
        }
    if hf["model_type"] == "nemotron_h":
        kinds = hf["hybrid_override_pattern"]
        keys |= {
            "attention.head_count_kv": [hf["num_key_value_heads"] * (kind == "*") for kind in kinds]
        }
        return keys | {
            "attention.layer_norm_epsilon": as_float32(hf["layer_norm_epsilon"]),
            "moe_latent_size": None,
        }
    if hf["model_type"] == "granitemoehybrid":
        kv_heads = [hf["num_key_value_heads"] * (kind == "attention") for kind in hf["layer_types"]]
        return keys | {"attention.head_count_kv": kv_heads, "rope.scaling.finetuned": False}
    return keys


def gemma4_keys(hf: dict) -> dict:
    """Sizes of local and of global layers."""
    local = [kind == "sliding_attention" for kind in hf["layer_types"]]
    global_head_dim = hf["global_head_dim"]
    global_kv_heads = hf.get("num_global_key_value_heads")
    layers = range(hf["num_hidden_layers"])
    first = len(layers) - hf.get("num_kv_shared_layers", 0)
    keys: dict[str, Any] = {
        "attention.sliding_window_pattern": local,
        "rope.dimension_count": global_head_dim,
    }
    keys |= {
        f"attention.{x}_length{end}": size
        for x in ("key", "value")
        for end, size in (("", global_head_dim), ("_swa", hf["head_dim"]))
    }
    if global_kv_heads:
        keys["attention.head_count_kv"] = [
            hf["num_key_value_heads"] if is_local else global_kv_heads for is_local in local
        ]
    if hf.get("use_double_wide_mlp"):
        keys["feed_forward_length"] = [
            hf["intermediate_size"] * (1 if i < first else 2) for i in layers
        ]
    return keys


KEYS_BY_ARCHITECTURE: dict[str, Callable[[dict], dict]] = {
    "cohere2": lambda hf: {"rope.dimension_count": hf["head_dim"], "rope.scaling.type": "none"},
    "command-r": lambda hf: {"rope.scaling.type": "none"},
    "deepseek2": latent_attention_keys,
    "exaone4": sliding_window_keys(4),
    "hunyuan-dense": hunyuan_keys,
    "hunyuan-moe": hunyuan_keys,
    "gemma3": lambda hf: {},
    "glm4moe": lambda hf: {"expert_gating_func": 2},
    "lfm2": convolution_layers,
    "lfm2moe": convolution_layers,
    "gpt-oss": lambda hf: {"expert_feed_forward_length": hf["intermediate_size"]},
    "llama": lambda hf: {
        "rope.dimension_count": hf.get("head_dim", 16),
        "attention.sliding_window": None,
    },
    "llama4": lambda hf: {
        "feed_forward_length": hf["intermediate_size_mlp"],
        "expert_feed_forward_length": hf["intermediate_size"],
    },
    "minimax-m2": lambda hf: {"expert_gating_func": 2},
    "mistral3": mistral_keys,
    "olmo2": sliding_window_keys(4),
    "olmoe": lambda hf: {"attention.layer_norm_rms_epsilon": as_float32(1e-5)},
    "phi3": longrope_keys,
    "phimoe": longrope_keys,
    "falcon-h1": mamba_keys,
    "gemma4": gemma4_keys,
    "granitehybrid": mamba_keys,
    "mamba2": mamba_keys,
    "nemotron_h_moe": mamba_keys,
    **dict.fromkeys(DELTA_NET_ARCHITECTURES, delta_net_keys),
}


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the first and the second half of the rows of each head."""
    return x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def tensors(hf: dict[str, Any], checkpoint: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The file's tensors for a checkpoint, without those that come from config.json."""
    architecture = ARCHITECTURES[hf["model_type"]]
    named_tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, value in checkpoint.items():
        if name in TENSOR_NAMES:
            file_name = TENSOR_NAMES[name]
            file_name = (
                "token_embd_norm.weight"
                if "lfm2" in architecture and file_name == "output_norm.weight"
                else file_name
            )
            named_tensors[file_name] = converted_values(architecture, hf, file_name, value)
            continue
        number, layer_name = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
        if expert := re.fullmatch(
            r"(?:(?:mlp|moe|mixer)\.)?experts\.(\d+)\.(\w+)\.weight", layer_name
        ):
            stacks.setdefault(f"blk.{number}.ffn_{EXPERT_MATRICES[expert[2]]}_exps.weight", {})[
                int(expert[1])
            ] = value
            continue
        for file_name, tensor in split_tensor(architecture, hf, layer_name, value):
            named_tensors[f"blk.{number}.{file_name}"] = converted_values(
                architecture, hf, file_name, tensor
            )
    return named_tensors | {
        name: np.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()
    }


def split_tensor(
    architecture: str, hf: dict, layer_name: str, value: np.ndarray
) -> list[tuple[str, np.ndarray]]:
    """The file's tensors (name in a layer, value) for one tensor of a checkpoint."""
    if layer_name.endswith("experts.gate_up_proj"):
        transposed = value.swapaxes(1, 2)
        halves = (
            (transposed[:, ::2], transposed[:, 1::2])
            if architecture == "gpt-oss"
            else np.split(transposed, 2, axis=1)
        )
        return [
            (f"ffn_{x}_exps.weight", half) for x, half in zip(("gate", "up"), halves, strict=True)
        ]
    if layer_name.endswith("experts.gate_up_proj_bias"):
        return [("ffn_gate_exps.bias", value[:, ::2]), ("ffn_up_exps.bias", value[:, 1::2])]
    if layer_name.endswith("experts.down_proj"):
        return [("ffn_down_exps.weight", value.swapaxes(1, 2))]
    if layer_name.endswith("experts.down_proj_bias"):
        return [("ffn_down_exps.bias", value)]
    granite = architecture in ("granitemoe", "granitehybrid")
    suffix = "_shexp" if hf.get("num_local_experts") else ""
    if granite and layer_name == "mlp.gate_up_proj.weight":
        return [
            (f"ffn_{x}{suffix}.weight", half)
            for x, half in zip(("gate", "up"), np.split(value, 2), strict=True)
        ]
    if granite and layer_name == "mlp.down_proj.weight":
        return [(f"ffn_down{suffix}.weight", value)]
    if layer_name == "linear_attn.in_proj_qkvz.weight":
        K = hf["linear_num_key_heads"]
        H = hf["linear_key_head_dim"]
        heads = value.reshape(K, -1, value.shape[1])
        q, k, v, z = np.split(heads, [H, 2 * H, (heads.shape[1] + 2 * H) // 2], axis=1)
        flat = [x.reshape(-1, value.shape[1]) for x in (q, k, v, z)]
        return [("attn_qkv.weight", np.concatenate(flat[:3])), ("attn_gate.weight", flat[3])]
    if layer_name == "self_attn.kv_b_proj.weight":
        key_value_heads = value.reshape(hf["num_attention_heads"], -1, value.shape[1])
        nope = hf["qk_nope_head_dim"]
        return [
            ("attn_k_b.weight", key_value_heads[:, :nope].swapaxes(1, 2)),
            ("attn_v_b.weight", key_value_heads[:, nope:]),
        ]
    if layer_name in LAYER_TENSOR_NAMES:
        return [(LAYER_TENSOR_NAMES[layer_name], value)]
    stem, _, ending = layer_name.rpartition(".")
    file_name = (
        "post_attention_norm"
        if stem == "post_attention_layernorm" and architecture in POST_NORM_ARCHITECTURES
        else LAYER_TENSOR_NAMES[stem]
    )
    return [(f"{file_name}.{ending}", value)]


def converted_values(architecture: str, hf: dict, file_name: str, value: np.ndarray) -> np.ndarray:
    """The values of a tensor as the converter transforms them."""
    stem = file_name.rpartition(".")[0]
    if architecture in PERMUTED_ARCHITECTURES and stem in ("attn_q", "attn_k"):
        return permuted(
            value, hf["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        )
    if architecture in ("gemma2", "gemma3") and stem.endswith("norm"):
        return value + 1
    if architecture in DELTA_NET_ARCHITECTURES and stem.endswith("norm") and stem != "ssm_norm":
        return value + 1
    if architecture in ("qwen35", "qwen35moe"):
        value = interleave_value_heads(hf, stem or file_name, value)
    if file_name == "ssm_a":
        value = -np.exp(value)
    if architecture not in DELTA_NET_ARCHITECTURES and file_name in ("ssm_a", "ssm_d"):
        return value[:, None]
    if architecture not in DELTA_NET_ARCHITECTURES and stem == "ssm_norm":
        return value.reshape(hf.get("mamba_n_groups") or hf.get("n_groups"), -1)
    if file_name == "ssm_conv1d.weight":
        return value[:, 0]
    if stem == "shortconv.conv":
        return value[:, 0]
    return value


def interleave_value_heads(hf: dict, stem: str, value: np.ndarray) -> np.ndarray:
    """Reorder value heads: the first of every key head, then the second of every key head, ..."""
    N = hf["linear_num_value_heads"]
    K = hf["linear_num_key_heads"]
    axis = 0
    num_keys_before = 0
    size = hf["linear_value_head_dim"]
    if stem in ("attn_qkv", "ssm_conv1d") and len(value) > N * size:
        num_keys_before = 2 * K * hf["linear_key_head_dim"]
    elif stem in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        size = 1
    elif stem == "ssm_out":
        axis = 1
    elif stem != "attn_gate":
        return value
    head, tail = np.split(value, [num_keys_before], axis=axis)
    order = np.arange(N * size).reshape(K, N // K, size).swapaxes(0, 1).reshape(-1)
    return np.concatenate([head, np.take(tail, order, axis=axis)], axis=axis)


def factors(hf: dict[str, Any]) -> dict[str, np.ndarray]:
    """Tensors that scale RoPE frequencies."""
    scaling = hf.get("rope_scaling") or {}
    # The frequencies of pairs that Gemma 4 does not rotate are divided by 1e30.
    if "global_head_dim" in hf:
        pairs = hf["global_head_dim"] // 2
        share = hf["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        return {
            "rope_freqs.weight": np.where(np.arange(pairs) < int(share * pairs), 1.0, 1e30).astype(
                np.float32
            )
        }
    if scaling.get("rope_type") == "llama3":
        size = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        waves = 2 * np.pi * hf["rope_theta"] ** (np.arange(0, size, 2) / size)
        length = scaling["original_max_position_embeddings"]
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        smooth = (length / waves - low) / (high - low)
        interpolated = 1 / ((1 - smooth) / scaling["factor"] + smooth)
        scale = np.where(
            waves < length / high,
            1.0,
            np.where(waves > length / low, scaling["factor"], interpolated),
        )
        return {"rope_freqs.weight": scale.astype(np.float32)}
    if "long_factor" in scaling and hf["model_type"].startswith("phi"):
        return {
            f"rope_factors_{x}.weight": np.float32(scaling[f"{x}_factor"])
            for x in ("long", "short")
        }
    return {}
