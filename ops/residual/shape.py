"""What the kernel is compiled for: a row lies in lines, of which each thread has some numbers."""

from typing import NamedTuple

LINE = 64  # numbers
VECTOR = 4  # neighbours that a thread has
LINES = 128 * VECTOR // LINE  # that all threads have together, once
MOST = 256  # lines: a copy brings no more, and 128 threads hold them in their registers
MEMORY = 220 << 10  # bytes of shared memory for a row and its weights


class RowShape(NamedTuple):
    """The sizes and options that the kernel is compiled for."""

    lines: int  # of a row
    eps: float
    rounds: str | None = None  # to which codes the norm is rounded besides
    centred: bool = False  # the mean of the sum is taken off before it is normalised
    added_centred: bool = False  # and that of what is added

    @property
    def padded(self) -> int:
        """Lines that the threads have: those past the row are zeros."""
        return padded(self.lines)


def padded(lines: int) -> int:
    return -(-lines // LINES) * LINES
