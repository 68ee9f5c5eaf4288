"""A tiny DeepSeek-V3 folder with random weights, including a multi-token-prediction layer."""

from pathlib import Path

import numpy as np

from quire.tests.support import tiny

D = 32
V = 96
CONFIG = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "float32",
}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    N = config["num_attention_heads"]
    R = config["q_lora_rank"]
    KV = config["kv_lora_rank"]
    F = 20
    nope = config["qk_nope_head_dim"]
    rope = config["qk_rope_head_dim"]
    v_dim = config["v_head_dim"]
    tensor_shapes = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for i in range(config["num_hidden_layers"] + 1):
        at = f"model.layers.{i}"
        tensor_shapes |= {
            f"{at}.input_layernorm.weight": (D,),
            f"{at}.post_attention_layernorm.weight": (D,),
        }
        tensor_shapes |= {
            f"{at}.self_attn.q_a_proj.weight": (R, D), f"{at}.self_attn.q_a_layernorm.weight": (R,),
            f"{at}.self_attn.q_b_proj.weight": (N * (nope + rope), R),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (KV + rope, D),
            f"{at}.self_attn.kv_a_layernorm.weight": (KV,),
            f"{at}.self_attn.kv_b_proj.weight": (N * (nope + v_dim), KV),
            f"{at}.self_attn.o_proj.weight": (D, N * v_dim),
        }  # fmt: skip
        if i == 0:
            tensor_shapes |= {f"{at}.mlp.{x}_proj.weight": (48, D) for x in ("gate", "up")}
            tensor_shapes[f"{at}.mlp.down_proj.weight"] = (D, 48)
            continue
        tensor_shapes |= {
            f"{at}.mlp.gate.weight": (6, D),
            f"{at}.mlp.gate.e_score_correction_bias": (6,),
        }
        for mlp_name in ["shared_experts", *(f"experts.{e}" for e in range(6))]:
            tensor_shapes |= {
                f"{at}.mlp.{mlp_name}.{x}_proj.weight": (F, D) for x in ("gate", "up")
            }
            tensor_shapes[f"{at}.mlp.{mlp_name}.down_proj.weight"] = (D, F)
    last = f"model.layers.{config['num_hidden_layers']}"
    tensor_shapes |= {f"{last}.{x}.weight": (D,) for x in ("enorm", "hnorm", "shared_head.norm")}
    return tensor_shapes | {
        f"{last}.eh_proj.weight": (D, 2 * D),
        f"{last}.embed_tokens.weight": (V, D),
        f"{last}.shared_head.head.weight": (V, D),
    }


def write(folder: Path, config: dict = CONFIG) -> dict[str, np.ndarray]:
    """Write a model folder; returns its tensors."""
    tensors = tiny.even(shapes(config))
    last = f"model.layers.{config['num_hidden_layers']}"
    tensors[f"{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{last}.shared_head.head.weight"] = tensors["lm_head.weight"]
    return tiny.write(folder, config, tensors)
