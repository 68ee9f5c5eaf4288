"""A tiny Llama folder with random weights."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama checkpoint's tensors by name."""
    D = config["hidden_size"]
    F = config["intermediate_size"]
    V = config["vocab_size"]
    N = config["num_attention_heads"]
    K = config["num_key_value_heads"]
    tensor_shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        tensor_shapes["lm_head.weight"] = (V, D)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        tensor_shapes |= {
            f"{at}.input_layernorm.weight": (D,),
            f"{at}.post_attention_layernorm.weight": (D,),
        }
        tensor_shapes |= {
            f"{at}.self_attn.{x}_proj.weight": (n * D // N, D)
            for x, n in (("q", N), ("k", K), ("v", K))
        }
        tensor_shapes |= {
            f"{at}.self_attn.o_proj.weight": (D, D),
            f"{at}.mlp.down_proj.weight": (D, F),
        }
        tensor_shapes |= {f"{at}.mlp.{x}_proj.weight": (F, D) for x in ("gate", "up")}
    return tensor_shapes


def draw(config: dict, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a Llama checkpoint."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32).astype(dtype)
        for name, shape in shapes(config).items()
    }


def even(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> dict[str, np.ndarray]:
    """Random tensors, scaled so that products with the matrices keep the norm of activations."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            1 + 0.3 * rng.standard_normal(shape)
            if name.endswith("norm.weight")
            else rng.standard_normal(shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 4)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def write(
    folder: Path, config: dict = LLAMA, tensors: dict | None = None, shards: int = 1
) -> dict[str, np.ndarray]:
    """Write a model folder, with an index if there are several shards; returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = draw(config) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    file_by_tensor = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
        for i, name in enumerate(sorted(tensors))
    }
    for file in set(file_by_tensor.values()):
        save_file(
            {name: tensors[name] for name in tensors if file_by_tensor[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": file_by_tensor})
    )
    return tensors
