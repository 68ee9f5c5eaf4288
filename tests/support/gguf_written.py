"""A tiny model as llama.cpp's converter writes it: its metadata and its tensors, from config.json
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
# keys of config.json, and what they are called in a file; more than one may say the same
NUMBERS = {
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
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
}
PARTS = {
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
SHARED = ("mlp.shared_experts", "mlp.shared_expert", "mlp.shared_mlp", "feed_forward.shared_expert")
PARTS |= {f"{where}.{x}_proj": f"ffn_{x}_shexp" for where in SHARED for x in ("gate", "up", "down")}
PARTS |= {  # of layers that keep a state, and of models whose layers are one block each
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
for where in ("linear_attn", "mamba", "mixer"):
    PARTS |= {
        f"{where}.in_proj": "ssm_in",
        f"{where}.conv1d": "ssm_conv1d",
        f"{where}.A_log": "ssm_a",
    }
    PARTS |= {f"{where}.D": "ssm_d", f"{where}.dt_bias": "ssm_dt.bias", f"{where}.norm": "ssm_norm"}
    PARTS |= {f"{where}.out_proj": "ssm_out"}
PARTS |= {f"mixer.{x}_proj": f"attn_{x}" for x in "qkv"}
PARTS |= {f"mixer.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in ("up", "down")}
PARTS |= {  # of Gemma 4
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
PARTS |= {f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
# Where attention has a norm before its block alone, a norm after it is the next block's.
AFTER = (
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
PERMUTED = (
    "llama",
    "mistral3",
    "smollm3",
    "granite",
    "granitemoe",
    "granitehybrid",
    "nemotron_h_moe",
)
DELTA = ("qwen35", "qwen35moe", "qwen3next")
EXPERT = {
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


def rounded(value: Any) -> Any:
    """As a file holds it."""
    return float(np.float32(value)) if isinstance(value, float) else value


def metadata(hf: dict[str, Any], layers: int) -> dict[str, Any]:
    """The keys that the converter writes for the sizes of a model."""
    architecture = ARCHITECTURES[hf["model_type"]]
    found = {"block_count": layers}
    for key, name in NUMBERS.items():
        if hf.get(key) is not None:
            found[name] = rounded(hf[key])
    head = hf.get("head_dim") or hf["hidden_size"] // hf.get("num_attention_heads", 1)
    if hf.get("head_dim") and "kv_lora_rank" not in hf:
        found |= {"attention.key_length": head, "attention.value_length": head}
    if hf.get("partial_rotary_factor") and "kv_lora_rank" not in hf:
        found["rope.dimension_count"] = int(head * hf["partial_rotary_factor"])
    found |= rope(hf) | OWN.get(architecture, lambda hf: {})(hf)
    found = {f"{architecture}.{key}": value for key, value in found.items() if value is not None}
    return {"general.architecture": architecture, "general.file_type": 32} | found


def rope(hf: dict[str, Any]) -> dict[str, Any]:
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    found: dict[str, Any] = {}
    if "full_attention" in scaling:
        found["rope.freq_base_swa"] = rounded(scaling["sliding_attention"]["rope_theta"])
        scaling = scaling["full_attention"]
    if "rope_theta" in scaling:
        found["rope.freq_base"] = rounded(scaling["rope_theta"])
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": rounded(scaling["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        keys = {
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        found |= {
            f"rope.scaling.{name}": rounded(scaling[key])
            for key, name in keys.items()
            if key in scaling
        }
    if kind == "longrope":
        found["rope.scaling.type"] = "longrope"
    return found


def windows(every: int) -> Callable[[dict], dict]:
    def own(hf: dict) -> dict:
        if not hf.get("sliding_window"):
            return {}
        layers = range(hf["num_hidden_layers"])
        kinds = hf.get("layer_types") or [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in layers
        ]
        return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds]}

    return own


def latent(hf: dict) -> dict:
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
        "rope.scaling.yarn_log_multiplier": None if weight is None else rounded(0.1 * weight),
    }


def kept(hf: dict) -> dict:
    """Keys and values of each layer: none where there is a convolution."""
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
        else 96,  # two thirds of 96, half as much again
    }


def long_factors(hf: dict) -> dict:
    window = hf.get("sliding_window") or 0
    trained = hf.get("original_max_position_embeddings")
    found = {"attention.sliding_window": window, "rope.scaling.original_context_length": trained}
    if (hf.get("rope_scaling") or {}).get("long_factor"):
        scale = hf["max_position_embeddings"] / trained
        factor = np.sqrt(1 + np.log(scale) / np.log(trained)) if scale > 1 else 1.0
        found["rope.scaling.attn_factor"] = rounded(float(factor))
    return found


def stretched(hf: dict) -> dict:
    """Hunyuan's base."""
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
        "rope.freq_base": rounded(base),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
    }


