"""A tiny model as llama.cpp's converter writes it: its metadata and its tensors, from config.json and a checkpoint."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

ARCHITECTURES = {
    "cohere": "command-r", "cohere2": "cohere2", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "ernie4_5": "ernie4_5", "ernie4_5_moe": "ernie4_5-moe", "exaone4": "exaone4", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "glm4": "glm4", "glm4_moe": "glm4moe", "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss", "granite": "granite", "granitemoe": "granitemoe", "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe", "lfm2": "lfm2", "lfm2_moe": "lfm2moe",
    "llama": "llama", "llama4_text": "llama4", "minimax_m2": "minimax-m2", "ministral3": "mistral3",
    "mistral": "llama", "mixtral": "llama", "olmo2": "olmo2", "olmo3": "olmo2", "olmoe": "olmoe", "phi3": "phi3",
    "phimoe": "phimoe", "qwen2": "qwen2", "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "seed_oss": "seed_oss", "smollm3": "smollm3",
}  # fmt: skip
NUMBERS = {  # keys of config.json, and what they are called in a file; more than one may say the same
    "hidden_size": "embedding_length", "max_position_embeddings": "context_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base", "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window", "num_local_experts": "expert_count", "num_experts": "expert_count",
    "n_routed_experts": "expert_count", "moe_num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_k": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count", "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count", "moe_layer_start_index": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm", "logit_scale": "logit_scale", "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank", "conv_L_cache": "shortconv.l_cache",
    "interleave_moe_layer_step": "interleave_moe_layer_step", "moe_layer_interval": "interleave_moe_layer_step",
    "rotary_dim": "rope.dimension_count", "qk_rope_head_dim": "rope.dimension_count",
}  # fmt: skip
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias", "lm_head.weight": "output.weight", "lm_head.bias": "output.bias",
}  # fmt: skip
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias", "mlp.gate_up_proj": "ffn_up",
    "mlp.expert_bias": "exp_probs_b.bias", "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias", "moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.router": "ffn_gate_inp", "feed_forward.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks.weight", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
SHARED = ("mlp.shared_experts", "mlp.shared_expert", "mlp.shared_mlp", "feed_forward.shared_expert")
PARTS |= {f"{where}.{x}_proj": f"ffn_{x}_shexp" for where in SHARED for x in ("gate", "up", "down")}
PARTS |= {f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
# Where attention has a norm before its block alone, a norm after it is the next block's.
AFTER = ("olmo2", "exaone4", "gemma2", "gemma3", "gpt-oss", "glm4moe", "seed_oss")
PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitemoe")
EXPERT = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


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
    head = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
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
    if "rope_theta" in scaling:
        found["rope.freq_base"] = rounded(scaling["rope_theta"])
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": rounded(scaling["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        keys = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        found |= {f"rope.scaling.{name}": rounded(scaling[key]) for key, name in keys.items() if key in scaling}
    if kind == "longrope":
        found["rope.scaling.type"] = "longrope"
    return found


def windows(every: int) -> Callable[[dict], dict]:
    def own(hf: dict) -> dict:
        if not hf.get("sliding_window"):
            return {}
        layers = range(hf["num_hidden_layers"])
        kinds = hf.get("layer_types") or ["sliding_attention" if (i + 1) % every else "full_attention" for i in layers]
        return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds]}

    return own


def latent(hf: dict) -> dict:
    rank, rotary = hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    gate = {"sigmoid": 2, "softmax": 1, None: None}[hf.get("scoring_func")]
    weight = (hf.get("rope_scaling") or {}).get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1, "attention.key_length": rank + rotary, "attention.value_length": rank,
        "attention.key_length_mla": hf["qk_nope_head_dim"] + rotary, "attention.value_length_mla": hf["v_head_dim"],
        "expert_gating_func": gate, "expert_weights_norm": True if hf.get("norm_topk_prob") else None,
        "rope.scaling.yarn_log_multiplier": None if weight is None else rounded(0.1 * weight),
    }  # fmt: skip


def kept(hf: dict) -> dict:
    """Keys and values of each layer: none where there is a convolution."""
    full = hf.get("full_attn_idxs", [])
    kinds = hf.get("layer_types") or ["full_attention" if i in full else "conv" for i in range(hf["num_hidden_layers"])]
    return {
        "attention.head_count_kv": [hf["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "expert_gating_func": 2 if "num_experts" in hf else None,
        "feed_forward_length": hf["intermediate_size"]
        if "num_experts" in hf
        else 96,  # two thirds of 96, half as much again
    }


def long_factors(hf: dict) -> dict:
    window, trained = hf.get("sliding_window") or 0, hf.get("original_max_position_embeddings")
    found = {"attention.sliding_window": window, "rope.scaling.original_context_length": trained}
    if (hf.get("rope_scaling") or {}).get("long_factor"):
        scale = hf["max_position_embeddings"] / trained
        factor = np.sqrt(1 + np.log(scale) / np.log(trained)) if scale > 1 else 1.0
        found["rope.scaling.attn_factor"] = rounded(float(factor))
    return found


def stretched(hf: dict) -> dict:
    """Hunyuan's base."""
    alpha = (hf.get("rope_scaling") or {}).get("alpha")
    base = hf["rope_theta"] * alpha ** (hf["head_dim"] / (hf["head_dim"] - 2)) if alpha else hf["rope_theta"]
    moe = {"expert_used_count": hf["moe_topk"][0], "expert_feed_forward_length": hf["moe_intermediate_size"][0],
           "expert_shared_feed_forward_length": hf["intermediate_size"]} if "moe_topk" in hf else {}  # fmt: skip
    return moe | {"rope.freq_base": rounded(base), "rope.scaling.type": "none", "rope.scaling.factor": 1.0}


