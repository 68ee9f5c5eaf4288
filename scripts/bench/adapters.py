"""LoRA adapters of random numbers: folders as PEFT writes them, for every weight of the layers that takes one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD = "lm_head.weight"  # as in PEFT's "all-linear", which leaves it out


def random_adapters(llm: Any, count: int, rank: int, folder: Path) -> list[Any]:
    """Requests for so many adapters, which are in host memory already."""
    from ...serving.api.lora import LoRARequest

    parts = [part for target in llm.engine.adapters.targets for part in target.parts]
    stems = {part.source.name.removesuffix(".weight"): part.shape for part in parts if part.source.name != HEAD}
    found = []
    for number in range(1, count + 1):
        (own := folder / str(number)).mkdir()
        write_random(own, stems, rank, seed=number)
        found.append(LoRARequest(f"adapter-{number}", number, str(own)))
        llm.engine.adapters.get(found[-1])
    return found


def write_random(folder: Path, stems: Mapping[str, tuple[int, int]], rank: int, seed: int) -> None:
    """An adapter of random numbers for weights of these names and sizes (outputs, inputs)."""
    import numpy as np
    from safetensors.numpy import save_file

    rng, tensors = np.random.default_rng(seed), {}
    for stem, (outputs, inputs) in stems.items():
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = rng.standard_normal(shape, np.float32) * np.float32(0.1 / shape[1] ** 0.5)
            tensors[f"base_model.model.{stem}.lora_{half}.weight"] = values
    targets = sorted({stem.rpartition(".")[2] for stem in stems})
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(tensors, folder / "adapter_model.safetensors")