def temperature(hf: dict) -> dict:
    scaling = hf["rope_parameters"]
    return {
        "rope.scaling.yarn_log_multiplier": scaling["mscale_all_dim"],
        "attention.temperature_scale": rounded(scaling["llama_4_scaling_beta"]),
    }


def delta(hf: dict) -> dict:
    """Where most layers have a gated delta net; the tensors of one that drafts come after them."""
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


def mamba(hf: dict) -> dict:
    heads = hf.get("mamba_n_heads") or hf.get("mamba_num_heads") or hf["num_heads"]
    size = hf.get("mamba_d_head") or hf.get("mamba_head_dim") or hf["head_dim"]
    found: dict[str, Any] = {
        "ssm.inner_size": heads * size,
        "context_length": hf.get("max_position_embeddings", 1 << 20),
    }
    if hf["model_type"] == "mamba2":
        return found | {
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": rounded(hf["layer_norm_epsilon"]),
        }
    if hf["model_type"] == "nemotron_h":
        kinds = hf["hybrid_override_pattern"]
        found |= {
            "attention.head_count_kv": [hf["num_key_value_heads"] * (kind == "*") for kind in kinds]
        }
        return found | {
            "attention.layer_norm_epsilon": rounded(hf["layer_norm_epsilon"]),
            "moe_latent_size": None,
        }
    if hf["model_type"] == "granitemoehybrid":
        kept = [hf["num_key_value_heads"] * (kind == "attention") for kind in hf["layer_types"]]
        return found | {"attention.head_count_kv": kept, "rope.scaling.finetuned": False}
    return found


def gemma4(hf: dict) -> dict:
    """Sizes of local and of other layers."""
    local = [kind == "sliding_attention" for kind in hf["layer_types"]]
    wide = hf["global_head_dim"]
    few = hf.get("num_global_key_value_heads")
    layers = range(hf["num_hidden_layers"])
    first = len(layers) - hf.get("num_kv_shared_layers", 0)
    found: dict[str, Any] = {
        "attention.sliding_window_pattern": local,
        "rope.dimension_count": wide,
    }
    found |= {
        f"attention.{x}_length{end}": size
        for x in ("key", "value")
        for end, size in (("", wide), ("_swa", hf["head_dim"]))
    }
    if few:
        found["attention.head_count_kv"] = [
            hf["num_key_value_heads"] if each else few for each in local
        ]
    if hf.get("use_double_wide_mlp"):
        found["feed_forward_length"] = [
            hf["intermediate_size"] * (1 if i < first else 2) for i in layers
        ]
    return found


OWN: dict[str, Callable[[dict], dict]] = {
    "cohere2": lambda hf: {"rope.dimension_count": hf["head_dim"], "rope.scaling.type": "none"},
    "command-r": lambda hf: {"rope.scaling.type": "none"},
    "deepseek2": latent,
    "exaone4": windows(4),
    "hunyuan-dense": stretched,
    "hunyuan-moe": stretched,
    "gemma3": lambda hf: {},
    "glm4moe": lambda hf: {"expert_gating_func": 2},
    "lfm2": kept,
    "lfm2moe": kept,
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
    "mistral3": temperature,
    "olmo2": windows(4),
    "olmoe": lambda hf: {"attention.layer_norm_rms_epsilon": rounded(1e-5)},
    "phi3": long_factors,
    "phimoe": long_factors,
    "falcon-h1": mamba,
    "gemma4": gemma4,
    "granitehybrid": mamba,
    "mamba2": mamba,
    "nemotron_h_moe": mamba,
    **dict.fromkeys(DELTA, delta),
}


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head with the second half between those of the first."""
    return x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def tensors(hf: dict[str, Any], checkpoint: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The file's tensors of a checkpoint's, those that are part of the configuration apart."""
    architecture = ARCHITECTURES[hf["model_type"]]
    found = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, value in checkpoint.items():
        if name in ENDS:
            own = ENDS[name]
            own = (
                "token_embd_norm.weight"
                if "lfm2" in architecture and own == "output_norm.weight"
                else own
            )
            found[own] = changed(architecture, hf, own, value)
            continue
        number, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
        if expert := re.fullmatch(r"(?:(?:mlp|moe|mixer)\.)?experts\.(\d+)\.(\w+)\.weight", rest):
            stacks.setdefault(f"blk.{number}.ffn_{EXPERT[expert[2]]}_exps.weight", {})[
                int(expert[1])
            ] = value
            continue
        for own, part in split(architecture, hf, rest, value):
            found[f"blk.{number}.{own}"] = changed(architecture, hf, own, part)
    return found | {
        name: np.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()
    }


