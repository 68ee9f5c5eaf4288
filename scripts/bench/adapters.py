"""Random LoRA adapters in PEFT's format, with a matrix pair for every weight that accepts one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD = "lm_head.weight"  # has no adapter, as with PEFT's "all-linear"


def random_adapters(llm: Any, count: int, rank: int, folder: Path) -> list[Any]:
    """Write `count` random adapters and load them into host memory; returns their LoRARequests."""
    from ...serving.api.lora import LoRARequest

    tensors = [tensor for target in llm.engine.adapters.targets for tensor in target.matrices]
    stems = {
        tensor.source.name.removesuffix(".weight"): tensor.shape
        for tensor in tensors
        if tensor.source.name != HEAD
    }
    requests = []
    for number in range(1, count + 1):
        (adapter_folder := folder / str(number)).mkdir()
        write_random(adapter_folder, stems, rank, seed=number)
        requests.append(LoRARequest(f"adapter-{number}", number, str(adapter_folder)))
        llm.engine.adapters.get(requests[-1])
    return requests


def write_random(folder: Path, stems: Mapping[str, tuple[int, int]], rank: int, seed: int) -> None:
    """Write a random adapter for the weights `stems`, given as name -> (outputs, inputs)."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors = {}
    for stem, (outputs, inputs) in stems.items():
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = rng.standard_normal(shape, np.float32) * np.float32(0.1 / shape[1] ** 0.5)
            tensors[f"base_model.model.{stem}.lora_{half}.weight"] = values
    targets = sorted({stem.rpartition(".")[2] for stem in stems})
    adapter_config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": targets,
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
    save_file(tensors, folder / "adapter_model.safetensors")
