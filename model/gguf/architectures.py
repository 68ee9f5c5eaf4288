"""From a GGUF file's metadata to the config.json of its model, which `model/families` reads.

A file does not state everything: llama.cpp has the rest in its code for each architecture. Here it
is in one function for each architecture.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ModelError
from . import hybrids
from .contents import Config, Contents, Shapes
from .metadata import Metadata, format_value
from .rotary import FREQS, Read, read_factors, rope_config, rotary_fraction


def hf_config(metadata: Mapping[str, Any], shapes: Shapes, read: Read | None = None) -> Config:
    """The config.json, with Hugging Face's keys, for a file's metadata and tensor shapes.

    `read(name)` returns a decoded tensor: some files store the scaling of the rotary embedding in
    one.
    """
    file = Contents(Metadata(metadata), shapes, read)
    architecture = file.meta.architecture
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"GGUF: general.architecture = {format_value(architecture)} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture](file)


def llama(file: Contents) -> Config:
    """Also Mistral, and with experts Mixtral: files of those have the same architecture."""
    if file.meta.count(".expert_count", 0, minimum=0):
        count, used, width = file.expert_sizes()
        file.have_bias(
            "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
        )
        return file.dense_config("mixtral", num_local_experts=count, num_experts_per_tok=used) | {
            "intermediate_size": width
        }
    return file.dense_config("llama", **llama_bias_config(file))


def llama_bias_config(file: Contents) -> Config:
    attention = file.have_bias("attn_q", "attn_k", "attn_v", "attn_output")
    return {
        "attention_bias": attention,
        "mlp_bias": file.have_bias("ffn_gate", "ffn_up", "ffn_down"),
    }


def mistral3(file: Contents) -> Config:
    """Mistral Small 3, and Ministral 3, which scales queries by position."""
    temperature_scale, mscale = (
        file.meta.number(key, 0.0)
        for key in (".attention.temperature_scale", ".rope.scaling.yarn_log_multiplier")
    )
    config = file.dense_config(
        "ministral3" if temperature_scale else "mistral", sliding_window=None
    )
    if temperature_scale:
        rope_parameters = dict(config.pop("rope_scaling", {}))
        if rope_parameters.get("rope_type") != "yarn":
            raise ModelError(
                f"GGUF: {file.meta.full_key('.rope.scaling.type')} must be yarn with "
                "attention.temperature_scale"
            )
        rope_parameters |= {
            "rope_theta": config.pop("rope_theta"),
            "llama_4_scaling_beta": temperature_scale,
        }
        rope_parameters |= {"mscale": 1.0, "mscale_all_dim": mscale} if mscale else {}
        config["rope_parameters"] = rope_parameters
    return config


def smollm3(file: Contents) -> Config:
    return file.dense_config("smollm3", no_rope_layer_interval=4, **llama_bias_config(file))


def qwen2(file: Contents) -> Config:
    return file.dense_config("qwen2", use_sliding_window=False)


def qwen2moe(file: Contents) -> Config:
    return file.dense_config(
        "qwen2_moe", **qwen_experts(file), **shared_expert(file), norm_topk_prob=False
    ) | {"qkv_bias": file.have_bias("attn_q", "attn_k", "attn_v")}


def qwen_experts(file: Contents) -> Config:
    count, used, width = file.expert_sizes()
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": file.layers_without("ffn_gate_inp.weight"),
        "use_sliding_window": False,
    }


def shared_expert(file: Contents) -> Config:
    return {
        "shared_expert_intermediate_size": file.size(file.first_tensor("ffn_down_shexp.weight"), 1)
    }


def qwen3(file: Contents) -> Config:
    bias = file.have_bias("attn_q", "attn_k", "attn_v", "attn_output")
    return file.dense_config("qwen3", attention_bias=bias, use_sliding_window=False)


def qwen3moe(file: Contents) -> Config:
    bias = file.have_bias("attn_q", "attn_k", "attn_v", "attn_output")
    return file.dense_config(
        "qwen3_moe", attention_bias=bias, **qwen_experts(file), norm_topk_prob=True
    )


def gemma2(file: Contents) -> Config:
    config = gemma(file, "gemma2", 46) | file.window_config(2, default_window=4096)
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return config | {key: file.meta.positive(f".{key}", default) for key, default in caps.items()}


def gemma(file: Contents, kind: str, largest: int) -> Config:
    """The largest model of each generation, known by its number of layers, has a query scale of its
    own.
    """
    config = file.dense_config(kind, hidden_activation="gelu_pytorch_tanh")
    del config["hidden_act"]
    query_scalar = (
        config["hidden_size"] // config["num_attention_heads"]
        if file.num_layers == largest
        else config["head_dim"]
    )
    return config | {
        "query_pre_attn_scalar": query_scalar,
        "tie_word_embeddings": not file.has("output.weight"),
    }


def gemma3(file: Contents) -> Config:
    config = gemma(file, "gemma3_text", 62) | file.window_config(6)
    config |= {
        "rope_local_base_freq": float(file.meta.positive(".rope.freq_base_swa", 10000.0)),
        "final_logit_softcapping": file.meta.positive(".final_logit_softcapping", None),
    }
    if ".rope.freq_base" not in file.meta:
        config["rope_theta"] = 1e6
    return config


def gemma4(file: Contents) -> Config:
    """Sliding-window layers have the sizes that end in `_swa`; `rope_freqs` holds the rotated
    fraction of the others.
    """
    meta = file.meta
    config = file.common_config("gemma4_text")
    if not meta.is_array(".attention.sliding_window_pattern"):
        raise ModelError(
            f"GGUF: {meta.full_key('.attention.sliding_window_pattern')} must be a list"
        )
    config |= file.window_config(None)
    kinds = config["layer_types"]
    L = file.num_layers
    if "full_attention" not in kinds:
        raise ModelError(
            f"GGUF: {meta.full_key('.attention.sliding_window_pattern')} must leave a layer "
            "without a window"
        )
    global_head_dim = meta.count(".attention.key_length")
    local_head_dim = meta.count(".attention.key_length_swa")
    kv_heads = meta.per_layer_counts(".attention.head_count_kv", L, minimum=1)
    widths = meta.per_layer_counts(".feed_forward_length", L, minimum=1)
    full = kinds.index("full_attention")
    kv_heads_by_kind = {kind: kv_heads[kinds.index(kind)] for kind in {*kinds}}
    full_attention_config = {
        "head_dim": global_head_dim,
        "num_key_value_heads": kv_heads_by_kind["full_attention"],
    }
    theta = meta.positive(".rope.freq_base", 1e6), meta.positive(".rope.freq_base_swa", 10000.0)
    config |= {
        "head_dim": local_head_dim,
        "num_key_value_heads": kv_heads_by_kind.get("sliding_attention", kv_heads[full]),
        "per_layer_config": {
            str(i): full_attention_config
            for i, kind in enumerate(kinds)
            if kind == "full_attention"
        },
        "attention_k_eq_v": not file.has(f"blk.{full}.attn_v.weight"),
        "intermediate_size": widths[0],
        "num_kv_shared_layers": meta.count(".attention.shared_kv_layers", 0, minimum=0),
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": meta.count(
            ".embedding_length_per_layer_input", 0, minimum=0
        ),
        "vocab_size_per_layer_input": file.size("per_layer_token_embd.weight", 0)
        if file.has("per_layer_token_embd.weight")
        else config["vocab_size"],
        "final_logit_softcapping": meta.positive(".final_logit_softcapping", None),
        "enable_moe_block": False,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": float(theta[0]),
                "partial_rotary_factor": gemma4_rotary_fraction(file, global_head_dim),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": float(theta[1])},
        },
    }
    if meta.count(".expert_count", 0, minimum=0):
        count, used, width = file.expert_sizes()
        config |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": used}
        config |= {"moe_intermediate_size": width}
    return config


def gemma4_rotary_fraction(file: Contents, head_dim: int) -> float:
    """The rotated fraction of Gemma 4's global heads: the factors of the other pairs are too large
    to matter.
    """
    if FREQS not in file.shapes:
        return 1.0
    factors = read_factors(FREQS, file.read, head_dim)
    num_rotated = factors.count(1.0)
    if factors != [1.0] * num_rotated + [1e30] * (len(factors) - num_rotated):
        raise ModelError(f"GGUF: the tensor {FREQS} must hold 1 for rotated pairs, then 1e30")
    return rotary_fraction(2 * num_rotated, head_dim)


def phi3(file: Contents) -> Config:
    window = file.meta.count(".attention.sliding_window", 0, minimum=0) or None
    trained = file.meta.count(".rope.scaling.original_context_length", None)
    return file.dense_config(
        "phi3", sliding_window=window, original_max_position_embeddings=trained
    )


def phimoe(file: Contents) -> Config:
    count, used, width = file.expert_sizes()
    config = phi3(file) | {
        "model_type": "phimoe",
        "intermediate_size": width,
        "num_local_experts": count,
    }
    bias = file.have_bias("attn_q", "attn_k", "attn_v", "attn_output")
    return config | {
        "num_experts_per_tok": used,
        "attention_bias": bias,
        "lm_head_bias": file.has("output.bias"),
    }


def granite(file: Contents) -> Config:
    file.meta.reject(".rope.scaling.finetuned", True)
    return file.dense_config("granite", **llama_bias_config(file), **multiplier_config(file))


def multiplier_config(file: Contents) -> Config:
    keys = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    keys |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    values = {name: file.meta.positive(f".{key}", None) for name, key in keys.items()}
    return {name: value for name, value in values.items() if value is not None}


def granitemoe(file: Contents) -> Config:
    count, used, width = file.expert_sizes()
    config = file.dense_config(
        "granitemoe", **multiplier_config(file), num_local_experts=count, num_experts_per_tok=used
    )
    config["attention_bias"] = file.have_bias("attn_q", "attn_k", "attn_v", "attn_output")
    if file.in_all_layers("ffn_down_shexp.weight"):
        shared = file.size("blk.0.ffn_down_shexp.weight", 1)
        config |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return config | {"intermediate_size": width}


def granitehybrid(file: Contents) -> Config:
    return hybrids.granitehybrid(file, multiplier_config(file))


def olmo2(file: Contents) -> Config:
    """OLMo 3 is OLMo 2 with windows."""
    file.meta.reject(".attention.clamp_kqv", 0.0)
    config = file.dense_config(
        "olmo2", attention_bias=file.have_bias("attn_q", "attn_k", "attn_v", "attn_output")
    )
    if file.meta.count(".attention.sliding_window", 0, minimum=0):
        config |= file.window_config(4) | {"model_type": "olmo3"}
    return config


def olmoe(file: Contents) -> Config:
    file.meta.reject(".attention.clamp_kqv", 0.0)
    count, used, width = file.expert_sizes()
    config = file.dense_config(
        "olmoe", num_experts=count, num_experts_per_tok=used, norm_topk_prob=False
    )
    return config | {"intermediate_size": width}


def command_r(file: Contents) -> Config:
    config = file.dense_config(
        "cohere", "layer_norm_eps", logit_scale=file.meta.positive(".logit_scale")
    )
    return config | {"use_qk_norm": file.in_all_layers("attn_q_norm.weight")}


def cohere2(file: Contents) -> Config:
    config = file.dense_config(
        "cohere2", "layer_norm_eps", logit_scale=file.meta.positive(".logit_scale")
    )
    return config | file.window_config(4)


def glm4(file: Contents) -> Config:
    reject_multi_axis_rope(file)
    return file.dense_config("glm4", attention_bias=file.have_bias("attn_q", "attn_k", "attn_v"))


def reject_multi_axis_rope(file: Contents) -> None:
    """Raise for multi-axis rotary embeddings, whose rows have another order."""
    sections = file.meta.per_layer_counts(".rope.dimension_sections", 1, 0)
    if any(sections):
        raise ModelError(
            f"GGUF: {file.meta.full_key('.rope.dimension_sections')}: vision models are not "
            "supported"
        )


def glm4moe(file: Contents) -> Config:
    reject_multi_axis_rope(file)
    config = file.dense_config("glm4_moe", **sigmoid_experts(file))
    bias = file.have_bias("attn_q", "attn_k", "attn_v")
    norms = file.in_all_layers("attn_q_norm.weight")
    return config | {"attention_bias": bias, "use_qk_norm": norms}


def sigmoid_experts(file: Contents) -> Config:
    """Experts as in DeepSeek-V3; old files do not state the groups that V3 has."""
    if (gate := file.gating_function("sigmoid")) != "sigmoid":
        name = file.meta.full_key(".expert_gating_func")
        raise ModelError(f"GGUF: {name} says {gate}; {file.meta.architecture} models have sigmoid")
    groups, chosen = (8, 4) if file.meta.count(".expert_count") == 256 else (1, 1)
    return routed_experts(file) | {
        "n_group": file.meta.count(".expert_group_count", groups, minimum=0) or 1,
        "topk_group": file.meta.count(".expert_group_used_count", chosen, minimum=0) or 1,
        "norm_topk_prob": file.meta.flag(".expert_weights_norm", False),
    }


def routed_experts(file: Contents) -> Config:
    count, used, width = file.expert_sizes()
    config = {
        "n_routed_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": width,
        "first_k_dense_replace": file.count_leading_without("ffn_gate_inp.weight"),
        "routed_scaling_factor": file.meta.number(".expert_weights_scale", 0.0) or 1.0,
    }  # fmt: skip
    shared_tensors = [f"blk.{number}.ffn_down_shexp.weight" for number in range(file.num_layers)]
    shared_widths = [file.size(name, 1) for name in shared_tensors if file.has(name)]
    if shared_widths and shared_widths[0] % width:
        raise ModelError(
            f"GGUF: the tensor {shared_tensors[-1]} is {shared_widths[0]} wide; it must be a "
            f"multiple of {width}"
        )
    return config | ({"n_shared_experts": shared_widths[0] // width} if shared_widths else {})


def deepseek2(file: Contents) -> Config:
    """DeepSeek-V2 (softmax), DeepSeek-V3 and its derivatives (sigmoid)."""
    meta = file.meta
    config = file.common_config("deepseek_v2")
    rank = meta.count(".attention.kv_lora_rank")
    rotary_dim = meta.count(".rope.dimension_count")
    has_mla_lengths = ".attention.key_length_mla" in meta  # absent in older files
    qk_head_dim, v_head_dim = (
        meta.count(f".attention.{x}_length{'_mla' if has_mla_lengths else ''}")
        for x in ("key", "value")
    )
    if qk_head_dim <= rotary_dim:
        raise ModelError(
            f"GGUF: {meta.full_key('.attention.key_length')} = {qk_head_dim}; it must be above the "
            f"{rotary_dim} rotated"
        )
    config |= rope_config(
        meta, file.shapes, file.read, rotary_dim, config["max_position_embeddings"]
    )
    if (
        mscale := meta.positive(".rope.scaling.yarn_log_multiplier", None)
    ) is not None and "rope_scaling" in config:
        mscale = round(10 * mscale, 7)  # the file stores a tenth of it
        config["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale}
    config |= {
        "q_lora_rank": meta.count(".attention.q_lora_rank", None)
        if file.has("blk.0.attn_q_a.weight")
        else None,
        "kv_lora_rank": rank,
        "v_head_dim": v_head_dim,
        "qk_nope_head_dim": qk_head_dim - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "intermediate_size": meta.uniform_count(".feed_forward_length", file.num_layers),
        "hidden_act": "silu",
        "attention_bias": file.have_bias("attn_kv_a_mqa", "attn_output"),
    }
    # V2 has no bias.
    has_selection_bias = any(name.endswith(".exp_probs_b.bias") for name in file.shapes)
    if file.gating_function("sigmoid" if has_selection_bias else "softmax") == "sigmoid":
        return config | sigmoid_experts(file) | {"model_type": "deepseek_v3"}
    groups = meta.count(".expert_group_count", 1, minimum=0) or 1
    config |= {
        "n_group": groups,
        "topk_group": meta.count(".expert_group_used_count", 1, minimum=0) or 1,
    }
    config |= {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return (
        config | routed_experts(file) | {"norm_topk_prob": meta.flag(".expert_weights_norm", False)}
    )


def gpt_oss(file: Contents) -> Config:
    count, used, width = file.expert_sizes()
    config = file.dense_config(
        "gpt_oss", num_local_experts=count, num_experts_per_tok=used
    ) | file.window_config(2, default_window=128)
    config["attention_bias"] = file.have_bias("attn_q", "attn_k", "attn_v", "attn_output")
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        config["rope_scaling"]["truncate"] = False
    return config | {"intermediate_size": width}


def seed_oss(file: Contents) -> Config:
    config = file.dense_config(
        "seed_oss", mlp_bias=file.have_bias("ffn_gate", "ffn_up", "ffn_down")
    )
    projections_by_key = {
        "attention_bias": ("attn_q", "attn_k", "attn_v"),
        "attention_out_bias": ("attn_output",),
    }
    return config | {key: file.have_bias(*names) for key, names in projections_by_key.items()}


def exaone4(file: Contents) -> Config:
    return file.dense_config("exaone4") | file.window_config(4)


def hunyuan_dense(file: Contents) -> Config:
    """The context extension is already in the file's rope base."""
    bias = file.have_bias("attn_q", "attn_k", "attn_v", "attn_output")
    return file.dense_config("hunyuan_v1_dense", attention_bias=bias, use_qk_norm=True)


