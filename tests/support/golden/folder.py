"""A tiny model on disk: its weights are generated from a seed and each tensor's name."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent
POSITIONS = (
    0,
    1,
    10,
    23,
    40,
    79,
    110,
    143,
)  # positions whose logits are stored, if a sequence has them


def draw(name: str, shape: tuple[int, ...], seed: int, model_type: str) -> np.ndarray:
    """One random tensor, scaled for clear greedy tokens, sharp attention and layers that outweigh
    the input embedding.

    Otherwise greedy tokens of a random model depend on rounding, or repeat.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    if name.endswith("_blocks"):  # MXFP4: two codes in a byte
        return rng.integers(0, 256, shape, np.uint8)
    if name.endswith("_scales"):
        return rng.integers(122, 125, shape, np.uint8)
    value = rng.standard_normal(shape)
    gemma = model_type.startswith("gemma")  # these models scale embeddings
    if len(shape) > 1:
        gain = 1.4 if "embed" not in name and "lm_head" not in name else 0.4 if gemma else 1.0
        return (gain * value / shape[-1] ** 0.5).astype(np.float32)
    if name.endswith("A_log"):  # a memory of some twenty tokens
        return (value - 3).astype(np.float32)
    bias = name.endswith("LayerNorm.bias")  # other biases of norms are drawn like scales
    if bias or ("norm" not in name.lower() and "scal" not in name):
        return (0.1 * value).astype(np.float32)
    centre = 1.0
    if "q_norm" in name or "k_norm" in name:
        centre = (
            0.7 if model_type.startswith("gemma4") else 1.6
        )  # Gemma 4 does not scale attention scores
    if name.endswith("model.norm.weight"):
        centre = 7.0 if gemma else 3.0
    norm_offset = model_type.startswith(("gemma2", "gemma3"))  # stored norm weights are scale - 1
    if model_type.startswith(("qwen3_next", "qwen3_5")):
        norm_offset = "linear_attn" not in name
    return (centre - norm_offset + 0.2 * value).astype(np.float32)


def write_folder(
    folder: Path, config: Mapping, tensors: Mapping[str, tuple[int, ...]], seed: int
) -> Path:
    """Write a Hugging Face folder with two safetensors shards and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    index = {}
    for number, shard_names in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        drawn = {
            name: draw(name, tuple(tensors[name]), seed, config["model_type"])
            for name in shard_names
        }
        save_file(drawn, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard_names, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder


def prompts(lengths: tuple[int, ...], vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
