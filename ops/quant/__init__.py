"""Quantised weight formats: a pytree node of packed arrays takes the place of a weight array.

Each format is a module here with the interface `Format`, and an entry in `FORMATS`. Its node is a
`Weight`, and a `Rounded` if Quire can quantise weights to the format.
"""

import importlib
from typing import Any, Protocol, cast

from ...sharding.spec import ArraySpec
from .compressed import FormatError, Rounded, Scheme
from .stack import matrix_spec, stack_specs

FORMATS = {
    "int8": ".int8",
    "int4": ".int4",
    "fp8": ".fp8",
    "nf4": ".nf4",
    "iq4": ".iq4",
    "nvfp4": ".nvfp4",
    "mxfp4": ".mxfp4",
    "fp4": ".fp4",
    "k4": ".k4",
    "k6": ".k6",
    "int5": ".int5",
    "codebook": ".codebook",
    "e8p": ".e8p",
    "int3": ".int3",
    "int2": ".int2",
}


class Format(Protocol):
    """The interface of the modules of this package."""

    # description of the format's names for users; None if weights cannot be quantised to it
    CHOICES: str | None
    # the format of the head (and of a tied embedding) of models in this format; a format that
    # rounds activations is its own
    HEAD: str | None
    SPLITS: bool  # whether its arrays can be split over the devices of `tensor`
    STORED: dict[str, Scheme]  # the compressed-tensors description of each name with all options
    METHOD: str | None  # the quant_method of checkpoints whose stacks of experts have this format
    MULTIPLE: int  # the inputs of such a stack must be a multiple of it

    def spec(self, dense: ArraySpec, *options: str) -> Any:
        """The specs of a weight in this format; FormatError if the format does not support it."""
        ...

    def kernels(self, *options: str) -> tuple[str, ...]:
        """The native CPU kernels for products in this format."""
        ...

    def tensors(self, E: int, into: int, out: tuple[int, ...]) -> Any:
        """For formats with a METHOD: a node of `StoredTensor`s, the tensors of a checkpoint that
        hold a stack.
        """
        ...


def format_of(name: str) -> tuple[Format, list[str]]:
    """The module and the options of a format's name, such as `int4-64-zero`."""
    kind, *options = name.split("-")
    if kind not in FORMATS:
        raise FormatError(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
    return cast(Format, importlib.import_module(FORMATS[kind], __name__)), options


def formats() -> list[Format]:
    return [format_of(name)[0] for name in FORMATS]


def packed(name: str | None, dense: ArraySpec) -> Any:
    """The specs of a weight in a format; `dense` itself if `name` is None."""
    if name is None:
        return dense
    module, options = format_of(name)
    return module.spec(dense, *options)


def stacked(name: str | None, dense: ArraySpec) -> Any:
    """The specs of a stack of matrices [E, K, ...], each quantised separately."""
    return dense if name is None else stack_specs(packed(name, matrix_spec(dense)), dense)


def example(name: str) -> Rounded:
    """The specs of a small matrix in a format. They are equal if two names mean the same format."""
    return packed(name, ArraySpec((2, 1), "float32", (None, None), inputs=(0,)))


def check(name: str) -> str:
    """Return the name if weights can be quantised to it; otherwise FormatError with a list."""
    if name.split("-")[0] not in FORMATS or not is_choice(name):
        choices = [module.CHOICES for module in formats() if module.CHOICES is not None]
        raise FormatError(f"quantization is {name!r}; it can be {', or '.join(choices)}")
    example(name)
    return name


def is_choice(name: str) -> bool:
    """Whether users can ask for the format; others come with checkpoints only."""
    return format_of(name)[0].CHOICES is not None


def stored_schemes() -> dict[str, Scheme]:
    """The compressed-tensors description of all formats, by name."""
    return {name: scheme for module in formats() for name, scheme in module.STORED.items()}


def stored_name(name: str) -> str:
    """The name of the same format with all options."""
    full_name = next(
        (full for full in format_of(name)[0].STORED if example(full) == example(name)), None
    )
    if full_name is None:
        raise FormatError(f"{name!r} has no form in which compressed-tensors keeps it")
    return full_name


def common_format(names: set[str | None]) -> str | None:
    """The format that can hold the quantised values of all these formats exactly.

    None if there is no such format or if one of the names is None.
    """
    if len(names) == 1:
        return next(iter(names))
    if None in names:
        return None
    formats = [example(name) for name in names if name is not None]
    if not all(node.is_integer for node in formats):
        return None
    has_minimum = any(node.has_minimum for node in formats)
    family = (
        f"k{max(node.bits for node in formats)}"
        if all(node.levels for node in formats)
        else "int8-weights"
    )
    group = min(node.inputs_per_value() for node in formats)
    return f"{family}-{group}{'-least' if has_minimum else ''}"


def has_gpu_kernel(name: str) -> bool:
    """Whether the GPU kernel for products supports the format."""
    return example(name).has_gpu_kernel


def splits(name: str) -> bool:
    """Whether weights in a format can be split over the devices of `tensor`."""
    return format_of(name)[0].SPLITS


def head_format(name: str | None) -> str | None:
    """The format of the head of a model whose weights have this format.

    Activations of the head are rounded only if those of the layers are.
    """
    if name is None:
        return None
    module, _ = format_of(name)
    scheme = module.STORED.get(name)
    return name if scheme is not None and scheme.activations is not None else module.HEAD


def kernels(name: str | None) -> tuple[str, ...]:
    """The native kernels of a format."""
    if name is None:
        return ()
    module, options = format_of(name)
    return module.kernels(*options)


def methods() -> list[str]:
    """The values of quant_method that determine the format of a checkpoint's experts."""
    return [module.METHOD for module in formats() if module.METHOD is not None]
