"""quantization_config of the compressed-tensors form, read and written; what is not understood is an error."""

import re
from typing import Any

from ...ops.quant import Scheme, stored_name, stored_schemes
from ..config import ModelError
from ..stored_format import StoredFormat

# What the keys of a compressed-tensors config may say, besides null; `...` where no value changes the weights, or where
# the formats' own schemes say it.
TOP = {
    "quant_method": ("compressed-tensors",), "format": ..., "config_groups": ..., "ignore": ...,
    "kv_cache_scheme": (), "sparsity_config": ..., "transform_config": ({},), "quantization_status": ...,
    "global_compression_ratio": ..., "version": ..., "run_compressed": ...,
}  # fmt: skip
GROUP = {"targets": ..., "weights": ..., "input_activations": ..., "output_activations": (), "format": ...}
# "weight" orders the columns while the rounding is made and writes them where they were; other orders move them.
ROUNDING = {
    "num_bits": ..., "type": ..., "symmetric": ..., "dynamic": ..., "strategy": ..., "group_size": ...,
    "block_structure": (), "actorder": (False, "weight", "static"), "observer": ..., "observer_kwargs": ...,
    "scale_dtype": ..., "zp_dtype": ...,
}  # fmt: skip
# What tells the formats apart, and what a config that leaves it out means.
DEFAULTS = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor", "group_size": None, "symmetric": True}


def stored_format(hf: dict[str, Any]) -> StoredFormat | None:
    """How the matrices are kept, where quantization_config says compressed-tensors; other methods are a family's."""
    top = hf.get("quantization_config")
    if not isinstance(top, dict) or top.get("quant_method") != "compressed-tensors":
        return None
    here = "quantization_config"
    top = known(here, top, TOP)
    sparsity = top.get("sparsity_config", {})
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise refusal(f"{here}.sparsity_config", sparsity, "none, or format 'dense'")
    groups = top.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        named = list(groups) if isinstance(groups, dict) else groups
        raise refusal(f"{here}.config_groups", named, "one group, for all matrices")
    ((name, group),) = groups.items()
    here = f"{here}.config_groups.{name}"
    group = known(here, group, GROUP)
    form = group.get("format", top.get("format"))
    quant = format_name(here, group, form)
    targets = patterns(f"{here}.targets", group.get("targets"))
    if not targets or any(re.fullmatch(r"\w+", target) and target != "Linear" for target in targets):
        raise refusal(f"{here}.targets", list(targets), "['Linear'], or names and patterns of modules")
    ignore = patterns("quantization_config.ignore", top.get("ignore", []))
    if "Linear" in ignore:
        raise refusal("quantization_config.ignore", "Linear", "names and patterns of modules")
    return StoredFormat(quant, form, targets, ignore)


def format_name(here: str, group: dict[str, Any], form: Any) -> str:
    """The name of the format whose scheme a group's weights, activations and `format` are."""
    left = stored_schemes()
    left = matching(f"{here}.weights", rounding(f"{here}.weights", group.get("weights")), left, "weights")
    activations, where = group.get("input_activations"), f"{here}.input_activations"
    if activations is None:
        left = {name: scheme for name, scheme in left.items() if scheme.activations is None}
        if not left:
            raise refusal(where, None, "an object")
    else:
        left = {name: scheme for name, scheme in left.items() if scheme.activations is not None}
        if not left:
            raise refusal(where, activations, "null")
        left = matching(where, rounding(where, activations), left, "activations")
    found = [name for name, scheme in left.items() if form in scheme.forms]
    if not found:
        right = dict.fromkeys(form for scheme in left.values() for form in scheme.forms)
        raise refusal("quantization_config.format", form, " or ".join(map(repr, right)))
    return found[0]


def rounding(where: str, table: Any) -> dict[str, Any]:
    """What a table says of a rounding, with what it leaves out."""
    said = known(where, table, ROUNDING)
    if said.get("group_size") == -1 and said.get("strategy", "channel") == "channel":  # all inputs
        said = said | {"group_size": None, "strategy": "channel"}
    elif "group_size" in said:
        said = {"strategy": "group"} | said
    return DEFAULTS | said


def matching(where: str, said: dict[str, Any], schemes: dict[str, Scheme], part: str) -> dict[str, Scheme]:
    """The schemes that agree with what is said, key by key; the first key on which none does is an error."""
    for key, default in DEFAULTS.items():
        own = {name: getattr(scheme, part).get(key, default) for name, scheme in schemes.items()}
        schemes = {name: scheme for name, scheme in schemes.items() if own[name] == said[key]}
        if not schemes:
            raise refusal(f"{where}.{key}", said[key], " or ".join(map(repr, dict.fromkeys(own.values()))))
    return schemes


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


def known(where: str, table: Any, keys: dict[str, Any]) -> dict[str, Any]:
    """What a table says, nulls left out; a key that is not known is an error, and so is a value that is not."""
    if not isinstance(table, dict):
        raise ModelError(f"config.json: {where} = {table!r:.80}; it must be an object")
    said = {key: value for key, value in table.items() if value is not None}
    for key, value in said.items():
        if key not in keys:
            raise ModelError(
                f"config.json: {where}.{key} = {value!r:.80} is not understood; it may change the result, so the model "
                "is not loaded"
            )
        if (right := keys[key]) is not ... and value not in right:
            raise refusal(f"{where}.{key}", value, " or ".join(map(repr, right)) or "null")
    return said


def refusal(where: str, value: Any, right: str) -> ModelError:
    return ModelError(f"config.json: {where} = {value!r:.80} is not supported; supported is {right}")


def quantization_config(quant: str, ignore: list[str]) -> dict[str, Any]:
    """What `stored_format` reads: all linear modules in one format, but those that are to be ignored."""
    scheme = stored_schemes()[stored_name(quant)]
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.forms[0],
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": scheme.weights,
                "input_activations": scheme.activations,
                "output_activations": None,
            }
        },
        "ignore": ignore,
    }
