"""How much the loss hears of each weight: squared gradients over calibration text, summed over its sequences."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import decoder
from ..checkpoint.dense_leaf import unread_leaf
from ..checkpoint.safetensors import read_header, write_whole
from ..config import ModelConfig, ModelError
from . import whole
from .source import Key, Source


def write(source: Source, samples: Sequence[Sequence[int]], folder: Path) -> None:
    """A file for each layer, unless all are there."""
    files = [file_of(folder, index) for index in range(len(source.config.layers))]
    if not all(file.exists() for file in files):
        squared_gradients(source, samples, lambda index, found: write_whole(files[index], found))


def read(source: Source, index: int, folder: Path) -> dict[Key, np.ndarray]:
    """Of a layer: for each key those of its matrices, one below the other."""
    stored, found = read_header(file_of(folder, index)), {}
    for leaf in source.leaves(index).values():
        for part in leaf.parts if leaf.rounded else ():
            found.setdefault(leaf.key(part), []).append(stored[part.name].read())
    return {key: np.concatenate(each) for key, each in found.items()}


def file_of(folder: Path, index: int) -> Path:
    return folder / f"gradients-{index:05}.safetensors"


def squared_gradients(
    source: Source, samples: Sequence[Sequence[int]], keep: Callable[[int, dict[str, np.ndarray]], None]
) -> None:
    """`keep(index, found)` for each layer, the last one first: for each of its matrices one as large, by their names.

    The diagonal of the empirical Fisher information, but for a factor. What enters each layer stays in memory for all
    sequences; of weights, those of a layer.
    """
    config = source.dense
    embedding, count = source.embedding(), len(config.layers)
    samples = [ids for ids in samples if len(ids) > 1]
    if not samples:
        raise ModelError("the calibration text has no piece of two tokens or more, and gradients need a next one")
    longest = max(map(len, samples))  # all are filled up to it: sequences of one length are compiled once
    tokens = [np.pad(np.array([ids], np.int32), ((0, 0), (0, longest - len(ids)))) for ids in samples]
    places = [np.where(np.arange(longest) < len(ids), np.arange(longest), -1)[None] for ids in samples]
    batches = [whole.entering(embedding, *pair, config) for pair in zip(tokens, places, strict=True)]
    entered: list[list[whole.Batch]] = []
    for index in range(count):
        weights = source.layer(index)
        entered.append(batches)
        batches = [batch.through(index, weights, config) for batch in batches]
    ends = source.ends()
    grads = [of_loss(ends, batch, jnp.asarray(ids[0]), config) for batch, ids in zip(batches, tokens, strict=True)]
    for index in reversed(range(count)):
        found, grads = of_layer(source, index, entered.pop(), grads)
        keep(index, found)


def of_loss(ends: Any, batch: whole.Batch, tokens_T: Any, config: ModelConfig) -> Any:
    """The gradient by what leaves the last layer, of how unlikely the tokens are together."""

    def loss(state):
        (x_TD, _), _ = state
        logits_TV = decoder.logits(ends, decoder.final_norm(ends, x_TD, config), config)
        each_T1 = jnp.take_along_axis(jax.nn.log_softmax(logits_TV[:-1]), tokens_T[1:, None], axis=1)
        return -jnp.where(batch.positions_T[1:, None] >= 0, each_T1, 0).sum()

    return jax.grad(loss)((batch.x, batch.cache))


def of_layer(
    source: Source, index: int, batches: list[whole.Batch], grads: list[Any]
) -> tuple[dict[str, np.ndarray], list[Any]]:
    """(the squared gradients of a layer's matrices, the gradients by what enters it)."""
    arrays, tree = jax.tree.flatten(source.layer(index))
    leaves = list(source.leaves(index).values())
    rounded = [at for at, leaf in enumerate(leaves) if leaf.rounded]

    @jax.jit
    def back(arrays, positions_T, state, grad, total):
        def run(own, state):
            weights = list(arrays)
            for at, array in zip(rounded, own, strict=True):
                weights[at] = array
            batch = replace(batches[0], positions_T=positions_T, x=state[0], cache=state[1])
            after = batch.through(index, jax.tree.unflatten(tree, weights), source.dense)
            return after.x, after.cache

        by_weights, by_state = jax.vjp(run, [arrays[at] for at in rounded], state)[1](grad)
        return [before + jnp.square(own) for before, own in zip(total, by_weights, strict=True)], by_state

    total, entering = [jnp.zeros_like(arrays[at]) for at in rounded], []
    for batch, grad in zip(batches, grads, strict=True):
        try:
            total, by_state = back(arrays, batch.positions_T, (batch.x, batch.cache), grad, total)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"the method needs gradients, and layer {index} of this model of the family {source.dense.family} has "
                f"none: {error}"
            ) from None
        entering.append(by_state)
    found: dict[str, np.ndarray] = {}
    for at, value in zip(rounded, total, strict=True):
        found |= unread_leaf(leaves[at].parts, np.asarray(value))
    return found, entering
