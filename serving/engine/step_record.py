"""What a step of the engine leaves behind, and who is told."""

from typing import NamedTuple

from ..request.request import Request
from .runner import Drawn, Launched
from .scheduler import Plan


class UnderWay(NamedTuple):
    """A step between its launch and the moment when its results are there."""

    plan: Plan
    results: Launched
    began: float  # when it was planned,
    scheduled: float  # when its plan was ready,
    launched: float  # and when it was on its way to the device


class TakenIn(NamedTuple):
    """A step whose results are there."""

    plan: Plan
    drawn: list[Drawn]
    began: float  # when the host began to wait for it
    collected: float  # when the results were there
    device_began: float  # when the device could begin: the step was launched, and the one before it was done


class StepRecord(NamedTuple):
    """What one call of `Engine.step` did: it launched a step, and took in the one before.

        host      [schedule][launch n+1][collect n .....][update]
        device     step n ..............................][ step n+1 ....

    A call in which nothing could be computed launched none, and one that failed may have taken none in.
    """

    began: float
    ended: float
    launched: UnderWay | None
    taken: TakenIn | None
    changed: tuple[Request, ...]  # requests that got tokens, or ended
    running: int  # sequences with a slot
    waiting: int  # sequences without one


class Observer:
    """Is told of every step, in the engine's thread; one of `Engine.observers`."""

    def observe(self, record: StepRecord) -> None:
        """A step is over."""
        raise NotImplementedError

    def close(self) -> None:
        """The engine is closed: nothing more comes."""
