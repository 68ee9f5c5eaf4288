"""Strict reading of quantization_config: what may change the weights and is not understood is an error."""

import re
from collections.abc import Mapping
from typing import Any

from ...config import ModelError

HERE = "quantization_config"
MEASURED = (  # endings of scales that were measured before for what is computed, not for weights
    ".input_scale", ".input_scale_ub", ".activation_scale", ".input_global_scale", ".output_scale", ".k_scale",
    ".v_scale", ".q_scale",
)  # fmt: skip


def known(where: str, table: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """What a table says, nulls left out; a key that is not known is an error, and so is a value that is not.

    `keys` gives the values that a key may have, besides null; `...` where none changes the weights, or others look.
    """
    if not isinstance(table, dict):
        raise ModelError(f"config.json: {where} = {table!r:.80}; it must be an object")
    said = {key: value for key, value in table.items() if value is not None}
    for key, value in said.items():
        if key not in keys:
            raise ModelError(
                f"config.json: {where}.{key} = {value!r:.80} is not understood; it may change the result, so the model "
                "is not loaded"
            )
        if (right := keys[key]) is not ... and not any(value == one and type(value) is type(one) for one in right):
            raise refusal(f"{where}.{key}", value, " or ".join(map(repr, right)) or "null")
    return said


def patterns(where: str, names: Any) -> tuple[str, ...]:
    """Names of modules; one that begins with `re:` must be a regular expression that is matched in bounded time."""
    right = "names of modules, or `re:` and a regular expression with at most four repeats and none of a bracket"
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refusal(where, names, "a list of names")
    for name in names:
        if not name.startswith("re:"):
            continue
        # A checkpoint's patterns are a stranger's: nested repeats, or many, can take longer than anybody waits.
        if len(name) > 200 or len(re.findall(r"[*+?{]", name)) > 4 or re.search(r"\)[*+?{]", name):
            raise refusal(where, name, right)
        try:
            re.compile(name[3:])
        except (re.error, OverflowError, RecursionError):
            raise refusal(where, name, right) from None
    return tuple(names)


def refusal(where: str, value: Any, right: str) -> ModelError:
    return ModelError(f"config.json: {where} = {value!r:.80} is not supported; supported is {right}")
