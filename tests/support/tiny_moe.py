"""Tiny mixtures of experts with random weights, by the names in their checkpoints and adapters."""

from pathlib import Path

import jax
import numpy as np

from quire.model.checkpoint.loader import read_config, weight_sources
from quire.model.families.common import Source
from quire.tests.support import peft, tiny

SHARED = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MIXTRAL = SHARED | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = SHARED | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
CONFIGS = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE}
# names of the experts' projections
EXPERTS = {"mixtral": ("w1", "w2", "w3"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
ATTENTION = peft.EVERY[:4]
MODULES = {  # `lora_target_modules` that select all modules that can have adapters
    "mixtral": [*ATTENTION, "experts", "gate", "lm_head"],
    "qwen3_moe": [*peft.EVERY, "experts", "gate", "lm_head"],
}


def write(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Write a model folder; returns its tensors."""
    config = CONFIGS[name]
    tiny.write(folder, config, {})
    sources = jax.tree.leaves(
        weight_sources(read_config(folder)), is_leaf=lambda node: isinstance(node, Source)
    )
    shapes = {tensor.name: tensor.shape for source in sources for tensor in source.parts}
    if name == "mixtral":
        shapes = {
            tensor_name.replace(".mlp.", ".block_sparse_moe."): shape
            for tensor_name, shape in shapes.items()
        }
    return tiny.write(folder, config, tiny.even(shapes))
