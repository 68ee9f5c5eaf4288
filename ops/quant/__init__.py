"""Weight formats: a node of packed arrays in place of one array.

A format is one module here and a line in `FORMATS`. `Format` says what the module has; its node is
a `Weight`, and one that weights are rounded to is `Rounded`.
"""

import importlib
from typing import Any, Protocol, cast

from ...sharding.spec import ArraySpec
from .compressed import FormatError, Rounded, Scheme
from .stack import in_front, one_of

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
    "codebook": ".codebook",
    "e8p": ".e8p",
    "int3": ".int3",
    "int2": ".int2",
}


class Format(Protocol):
    """A module of this package."""

    # what a user may ask to round to, in words; None: it is only found in checkpoints
    CHOICES: str | None
    # the format of the head, and of an embedding that is the head too, beside this one
    HEAD: str | None
    SPLITS: bool  # whether its arrays can be split over the devices of `tensor`
    STORED: dict[str, Scheme]  # names with all options, and how compressed-tensors describes each
    METHOD: str | None  # the quant_method of checkpoints that keep stacks of experts so
    MULTIPLE: int  # what the inputs of such a stack must divide by

    def spec(self, dense: ArraySpec, *options: str) -> Any:
        """The specs of a weight kept so; FormatError where it cannot be."""
        ...

    def kernels(self, *options: str) -> tuple[str, ...]:
        """The native kernels that multiply with it on a CPU; XLA does it elsewhere, or where these
        are missing.
        """
        ...

    def tensors(self, E: int, into: int, out: tuple[int, ...]) -> Any:
        """Of a format with a METHOD: a node of the tensors in which a checkpoint holds a stack, as
        `StoredTensor`s.
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
    """The specs of an array kept in a format; without one, of the array itself."""
    if name is None:
        return dense
    module, options = format_of(name)
    return module.spec(dense, *options)


def stacked(name: str | None, dense: ArraySpec) -> Any:
    """The same of a stack of matrices [E, K, ...], each of them rounded by itself."""
    return dense if name is None else in_front(packed(name, one_of(dense)), dense)


def example(name: str) -> Rounded:
    """The specs of a small matrix kept so: two names mean the same format where these are equal."""
    return packed(name, ArraySpec((2, 1), "float32", (None, None), inputs=(0,)))


def check(name: str) -> str:
    """The name of a format that weights can be rounded to, or an error that lists them."""
    if name.split("-")[0] not in FORMATS or format_of(name)[0].CHOICES is None:
        choices = [module.CHOICES for module in formats() if module.CHOICES is not None]
        raise FormatError(f"quantization is {name!r}; it can be {', or '.join(choices)}")
    example(name)
    return name


def stored_schemes() -> dict[str, Scheme]:
    """By name, all that compressed-tensors can say of a checkpoint."""
    return {name: scheme for module in formats() for name, scheme in module.STORED.items()}


def stored_name(name: str) -> str:
    """The same format by the name that says all its options."""
    found = next(
        (full for full in format_of(name)[0].STORED if example(full) == example(name)), None
    )
    if found is None:
        raise FormatError(f"{name!r} has no form in which compressed-tensors keeps it")
    return found


def common(names: set[str | None]) -> str | None:
    """The format that holds the codes of all these exactly; None where one is no format, or no
    format does.
    """
    if len(names) == 1:
        return next(iter(names))
    if None in names:
        return None
    every = [example(name) for name in names if name is not None]
    if not all(one.is_whole for one in every):
        return None
    least = any(one.has_minimum for one in every)
    kind = (
        f"k{max(one.bits for one in every)}" if all(one.levels for one in every) else "int8-weights"
    )
    return f"{kind}-{min(one.shared() for one in every)}{'-least' if least else ''}"


def has_gpu_kernel(name: str) -> bool:
    """Whether the product's kernel for GPUs takes codes of a format."""
    return example(name).has_gpu_kernel


def splits(name: str) -> bool:
    """Whether weights in a format can be split over the devices of `tensor`."""
    return format_of(name)[0].SPLITS


def head(name: str | None) -> str | None:
    """The format of the head beside weights in another."""
    return None if name is None else format_of(name)[0].HEAD


def kernels(name: str | None) -> tuple[str, ...]:
    """The native kernels of a format."""
    if name is None:
        return ()
    module, options = format_of(name)
    return module.kernels(*options)


def methods() -> list[str]:
    """The values of quant_method that say in which format a checkpoint keeps its experts."""
    return [module.METHOD for module in formats() if module.METHOD is not None]
