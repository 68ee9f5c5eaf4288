"""The declaration of an array: its shape, dtype, logical axes and initialiser."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ALIGNMENT = 64  # bytes: JAX on CPU uses an aligned host buffer in place, and copies others


class Interleaved(NamedTuple):
    """A logical axis of several runs that are split separately: in a fused QKV the queries, the
    keys, the values.

    If there are more devices than a run in `shared` has elements, several devices hold the same
    element. The first `repeated` elements follow again after the last. `widths` gives the size of
    an element in each run, where it is not 1.
    """

    axis: str
    sizes: tuple[int, ...]
    shared: tuple[int, ...] = ()
    repeated: int = 0
    widths: tuple[int, ...] = ()


@dataclass(frozen=True)
class ArraySpec:
    """A leaf of an abstract weight tree, which determines sharding, random weights, loading and
    memory sizes.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | Interleaved | None, ...]
    init: str = "normal"
    fan_in: int = 1
    inputs: tuple[int, ...] = ()  # the axes that a product sums over; empty if there is no product
    stacked: bool = False  # the first axis counts separate matrices, such as experts

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"axes {self.axes} do not match shape {self.shape}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * jnp.dtype(self.dtype).itemsize

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialised host array that JAX on CPU can use without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def nbytes(tree) -> int:
    """Bytes of all arrays (or specs) in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def random_arrays(tree, seed: int = 0, on_device: bool = False):
    """A tree of random arrays by its specs.

    Drawn by NumPy on the host, which needs no compilation, or on the device, which is much faster
    for gigabytes.
    """
    leaves, shape = jax.tree.flatten(tree)
    if on_device:
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        return shape.unflatten(
            [draw_on_device(spec, key) for spec, key in zip(leaves, keys, strict=True)]
        )

    rng = np.random.default_rng(seed)

    def draw(spec: ArraySpec):
        def integers(low: int, high: int, dtype):
            return rng.integers(low, high, spec.shape, dtype)

        value = values(spec, np, partial(rng.standard_normal, spec.shape, np.float32), integers)
        return jnp.asarray(value.astype(spec.dtype))

    return shape.unflatten([draw(spec) for spec in leaves])


@partial(jax.jit, static_argnames="spec")
def draw_on_device(spec: ArraySpec, key) -> jax.Array:
    """A random array by its spec."""

    def integers(low: int, high: int, dtype):
        return jax.random.randint(key, spec.shape, low, high, dtype)

    return values(
        spec, jnp, partial(jax.random.normal, key, spec.shape, jnp.float32), integers
    ).astype(spec.dtype)


def values(spec: ArraySpec, xp, normal: Callable, integers: Callable):
    """The values of an array by its `init`, in NumPy or jax.numpy (`xp`)."""
    if spec.init == "zeros":
        return xp.zeros(spec.shape, xp.float32)
    if spec.init == "ones":
        return xp.ones(spec.shape, xp.float32)
    if spec.init == "normal":
        return normal() / math.sqrt(spec.fan_in)
    if spec.init == "bytes":  # packed quantised values, uniform
        return integers(0, 256, xp.uint8)
    if spec.init == "fives":  # quantised values of five bits, one per byte
        return integers(0, 32, xp.uint8)
    if spec.init == "sixes":  # of six bits
        return integers(0, 64, xp.uint8)
    if spec.init == "words":
        return integers(0, 1 << 16, xp.uint16)
    if spec.init == "float8":  # E4M3 with magnitudes below 2: standard deviation 0.62
        bits = integers(0, 128, xp.uint8)
        return (bits & 64) << 1 | bits & 63
    if spec.init == "signed":
        return integers(-127, 128, xp.int8)
    if spec.init.startswith("scale/"):  # for quantised values that are uniform up to this number
        return xp.full(
            spec.shape, math.sqrt(3 / spec.fan_in) / float(spec.init.removeprefix("scale/"))
        )
    if spec.init == "exponents":  # biased by 127; the quantised values are about 2^1.5
        return xp.full(spec.shape, 127 - round(math.log2(spec.fan_in) / 2 + 1.5))
    raise ValueError(f"unknown init {spec.init!r}")
