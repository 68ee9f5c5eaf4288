"""What quantization_config says of a checkpoint in the compressed-tensors form; what is not understood is an error."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..config import ModelError


@dataclass(frozen=True)
class Stored:
    """How a checkpoint of the compressed-tensors form keeps its matrices."""

    quant: str  # the format, as `ops.quant.packed` names it
    words: bool  # several codes lie in an int32
    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    @property
    def bits(self) -> int:
        return 4 if self.quant.startswith("int4") else 8

    @property
    def group(self) -> int | None:
        """Inputs that share a scale; None: all."""
        return int(self.quant.split("-")[1]) if self.bits == 4 else None

    @property
    def zero(self) -> bool:
        return self.quant.endswith("zero")

    @cached_property
    def sets(self) -> tuple[tuple[frozenset[str], list[re.Pattern]], ...]:
        """The names and patterns of the targets, and those of what is left as it is."""
        return tuple(
            (frozenset(names), [re.compile(name[3:]) for name in names if name.startswith("re:")])
            for names in (self.targets, self.ignore)
        )

    def covers(self, module: str) -> bool:
        """Whether the matrix of a linear module is kept as codes."""
        aimed, spared = (module in names or any(one.match(module) for one in those) for names, those in self.sets)
        return ("Linear" in self.targets or aimed) and not spared

    def renamed(self, canonical: Callable[[str], str]) -> "Stored":
        """The same with a family's own names of the modules; patterns stay, most of them begin with `.*`."""
        targets, ignore = (
            tuple(name if name.startswith("re:") else canonical(name) for name in names)
            for names in (self.targets, self.ignore)
        )
        return replace(self, targets=targets, ignore=ignore)


# What the keys of a compressed-tensors config may say, besides null; `...` where no value changes the weights.
FORMATS = ("int-quantized", "pack-quantized")
COMPRESSED = {
    "quant_method": ("compressed-tensors",), "format": FORMATS, "config_groups": ..., "ignore": ...,
    "kv_cache_scheme": (), "sparsity_config": ..., "transform_config": ({},), "quantization_status": ...,
    "global_compression_ratio": ..., "version": ..., "run_compressed": ...,
}  # fmt: skip
GROUP = {
    "targets": ..., "weights": ..., "input_activations": ..., "output_activations": (), "format": FORMATS,
}  # fmt: skip
ROUNDING = {
    "type": ("int",), "block_structure": (), "observer": ..., "observer_kwargs": ..., "scale_dtype": ...,
    "zp_dtype": ...,
}  # fmt: skip
# "weight" orders the columns while the rounding is made and writes them where they were; other orders move them.
WEIGHTS = ROUNDING | {
    "num_bits": (4, 8), "symmetric": (True, False), "dynamic": (False,), "strategy": ("channel", "group"),
    "group_size": (-1, 32, 64, 128), "actorder": (False, "weight", "static"),
}  # fmt: skip
ACTIVATIONS = ROUNDING | {
    "num_bits": (8,), "symmetric": (True,), "dynamic": (True,), "strategy": ("token",), "group_size": (),
    "actorder": (False,),
}  # fmt: skip


def stored_format(hf: dict[str, Any]) -> Stored | None:
    """How the matrices are kept, where quantization_config says compressed-tensors; other methods are a family's."""
    top = hf.get("quantization_config")
    if not isinstance(top, dict) or top.get("quant_method") != "compressed-tensors":
        return None
    here = "quantization_config"
    top = known(here, top, COMPRESSED)
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
    quant = rounding(here, group, form)
    targets = patterns(f"{here}.targets", group.get("targets"))
    if not targets or any(re.fullmatch(r"\w+", target) and target != "Linear" for target in targets):
        raise refusal(f"{here}.targets", list(targets), "['Linear'], or names and patterns of modules")
    ignore = patterns("quantization_config.ignore", top.get("ignore", []))
    if "Linear" in ignore:
        raise refusal("quantization_config.ignore", "Linear", "names and patterns of modules")
    return Stored(quant, form == "pack-quantized", targets, ignore)


def rounding(here: str, group: dict[str, Any], form: str | None) -> str:
    """The name of the format that a group's weights and activations are rounded to."""
    weights, activations = known(f"{here}.weights", group.get("weights"), WEIGHTS), group.get("input_activations")
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    implied = {None: "tensor", -1: "channel"}.get(size, "group")
    strategy, right = weights.get("strategy", implied), {4: "group", 8: "channel"}[bits]
    if strategy != right:
        raise refusal(f"{here}.weights.strategy", strategy, f"{right!r} for {bits} bits")
    if bits == 4 and size not in (32, 64, 128):
        raise refusal(f"{here}.weights.group_size", size, "32, 64 or 128")
    symmetric = weights.get("symmetric", True)
    if bits == 8 and not symmetric:
        raise refusal(f"{here}.weights.symmetric", symmetric, "true for 8 bits")
    if activations is not None:
        activations = known(f"{here}.input_activations", activations, ACTIVATIONS)
        if not activations.get("dynamic"):
            raise refusal(f"{here}.input_activations.dynamic", activations.get("dynamic", False), "true")
        if activations.get("strategy") != "token":
            raise refusal(f"{here}.input_activations.strategy", activations.get("strategy"), "'token'")
        if bits == 4:
            raise refusal(f"{here}.input_activations", activations, "null for 4 bits")
    allowed = FORMATS[1:] if bits == 4 else FORMATS[:1] if activations is not None else FORMATS
    if form not in allowed:
        raise refusal("quantization_config.format", form, " or ".join(map(repr, allowed)))
    if bits == 4:
        return f"int4-{int(size)}" + ("" if symmetric else "-zero")
    return "int8-weights" if activations is None else "int8"


def patterns(where: str, names: Any) -> tuple[str, ...]:
    """Names of modules, and what follows `re:` as regular expressions that are sure to end."""
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
    kind, *options = quant.split("-")
    whole = {"type": "int", "symmetric": "zero" not in options, "dynamic": False}
    activations = None
    if kind == "int4":
        size = next((int(option) for option in options if option.isdigit()), 32)
        weights = whole | {"num_bits": 4, "strategy": "group", "group_size": size}
    else:
        weights = whole | {"num_bits": 8, "strategy": "channel"}
        if "weights" not in options:
            activations = weights | {"strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        # vLLM takes weights without rounded activations in words alone, those of eight bits too.
        "format": FORMATS[0] if activations else FORMATS[1],
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": ignore,
    }
