"""From a GGUF file's metadata to the config.json of the model that it was made from: what `model/families` reads.

A file does not say everything: llama.cpp has the rest in the code of each architecture. It stands here, one function
an architecture, beside what the file does say.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ModelError
from . import hybrids
from .contents import Config, Contents, Shapes
from .metadata import Metadata, shown
from .rotary import FREQS, Read, part, read_factors, rope_of


def config_of(metadata: Mapping[str, Any], shapes: Shapes, read: Read | None = None) -> Config:
    """The config.json, with the keys of Hugging Face, of a file with this metadata and tensors of these shapes.

    `read(name)` gives a tensor in numbers: some files keep what their rotary embedding is scaled by in one.
    """
    file = Contents(Metadata(metadata), shapes, read)
    architecture = file.meta.architecture
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"GGUF: general.architecture = {shown(architecture)} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture](file)


def llama(file: Contents) -> Config:
    """Also of Mistral, and with experts of Mixtral: of the makers' own the file has the name alone."""
    if file.meta.count(".expert_count", 0, least=0):
        count, used, width = file.experts()
        file.biases("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        return file.dense("mixtral", num_local_experts=count, num_experts_per_tok=used) | {"intermediate_size": width}
    return file.dense("llama", **llama_biases(file))


def llama_biases(file: Contents) -> Config:
    attention = file.biases("attn_q", "attn_k", "attn_v", "attn_output")
    return {"attention_bias": attention, "mlp_bias": file.biases("ffn_gate", "ffn_up", "ffn_down")}


def mistral3(file: Contents) -> Config:
    """Mistral Small 3, and Ministral 3, whose queries grow with their position."""
    scale, weight = (
        file.meta.number(key, 0.0) for key in (".attention.temperature_scale", ".rope.scaling.yarn_log_multiplier")
    )
    config = file.dense("ministral3" if scale else "mistral", sliding_window=None)
    if scale:
        rope = dict(config.pop("rope_scaling", {}))
        if rope.get("rope_type") != "yarn":
            raise ModelError(f"GGUF: {file.meta.name('.rope.scaling.type')} must be yarn beside a temperature")
        rope |= {"rope_theta": config.pop("rope_theta"), "llama_4_scaling_beta": scale}
        rope |= {"mscale": 1.0, "mscale_all_dim": weight} if weight else {}
        config["rope_parameters"] = rope
    return config


def smollm3(file: Contents) -> Config:
    return file.dense("smollm3", no_rope_layer_interval=4, **llama_biases(file))


def qwen2(file: Contents) -> Config:
    return file.dense("qwen2", use_sliding_window=False)


def qwen2moe(file: Contents) -> Config:
    return file.dense("qwen2_moe", **qwen_experts(file), **shared_expert(file), norm_topk_prob=False) | {
        "qkv_bias": file.biases("attn_q", "attn_k", "attn_v")
    }


def qwen_experts(file: Contents) -> Config:
    count, used, width = file.experts()
    return {
        "num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": width, "decoder_sparse_step": 1,
        "mlp_only_layers": file.without("ffn_gate_inp.weight"), "use_sliding_window": False,
    }  # fmt: skip


def shared_expert(file: Contents) -> Config:
    return {"shared_expert_intermediate_size": file.size(file.first_with("ffn_down_shexp.weight"), 1)}


def qwen3(file: Contents) -> Config:
    bias = file.biases("attn_q", "attn_k", "attn_v", "attn_output")
    return file.dense("qwen3", attention_bias=bias, use_sliding_window=False)


def qwen3moe(file: Contents) -> Config:
    bias = file.biases("attn_q", "attn_k", "attn_v", "attn_output")
    return file.dense("qwen3_moe", attention_bias=bias, **qwen_experts(file), norm_topk_prob=True)


def gemma2(file: Contents) -> Config:
    config = gemma(file, "gemma2", 46) | file.windows(2, otherwise=4096)
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return config | {key: file.meta.positive(f".{key}", usual) for key, usual in caps.items()}


def gemma(file: Contents, kind: str, largest: int) -> Config:
    """The largest model of each generation, told by its layers, scales scores by other than the size of its heads."""
    config = file.dense(kind, hidden_activation="gelu_pytorch_tanh")
    del config["hidden_act"]
    scaled = config["hidden_size"] // config["num_attention_heads"] if file.layers == largest else config["head_dim"]
    return config | {"query_pre_attn_scalar": scaled, "tie_word_embeddings": not file.has("output.weight")}


def gemma3(file: Contents) -> Config:
    config = gemma(file, "gemma3_text", 62) | file.windows(6)
    config |= {
        "rope_local_base_freq": float(file.meta.positive(".rope.freq_base_swa", 10000.0)),
        "final_logit_softcapping": file.meta.positive(".final_logit_softcapping", None),
    }
    if ".rope.freq_base" not in file.meta:
        config["rope_theta"] = 1e6
    return config


def gemma4(file: Contents) -> Config:
    """Local layers have the sizes that end in swa, the others those without; what turns is in the factors."""
    meta, config = file.meta, file.common("gemma4_text")
    if not meta.is_array(".attention.sliding_window_pattern"):
        raise ModelError(f"GGUF: {meta.name('.attention.sliding_window_pattern')} must be a list")
    config |= file.windows(None)
    kinds, L = config["layer_types"], file.layers
    if "full_attention" not in kinds:
        raise ModelError(f"GGUF: {meta.name('.attention.sliding_window_pattern')} must leave a layer without a window")
    wide, local = meta.count(".attention.key_length"), meta.count(".attention.key_length_swa")
    kept = meta.of_layers(".attention.head_count_kv", L, least=1)
    widths, full = meta.of_layers(".feed_forward_length", L, least=1), kinds.index("full_attention")
    keys = {kind: kept[kinds.index(kind)] for kind in {*kinds}}
    own = {"head_dim": wide, "num_key_value_heads": keys["full_attention"]}
    theta = meta.positive(".rope.freq_base", 1e6), meta.positive(".rope.freq_base_swa", 10000.0)
    config |= {
        "head_dim": local, "num_key_value_heads": keys.get("sliding_attention", kept[full]),
        "per_layer_config": {str(i): own for i, kind in enumerate(kinds) if kind == "full_attention"},
        "attention_k_eq_v": not file.has(f"blk.{full}.attn_v.weight"), "intermediate_size": widths[0],
        "num_kv_shared_layers": meta.count(".attention.shared_kv_layers", 0, least=0),
        "use_double_wide_mlp": widths[-1] == 2 * widths[0], "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": meta.count(".embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": file.size("per_layer_token_embd.weight", 0)
        if file.has("per_layer_token_embd.weight") else config["vocab_size"],
        "final_logit_softcapping": meta.positive(".final_logit_softcapping", None), "enable_moe_block": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": share_turned(file, wide),
                               "rope_theta": float(theta[0])},
            "sliding_attention": {"rope_type": "default", "rope_theta": float(theta[1])},
        },
    }  # fmt: skip
    if meta.count(".expert_count", 0, least=0):
        count, used, width = file.experts()
        config |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": used}
        config |= {"moe_intermediate_size": width}
    return config


