"""LoRA adapters of random numbers: folders as PEFT writes them, for every weight of the layers that takes one."""

import json
from pathlib import Path
from typing import Any

HEAD = "lm_head.weight"  # as in PEFT's "all-linear", which leaves it out


def random_adapters(llm: Any, count: int, rank: int, folder: Path) -> list[Any]:
    """Requests for so many adapters, which are in host memory already."""
    import numpy as np
    from safetensors.numpy import save_file

    from ...serving.api.lora import LoRARequest

    rng, found = np.random.default_rng(0), []
    parts = [part for target in llm.engine.adapters.targets for part in target.parts]
    parts = [part for part in parts if part.source.name != HEAD]
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    for number in range(1, count + 1):
        own, tensors = folder / str(number), {}
        for part in parts:
            stem, (outputs, inputs) = part.source.name.removesuffix(".weight"), part.shape
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = rng.standard_normal(shape, np.float32) * np.float32(0.1 / shape[1] ** 0.5)
                tensors[f"base_model.model.{stem}.lora_{half}.weight"] = values
        own.mkdir()
        (own / "adapter_config.json").write_text(json.dumps(about))
        save_file(tensors, own / "adapter_model.safetensors")
        found.append(LoRARequest(f"adapter-{number}", number, str(own)))
        llm.engine.adapters.get(found[-1])
    return found