def hunyuan_moe(file: Contents) -> Config:
    count, used, width = file.expert_sizes()
    experts = {
        "num_experts": count,
        "moe_topk": used,
        "moe_intermediate_size": width,
        "num_shared_expert": 1,
    }
    return hunyuan_dense(file) | experts | {"model_type": "hunyuan_v1_moe"}


def ernie(file: Contents) -> Config:
    reject_multi_axis_rope(file)
    names = ("attn_q", "attn_k", "attn_v", "attn_output")
    return file.dense_config(
        "ernie4_5", use_bias=file.have_bias(*names, "ffn_gate", "ffn_up", "ffn_down")
    )


def ernie_moe(file: Contents) -> Config:
    reject_multi_axis_rope(file)
    count, used, width = file.expert_sizes()
    interval = file.meta.count(".interleave_moe_layer_step", 1)
    expert_layers = [
        number for number in range(file.num_layers) if file.has(f"blk.{number}.ffn_gate_inp.weight")
    ]
    if not expert_layers or expert_layers != [
        i for i in range(expert_layers[0], expert_layers[-1] + 1) if (i + 1) % interval == 0
    ]:
        raise ModelError(
            f"GGUF: the layers {format_value(expert_layers)} have experts; it must be every "
            f"{interval} layers"
        )
    shared = [
        name for number in expert_layers if file.has(name := f"blk.{number}.ffn_down_shexp.weight")
    ]
    return file.dense_config(
        "ernie4_5_moe", use_bias=file.have_bias("attn_q", "attn_k", "attn_v", "attn_output")
    ) | {
        "moe_num_experts": count,
        "moe_k": used,
        "moe_intermediate_size": width,
        "moe_layer_interval": interval,
        "moe_layer_start_index": expert_layers[0],
        "moe_layer_end_index": expert_layers[-1],
        "moe_num_shared_experts": file.size(shared[0], 1) // width if shared else 0,
    }


