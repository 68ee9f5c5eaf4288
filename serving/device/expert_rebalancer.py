"""Moves experts between devices while serving, to balance the load."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ...model.config import ModelConfig
from ...model.expert_copies import placed
from ...model.weights import ModelWeights, MoeWeights
from .expert_loads import ExpertLoads
from .expert_placement import balanced, busiest, settled, transfers
from .updates import move_experts

STACKS = ("up_EDGF", "down_EFD", "up_bias_EGF", "down_bias_ED")
WORTH = 1.1  # an automatic move must make the busiest device's share so many times smaller


class ExpertRebalancer:
    """Plans all layers at once, and moves one layer's experts between two steps."""

    def __init__(self, loads: ExpertLoads, config: ModelConfig, mesh: Mesh, interval: int):
        self.loads = loads
        self.config = config
        self.mesh = mesh
        self.every = interval  # steps from one plan to the next; 0: only when asked
        self.since = 0
        self.queue: deque[tuple[int, np.ndarray]] = deque()
        self.programs: dict[Any, Any] = {}

    def lower(self, weights: ModelWeights) -> Iterator[tuple[Any, jax.stages.Lowered]]:
        """The programs that move experts, one for each shape."""
        n = self.loads.devices
        slots_per_device = self.loads.held_LS.shape[1] // self.loads.devices
        places = np.zeros((n, n, slots_per_device), np.int32)
        keys = set()
        for index in self.config.expert_layers:
            for leaf in jax.tree.leaves(stacks(weights.layers[index].moe)):
                if (key := key_of(leaf)) not in keys:
                    keys.add(key)
                    spec = leaf.sharding.spec
                    yield (
                        key,
                        move_experts.lower(
                            leaf, places, places, np.int32(0), mesh=self.mesh, places=spec
                        ),
                    )

    def plan(self, worth: float = 1.0) -> dict[str, float]:
        """Queue the layers whose busiest device would get less than 1 / worth of its recent tokens.

        Returns how many they are, and the tokens of the busiest device before and after, in units
        of the mean and averaged over all layers.
        """
        loads_LE = self.loads.recent_LE
        experts_LS = self.loads.held_LS
        n = self.loads.devices
        self.queue.clear()
        loads_before = []
        loads_after = []
        for at, new_S in enumerate(balanced(loads_LE, experts_LS.shape[1], n)):
            then, now = (
                busiest(loads_LE[at], experts_S, n) for experts_S in (new_S, experts_LS[at])
            )
            if now > worth * then:
                self.queue.append((at, new_S))
            loads_before.append(now)
            loads_after.append(min(then, now))
        return {
            "layers": len(self.queue),
            "before": float(np.mean(loads_before)),
            "after": float(np.mean(loads_after)),
        }

    def launching(self, weights: ModelWeights) -> ModelWeights:
        """The weights for the next step, after moving one queued layer."""
        self.since += 1
        if self.every and self.since >= self.every:
            self.since = 0
            self.plan(WORTH)
        return self.move(weights, *self.queue.popleft()) if self.queue else weights

    def move(self, weights: ModelWeights, at: int, new_S: np.ndarray) -> ModelWeights:
        """Apply a layer's new placement to its weights and its routing table."""
        n = self.loads.devices
        experts_LS = self.loads.held_LS.copy()
        index = self.config.expert_layers[at]
        new_S = settled(new_S, experts_LS[at], n)
        sent, targets, turns = transfers(new_S, experts_LS[at], n)
        layer = weights.layers[index]
        moved = jax.tree.map(
            lambda leaf: self.programs[key_of(leaf)](leaf, sent, targets, np.int32(turns)),
            stacks(layer.moe),
        )
        moe = self.config.layers[index].moe
        assert moe is not None
        moe_weights = placed(layer.moe.replace(**moved), new_S, self.mesh, moe)
        self.loads.moved += int((new_S != experts_LS[at]).sum())
        experts_LS[at] = new_S
        self.loads.held_LS = experts_LS
        layers = weights.layers
        return weights.replace(
            layers=(*layers[:index], layer.replace(moe=moe_weights), *layers[index + 1 :])
        )

    def reload(self) -> None:
        """Reset the placement, since the weights were loaded again."""
        self.queue.clear()
        self.loads.reload()


def stacks(w: MoeWeights) -> dict[str, Any]:
    return {name: getattr(w, name) for name in STACKS if getattr(w, name) is not None}


def key_of(leaf: Any) -> Any:
    spec = leaf.sharding.spec
    return leaf.shape, leaf.dtype.name, (*spec, *[None] * (leaf.ndim - len(spec)))
