"""A tiny model on disk: weights drawn from a seed and each tensor's name, so that nothing of size is stored."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent
POSITIONS = (0, 1, 10, 23, 40, 79, 110, 143)  # where logits are kept, as far as a sequence reaches


def draw(name: str, shape: tuple[int, ...], seed: int, model_type: str) -> np.ndarray:
    """One tensor: matrices that keep the scale of what they meet, vectors of moderate size."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    value = np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(shape)
    if len(shape) > 1:
        # Sharp enough that the best token is clear, and that what a layer adds outweighs the token itself.
        return (value * (3.0 if "embed" in name or "lm_head" in name else 1.4) / shape[-1] ** 0.5).astype(np.float32)
    centre = 1.0 if "norm" in name and not model_type.startswith(("gemma2", "gemma3")) else 0.0
    return (centre + 0.2 * value).astype(np.float32)


def write_folder(folder: Path, config: Mapping, tensors: Mapping[str, tuple[int, ...]], seed: int) -> Path:
    """A Hugging Face folder; the safetensors come in two shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names, index = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        drawn = {name: draw(name, tuple(tensors[name]), seed, config["model_type"]) for name in part}
        save_file(drawn, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def prompts(lengths: tuple[int, ...], vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
