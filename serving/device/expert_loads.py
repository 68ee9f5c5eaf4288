"""The host's view of expert placement and of the tokens that each expert gets."""

from typing import Any

import numpy as np

from ...model.config import ModelConfig
from ...model.expert_copies import first_placements
from .expert_placement import busiest
from .programs import Call
from .state import State
from .updates import read_loads

EVERY = 64  # steps between two reads of the counters
DECAY = 0.9  # of the recent counts, from one read to the next


class ExpertLoads:
    """Reads the device's token counters every few steps, without waiting for the device."""

    def __init__(self, config: ModelConfig, devices: int = 1):
        self.layers = config.expert_layers
        self.devices = devices
        self.held_LS = first_placements(config)  # the expert at each place
        self.moved = 0  # places that got another expert
        self.counted_LE = np.zeros((len(self.layers), config.experts), np.uint32)
        self.rows_LE = np.zeros(self.counted_LE.shape, np.int64)  # since the start
        self.recent_LE = np.zeros(self.counted_LE.shape)
        self.since = 0  # steps since the last read
        self.config = config
        self.arriving: Any = None  # counters on their way to the host
        self.program: Any = None

    def read(self, state: State) -> Call:
        """The program that reads the counters."""
        return Call(read_loads, (state.loads_nLE,))

    def launched(self, state: State) -> None:
        """Start to read the counters after a launched step, if that is due."""
        self.since += 1
        if self.arriving is not None and self.arriving.is_ready():
            self.take()
        if self.since >= EVERY and self.arriving is None:
            self.look(state)

    def look(self, state: State) -> None:
        self.arriving = self.program(state.loads_nLE)
        self.since = 0
        self.arriving.copy_to_host_async()

    def settle(self, state: State) -> None:
        """Read the counters now; no step is in flight."""
        if self.arriving is not None:
            self.take()
        if self.since:
            self.look(state)
            self.take()

    def take(self) -> None:
        counters_LE = np.asarray(self.arriving)
        self.arriving = None
        new_LE = counters_LE - self.counted_LE  # of counters that wrap
        self.counted_LE = counters_LE
        self.rows_LE = self.rows_LE + new_LE  # a new array: other threads read the old one
        self.recent_LE = self.recent_LE * DECAY + new_LE

    def reset(self) -> None:
        """Start at zero counters, since the device state is new."""
        self.arriving = None
        self.since = 0
        self.counted_LE = np.zeros_like(self.counted_LE)

    def reload(self) -> None:
        """Reset the placement, since the weights were loaded again."""
        self.held_LS = first_placements(self.config)

    def loads(self) -> dict[int, dict[str, list]]:
        """By layer: total and recent tokens of each expert, and the experts of each device."""
        held_LnO = self.held_LS.reshape(len(self.layers), self.devices, -1)
        return {
            layer: {
                "rows": rows_E.tolist(),
                "recent": recent_E.round(1).tolist(),
                "devices": held_nO.tolist(),
            }
            for layer, rows_E, recent_E, held_nO in zip(
                self.layers, self.rows_LE, self.recent_LE, held_LnO, strict=True
            )
        }

    def skew(self) -> dict[int, float]:
        """Recent tokens of the busiest expert by layer, as a ratio to the mean."""
        return {
            layer: peak(row_E) for layer, row_E in zip(self.layers, self.recent_LE, strict=True)
        }

    def device_skew(self) -> dict[int, float]:
        """Recent tokens of the busiest device by layer, as a ratio to the mean."""
        skews = (
            busiest(*pair, self.devices) for pair in zip(self.recent_LE, self.held_LS, strict=True)
        )
        return dict(zip(self.layers, skews, strict=True))


def peak(loads: np.ndarray) -> float:
    """The largest value as a ratio to the mean."""
    mean = loads.mean()
    return float(loads.max() / mean) if mean else 1.0
