"""Sensitivity of the loss to each weight: squared gradients summed over calibration sequences."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import decoder
from ..checkpoint.dense_leaf import leaf_to_tensors
from ..checkpoint.safetensors import publish_tensors, read_header
from ..config import ModelConfig, ModelError
from . import whole
from .source import CheckpointSource, Key


def write(source: CheckpointSource, samples: Sequence[Sequence[int]], folder: Path) -> None:
    """Write the squared gradients of each layer to a file, unless all files exist."""
    files = [gradients_file(folder, index) for index in range(len(source.config.layers))]
    if not all(file.exists() for file in files):
        squared_gradients(
            source, samples, lambda index, squares: publish_tensors(files[index], squares)
        )


def read(source: CheckpointSource, index: int, folder: Path) -> dict[Key, np.ndarray]:
    """Read a layer's squared gradients, with the matrices of each key concatenated."""
    stored = read_header(gradients_file(folder, index))
    squares_by_key = {}
    for leaf in source.leaves(index).values():
        for source_tensor in leaf.sources if leaf.rounded else ():
            squares_by_key.setdefault(leaf.key(source_tensor), []).append(
                stored[source_tensor.name].read()
            )
    return {key: np.concatenate(squares) for key, squares in squares_by_key.items()}


def gradients_file(folder: Path, index: int) -> Path:
    return folder / f"gradients-{index:05}.safetensors"


def squared_gradients(
    source: CheckpointSource,
    samples: Sequence[Sequence[int]],
    keep: Callable[[int, dict[str, np.ndarray]], None],
) -> None:
    """Call `keep(index, squares)` for each layer, last first; `squares` are by matrix name.

    Squared gradients are the diagonal of the empirical Fisher information up to a factor. The
    inputs of all layers stay in memory for all sequences; the weights of only one layer do.
    """
    config = source.dense
    embedding = source.embedding()
    count = len(config.layers)
    samples = [ids for ids in samples if len(ids) > 1]
    if not samples:
        raise ModelError(
            "the calibration text has no piece of two tokens or more, and gradients need a next one"
        )
    longest = max(map(len, samples))  # sequences are padded to one length, to compile once
    tokens = [
        np.pad(np.array([ids], np.int32), ((0, 0), (0, longest - len(ids)))) for ids in samples
    ]
    positions = [
        np.where(np.arange(longest) < len(ids), np.arange(longest), -1)[None] for ids in samples
    ]
    batches = [
        whole.embed_batch(embedding, *pair, config) for pair in zip(tokens, positions, strict=True)
    ]
    entered: list[list[whole.Batch]] = []
    for index in range(count):
        weights = source.layer(index)
        entered.append(batches)
        batches = [batch.run_layer(index, weights, config) for batch in batches]
    head_weights = source.ends()
    grads = [
        loss_gradient(head_weights, batch, jnp.asarray(ids[0]), config)
        for batch, ids in zip(batches, tokens, strict=True)
    ]
    for index in reversed(range(count)):
        squares, grads = layer_gradients(source, index, entered.pop(), grads)
        keep(index, squares)


def loss_gradient(head_weights: Any, batch: whole.Batch, tokens_T: Any, config: ModelConfig) -> Any:
    """The gradient of the sequence's negative log-likelihood by the last layer's output."""

    def loss(state):
        (x_TD, _), _ = state
        logits_TV = decoder.logits(
            head_weights, decoder.final_norm(head_weights, x_TD, config), config
        )
        log_prob_T1 = jnp.take_along_axis(
            jax.nn.log_softmax(logits_TV[:-1]), tokens_T[1:, None], axis=1
        )
        return -jnp.where(batch.positions_T[1:, None] >= 0, log_prob_T1, 0).sum()

    return jax.grad(loss)((batch.x, batch.cache))


def layer_gradients(
    source: CheckpointSource, index: int, batches: list[whole.Batch], grads: list[Any]
) -> tuple[dict[str, np.ndarray], list[Any]]:
    """(squared gradients of a layer's matrices, gradients by its input)."""
    arrays, tree = jax.tree.flatten(source.layer(index))
    leaves = list(source.leaves(index).values())
    rounded = [at for at, leaf in enumerate(leaves) if leaf.rounded]

    @jax.jit
    def back(arrays, positions_T, state, grad, total):
        def run(matrices, state):
            weights = list(arrays)
            for at, array in zip(rounded, matrices, strict=True):
                weights[at] = array
            batch = replace(batches[0], positions_T=positions_T, x=state[0], cache=state[1])
            output = batch.run_layer(index, jax.tree.unflatten(tree, weights), source.dense)
            return output.x, output.cache

        by_weights, by_state = jax.vjp(run, [arrays[at] for at in rounded], state)[1](grad)
        return [
            square + jnp.square(gradient)
            for square, gradient in zip(total, by_weights, strict=True)
        ], by_state

    total = [jnp.zeros_like(arrays[at]) for at in rounded]
    entering = []
    for batch, grad in zip(batches, grads, strict=True):
        try:
            total, by_state = back(arrays, batch.positions_T, (batch.x, batch.cache), grad, total)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"the method needs gradients, and layer {index} of this model of the family "
                f"{source.dense.family} has none: {error}"
            ) from None
        entering.append(by_state)
    squares: dict[str, np.ndarray] = {}
    for at, value in zip(rounded, total, strict=True):
        squares |= leaf_to_tensors(leaves[at].sources, np.asarray(value))
    return squares, entering
