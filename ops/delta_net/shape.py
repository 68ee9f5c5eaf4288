"""Sizes of the Hopper kernel, in which each of 128 threads holds a column of a memory."""

from typing import NamedTuple

THREADS = 128
VALUES = 64, 128  # supported value sizes; with 64 a program computes two heads
MAX_KEYS = 256  # key size
MAX_REGISTER_KEYS = 128  # key elements whose lines are held in registers
LINE = 32  # sizes of copies are multiples of it, in elements
STAGES = 4  # tokens in shared memory at once
# partial sums of a thread, each over every fourth key element; also the unrolling of the loop over
# lines in shared memory
SUMS = 4


class MemoryShape(NamedTuple):
    """The sizes and options that the kernel is compiled for."""

    keys: int  # key size
    values: int  # value size
    shared: int  # value heads per key head
    by_key: bool  # whether there is a decay per key element
    corrects: bool

    @property
    def register_keys(self) -> int:
        """Key elements whose lines are held in registers; the others stay in shared memory."""
        return min(self.keys, MAX_REGISTER_KEYS)

    @property
    def heads(self) -> int:
        """Heads of a program."""
        return THREADS // self.values
