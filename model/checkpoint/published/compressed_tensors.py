"""compressed-tensors checkpoints, which vLLM's tools and Quire write.

A matrix [out, in] called `name.weight` is stored in several tensors such as `name.weight_scale`;
each format defines which. Unsupported values in quantization_config are an error.
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
from .keys import CONFIG_KEY, STATIC_SCALES, checked_entries, checked_patterns, unsupported_value
from .matrix import LargestValue, Matrix, MatrixTensors, check, pop_tensors, quantize_dense

QUIRE_METHOD = "quire"  # quant_method of Quire's formats that compressed-tensors lacks
ANY_INPUTS = 1024  # a number of inputs that the group size of any format divides

# Values that the keys of a config may have besides null. `...`: any value, because it does not
# change the weights or is checked against the formats' schemes.
TOP = {
    "quant_method": ("compressed-tensors", QUIRE_METHOD),
    "format": ...,
    "config_groups": ...,
    "ignore": ...,
    "kv_cache_scheme": ...,
    "sparsity_config": ...,
    "transform_config": ({},),
    "quantization_status": ...,
    "global_compression_ratio": ...,
    "version": ...,
    "run_compressed": ...,
}
GROUP = {
    "targets": ...,
    "weights": ...,
    "input_activations": ...,
    "output_activations": (),
    "format": ...,
}
# "weight" only orders the columns during rounding; other values permute the stored columns.
ROUNDING = {
    "num_bits": ...,
    "type": ...,
    "symmetric": ...,
    "dynamic": ...,
    "strategy": ...,
    "group_size": ...,
    "block_structure": ...,
    "actorder": (False, "weight", "static"),
    "observer": ...,
    "observer_kwargs": ...,
    "scale_dtype": ...,
    "zp_dtype": ...,
}
GROUPS = ("group", "tensor_group")
# The keys that distinguish formats, and their defaults.
DEFAULTS = {
    "num_bits": 8,
    "type": "int",
    "dynamic": False,
    "strategy": "tensor",
    "group_size": None,
    "symmetric": True,
}


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    """Parse quantization_config."""
    top = checked_entries(CONFIG_KEY, config, TOP)
    sparsity = top.get("sparsity_config", {})
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise unsupported_value(
            f"{CONFIG_KEY}.sparsity_config", sparsity, "none, or format 'dense'"
        )
    groups = top.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise unsupported_value(f"{CONFIG_KEY}.config_groups", groups, "an object of groups")
    ignore = checked_patterns(f"{CONFIG_KEY}.ignore", top.get("ignore", []))
    if "Linear" in ignore:
        raise unsupported_value(f"{CONFIG_KEY}.ignore", "Linear", "names and patterns of modules")
    stored_groups = [
        read_group(f"{CONFIG_KEY}.config_groups.{name}", group, top.get("format"))
        for name, group in groups.items()
    ]
    stored_groups.sort(key=lambda group: "Linear" in group.targets)
    return StoredFormat(top.get("quant_method", "compressed-tensors"), tuple(stored_groups), ignore)


def read_group(key_path: str, group: Any, form: Any) -> StoredGroup:
    """One of config_groups; `form` is the default for groups without `format`."""
    group = checked_entries(key_path, group, GROUP)
    form = group.get("format", form)
    targets = checked_patterns(f"{key_path}.targets", group.get("targets"))
    if not targets or any(
        re.fullmatch(r"\w+", target) and target != "Linear" for target in targets
    ):
        raise unsupported_value(
            f"{key_path}.targets", list(targets), "['Linear'], or names and patterns of modules"
        )
    name = format_name(key_path, group, form)
    return (
        StoredGroup(FORMS[name].quant, name, targets)
        if name in FORMS
        else StoredGroup(name, form, targets)
    )


def format_name(key_path: str, group: dict[str, Any], form: Any) -> str:
    """The format, or the key of FORMS, whose scheme matches a group's weights and activations."""
    weights = read_rounding(f"{key_path}.weights", group.get("weights"))
    schemes = stored_schemes() | {name: form.scheme for name, form in FORMS.items()}
    candidates = matching_schemes(f"{key_path}.weights", weights, schemes, "weights")
    activations = group.get("input_activations")
    activations_path = f"{key_path}.input_activations"
    if activations is not None and weights["type"] == "float" and weights["strategy"] in GROUPS:
        # No kernel here quantises activations in groups: they stay unquantised.
        read_rounding(activations_path, activations)
        activations = None
    if activations is None:
        candidates = {
            name: scheme for name, scheme in candidates.items() if scheme.activations is None
        }
        if not candidates:
            raise unsupported_value(activations_path, None, "an object")
    else:
        candidates = {
            name: scheme for name, scheme in candidates.items() if scheme.activations is not None
        }
        if not candidates:
            raise unsupported_value(activations_path, activations, "null")
        candidates = matching_schemes(
            activations_path,
            read_rounding(activations_path, activations),
            candidates,
            "activations",
        )
    names = [name for name, scheme in candidates.items() if form in scheme.forms]
    if not names:
        allowed = dict.fromkeys(form for scheme in candidates.values() for form in scheme.forms)
        raise unsupported_value(f"{CONFIG_KEY}.format", form, " or ".join(map(repr, allowed)))
    return names[0]