def share_turned(file: Contents, head_dim: int) -> float:
    """The pairs of Gemma 4's wide heads that turn: the others are divided by more than any number of positions."""
    if FREQS not in file.shapes:
        return 1.0
    factors = read_factors(FREQS, file.read, head_dim)
    turned = factors.count(1.0)
    if factors != [1.0] * turned + [1e30] * (len(factors) - turned):
        raise ModelError(f"GGUF: the tensor {FREQS} must hold 1 for pairs that turn, then 1e30")
    return part(2 * turned, head_dim)


def phi3(file: Contents) -> Config:
    window = file.meta.count(".attention.sliding_window", 0, least=0) or None
    trained = file.meta.count(".rope.scaling.original_context_length", None)
    return file.dense("phi3", sliding_window=window, original_max_position_embeddings=trained)


def phimoe(file: Contents) -> Config:
    count, used, width = file.experts()
    config = phi3(file) | {"model_type": "phimoe", "intermediate_size": width, "num_local_experts": count}
    bias = file.biases("attn_q", "attn_k", "attn_v", "attn_output")
    return config | {"num_experts_per_tok": used, "attention_bias": bias, "lm_head_bias": file.has("output.bias")}


def granite(file: Contents) -> Config:
    file.meta.refuse(".rope.scaling.finetuned", True)
    return file.dense("granite", **llama_biases(file), **multipliers(file))


