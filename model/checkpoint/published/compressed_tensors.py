"""Checkpoints of the compressed-tensors form, which vLLM's tools write and Quire too.

A matrix [out, in] called `name.weight` lies in several tensors, `name.weight_scale` and others: each format says in
which. What is not understood of quantization_config is an error.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....ops import quant
from ....ops.quant import FormatError, Rounded, Scheme, stored_schemes
from ....ops.quant.compressed import Layout
from ...config import ModelError
from ...stored_format import StoredFormat, StoredGroup
from ..safetensors import Tensor
from . import fp8
from .forms import FORMS
from .keys import HERE, MEASURED, known, patterns, refusal
from .matrix import Largest, Matrix, Parts, check, rounded, take

OWN = "quire"  # quant_method of what is said in these words and lies in a form that compressed-tensors has not
WIDE = 1024  # inputs that divide by the group of any format

# What the keys of a compressed-tensors config may say, besides null; `...` where no value changes the weights, or where
# the formats' own schemes say it.
TOP = {
    "quant_method": ("compressed-tensors", OWN), "format": ..., "config_groups": ..., "ignore": ...,
    "kv_cache_scheme": ..., "sparsity_config": ..., "transform_config": ({},), "quantization_status": ...,
    "global_compression_ratio": ..., "version": ..., "run_compressed": ...,
}  # fmt: skip
GROUP = {"targets": ..., "weights": ..., "input_activations": ..., "output_activations": (), "format": ...}
# "weight" orders the columns while the rounding is made and writes them where they were; other orders move them.
ROUNDING = {
    "num_bits": ..., "type": ..., "symmetric": ..., "dynamic": ..., "strategy": ..., "group_size": ...,
    "block_structure": ..., "actorder": (False, "weight", "static"), "observer": ..., "observer_kwargs": ...,
    "scale_dtype": ..., "zp_dtype": ...,
}  # fmt: skip
GROUPS = ("group", "tensor_group")
# What tells the formats apart, and what a config that leaves it out means.
DEFAULTS = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor", "group_size": None, "symmetric": True}


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    """How the matrices are kept."""
    top = known(HERE, config, TOP)
    sparsity = top.get("sparsity_config", {})
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise refusal(f"{HERE}.sparsity_config", sparsity, "none, or format 'dense'")
    groups = top.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refusal(f"{HERE}.config_groups", groups, "an object of groups")
    ignore = patterns(f"{HERE}.ignore", top.get("ignore", []))
    if "Linear" in ignore:
        raise refusal(f"{HERE}.ignore", "Linear", "names and patterns of modules")
    found = [read_group(f"{HERE}.config_groups.{name}", group, top.get("format")) for name, group in groups.items()]
    found.sort(key=lambda group: "Linear" in group.targets)  # names before kinds of modules
    return StoredFormat(top.get("quant_method", "compressed-tensors"), tuple(found), ignore)


def read_group(here: str, group: Any, form: Any) -> StoredGroup:
    """One of config_groups; `form` is the `format` of all that say none."""
    group = known(here, group, GROUP)
    form = group.get("format", form)
    targets = patterns(f"{here}.targets", group.get("targets"))
    if not targets or any(re.fullmatch(r"\w+", target) and target != "Linear" for target in targets):
        raise refusal(f"{here}.targets", list(targets), "['Linear'], or names and patterns of modules")
    name = format_name(here, group, form)
    return StoredGroup(FORMS[name].quant, name, targets) if name in FORMS else StoredGroup(name, form, targets)


def format_name(here: str, group: dict[str, Any], form: Any) -> str:
    """The name of the format, or of one of FORMS, whose scheme a group's weights, activations and `format` are."""
    weights = rounding(f"{here}.weights", group.get("weights"))
    schemes = stored_schemes() | {name: form.scheme for name, form in FORMS.items()}
    left = matching(f"{here}.weights", weights, schemes, "weights")
    activations, where = group.get("input_activations"), f"{here}.input_activations"
    if activations is not None and weights["type"] == "float" and weights["strategy"] in GROUPS:
        rounding(where, activations)  # in groups too, which no kernel here multiplies: rows stay as they are
        activations = None
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
        raise refusal(f"{HERE}.format", form, " or ".join(map(repr, right)))
    return found[0]


def rounding(where: str, table: Any) -> dict[str, Any]:
    """What a table says of a rounding, with what it leaves out."""
    said = known(where, table, ROUNDING)
    if said.get("group_size") == -1 and said.get("strategy", "channel") == "channel":  # all inputs
        said = said | {"group_size": None, "strategy": "channel"}
    elif "group_size" in said:
        said = {"strategy": "group"} | said
    said = DEFAULTS | said
    if (said["type"], said["num_bits"]) != ("float", 8):
        if "block_structure" in said:
            raise refusal(f"{where}.block_structure", said["block_structure"], "null")
        return said
    if said["strategy"] == "tensor" and not where.endswith("activations"):  # which is a scale an output too
        said["strategy"] = "channel"
    elif said["strategy"] == "tensor":  # of a row by itself is closer
        said |= {"strategy": "token", "dynamic": True}
    elif said["strategy"] == "block":
        said |= {"strategy": "group", "group_size": block(f"{where}.block_structure", said.get("block_structure"))}
    return said


