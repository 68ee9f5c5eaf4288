"""What the kernel is compiled for: a row lies in lines, of which each thread has some numbers."""

from typing import NamedTuple

LINE = 64  # numbers
VECTOR = 4  # neighbours that a thread has
LINES = 128 * VECTOR // LINE  # that all threads have together, once
MOST = 256  # lines: a copy brings no more, and 128 threads hold them in their registers


class RowShape(NamedTuple):
    """The sizes and options that the kernel is compiled for."""

    lines: int  # of a row
    eps: float
    rounds: str | None = None  # to which codes the norm is rounded besides

    @property
    def padded(self) -> int:
        """Lines that the threads have: those past the row are zeros."""
        return -(-self.lines // LINES) * LINES
