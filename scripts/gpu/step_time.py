"""A model of a step's time: bytes, operations and launches. No card has confirmed its constants yet; each is a guess
that a first card replaces.

    seconds = max(bytes / (SUSTAINED * bandwidth), operations / (PRODUCTS * speed)) + launches * LAUNCH

It is that of a step whose graphs hold all of it: where the host must learn what to launch, a step takes longer.
"""

from ...model.planning.cost import Device

SUSTAINED = 0.88  # of the maker's bandwidth: what a copy reaches
PRODUCTS = 0.65  # of the maker's speed of products
LAUNCH = 2.0e-6  # seconds of a kernel within a graph that no byte explains: its start, and its last blocks alone


def step_seconds(device: Device, moved: float, operations: float, launches: float) -> float:
    """Seconds of a step that moves so many bytes, by the model above."""
    busy = max(moved / (SUSTAINED * device.bandwidth), operations / (PRODUCTS * device.flops))
    return busy + launches * LAUNCH


def roof_seconds(device: Device, needed: float, operations: float) -> float:
    """Seconds of the bytes that any program must read, or of its operations: of this a step reaches a share."""
    return step_seconds(device, needed, operations, 0)