def lfm2(file: Contents) -> Config:
    config = short_convolution_config(file, "lfm2")
    return config | {
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": file.meta.uniform_count(".feed_forward_length", 1),
    }


def short_convolution_config(file: Contents, kind: str) -> Config:
    config = file.common_config(kind)
    config |= file.head_config(config)
    kv_heads = file.meta.per_layer_counts(".attention.head_count_kv", file.num_layers)
    file.meta.reject(".attention.sliding_window", 0)
    return config | {
        "norm_eps": config.pop("rms_norm_eps"),
        "conv_L_cache": file.meta.count(".shortconv.l_cache"),
        "conv_bias": False,
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
    }


def lfm2moe(file: Contents) -> Config:
    if file.gating_function("sigmoid") != "sigmoid":
        raise ModelError(f"GGUF: {file.meta.full_key('.expert_gating_func')} must be 2 for sigmoid")
    count, used, width = file.expert_sizes()
    first = file.count_leading_without("ffn_gate_inp.weight")
    bias = file.in_all_layers("exp_probs_b.bias", range(first, file.num_layers))
    return short_convolution_config(file, "lfm2_moe") | {
        "intermediate_size": file.meta.uniform_count(".feed_forward_length", file.num_layers),
        "num_dense_layers": first,
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "routed_scaling_factor": file.meta.number(".expert_weights_scale", 0.0) or 1.0,
        "use_expert_bias": bias,
    }


