"""One declaration of an array: its shape, dtype, logical axes and how it is initialised."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ALIGNMENT = 64  # JAX on a CPU takes over a buffer that lies so, where it would copy another


class Runs(NamedTuple):
    """A logical axis made of several runs, each of which is split by itself: queries, then keys, then values.

    An element of a run that is `shared` is held by several devices where they are more. So many elements lie `again`
    after the last, from the first on.
    """

    axis: str
    sizes: tuple[int, ...]
    shared: tuple[int, ...] = ()
    again: int = 0


@dataclass(frozen=True)
class ArraySpec:
    """A leaf of an abstract tree; shardings, random init, loading and memory sizes all come from it."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | Runs | None, ...]
    init: str = "normal"
    fan_in: int = 1
    inputs: tuple[int, ...] = ()  # the axes that every product with it sums over; empty where it is in no product
    stacked: bool = False  # its first axis counts matrices, each with rows of its own

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
    """An array of no particular values that JAX can take over without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def nbytes(tree) -> int:
    """Bytes of all arrays (or specs) in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def random_arrays(tree, seed: int = 0, on_device: bool = False):
    """A tree of arrays drawn as its specs say.

    By numpy on the host, which costs no compilation; or where they are to lie, which for gigabytes takes a moment.
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
    """An array drawn as its spec says, from a key."""

    def integers(low: int, high: int, dtype):
        return jax.random.randint(key, spec.shape, low, high, dtype)

    return values(spec, jnp, partial(jax.random.normal, key, spec.shape, jnp.float32), integers).astype(spec.dtype)


def values(spec: ArraySpec, xp, normal: Callable, integers: Callable):
    """What an array holds, by numpy or its like in JAX."""
    if spec.init == "zeros":
        return xp.zeros(spec.shape, xp.float32)
    if spec.init == "ones":
        return xp.ones(spec.shape, xp.float32)
    if spec.init == "normal":
        return normal() / math.sqrt(spec.fan_in)
    if spec.init == "bytes":  # packed codes, all equally likely
        return integers(0, 256, xp.uint8)
    if spec.init == "signed":
        return integers(-127, 128, xp.int8)
    if spec.init.startswith("scale/"):  # of codes spread evenly up to this number
        return xp.full(spec.shape, math.sqrt(3 / spec.fan_in) / float(spec.init.removeprefix("scale/")))
    if spec.init == "exponents":  # 127 means 1; the codes they scale are as large as 2^1.5
        return xp.full(spec.shape, 127 - round(math.log2(spec.fan_in) / 2 + 1.5))
    raise ValueError(f"unknown init {spec.init!r}")
