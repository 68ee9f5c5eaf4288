"""One declaration of an array: its shape, dtype, logical axes and how it is initialised."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ALIGNMENT = 64  # JAX on a CPU takes over a buffer that lies so, where it would copy another


@dataclass(frozen=True)
class ArraySpec:
    """A leaf of an abstract tree; shardings, random init, loading and memory sizes all come from it."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    init: str = "normal"
    fan_in: int = 1
    inputs: tuple[int, ...] = ()  # the axes that every product with it sums over; empty where it is no plain matrix

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


def random_arrays(tree, seed: int = 0):
    """A tree of arrays drawn as its specs say; numpy on the host, so that it costs no compilation."""
    rng = np.random.default_rng(seed)

    def draw(spec: ArraySpec):
        if spec.init == "zeros":
            value = np.zeros(spec.shape, np.float32)
        elif spec.init == "ones":
            value = np.ones(spec.shape, np.float32)
        elif spec.init == "normal":
            value = rng.standard_normal(spec.shape, np.float32) / math.sqrt(spec.fan_in)
        elif spec.init == "bytes":  # packed codes, all equally likely
            value = rng.integers(0, 256, spec.shape, np.uint8)
        elif spec.init == "signed":
            value = rng.integers(-127, 128, spec.shape, np.int8)
        elif spec.init.startswith("scale/"):  # of codes spread evenly up to this number
            value = np.full(spec.shape, math.sqrt(3 / spec.fan_in) / float(spec.init.removeprefix("scale/")))
        elif spec.init == "exponents":  # 127 means 1; the codes they scale are as large as 2^1.5
            value = np.full(spec.shape, 127 - round(math.log2(spec.fan_in) / 2 + 1.5))
        else:
            raise ValueError(f"unknown init {spec.init!r}")
        return jnp.asarray(value.astype(spec.dtype))

    return jax.tree.map(draw, tree)