def read_rounding(key_path: str, table: Any) -> dict[str, Any]:
    """A table of rounding options with defaults filled in."""
    options = checked_entries(key_path, table, ROUNDING)
    if options.get("group_size") == -1 and options.get("strategy", "channel") == "channel":
        options = options | {"group_size": None, "strategy": "channel"}
    elif "group_size" in options:
        options = {"strategy": "group"} | options
    options = DEFAULTS | options
    if (options["type"], options["num_bits"]) != ("float", 8):
        if "block_structure" in options:
            raise unsupported_value(
                f"{key_path}.block_structure", options["block_structure"], "null"
            )
        return options
    # One scale for the tensor is the same scale for each output.
    if options["strategy"] == "tensor" and not key_path.endswith("activations"):
        options["strategy"] = "channel"
    elif options["strategy"] == "tensor":  # a scale for each token is more accurate
        options |= {"strategy": "token", "dynamic": True}
    elif options["strategy"] == "block":
        options |= {
            "strategy": "group",
            "group_size": block_size(f"{key_path}.block_structure", options.get("block_structure")),
        }
    return options


def block_size(key_path: str, sides: Any) -> int:
    """The inputs of a block that share a scale."""
    if sides != [fp8.SIDE, fp8.SIDE]:
        raise unsupported_value(key_path, sides, repr([fp8.SIDE, fp8.SIDE]))
    return fp8.SIDE


def matching_schemes(
    key_path: str, options: dict[str, Any], schemes: dict[str, Scheme], component: str
) -> dict[str, Scheme]:
    """Filter schemes by each key of DEFAULTS; it is an error if no scheme is left."""
    for key, default in DEFAULTS.items():
        value_by_scheme = {
            name: getattr(scheme, component).get(key, default) for name, scheme in schemes.items()
        }
        schemes = {
            name: scheme
            for name, scheme in schemes.items()
            if value_by_scheme[name] == options[key]
        }
        if not schemes:
            raise unsupported_value(
                f"{key_path}.{key}",
                options[key],
                " or ".join(map(repr, dict.fromkeys(value_by_scheme.values()))),
            )
    return schemes


# It cannot hold block-wise FP8, which layout `fp8` can.
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
    """`quantization_config` with a group of modules for each format."""
    groups: dict[str, Any] = {}
    for number, (name, module_names) in enumerate(modules.items()):
        config = quantization_config(name, ())
        group = config["config_groups"]["group_0"] | {
            "targets": list(module_names),
            "format": config["format"],
        }
        groups[f"group_{number}"] = group
    forms = {group["format"] for group in groups.values()}
    form = forms.pop() if len(forms) == 1 else "mixed-precision"
    return quantization_config(next(iter(modules)), ignore) | {
        "format": form,
        "config_groups": groups,
    }


@dataclass(frozen=True)
class Coded(Matrix):
    """A matrix stored in the tensors that its format defines."""

    def fields(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        form = self.group.form
        assert isinstance(form, str) and self.format is not None
        if form in FORMS:
            return FORMS[form].fields(arrays, self.shape[1])
        return self.format.fields(arrays, self.shape[1], form)


def layout(name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
    """The tensors of a matrix [out, in]; reject shapes that cannot be stored."""
    form = group.form
    assert isinstance(form, str) and group.quant is not None
    rows, columns = shape
    try:
        if form in FORMS:
            return FORMS[form].layout(rows, columns)
        return quant.example(group.quant).layout(rows, columns, form)
    except FormatError as error:
        raise ModelError(f"tensor {name!r} {error}") from None


MARKS = (".weight_scale", ".weight_packed")  # every form has at least one of these tensors


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    """Replace the tensors of each quantised matrix by one `Matrix` under its dense name."""
    gathered: dict[str, Any] = dict(tensors)
    marked = {name[: -len(mark)]: mark for name in tensors for mark in MARKS if name.endswith(mark)}
    for stem, mark in marked.items():
        group = stored.group_of(stem) or stored.groups[0]
        matrix_tensors = pop_tensors(
            gathered, stem, mark, tuple(layout("", group, (1, ANY_INPUTS)))
        )
        for ending in (".weight", ".weight_packed", ".weight_g_idx", ".weight_zero_point"):
            if stem + ending in gathered:
                raise ModelError(
                    f"the checkpoint holds the tensor {stem + ending!r} beside {stem + mark!r}, "
                    "which quantization_config does not explain"
                )
        gathered[f"{stem}.weight"] = matrix(stem, matrix_tensors, group)
    return {name: tensor for name, tensor in gathered.items() if not name.endswith(STATIC_SCALES)}


def matrix(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    """One matrix, with the shapes and dtypes of its tensors checked."""
    codes = next(iter(tensors.values()))
    shape = codes.shape
    if stated := tensors.get(".weight_shape"):
        check(stated, ("int64", "int32"), (2,))
        shape = tuple(int(size) for size in stated.read())
        if min(shape) < 1:
            raise ModelError(f"tensor {stated.name!r} holds {list(shape)}; sizes are at least 1")
    if len(shape) != 2 or not all(shape):
        raise ModelError(
            f"tensor {codes.name!r} is {list(shape)} of {codes.dtype.name}; it must be a matrix"
        )
    if ".weight_packed" in tensors and not stated:  # two codes a byte
        shape = shape[0], 2 * shape[1]
    for ending, (dtypes, shapes) in layout(codes.name, group, shape).items():
        check(tensors[ending], dtypes, *shapes)
    return Coded(f"{stem}.weight", shape, group, tensors)


def round_matrix(value: np.ndarray, group: StoredGroup, largest: LargestValue) -> MatrixTensors:
    assert isinstance(group.form, str)
    form = FORMS.get(group.form)
    if form is not None and form.rounded is not None:
        return form.rounded(value.astype(np.float32), largest())
    return parts(quantize_dense(value, group), group)


def parts(node: Rounded, group: StoredGroup) -> MatrixTensors:
    assert isinstance(group.form, str)
    if group.form not in FORMS:
        return node.parts(group.form)
    form = FORMS[group.form]
    assert form.node_tensors is not None
    return form.node_tensors(node)
