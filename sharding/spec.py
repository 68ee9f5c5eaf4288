"""One declaration of an array: its shape, dtype, logical axes and how it is initialised."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ALIGNMENT = 64  # bytes: on a CPU JAX uses a host buffer that is aligned so in place, and copies any other


class Runs(NamedTuple):
    """A logical axis of several runs, each split by itself: in a fused qkv the queries, then the keys, then the values.

    Where there are more devices than a run in `shared` has elements, several devices hold the same element. The first
    `again` elements are repeated after the last. `each`: of how many numbers an element of each run consists, where
    that differs.
    """

    axis: str
    sizes: tuple[int, ...]
    shared: tuple[int, ...] = ()
    again: int = 0
    each: tuple[int, ...] = ()


@dataclass(frozen=True)
class ArraySpec:
    """A leaf of an abstract weight tree: shardings, random weights, loading and memory sizes follow from it."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | Runs | None, ...]
    init: str = "normal"
    fan_in: int = 1
    inputs: tuple[int, ...] = ()  # the axes that a product with it sums over; empty where there is no product
    stacked: bool = False  # the first axis counts matrices that are multiplied one by one, such as experts

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
    """An uninitialised host array that JAX on a CPU can use without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def nbytes(tree) -> int:
    """Bytes of all arrays (or specs) in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def random_arrays(tree, seed: int = 0, on_device: bool = False):
    """A tree of random arrays as its specs declare them.

    Drawn by numpy on the host, which needs no compilation, or on the device, which is much faster for gigabytes.
    """
    leaves, shape = jax.tree.flatten(tree)
    if on_device:
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        return shape.unflatten([draw_on_device(spec, key) for spec, key in zip(leaves, keys, strict=True)])

    rng = np.random.default_rng(seed)

    def draw(spec: ArraySpec):
        def integers(low: int, high: int, dtype):
            return rng.integers(low, high, spec.shape, dtype)

        value = values(spec, np, partial(rng.standard_normal, spec.shape, np.float32), integers)
        return jnp.asarray(value.astype(spec.dtype))

    return shape.unflatten([draw(spec) for spec in leaves])


@partial(jax.jit, static_argnames="spec")
def draw_on_device(spec: ArraySpec, key) -> jax.Array:
    """A random array as its spec declares it."""

    def integers(low: int, high: int, dtype):
        return jax.random.randint(key, spec.shape, low, high, dtype)

    return values(spec, jnp, partial(jax.random.normal, key, spec.shape, jnp.float32), integers).astype(spec.dtype)


def values(spec: ArraySpec, xp, normal: Callable, integers: Callable):
    """The values of an array by its `init`, in numpy or jax.numpy (`xp`)."""
    if spec.init == "zeros":
        return xp.zeros(spec.shape, xp.float32)
    if spec.init == "ones":
        return xp.ones(spec.shape, xp.float32)
    if spec.init == "normal":
        return normal() / math.sqrt(spec.fan_in)
    if spec.init == "bytes":  # packed codes, all equally likely
        return integers(0, 256, xp.uint8)
    if spec.init == "sixes":  # codes of six bits
        return integers(0, 64, xp.uint8)
    if spec.init == "words":
        return integers(0, 1 << 16, xp.uint16)
    if spec.init == "float8":  # bits of E4M3 below 2, of either sign: of a size of 0.62
        bits = integers(0, 128, xp.uint8)
        return (bits & 64) << 1 | bits & 63
    if spec.init == "signed":
        return integers(-127, 128, xp.int8)
    if spec.init.startswith("scale/"):  # for codes that are uniform up to this number
        return xp.full(spec.shape, math.sqrt(3 / spec.fan_in) / float(spec.init.removeprefix("scale/")))
    if spec.init == "exponents":  # 127 means 1; the codes they scale are as large as 2^1.5
        return xp.full(spec.shape, 127 - round(math.log2(spec.fan_in) / 2 + 1.5))
    raise ValueError(f"unknown init {spec.init!r}")