def llama4(file: Contents) -> Config:
    """Its windows, query temperature and QK norms (absent in Maverick) are constants of llama.cpp's
    code.
    """
    file.meta.reject(".attention.sliding_window", 8192)
    count, used, width = file.expert_sizes()
    config = file.dense_config(
        "llama4_text", attention_bias=file.have_bias("attn_q", "attn_k", "attn_v", "attn_output")
    )
    return config | {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": width,
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "interleave_moe_layer_step": file.meta.count(".interleave_moe_layer_step"),
        "no_rope_layer_interval": 4,
        "use_qk_norm": count != 128,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def minimax_m2(file: Contents) -> Config:
    if file.gating_function("sigmoid") != "sigmoid":
        raise ModelError(f"GGUF: {file.meta.full_key('.expert_gating_func')} must be 2 for sigmoid")
    count, used, width = file.expert_sizes()
    experts = {"num_local_experts": count, "num_experts_per_tok": used, "scoring_func": "sigmoid"}
    return file.dense_config("minimax_m2", **experts) | {"intermediate_size": width}


ARCHITECTURES: dict[str, Callable[[Contents], Config]] = {
    "cohere2": cohere2,
    "command-r": command_r,
    "deepseek2": deepseek2,
    "ernie4_5": ernie,
    "ernie4_5-moe": ernie_moe,
    "exaone4": exaone4,
    "falcon-h1": hybrids.falcon_h1,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "glm4": glm4,
    "glm4moe": glm4moe,
    "gpt-oss": gpt_oss,
    "granite": granite,
    "granitehybrid": granitehybrid,
    "granitemoe": granitemoe,
    "hunyuan-dense": hunyuan_dense,
    "hunyuan-moe": hunyuan_moe,
    "lfm2": lfm2,
    "lfm2moe": lfm2moe,
    "llama": llama,
    "llama4": llama4,
    "mamba2": hybrids.mamba2,
    "minimax-m2": minimax_m2,
    "mistral3": mistral3,
    "nemotron_h": hybrids.nemotron_h,
    "nemotron_h_moe": hybrids.nemotron_h,
    "olmo2": olmo2,
    "olmoe": olmoe,
    "phi3": phi3,
    "phimoe": phimoe,
    "qwen2": qwen2,
    "qwen2moe": qwen2moe,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
    "qwen3next": hybrids.qwen3next,
    "qwen35": hybrids.qwen35,
    "qwen35moe": hybrids.qwen35moe,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
}
