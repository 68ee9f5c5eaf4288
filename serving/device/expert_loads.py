"""What the host knows of a mixture's experts: where they lie, and how many rows each of them got."""

from typing import Any

import jax
import numpy as np

from ...model.config import ModelConfig
from ...model.expert_copies import first_placements
from .expert_placement import busiest
from .state import State
from .step import read_loads

EVERY = 64  # steps from one look at the counters to the next
KEPT = 0.9  # of the rows that are taken for recent ones, from look to look


class ExpertLoads:
    """Reads the counters of the device now and then, without waiting for it."""

    def __init__(self, config: ModelConfig, devices: int = 1):
        self.layers, self.devices = config.expert_layers, devices
        self.held_LS = first_placements(config)  # the expert of each place
        self.moved = 0  # places that got another
        self.counted_LE = np.zeros((len(self.layers), config.experts), np.uint32)
        self.rows_LE = np.zeros(self.counted_LE.shape, np.int64)  # since the start
        self.recent_LE = np.zeros(self.counted_LE.shape)
        self.since = 0  # steps after the last look
        self.config = config
        self.arriving: jax.Array | None = None
        self.program: Any = None

    def lower(self, state: State) -> jax.stages.Lowered:
        """What is to be compiled."""
        return read_loads.lower(state.loads_nLE)

    def launched(self, state: State) -> None:
        """A step is under way; its counters are copied when that is due."""
        self.since += 1
        if self.arriving is not None and self.arriving.is_ready():
            self.take()
        if self.since >= EVERY and self.arriving is None:
            self.look(state)

    def look(self, state: State) -> None:
        self.arriving, self.since = self.program(state.loads_nLE), 0
        self.arriving.copy_to_host_async()

    def settle(self, state: State) -> None:
        """Nothing is under way: nobody waits."""
        if self.arriving is not None:
            self.take()
        if self.since:
            self.look(state)
            self.take()

    def take(self) -> None:
        found_LE, self.arriving = np.asarray(self.arriving), None
        new_LE = found_LE - self.counted_LE  # of counters that wrap
        self.counted_LE = found_LE
        self.rows_LE = self.rows_LE + new_LE  # a new array: other threads read the old one
        self.recent_LE = self.recent_LE * KEPT + new_LE

    def reset(self) -> None:
        """The counters begin again."""
        self.arriving, self.since = None, 0
        self.counted_LE = np.zeros_like(self.counted_LE)

    def reload(self) -> None:
        """The weights were read again."""
        self.held_LS = first_placements(self.config)

    def loads(self) -> dict[int, dict[str, list]]:
        """By layer: rows that each expert got since the start, and of late, and the experts that each device has."""
        held_LnO = self.held_LS.reshape(len(self.layers), self.devices, -1)
        return {
            layer: {"rows": rows_E.tolist(), "recent": recent_E.round(1).tolist(), "devices": held_nO.tolist()}
            for layer, rows_E, recent_E, held_nO in zip(
                self.layers, self.rows_LE, self.recent_LE, held_LnO, strict=True
            )
        }

    def skew(self) -> dict[int, float]:
        """By layer: recent rows of the busiest expert against the mean; 1 where all got as many."""
        return {layer: peak(row_E) for layer, row_E in zip(self.layers, self.recent_LE, strict=True)}

    def device_skew(self) -> dict[int, float]:
        """By layer: recent rows of the busiest device against the mean."""
        found = (busiest(*pair, self.devices) for pair in zip(self.recent_LE, self.held_LS, strict=True))
        return dict(zip(self.layers, found, strict=True))


def peak(loads: np.ndarray) -> float:
    """The largest in units of the mean."""
    mean = loads.mean()
    return float(loads.max() / mean) if mean else 1.0
