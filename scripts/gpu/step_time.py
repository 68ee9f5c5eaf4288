"""A model of a step's time: bytes, operations and launches. No card has confirmed its constants
yet; each is a guess that a first card replaces.

    seconds = max(bytes / (SUSTAINED * bandwidth), operations / (PRODUCTS * speed)) + launches *
    LAUNCH

It is that of a step whose graphs hold all of it: where the host must learn what to launch, a step
takes longer.
"""

from dataclasses import dataclass

from ...model.config import ModelConfig
from ...model.planning.cost import DEVICES, Device
from ...model.planning.meshes import Planner, Workload

SUSTAINED = 0.88  # of the maker's bandwidth: what a copy reaches
PRODUCTS = 0.65  # of the maker's speed of products
PAGES = 0.92  # of what a copy reaches: what attention does where it reads a cache in pages
# of what products reach: what attention does where exponentials take their turns with them
SOFTMAX = 0.8
# seconds of a kernel within a graph that no byte explains: its start, and its last blocks alone
LAUNCH = 2.0e-6


@dataclass(frozen=True)
class Goal:
    """A share of the roof that a decode step is to reach, and what the model says of an H200."""

    share: float
    seconds: float
    predicted: float  # share

    def __str__(self) -> str:
        return (
            f"{self.share:.0%} of the roof (an H200 by the model: {self.seconds * 1e3:.2f} ms, "
            f"{self.predicted:.0%})"
        )


# by cases of tools/gpu/ahead.py; docs/kernels.md has the programs from which the model says it
GOALS = {
    "llama-3-8b, bf16, batch 1": Goal(0.90, 4.25e-3, 0.84),
    "llama-3-8b, bf16, batch 64": Goal(0.80, 6.36e-3, 0.88),
    "qwen3-30b-a3b, bf16, batch 64": Goal(0.75, 17.86e-3, 0.87),
}


def least(
    config: ModelConfig,
    rows: int,
    batch: int,
    length: int,
    *,
    prompts: bool = False,
    tensor: int = 1,
) -> tuple[float, float]:
    """(bytes, operations) of one device's part of a step: of experts those that are chosen, if each
    token chooses by chance."""
    sizes = {"data": 1, "pipe": 1, "context": 1, "expert": 1, "tensor": tensor}
    device = DEVICES["h200"]  # any: its rates are taken out again
    time = Planner(config, device, Workload(batch, length, rows)).time(
        sizes, rows, batch, length, prompts
    )
    return time.read * device.bandwidth, time.compute * device.flops


def step_seconds(device: Device, moved: float, operations: float, launches: float) -> float:
    """Seconds of a step that moves so many bytes, by the model above."""
    busy = max(moved / (SUSTAINED * device.bandwidth), operations / (PRODUCTS * device.flops))
    return busy + launches * LAUNCH


def attention_seconds(device: Device, moved: float, operations: float) -> float:
    """Seconds of attention alone: of its kernel, and of the one that joins what the parts of long
    sequences came to.
    """
    return step_seconds(device, moved / PAGES, operations / SOFTMAX, launches=2)


def known_device(kind: str) -> Device | None:
    """The card that a driver's name means, as far as its rates are known."""
    return next((device for name, device in DEVICES.items() if name in kind.lower()), None)