def block(where: str, sides: Any) -> int:
    """The inputs of a block that shares a scale."""
    if sides != [fp8.SIDE, fp8.SIDE]:
        raise refusal(where, sides, repr([fp8.SIDE, fp8.SIDE]))
    return fp8.SIDE


def matching(where: str, said: dict[str, Any], schemes: dict[str, Scheme], part: str) -> dict[str, Scheme]:
    """The schemes that agree with what is said, key by key; the first key on which none does is an error."""
    for key, default in DEFAULTS.items():
        own = {name: getattr(scheme, part).get(key, default) for name, scheme in schemes.items()}
        schemes = {name: scheme for name, scheme in schemes.items() if own[name] == said[key]}
        if not schemes:
            raise refusal(f"{where}.{key}", said[key], " or ".join(map(repr, dict.fromkeys(own.values()))))
    return schemes


# Of FP8 in blocks it has no form; layout `fp8` has one.
WRITES = (
    *(name for name in stored_schemes() if name != "fp8-weights-128"),
    *(name for name, form in FORMS.items() if form.written),
)


def quantization_config(name: str, ignore: Sequence[str]) -> dict[str, Any]:
    scheme = FORMS[name].scheme if name in FORMS else stored_schemes()[name]
    return {
        "quant_method": scheme.method,
        "format": scheme.forms[0],
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"symmetric": True, "dynamic": False} | scheme.weights,
                "input_activations": scheme.activations,
                "output_activations": None,
            }
        },
        "ignore": list(ignore),
    }


def mixed_config(modules: Mapping[str, Sequence[str]], ignore: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` where each format has modules of its own, by their names."""
    groups: dict[str, Any] = {}
    for number, (name, own) in enumerate(modules.items()):
        said = quantization_config(name, ())
        about = said["config_groups"]["group_0"] | {"targets": list(own), "format": said["format"]}
        groups[f"group_{number}"] = about
    forms = {about["format"] for about in groups.values()}
    form = forms.pop() if len(forms) == 1 else "mixed-precision"
    return quantization_config(next(iter(modules)), ignore) | {"format": form, "config_groups": groups}


@dataclass(frozen=True)
class Coded(Matrix):
    """A matrix in the tensors that its format names."""

    def fields(self, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.group.form in FORMS:
            return FORMS[self.group.form].fields(parts, self.shape[1])
        return self.format.fields(parts, self.shape[1], self.group.form)


def layout(name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
    """The tensors of a matrix [out, in]; `name` is for the error where the format can keep none of this shape."""
    assert group.quant is not None
    try:
        if group.form in FORMS:
            return FORMS[group.form].layout(*shape)
        return quant.example(group.quant).layout(*shape, group.form)
    except FormatError as error:
        raise ModelError(f"tensor {name!r} {error}") from None


MARKS = (".weight_scale", ".weight_packed")  # of which every form has one or both


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    """The tensors of a checkpoint with each quantised matrix as one, under the name that it would have dense."""
    found: dict[str, Any] = dict(tensors)
    marked = {name[: -len(mark)]: mark for name in tensors for mark in MARKS if name.endswith(mark)}
    for stem, mark in marked.items():
        group = stored.group_of(stem) or stored.groups[0]
        mine = take(found, stem, mark, tuple(layout("", group, (1, WIDE))))
        for other in (".weight", ".weight_packed", ".weight_g_idx", ".weight_zero_point"):
            if stem + other in found:
                raise ModelError(
                    f"the checkpoint holds the tensor {stem + other!r} beside {stem + mark!r}, which "
                    "quantization_config does not explain"
                )
        found[f"{stem}.weight"] = matrix(stem, mine, group)
    return {name: tensor for name, tensor in found.items() if not name.endswith(MEASURED)}


def matrix(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    """One matrix, the shapes and dtypes of its tensors checked."""
    codes = next(iter(tensors.values()))
    shape = codes.shape
    if stated := tensors.get(".weight_shape"):
        check(stated, ("int64", "int32"), (2,))
        shape = tuple(int(size) for size in stated.read())
        if min(shape) < 1:
            raise ModelError(f"tensor {stated.name!r} holds {list(shape)}; sizes are at least 1")
    if len(shape) != 2 or not all(shape):
        raise ModelError(f"tensor {codes.name!r} is {list(shape)} of {codes.dtype.name}; it must be a matrix")
    if ".weight_packed" in tensors and not stated:  # two codes a byte
        shape = shape[0], 2 * shape[1]
    for ending, (dtypes, shapes) in layout(codes.name, group, shape).items():
        check(tensors[ending], dtypes, *shapes)
    return Coded(f"{stem}.weight", shape, group, tensors)


def round_matrix(value: np.ndarray, group: StoredGroup, largest: Largest) -> Parts:
    form = FORMS.get(group.form)
    if form is not None and form.rounded is not None:
        return form.rounded(value.astype(np.float32), largest())
    return parts(rounded(value, group), group)


def parts(node: Rounded, group: StoredGroup) -> Parts:
    if group.form not in FORMS:
        return node.parts(group.form)
    form = FORMS[group.form]
    assert form.parts is not None
    return form.parts(node)
