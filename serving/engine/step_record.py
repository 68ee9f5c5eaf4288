"""The record of a step that the engine passes to its observers."""

from typing import NamedTuple

from ..request.request import Request
from .step_result import InFlightStep, StepResult


class StepRecord(NamedTuple):
    """One call of `Engine.step`: it launched a step, and processed the results of an earlier one.

        host      [schedule][launch n+1][collect n .....][update]
        device     step n ..............................][ step n+1 ....

    Nothing was launched where nothing could be computed; there is no result while the pipeline
    fills, or after a failure.
    """

    began: float
    ended: float
    launched: InFlightStep | None
    result: StepResult | None
    changed: tuple[Request, ...]  # requests that got tokens, or ended
    running: int  # sequences with a slot
    waiting: int  # sequences without one


class Observer:
    """Receives the record of every step, in the engine's thread; one of `Engine.observers`."""

    def observe(self, record: StepRecord) -> None:
        """Handle the record of a step."""
        raise NotImplementedError

    def close(self) -> None:
        """Handle the engine's shutdown."""
