"""Small arrays of weights side by side in memory of large pages, which kernels read faster than pages of 4 KiB.

NumPy asks for large pages where an array has 4 MiB or more, so that only smaller ones are moved.
"""

from threading import Lock
from typing import Any

import jax
import numpy as np

from ...sharding.spec import ALIGNMENT, empty

LARGE = 4 << 20  # bytes from which on NumPy asks for them
SLAB = 32 << 20


class Allocator:
    """Gives out slabs piece by piece. A slab is freed with the last of its arrays."""

    def __init__(self) -> None:
        self.lock, self.room = Lock(), empty((0,), np.uint8)

    def take(self, size: int) -> np.ndarray:
        with self.lock:
            if len(self.room) < size:
                self.room = empty((SLAB,), np.uint8)
            whole = -(-size // ALIGNMENT) * ALIGNMENT
            own, self.room = self.room[:size], self.room[whole:]
        return own


allocator = Allocator()


def side_by_side(tree: Any) -> Any:
    """A tree whose small NumPy arrays lie in slabs."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or not 0 < leaf.nbytes < LARGE:
            return leaf
        own = allocator.take(leaf.nbytes).view(leaf.dtype).reshape(leaf.shape)
        np.copyto(own, leaf)
        return own

    return jax.tree.map(move, tree)
