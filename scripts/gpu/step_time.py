"""A model of a step's time: bytes, operations and launches. No card has confirmed its constants yet; each is a guess
that a first card replaces.

    seconds = max(bytes / (SUSTAINED * bandwidth), operations / (PRODUCTS * speed)) + launches * LAUNCH + waits * WAIT
"""

from ...model.planning.cost import Device

SUSTAINED = 0.88  # of the maker's bandwidth: what a copy reaches
PRODUCTS = 0.65  # of the maker's speed of products
LAUNCH = 2.0e-6  # seconds of a kernel within a graph that no byte explains: its start, and its last blocks alone
WAIT = 12e-6  # seconds in which the card stands still where the host must learn what to launch


def step_seconds(device: Device, moved: float, operations: float, launches: float, waits: float = 0) -> float:
    """Seconds of a step that moves so many bytes, by the model above."""
    busy = max(moved / (SUSTAINED * device.bandwidth), operations / (PRODUCTS * device.flops))
    return busy + launches * LAUNCH + waits * WAIT


def copy_seconds(device: Device, moved: float) -> float:
    """Seconds of the bytes alone, at the speed of a copy: the roof of which a step reaches a share."""
    return moved / (SUSTAINED * device.bandwidth)
