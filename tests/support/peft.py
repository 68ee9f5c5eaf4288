"""Adapter folders as PEFT writes them, and adapters merged into a model's tensors, in numpy."""

import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ABOUT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_rslora": False}
EVERY = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


def draw(
    tensors: dict[str, np.ndarray],
    names=EVERY,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.5,
    ranks=None,
) -> dict[str, np.ndarray]:
    """Random matrices for every weight whose module has one of these names."""
    rng = np.random.default_rng(seed)
    adapter = {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in names:
            continue
        module_rank = (ranks or {}).get(module.rpartition(".")[2], rank)
        for half, shape in (
            ("A", (module_rank, weight.shape[1])),
            ("B", (weight.shape[0], module_rank)),
        ):
            value = rng.standard_normal(shape) * size / shape[1] ** 0.5
            adapter[f"base_model.model.{module}.lora_{half}.weight"] = value.astype(np.float32)
    return adapter


def magnitude_vectors(
    tensors: dict[str, np.ndarray], adapter: dict[str, np.ndarray], seed: int = 0
) -> dict[str, np.ndarray]:
    """DoRA's magnitude vectors: new row lengths for each adapted weight."""
    rng = np.random.default_rng(seed)
    magnitudes = {}
    for name, weight in tensors.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapter:
            factors = 1 + 0.3 * rng.standard_normal(len(weight))
            magnitudes[f"{module}.lora_magnitude_vector"] = (
                np.linalg.norm(weight, axis=1) * factors
            ).astype(np.float32)
    return magnitudes


def write(folder: Path, adapter: dict[str, np.ndarray], about: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(ABOUT | (about or {})))
    save_file(adapter, folder / "adapter_model.safetensors")
    return folder


def merged(
    tensors: dict[str, np.ndarray], adapter: dict[str, np.ndarray], about: dict | None = None
) -> dict:
    """W + scale * B A as PEFT merges, with alpha of the first pattern that matches the module.

    With DoRA, rows get the lengths of the magnitude vector, in float64.
    """
    about = ABOUT | (about or {})
    merged_tensors = dict(tensors)
    for name in tensors:
        module = name.removesuffix(".weight")
        if (up := adapter.get(f"base_model.model.{module}.lora_B.weight")) is None:
            continue
        down = adapter[f"base_model.model.{module}.lora_A.weight"]
        alphas = (about.get("alpha_pattern") or {}).items()
        matching_alphas = [value for key, value in alphas if re.match(rf"(.*\.)?({key})$", module)]
        alpha = matching_alphas[0] if matching_alphas else about["lora_alpha"]
        rank = down.shape[0]
        scale = alpha / rank**0.5 if about["use_rslora"] else alpha / rank
        merged_tensors[name] = tensors[name] + np.float32(scale) * (up @ down)
        if (length := adapter.get(f"base_model.model.{module}.lora_magnitude_vector")) is not None:
            dense = tensors[name].astype(np.float64) + scale * up.astype(np.float64) @ down
            merged_tensors[name] = (
                length[:, None] * dense / np.linalg.norm(dense, axis=1)[:, None]
            ).astype(np.float32)
    return merged_tensors
