"""A tiny Qwen3-Next folder with random weights, including a multi-token-prediction layer."""

from pathlib import Path

import jax
import numpy as np

from quire.model.checkpoint.loader import read_config, weight_sources
from quire.model.families.common import Source
from quire.tests.support import tiny

D = 32
V = 96
F = 20
EXPERTS = 6
CONFIG = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": F,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 24,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def mtp_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Tensors of the multi-token-prediction layer."""
    N, K, H = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    at = "mtp.layers.0"
    shared = config["shared_expert_intermediate_size"]
    shapes = {
        "mtp.fc.weight": (D, 2 * D),
        "mtp.norm.weight": (D,),
        "mtp.pre_fc_norm_embedding.weight": (D,),
        "mtp.pre_fc_norm_hidden.weight": (D,),
        f"{at}.input_layernorm.weight": (D,),
        f"{at}.post_attention_layernorm.weight": (D,),
        f"{at}.self_attn.q_proj.weight": (2 * N * H, D),
        f"{at}.self_attn.k_proj.weight": (K * H, D),
        f"{at}.self_attn.v_proj.weight": (K * H, D),
        f"{at}.self_attn.q_norm.weight": (H,),
        f"{at}.self_attn.k_norm.weight": (H,),
        f"{at}.self_attn.o_proj.weight": (D, N * H),
        f"{at}.mlp.gate.weight": (EXPERTS, D),
        f"{at}.mlp.shared_expert_gate.weight": (1, D),
    }
    for mlp_name, width in [
        ("shared_expert", shared),
        *((f"experts.{e}", F) for e in range(EXPERTS)),
    ]:
        shapes |= {f"{at}.mlp.{mlp_name}.{x}_proj.weight": (width, D) for x in ("gate", "up")}
        shapes[f"{at}.mlp.{mlp_name}.down_proj.weight"] = (D, width)
    return shapes


def write(folder: Path, config: dict = CONFIG) -> dict[str, np.ndarray]:
    """Write a model folder; returns its tensors."""
    tiny.write(folder, config, {})
    sources = jax.tree.leaves(
        weight_sources(read_config(folder)), is_leaf=lambda node: isinstance(node, Source)
    )
    shapes = {
        tensor.name: tensor.shape for source in sources for tensor in source.parts
    } | mtp_shapes(config)
    tensors = tiny.even(shapes)
    norms = [name for name in shapes if name.endswith("norm.weight") and "linear_attn" not in name]
    tensors |= {
        name: tensors[name] - np.float32(1) for name in norms
    }  # norms add 1 to their weights
    return tiny.write(folder, config, tensors)
