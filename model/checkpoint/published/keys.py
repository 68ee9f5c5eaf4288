"""Strict parsing of quantization_config: unknown keys and values raise an error."""

import re
from collections.abc import Mapping
from typing import Any

from ...config import ModelError

CONFIG_KEY = "quantization_config"
STATIC_SCALES = (  # endings of static scales of activations and the KV cache, which are not used
    ".input_scale",
    ".input_scale_ub",
    ".activation_scale",
    ".input_global_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)


def checked_entries(key_path: str, table: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config object that are not null, with every key and value checked.

    `keys` maps each supported key to its supported values. `...`: any value, because it does not
    change the weights or is checked elsewhere.
    """
    if not isinstance(table, dict):
        raise ModelError(f"config.json: {key_path} = {table!r:.80}; it must be an object")
    entries = {key: value for key, value in table.items() if value is not None}
    for key, value in entries.items():
        if key not in keys:
            raise ModelError(
                f"config.json: {key_path}.{key} = {value!r:.80} is not understood; it may change "
                "the result, so the model is not loaded"
            )
        if (allowed := keys[key]) is not ... and not any(
            value == allowed_value and type(value) is type(allowed_value)
            for allowed_value in allowed
        ):
            raise unsupported_value(
                f"{key_path}.{key}", value, " or ".join(map(repr, allowed)) or "null"
            )
    return entries


def checked_patterns(key_path: str, names: Any) -> tuple[str, ...]:
    """Check a list of modules; `re:` begins a regular expression, which must be simple."""
    right = (
        "names of modules, or `re:` and a regular expression with at most four repeats and "
        "none of a bracket"
    )
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise unsupported_value(key_path, names, "a list of names")
    for name in names:
        if not name.startswith("re:"):
            continue
        # Checkpoints are untrusted: nested or many repeats could take exponential time.
        if len(name) > 200 or len(re.findall(r"[*+?{]", name)) > 4 or re.search(r"\)[*+?{]", name):
            raise unsupported_value(key_path, name, right)
        try:
            re.compile(name[3:])
        except (re.error, OverflowError, RecursionError):
            raise unsupported_value(key_path, name, right) from None
    return tuple(names)


def unsupported_value(key_path: str, value: Any, right: str) -> ModelError:
    return ModelError(
        f"config.json: {key_path} = {value!r:.80} is not supported; supported is {right}"
    )
