"""Redundant experts: the expert in each slot, and the tables that the decoder reads."""

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .config import Layer, ModelConfig, ModelError, Moe
from .weights import ModelWeights, MoeWeights


def with_redundancy(config: ModelConfig, redundancy: int) -> ModelConfig:
    """The model with `redundancy` additional expert slots in each layer that has experts."""

    def widen(layer: Layer) -> Layer:
        return (
            layer if layer.moe is None else replace(layer, moe=replace(layer.moe, spare=redundancy))
        )

    return (
        replace(config, layers=tuple(widen(layer) for layer in config.layers))
        if redundancy
        else config
    )


def redundancy_of(config: ModelConfig) -> int:
    """The number of redundant expert slots of a layer."""
    return max((layer.moe.spare for layer in config.layers if layer.moe is not None), default=0)


def check(config: ModelConfig, redundancy: int, devices: int, stages: int = 1) -> None:
    """Raise for a number of redundant experts that the devices cannot share."""
    if not redundancy:
        return
    if stages > 1:
        raise ModelError(
            f"expert_redundancy is {redundancy}, and pipeline_parallel_size {stages}: experts of "
            "layers in stages are neither counted nor moved; leave one of the two out"
        )
    if devices == 1 or not config.experts:
        raise ModelError(
            f"expert_redundancy is {redundancy}, and there is nothing to balance: it needs a model "
            "with experts that several devices share, as with expert_parallel_size 2"
        )
    valid_counts = [
        n
        for n in range(1, config.experts * (devices - 1) + 1)
        if (config.experts + n) % devices == 0
    ]
    if (
        redundancy not in valid_counts
        or len({layer.moe.experts for layer in config.layers if layer.moe is not None}) > 1
    ):
        nearest = sorted(valid_counts, key=lambda n: abs(n - redundancy))[:4]
        raise ModelError(
            f"expert_redundancy is {redundancy}; with the model's {config.experts} experts it must "
            f"give each of {devices} devices as many, and no expert twice: it could be "
            f"{', '.join(map(str, sorted(nearest)))}"
        )


def first_placement(moe: Moe) -> np.ndarray:
    """The expert of each slot after loading: all in order, then the first ones again."""
    return np.arange(moe.slots) % moe.experts


def first_placements(config: ModelConfig) -> np.ndarray:
    """The first placement of all layers with experts: [L, S]."""
    return np.stack(
        [first_placement(layer.moe) for layer in config.layers if layer.moe is not None]
    )


def tables(experts_S: np.ndarray, num_experts: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(copies_E, slots_EC): the number of copies of each expert, and their slots."""
    copies_E = np.bincount(experts_S, minlength=num_experts).astype(np.int32)
    slots_EC = np.zeros((num_experts, columns), np.int32)
    order = np.argsort(experts_S, kind="stable")
    nth = np.arange(len(order)) - np.repeat(np.cumsum(copies_E) - copies_E, copies_E)
    slots_EC[experts_S[order], nth] = order
    return copies_E, slots_EC


def placed(w: MoeWeights, experts_S: np.ndarray, mesh: Mesh, moe: Moe) -> MoeWeights:
    """A layer's weights with the tables for these experts in its slots."""
    copies_and_slots = tables(experts_S, moe.experts, moe.spare + 1)
    copies_E, slots_EC = jax.device_put(copies_and_slots, NamedSharding(mesh, PartitionSpec()))
    return w.replace(copies_E=copies_E, slots_EC=slots_EC)


def with_first_placement(
    weights: ModelWeights, config: ModelConfig, mesh: Mesh | None
) -> ModelWeights:
    """Weights as just loaded, with the tables of their first placement."""
    layers = list(weights.layers)
    for index in config.expert_layers:
        moe = config.layers[index].moe
        if mesh is not None and moe is not None and moe.spare:
            moe_weights = placed(layers[index].moe, first_placement(moe), mesh, moe)
            layers[index] = layers[index].replace(moe=moe_weights)
    return weights.replace(layers=tuple(layers))
