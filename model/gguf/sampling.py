"""The sampling parameters that a GGUF file recommends, to and from generation_config.json."""

from collections.abc import Mapping
from typing import Any

from .metadata import Metadata

APPLIED = {  # keys of general.sampling: names in generation_config.json
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip
NOT_APPLIED = {  # reported under their own names: transformers has none
    "penalty_last_n": "repetition_penalty_last_n",
    "mirostat": "mirostat",
    "xtc_probability": "xtc_probability",
}


def recommended_sampling(meta: Metadata) -> dict[str, Any]:
    """The recommendation of a file under the names of generation_config.json."""
    keys = APPLIED | NOT_APPLIED
    numbers = {name: meta.number(f"general.sampling.{key}", None) for key, name in keys.items()}
    values = {name: value for name, value in numbers.items() if value is not None}
    if (
        values.get("repetition_penalty", 1) == 1 or values.get("repetition_penalty_last_n") == 0
    ):  # no token is penalised
        values.pop("repetition_penalty", None)
        values.pop("repetition_penalty_last_n", None)
    sequence = meta.text("general.sampling.sequence", None)
    return values | ({"sampler_sequence": sequence} if sequence else {})


def sampling_metadata(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that recommends what a generation_config.json does."""
    values = {key: generation.get(name) for key, name in APPLIED.items()}
    if generation.get("do_sample") is False:
        values["temp"] = 0.0
    if values["top_k"] is not None:
        values["top_k"] = max(0, int(values["top_k"]))  # -1 and 0 both mean the whole vocabulary
    floats = {
        key: value if key == "top_k" else float(value)
        for key, value in values.items()
        if value is not None
    }
    return {f"general.sampling.{key}": value for key, value in floats.items()}
