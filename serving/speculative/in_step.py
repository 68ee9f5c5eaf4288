"""Drafts that the step itself makes, on the device, right after the tokens that it draws."""

from itertools import takewhile

from ..api.speculation import SpeculativeConfig
from ..request.sequence import Sequence


class StepDrafter:
    """Takes what the sequence's last step proposed: of each path of drafts as many tokens as paths
    can be long.
    """

    def __init__(self, depth: int):
        self.depth = depth

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """The first path; the others are left with the sequence."""
        starts = range(0, len(seq.proposed), self.depth)
        paths = [seq.proposed[start : start + min(most, self.depth)] for start in starts]
        first, *seq.branches = [
            list(takewhile(lambda token: token >= 0, path)) for path in paths
        ] or [[]]
        return first

    def end(self, seq: Sequence) -> None:
        pass


def make(config: SpeculativeConfig) -> StepDrafter:
    return StepDrafter(config.depth)
