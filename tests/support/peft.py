"""Folders as PEFT writes them, and the same adapters merged into a model's tensors, in numpy."""

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
    found = {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in names:
            continue
        own = (ranks or {}).get(module.rpartition(".")[2], rank)
        for half, shape in (("A", (own, weight.shape[1])), ("B", (weight.shape[0], own))):
            value = rng.standard_normal(shape) * size / shape[1] ** 0.5
            found[f"base_model.model.{module}.lora_{half}.weight"] = value.astype(np.float32)
    return found


def lengths(
    tensors: dict[str, np.ndarray], adapter: dict[str, np.ndarray], seed: int = 0
) -> dict[str, np.ndarray]:
    """What DoRA has besides: other lengths for the rows of each weight that is adapted."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, weight in tensors.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapter:
            times = 1 + 0.3 * rng.standard_normal(len(weight))
            found[f"{module}.lora_magnitude_vector"] = (
                np.linalg.norm(weight, axis=1) * times
            ).astype(np.float32)
    return found


def write(folder: Path, adapter: dict[str, np.ndarray], about: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(ABOUT | (about or {})))
    save_file(adapter, folder / "adapter_model.safetensors")
    return folder


def merged(
    tensors: dict[str, np.ndarray], adapter: dict[str, np.ndarray], about: dict | None = None
) -> dict:
    """PEFT's own sum: W + scale * B A, with the rank and alpha of the first pattern that fits; of
    DoRA its rows get their lengths, in float64."""
    about = ABOUT | (about or {})
    found = dict(tensors)
    for name in tensors:
        module = name.removesuffix(".weight")
        if (up := adapter.get(f"base_model.model.{module}.lora_B.weight")) is None:
            continue
        down = adapter[f"base_model.model.{module}.lora_A.weight"]
        alphas = (about.get("alpha_pattern") or {}).items()
        fitting = [value for key, value in alphas if re.match(rf"(.*\.)?({key})$", module)]
        alpha = fitting[0] if fitting else about["lora_alpha"]
        rank = down.shape[0]
        scale = alpha / rank**0.5 if about["use_rslora"] else alpha / rank
        found[name] = tensors[name] + np.float32(scale) * (up @ down)
        if (length := adapter.get(f"base_model.model.{module}.lora_magnitude_vector")) is not None:
            whole = tensors[name].astype(np.float64) + scale * up.astype(np.float64) @ down
            found[name] = (length[:, None] * whole / np.linalg.norm(whole, axis=1)[:, None]).astype(
                np.float32
            )
    return found
