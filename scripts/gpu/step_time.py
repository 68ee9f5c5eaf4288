"""A performance model of a step's time on a GPU, from its bytes, operations and kernel launches.
The constants are estimates that no measurement has confirmed yet.

    seconds = max(bytes / (SUSTAINED * bandwidth), operations / (PRODUCTS * speed)) + launches *
    LAUNCH

The model holds for steps that run entirely as CUDA graphs; steps that synchronise with the host
take longer.
"""

from dataclasses import dataclass

from ...model.config import ModelConfig
from ...model.planning.cost import DEVICES, Device
from ...model.planning.meshes import Planner, Workload

SUSTAINED = 0.88  # fraction of the vendor's memory bandwidth that a copy reaches
PRODUCTS = 0.65  # fraction of the vendor's peak FLOP/s that matrix products reach
PAGES = 0.92  # fraction of the copy bandwidth that attention over a paged cache reaches
SOFTMAX = 0.8  # fraction of the matrix product rate that attention reaches; exponentials interleave
# Fixed seconds of a kernel in a CUDA graph: its start, and its last wave of blocks.
LAUNCH = 2.0e-6


@dataclass(frozen=True)
class Goal:
    """The share of the memory roofline that a decode step is to reach, and the model's prediction
    for an H200.
    """

    share: float
    seconds: float  # predicted
    predicted: float  # predicted share

    def __str__(self) -> str:
        return (
            f"{self.share:.0%} of the roof (an H200 by the model: {self.seconds * 1e3:.2f} ms, "
            f"{self.predicted:.0%})"
        )


# Cases as in tools/gpu/ahead.py; docs/kernels.md lists the compiled programs that the predictions
# use.
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
    """Minimum (bytes, operations) of a step on one device. Counts the experts that would be chosen
    if every token chose experts at random.
    """
    sizes = {"data": 1, "pipe": 1, "context": 1, "expert": 1, "tensor": tensor}
    device = DEVICES["h200"]  # any device: its rates cancel out below
    time = Planner(config, device, Workload(batch, length, rows)).time(
        sizes, rows, batch, length, prompts
    )
    return time.read * device.bandwidth, time.compute * device.flops


def step_seconds(device: Device, moved: float, operations: float, launches: float) -> float:
    """Predicted seconds of a step that moves `moved` bytes."""
    busy = max(moved / (SUSTAINED * device.bandwidth), operations / (PRODUCTS * device.flops))
    return busy + launches * LAUNCH


def attention_seconds(device: Device, moved: float, operations: float) -> float:
    """Predicted seconds of attention: its kernel and the kernel that merges split sequences."""
    return step_seconds(device, moved / PAGES, operations / SOFTMAX, launches=2)


def known_device(kind: str) -> Device | None:
    """The device whose rates are known for a driver's device name, or None."""
    return next((device for name, device in DEVICES.items() if name in kind.lower()), None)
