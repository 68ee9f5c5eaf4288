"""Sizes of the Hopper kernel. A row is stored as lines of LINE elements."""

from typing import NamedTuple

LINE = 64  # elements of a line
VECTOR = 4  # adjacent elements of a thread
LINES = 128 * VECTOR // LINE  # lines for one vector of each of the 128 threads
MAX_LINES = 256  # of a row: limited by the size of a copy and by registers
MAX_SMEM_BYTES = 220 << 10  # for a row and the weights of its norms


class ResidualShape(NamedTuple):
    """The sizes and options that the kernel is compiled for."""

    lines: int  # of a row
    eps: float
    rounds: str | None = None  # the format to which the norm is rounded in addition
    centred: bool = False  # whether the norm of the sum subtracts the mean
    added_centred: bool = False  # whether the norm of y subtracts the mean

    @property
    def padded(self) -> int:
        """The number of lines with the zeros that pad the row."""
        return padded(self.lines)


def padded(lines: int) -> int:
    return -(-lines // LINES) * LINES
