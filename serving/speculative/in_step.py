"""Drafts that the step itself makes, on the device, right after the tokens that it draws."""

from itertools import takewhile

from ..api.speculation import SpeculativeConfig
from ..request.sequence import Sequence


class StepDrafter:
    """Takes what the sequence's last step proposed."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        return list(takewhile(lambda token: token >= 0, seq.proposed[:most]))

    def end(self, seq: Sequence) -> None:
        pass


def make(config: SpeculativeConfig) -> StepDrafter:
    return StepDrafter()