def multipliers(file: Contents) -> Config:
    keys = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    keys |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    found = {name: file.meta.positive(f".{key}", None) for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def granitemoe(file: Contents) -> Config:
    count, used, width = file.experts()
    config = file.dense("granitemoe", **multipliers(file), num_local_experts=count, num_experts_per_tok=used)
    config["attention_bias"] = file.biases("attn_q", "attn_k", "attn_v", "attn_output")
    if file.everywhere("ffn_down_shexp.weight"):
        shared = file.size("blk.0.ffn_down_shexp.weight", 1)
        config |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return config | {"intermediate_size": width}


def granitehybrid(file: Contents) -> Config:
    return hybrids.granitehybrid(file, multipliers(file))


def olmo2(file: Contents) -> Config:
    """OLMo 3 is OLMo 2 with windows."""
    file.meta.refuse(".attention.clamp_kqv", 0.0)
    config = file.dense("olmo2", attention_bias=file.biases("attn_q", "attn_k", "attn_v", "attn_output"))
    if file.meta.count(".attention.sliding_window", 0, least=0):
        config |= file.windows(4) | {"model_type": "olmo3"}
    return config


def olmoe(file: Contents) -> Config:
    file.meta.refuse(".attention.clamp_kqv", 0.0)
    count, used, width = file.experts()
    config = file.dense("olmoe", num_experts=count, num_experts_per_tok=used, norm_topk_prob=False)
    return config | {"intermediate_size": width}


def command_r(file: Contents) -> Config:
    config = file.dense("cohere", "layer_norm_eps", logit_scale=file.meta.positive(".logit_scale"))
    return config | {"use_qk_norm": file.everywhere("attn_q_norm.weight")}


def cohere2(file: Contents) -> Config:
    config = file.dense("cohere2", "layer_norm_eps", logit_scale=file.meta.positive(".logit_scale"))
    return config | file.windows(4)


def glm4(file: Contents) -> Config:
    refuse_sections(file)
    return file.dense("glm4", attention_bias=file.biases("attn_q", "attn_k", "attn_v"))


def refuse_sections(file: Contents) -> None:
    """A rotary embedding of several positions has its rows in another order."""
    sections = file.meta.of_layers(".rope.dimension_sections", 1, 0)
    if any(sections):
        raise ModelError(f"GGUF: {file.meta.name('.rope.dimension_sections')}: models that see are not supported")


def glm4moe(file: Contents) -> Config:
    refuse_sections(file)
    config = file.dense("glm4_moe", **sigmoid_experts(file))
    bias, norms = file.biases("attn_q", "attn_k", "attn_v"), file.everywhere("attn_q_norm.weight")
    return config | {"attention_bias": bias, "use_qk_norm": norms}


def sigmoid_experts(file: Contents) -> Config:
    """As DeepSeek-V3 chooses them. Contentss from before groups were written say nothing of those that V3 has."""
    if (gate := file.gate("sigmoid")) != "sigmoid":
        name = file.meta.name(".expert_gating_func")
        raise ModelError(f"GGUF: {name} says {gate}; {file.meta.architecture} models have sigmoid")
    groups, chosen = (8, 4) if file.meta.count(".expert_count") == 256 else (1, 1)
    return routed_experts(file) | {
        "n_group": file.meta.count(".expert_group_count", groups, least=0) or 1,
        "topk_group": file.meta.count(".expert_group_used_count", chosen, least=0) or 1,
        "norm_topk_prob": file.meta.flag(".expert_weights_norm", False),
    }


def routed_experts(file: Contents) -> Config:
    count, used, width = file.experts()
    config = {
        "n_routed_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": width,
        "first_k_dense_replace": file.leading("ffn_gate_inp.weight"),
        "routed_scaling_factor": file.meta.number(".expert_weights_scale", 0.0) or 1.0,
    }  # fmt: skip
    shared = [f"blk.{number}.ffn_down_shexp.weight" for number in range(file.layers)]
    found = [file.size(name, 1) for name in shared if file.has(name)]
    if found and found[0] % width:
        raise ModelError(f"GGUF: the tensor {shared[-1]} is {found[0]} wide; it must be a multiple of {width}")
    return config | ({"n_shared_experts": found[0] // width} if found else {})


def deepseek2(file: Contents) -> Config:
    """V2 by softmax, V3 and what is made like it by a sigmoid."""
    meta, config = file.meta, file.common("deepseek_v2")
    rank, rotary = meta.count(".attention.kv_lora_rank"), meta.count(".rope.dimension_count")
    split = ".attention.key_length_mla" in meta  # files from before: the sizes are those of the heads
    whole, value = (meta.count(f".attention.{x}_length{'_mla' if split else ''}") for x in ("key", "value"))
    if whole <= rotary:
        raise ModelError(f"GGUF: {meta.name('.attention.key_length')} = {whole}; it must be above the {rotary} rotated")
    config |= rope_of(meta, file.shapes, file.read, rotary, config["max_position_embeddings"])
    if (weight := meta.positive(".rope.scaling.yarn_log_multiplier", None)) is not None and "rope_scaling" in config:
        weight = round(10 * weight, 7)  # the file has a tenth of it
        config["rope_scaling"] |= {"mscale": weight, "mscale_all_dim": weight}
    config |= {
        "q_lora_rank": meta.count(".attention.q_lora_rank", None) if file.has("blk.0.attn_q_a.weight") else None,
        "kv_lora_rank": rank, "qk_nope_head_dim": whole - rotary, "qk_rope_head_dim": rotary, "v_head_dim": value,
        "intermediate_size": meta.same(".feed_forward_length", file.layers), "hidden_act": "silu",
        "attention_bias": file.biases("attn_kv_a_mqa", "attn_output"),
    }  # fmt: skip
    chosen = any(name.endswith(".exp_probs_b.bias") for name in file.shapes)  # by a bias, which V2 has not
    if file.gate("sigmoid" if chosen else "softmax") == "sigmoid":
        return config | sigmoid_experts(file) | {"model_type": "deepseek_v3"}
    groups = meta.count(".expert_group_count", 1, least=0) or 1
    config |= {"n_group": groups, "topk_group": meta.count(".expert_group_used_count", 1, least=0) or 1}
    config |= {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return config | routed_experts(file) | {"norm_topk_prob": meta.flag(".expert_weights_norm", False)}


def gpt_oss(file: Contents) -> Config:
    count, used, width = file.experts()
    config = file.dense("gpt_oss", num_local_experts=count, num_experts_per_tok=used) | file.windows(2, otherwise=128)
    config["attention_bias"] = file.biases("attn_q", "attn_k", "attn_v", "attn_output")
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        config["rope_scaling"]["truncate"] = False
    return config | {"intermediate_size": width}


def seed_oss(file: Contents) -> Config:
    config = file.dense("seed_oss", mlp_bias=file.biases("ffn_gate", "ffn_up", "ffn_down"))
    own = {"attention_bias": ("attn_q", "attn_k", "attn_v"), "attention_out_bias": ("attn_output",)}
    return config | {key: file.biases(*names) for key, names in own.items()}


def exaone4(file: Contents) -> Config:
    return file.dense("exaone4") | file.windows(4)


def hunyuan_dense(file: Contents) -> Config:
    """What stretches its context is in the base already."""
    bias = file.biases("attn_q", "attn_k", "attn_v", "attn_output")
    return file.dense("hunyuan_v1_dense", attention_bias=bias, use_qk_norm=True)


def hunyuan_moe(file: Contents) -> Config:
    count, used, width = file.experts()
    experts = {"num_experts": count, "moe_topk": used, "moe_intermediate_size": width, "num_shared_expert": 1}
    return hunyuan_dense(file) | experts | {"model_type": "hunyuan_v1_moe"}


def ernie(file: Contents) -> Config:
    refuse_sections(file)
    names = ("attn_q", "attn_k", "attn_v", "attn_output")
    return file.dense("ernie4_5", use_bias=file.biases(*names, "ffn_gate", "ffn_up", "ffn_down"))


def ernie_moe(file: Contents) -> Config:
    refuse_sections(file)
    count, used, width = file.experts()
    every = file.meta.count(".interleave_moe_layer_step", 1)
    sparse = [number for number in range(file.layers) if file.has(f"blk.{number}.ffn_gate_inp.weight")]
    if not sparse or sparse != [i for i in range(sparse[0], sparse[-1] + 1) if (i + 1) % every == 0]:
        raise ModelError(f"GGUF: the layers {shown(sparse)} have experts, which is not every {every} of them")
    shared = [name for number in sparse if file.has(name := f"blk.{number}.ffn_down_shexp.weight")]
    return file.dense("ernie4_5_moe", use_bias=file.biases("attn_q", "attn_k", "attn_v", "attn_output")) | {
        "moe_num_experts": count, "moe_k": used, "moe_intermediate_size": width, "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1], "moe_layer_interval": every,
        "moe_num_shared_experts": file.size(shared[0], 1) // width if shared else 0,
    }  # fmt: skip


def lfm2(file: Contents) -> Config:
    config = short_convolutions(file, "lfm2")
    return config | {"block_auto_adjust_ff_dim": False, "block_ff_dim": file.meta.same(".feed_forward_length", 1)}


def short_convolutions(file: Contents, kind: str) -> Config:
    config = file.common(kind)
    config |= file.heads(config)
    kept = file.meta.of_layers(".attention.head_count_kv", file.layers)
    file.meta.refuse(".attention.sliding_window", 0)
    return config | {
        "norm_eps": config.pop("rms_norm_eps"), "conv_L_cache": file.meta.count(".shortconv.l_cache"),
        "conv_bias": False, "layer_types": ["full_attention" if heads else "conv" for heads in kept],
    }  # fmt: skip


def lfm2moe(file: Contents) -> Config:
    if file.gate("sigmoid") != "sigmoid":
        raise ModelError(f"GGUF: {file.meta.name('.expert_gating_func')} must be 2 for sigmoid")
    count, used, width = file.experts()
    first = file.leading("ffn_gate_inp.weight")
    bias = file.everywhere("exp_probs_b.bias", range(first, file.layers))
    return short_convolutions(file, "lfm2_moe") | {
        "intermediate_size": file.meta.same(".feed_forward_length", file.layers), "num_dense_layers": first,
        "num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": width, "norm_topk_prob": True,
        "routed_scaling_factor": file.meta.number(".expert_weights_scale", 0.0) or 1.0, "use_expert_bias": bias,
    }  # fmt: skip


def llama4(file: Contents) -> Config:
    """Its windows, the temperature of its queries and the norms that Maverick lacks are in llama.cpp's code alone."""
    file.meta.refuse(".attention.sliding_window", 8192)
    count, used, width = file.experts()
    config = file.dense("llama4_text", attention_bias=file.biases("attn_q", "attn_k", "attn_v", "attn_output"))
    return config | {
        "intermediate_size_mlp": config["intermediate_size"], "intermediate_size": width, "num_local_experts": count,
        "num_experts_per_tok": used, "interleave_moe_layer_step": file.meta.count(".interleave_moe_layer_step"),
        "no_rope_layer_interval": 4, "use_qk_norm": count != 128, "attention_chunk_size": 8192,
        "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
    }  # fmt: skip


def minimax_m2(file: Contents) -> Config:
    if file.gate("sigmoid") != "sigmoid":
        raise ModelError(f"GGUF: {file.meta.name('.expert_gating_func')} must be 2 for sigmoid")
    count, used, width = file.experts()
    experts = {"num_local_experts": count, "num_experts_per_tok": used, "scoring_func": "sigmoid"}
    return file.dense("minimax_m2", **experts) | {"intermediate_size": width}


ARCHITECTURES: dict[str, Callable[[Contents], Config]] = {
    "cohere2": cohere2, "command-r": command_r, "deepseek2": deepseek2, "ernie4_5": ernie, "ernie4_5-moe": ernie_moe,
    "exaone4": exaone4, "falcon-h1": hybrids.falcon_h1, "gemma2": gemma2, "gemma3": gemma3, "gemma4": gemma4,
    "glm4": glm4, "glm4moe": glm4moe, "gpt-oss": gpt_oss, "granite": granite, "granitehybrid": granitehybrid,
    "granitemoe": granitemoe, "hunyuan-dense": hunyuan_dense, "hunyuan-moe": hunyuan_moe, "lfm2": lfm2,
    "lfm2moe": lfm2moe, "llama": llama, "llama4": llama4, "mamba2": hybrids.mamba2, "minimax-m2": minimax_m2,
    "mistral3": mistral3, "nemotron_h": hybrids.nemotron_h, "nemotron_h_moe": hybrids.nemotron_h, "olmo2": olmo2,
    "olmoe": olmoe, "phi3": phi3, "phimoe": phimoe, "qwen2": qwen2, "qwen2moe": qwen2moe, "qwen3": qwen3,
    "qwen3moe": qwen3moe, "qwen3next": hybrids.qwen3next, "qwen35": hybrids.qwen35, "qwen35moe": hybrids.qwen35moe,
    "seed_oss": seed_oss, "smollm3": smollm3,
}  # fmt: skip