def temperature(hf: dict) -> dict:
    scaling = hf["rope_parameters"]
    return {
        "rope.scaling.yarn_log_multiplier": scaling["mscale_all_dim"],
        "attention.temperature_scale": rounded(scaling["llama_4_scaling_beta"]),
    }


OWN: dict[str, Callable[[dict], dict]] = {
    "cohere2": lambda hf: {"rope.dimension_count": hf["head_dim"], "rope.scaling.type": "none"},
    "command-r": lambda hf: {"rope.scaling.type": "none"},
    "deepseek2": latent, "exaone4": windows(4), "hunyuan-dense": stretched, "hunyuan-moe": stretched,
    "gemma3": lambda hf: {}, "glm4moe": lambda hf: {"expert_gating_func": 2}, "lfm2": kept, "lfm2moe": kept,
    "gpt-oss": lambda hf: {"expert_feed_forward_length": hf["intermediate_size"]},
    "llama": lambda hf: {"rope.dimension_count": hf.get("head_dim", 16), "attention.sliding_window": None},
    "llama4": lambda hf: {
        "feed_forward_length": hf["intermediate_size_mlp"], "expert_feed_forward_length": hf["intermediate_size"],
    },
    "minimax-m2": lambda hf: {"expert_gating_func": 2}, "mistral3": temperature, "olmo2": windows(4),
    "olmoe": lambda hf: {"attention.layer_norm_rms_epsilon": rounded(1e-5)}, "phi3": long_factors,
    "phimoe": long_factors,
}  # fmt: skip


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head with the second half between those of the first."""
    return x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def tensors(hf: dict[str, Any], checkpoint: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The file's tensors of a checkpoint's, those that are part of the configuration apart."""
    architecture, found = ARCHITECTURES[hf["model_type"]], {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, value in checkpoint.items():
        if name in ENDS:
            own = ENDS[name]
            own = "token_embd_norm.weight" if "lfm2" in architecture and own == "output_norm.weight" else own
            found[own] = changed(architecture, hf, own, value)
            continue
        number, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
        if expert := re.fullmatch(r"(?:mlp|moe)\.experts\.(\d+)\.(\w+)\.weight", rest):
            stacks.setdefault(f"blk.{number}.ffn_{EXPERT[expert[2]]}_exps.weight", {})[int(expert[1])] = value
            continue
        for own, part in split(architecture, hf, rest, value):
            found[f"blk.{number}.{own}"] = changed(architecture, hf, own, part)
    return found | {name: np.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}


def split(architecture: str, hf: dict, rest: str, value: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The name in a layer, or the names of what one tensor becomes."""
    if rest.endswith("experts.gate_up_proj"):
        turned = value.swapaxes(1, 2)
        halves = (turned[:, ::2], turned[:, 1::2]) if architecture == "gpt-oss" else np.split(turned, 2, axis=1)
        return [(f"ffn_{x}_exps.weight", half) for x, half in zip(("gate", "up"), halves, strict=True)]
    if rest.endswith("experts.gate_up_proj_bias"):
        return [("ffn_gate_exps.bias", value[:, ::2]), ("ffn_up_exps.bias", value[:, 1::2])]
    if rest.endswith("experts.down_proj"):
        return [("ffn_down_exps.weight", value.swapaxes(1, 2))]
    if rest.endswith("experts.down_proj_bias"):
        return [("ffn_down_exps.bias", value)]
    if architecture == "granitemoe" and rest == "mlp.gate_up_proj.weight":
        return [(f"ffn_{x}_shexp.weight", half) for x, half in zip(("gate", "up"), np.split(value, 2), strict=True)]
    if architecture == "granitemoe" and rest == "mlp.down_proj.weight":
        return [("ffn_down_shexp.weight", value)]
    if rest == "self_attn.kv_b_proj.weight":
        both = value.reshape(hf["num_attention_heads"], -1, value.shape[1])
        nope = hf["qk_nope_head_dim"]
        return [("attn_k_b.weight", both[:, :nope].swapaxes(1, 2)), ("attn_v_b.weight", both[:, nope:])]
    if rest in PARTS:
        return [(PARTS[rest], value)]
    stem, _, ending = rest.rpartition(".")
    own = "post_attention_norm" if stem == "post_attention_layernorm" and architecture in AFTER else PARTS[stem]
    return [(f"{own}.{ending}", value)]


def changed(architecture: str, hf: dict, own: str, value: np.ndarray) -> np.ndarray:
    """What the converter does to the numbers."""
    stem = own.rpartition(".")[0]
    if architecture in PERMUTED and stem in ("attn_q", "attn_k"):
        return permuted(value, hf["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"])
    if architecture.startswith("gemma") and stem.endswith("norm"):
        return value + 1
    if stem == "shortconv.conv":
        return value[:, 0]
    return value


def factors(hf: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors that say how frequencies are scaled."""
    scaling = hf.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        size = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        waves = 2 * np.pi * hf["rope_theta"] ** (np.arange(0, size, 2) / size)
        length = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = (length / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / scaling["factor"] + smooth)
        found = np.where(waves < length / high, 1.0, np.where(waves > length / low, scaling["factor"], between))
        return {"rope_freqs.weight": found.astype(np.float32)}
    if "long_factor" in scaling and hf["model_type"].startswith("phi"):
        return {f"rope_factors_{x}.weight": np.float32(scaling[f"{x}_factor"]) for x in ("long", "short")}
    return {}
