"""What the kernel for NVIDIA GPUs is compiled for: each of its 128 threads has a column of a
memory.
"""

from typing import NamedTuple

THREADS = 128
VALUES = 64, 128  # numbers of a value: each thread has one, of one head or of one of two
MOST_KEYS = 256  # numbers of a key
HELD = 128  # of them for which a thread has registers
LINE = 32  # numbers: a copy brings a multiple of so many
STAGES = 4  # rows that are in shared memory at once
# that a thread adds up side by side, each of every fourth number of a key; also lines of a turn
# beyond HELD
SUMS = 4


class MemoryShape(NamedTuple):
    """The sizes and options that the kernel is compiled for."""

    keys: int  # numbers of a key
    values: int  # numbers of a value
    shared: int  # heads that share a key
    by_key: bool  # each number of a key has a decay
    corrects: bool

    @property
    def held(self) -> int:
        """Numbers of a key for which a thread has registers; of the others the memory stays in
        shared memory.
        """
        return min(self.keys, HELD)

    @property
    def heads(self) -> int:
        """Those of a program."""
        return THREADS // self.values
