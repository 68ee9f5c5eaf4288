"""Configurations for planning: published models with their figures, and random ones."""

import random
from dataclasses import replace

from quire.model.config import Attention, LatentAttention, Layer, Mlp, ModelConfig, Moe, Rope

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
# (config, (parameters, KV bytes per token, KV bytes of 4,096 tokens)), as published
PUBLISHED = {
    "7B": (
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        }
        | {"max_position_embeddings": 4096, "vocab_size": 32000},
        (6_738_415_616, 0.5 * 2**20, 2 * 2**30),
    ),
    "70B": (
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        }
        | {"num_key_value_heads": 8, "max_position_embeddings": 4096, "vocab_size": 32000},
        (68_976_648_192, 0.3125 * 2**20, 1.25 * 2**30),
    ),
    "405B": (
        {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
        }
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "vocab_size": 128256},
        (405_853_388_800, 0.492 * 2**20, 2 * 2**30),
    ),
}


def random_config(rng: random.Random) -> ModelConfig:
    """A few random layers: full, sliding-window, latent or shared attention; dense or experts."""
    rope = Rope((1.0,))
    layers: list[Layer] = []
    for index in range(rng.randint(1, 8)):
        if rng.random() < 0.2:
            attention = LatentAttention(
                heads=2,
                q_rank=rng.choice([None, 6]),
                kv_rank=rng.choice([8, 16]),
                nope_dim=4,
                rope_dim=2,
                v_dim=4,
                scale=1.0,
                rope=rope,
            )
        else:
            attention = Attention(
                heads=4,
                kv_heads=rng.choice([1, 2, 4]),
                head_dim=8,
                scale=1.0,
                window=rng.choice([None, 5, 32]),
            )
            owners = [
                i
                for i in range(index)
                if isinstance(layers[i].attention, Attention)
                and layers[i].attention.kv_source is None
            ]
            if owners and rng.random() < 0.4:
                source = rng.choice(owners)
                attention = replace(layers[source].attention, kv_source=source)
        moe = Moe(experts=4, top_k=2, dim=6) if rng.random() < 0.3 else None
        layers.append(Layer(attention, None if moe else Mlp(12), moe))
    return ModelConfig(
        family="llama",
        vocab_size=50,
        dim=16,
        layers=tuple(layers),
        max_len=128,
        tied=rng.random() < 0.5,
        dtype=rng.choice(["bfloat16", "float32"]),
    )