def split(
    architecture: str, hf: dict, rest: str, value: np.ndarray
) -> list[tuple[str, np.ndarray]]:
    """The name in a layer, or the names of what one tensor becomes."""
    if rest.endswith("experts.gate_up_proj"):
        turned = value.swapaxes(1, 2)
        halves = (
            (turned[:, ::2], turned[:, 1::2])
            if architecture == "gpt-oss"
            else np.split(turned, 2, axis=1)
        )
        return [
            (f"ffn_{x}_exps.weight", half) for x, half in zip(("gate", "up"), halves, strict=True)
        ]
    if rest.endswith("experts.gate_up_proj_bias"):
        return [("ffn_gate_exps.bias", value[:, ::2]), ("ffn_up_exps.bias", value[:, 1::2])]
    if rest.endswith("experts.down_proj"):
        return [("ffn_down_exps.weight", value.swapaxes(1, 2))]
    if rest.endswith("experts.down_proj_bias"):
        return [("ffn_down_exps.bias", value)]
    granite = architecture in ("granitemoe", "granitehybrid")
    beside = "_shexp" if hf.get("num_local_experts") else ""
    if granite and rest == "mlp.gate_up_proj.weight":
        return [
            (f"ffn_{x}{beside}.weight", half)
            for x, half in zip(("gate", "up"), np.split(value, 2), strict=True)
        ]
    if granite and rest == "mlp.down_proj.weight":
        return [(f"ffn_down{beside}.weight", value)]
    if rest == "linear_attn.in_proj_qkvz.weight":
        K = hf["linear_num_key_heads"]
        H = hf["linear_key_head_dim"]
        each = value.reshape(K, -1, value.shape[1])
        q, k, v, z = np.split(each, [H, 2 * H, (each.shape[1] + 2 * H) // 2], axis=1)
        flat = [x.reshape(-1, value.shape[1]) for x in (q, k, v, z)]
        return [("attn_qkv.weight", np.concatenate(flat[:3])), ("attn_gate.weight", flat[3])]
    if rest == "self_attn.kv_b_proj.weight":
        both = value.reshape(hf["num_attention_heads"], -1, value.shape[1])
        nope = hf["qk_nope_head_dim"]
        return [
            ("attn_k_b.weight", both[:, :nope].swapaxes(1, 2)),
            ("attn_v_b.weight", both[:, nope:]),
        ]
    if rest in PARTS:
        return [(PARTS[rest], value)]
    stem, _, ending = rest.rpartition(".")
    own = (
        "post_attention_norm"
        if stem == "post_attention_layernorm" and architecture in AFTER
        else PARTS[stem]
    )
    return [(f"{own}.{ending}", value)]


def changed(architecture: str, hf: dict, own: str, value: np.ndarray) -> np.ndarray:
    """What the converter does to the numbers."""
    stem = own.rpartition(".")[0]
    if architecture in PERMUTED and stem in ("attn_q", "attn_k"):
        return permuted(
            value, hf["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        )
    if architecture in ("gemma2", "gemma3") and stem.endswith("norm"):
        return value + 1
    if architecture in DELTA and stem.endswith("norm") and stem != "ssm_norm":
        return value + 1
    if architecture in ("qwen35", "qwen35moe"):
        value = round_by_round(hf, stem or own, value)
    if own == "ssm_a":
        value = -np.exp(value)
    if architecture not in DELTA and own in ("ssm_a", "ssm_d"):
        return value[:, None]
    if architecture not in DELTA and stem == "ssm_norm":
        return value.reshape(hf.get("mamba_n_groups") or hf.get("n_groups"), -1)
    if own == "ssm_conv1d.weight":
        return value[:, 0]
    if stem == "shortconv.conv":
        return value[:, 0]
    return value


def round_by_round(hf: dict, stem: str, value: np.ndarray) -> np.ndarray:
    """The heads of values so that each of the keys' has one before any has a second."""
    N = hf["linear_num_value_heads"]
    K = hf["linear_num_key_heads"]
    axis = 0
    before = 0
    size = hf["linear_value_head_dim"]
    if stem in ("attn_qkv", "ssm_conv1d") and len(value) > N * size:
        before = 2 * K * hf["linear_key_head_dim"]
    elif stem in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        size = 1
    elif stem == "ssm_out":
        axis = 1
    elif stem != "attn_gate":
        return value
    head, rest = np.split(value, [before], axis=axis)
    order = np.arange(N * size).reshape(K, N // K, size).swapaxes(0, 1).reshape(-1)
    return np.concatenate([head, np.take(rest, order, axis=axis)], axis=axis)


def factors(hf: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors that say how frequencies are scaled."""
    scaling = hf.get("rope_scaling") or {}
    # Gemma 4's pairs that do not turn are divided by more than any position
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
        between = 1 / ((1 - smooth) / scaling["factor"] + smooth)
        found = np.where(
            waves < length / high, 1.0, np.where(waves > length / low, scaling["factor"], between)
        )
        return {"rope_freqs.weight": found.astype(np.float32)}
    if "long_factor" in scaling and hf["model_type"].startswith("phi"):
        return {
            f"rope_factors_{x}.weight": np.float32(scaling[f"{x}_factor"])
            for x in ("long", "short")
        }
    return {}
