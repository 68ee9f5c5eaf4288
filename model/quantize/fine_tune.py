"""Fine-tune output scales and norms of a quantised model to predict like the dense one.

The last step of QuIP# (arXiv 2402.04396): Adam minimises the Kullback-Leibler divergence of the
next-token distribution from the dense model's over the calibration text. Codes do not change.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding import struct
from .. import decoder
from ..checkpoint.dense_leaf import leaf_to_tensors
from ..checkpoint.published import writer_for_format
from ..checkpoint.safetensors import Tensor, publish_tensors, read_header
from ..config import ModelConfig, ModelError
from ..stored_format import StoredFormat
from . import whole
from .folds import divide_norm, norm_scale_leaf
from .source import CheckpointSource, Leaf

SCALE = ".weight_scale"
RATE = 1e-2  # Adam's largest learning rate, for factors that start at 1
WARM = 0.1  # share of the steps for warm-up
ROWS = 1024  # tokens of a step, unless a sequence is longer
DECAYS = (0.9, 0.95)
LEAST = 1e-8
Arrays = dict[str, Any]  # by layer and leaf


class TuningState(struct.PyTreeNode):
    """Factors of scales and norms, and Adam's moments."""

    factors: Arrays
    first_moment: Arrays
    second_moment: Arrays

    @classmethod
    def start(cls, factors: Arrays) -> "TuningState":
        return cls(
            factors, *({name: np.zeros_like(x) for name, x in factors.items()} for _ in range(2))
        )

    @classmethod
    def read(cls, file: Path) -> "TuningState":
        arrays: list[Arrays] = [{}, {}, {}]
        for name, tensor in read_header(file).items():
            number, leaf = name.split("/")
            arrays[int(number)][leaf] = tensor.read()
        return cls(*arrays)

    def write(self, file: Path) -> None:
        fields = enumerate((self.factors, self.first_moment, self.second_moment))
        publish_tensors(
            file,
            {
                f"{number}/{name}": np.asarray(x)
                for number, arrays in fields
                for name, x in arrays.items()
            },
        )


def check(stored: StoredFormat) -> None:
    """Reject formats without a floating-point scale for each output."""
    for group in stored.groups:
        scale_layout = writer_for_format(stored).layout("a.weight", group, (256, 256)).get(SCALE)
        if (
            scale_layout is None
            or scale_layout[0][0] not in ("float32", "float16", "bfloat16")
            or scale_layout[1][0][:1] != (256,)
        ):
            raise ModelError(
                "fine_tune_epochs is for formats whose outputs have scales in floating point, "
                "such as e8p-2, or int4-64 laid out as compressed-tensors; quantization is "
                f"{group.quant!r}, laid out as {stored.method}"
            )


def tune(
    source: CheckpointSource,
    quantised: Mapping[str, Tensor],
    samples: Sequence[Sequence[int]],
    epochs: int,
    folder: Path,
    progress: Callable[[int], None],
) -> dict[str, Tensor]:
    """Fine-tune quantised layers; `progress` is called with the number of finished epochs.

    The whole quantised model is in memory in float32, and the dense model's last hidden states of
    all tokens. Each epoch is saved in `folder`, from which an interrupted run continues.
    """
    config = source.dense
    count = len(source.config.layers)
    tensors = {name: quantised.get(tensor.name, tensor) for name, tensor in source.tensors.items()}
    tuned_source = replace(source, tensors=tensors)  # with norms that the method may have changed
    leaves = [tuned_source.leaves(index) for index in range(count)]
    finished_epochs = [
        number for number in range(epochs + 1) if epoch_file(folder, number).exists()
    ]
    state = (
        TuningState.read(epoch_file(folder, finished_epochs[-1]))
        if finished_epochs
        else TuningState.start(make_factors(leaves))
    )
    if (first_epoch := finished_epochs[-1] if finished_epochs else 0) < epochs:
        entering = whole.embed_samples(source.embedding(), samples, config, ROWS)
        leaving = entering
        for index in range(count):
            weights = source.layer(index)
            leaving = [batch.run_layer(index, weights, config) for batch in leaving]
        head_weights = source.ends()
        layers = [source.layer(index, quantised) for index in range(count)]
        targets = [batch.x[0] for batch in leaving]
        for epoch in range(first_epoch, epochs):
            order = list(range(len(entering)))
            Random(epoch).shuffle(order)
            for number, batch_index in enumerate(order, epoch * len(order)):
                rate = learning_rate(number, epochs * len(order))
                batch = entering[batch_index]
                step_inputs = batch.x, batch.positions_T, targets[batch_index], batch.shape
                try:
                    state = step(
                        state, layers, head_weights, *step_inputs, rate, number + 1, config
                    )
                except (NotImplementedError, ValueError) as error:
                    raise ModelError(
                        "fine-tuning needs gradients, and this model of the family "
                        f"{config.family} has none: {error}"
                    ) from None
            state.write(epoch_file(folder, epoch + 1))
            progress(epoch + 1)
    publish_tensors(
        folder / "fine-tuned.safetensors",
        changed_tensors(tuned_source, quantised, leaves, state.factors),
    )
    return {**quantised, **read_header(folder / "fine-tuned.safetensors")}


def epoch_file(folder: Path, epoch: int) -> Path:
    return folder / f"fine-tuned-{epoch:05}.safetensors"


def learning_rate(number: int, steps: int) -> float:
    """Linear warm-up, then cosine decay."""
    up = max(1, round(WARM * steps))
    return RATE * min(
        (number + 1) / up, (1 + math.cos(math.pi * max(0, number - up) / max(1, steps - up))) / 2
    )


def make_factors(leaves: Sequence[Mapping[str, Leaf]]) -> Arrays:
    """Factors of 1 for the outputs of quantised matrices and the elements of norms."""
    factors = {}
    for index, layer_leaves in enumerate(leaves):
        for name, leaf in layer_leaves.items():
            if leaf.rounded:
                shape = [
                    1 if axis in leaf.spec.inputs else size
                    for axis, size in enumerate(leaf.spec.shape)
                ]
                factors[f"{index}.{name}"] = np.ones(shape, np.float32)
            elif is_norm(name, layer_leaves):
                factors[f"{index}.{name}"] = np.ones(leaf.spec.shape, np.float32)
    return factors


def is_norm(name: str, leaves: Mapping[str, Leaf]) -> bool:
    """Whether a leaf is the scale of a norm without bias, in a tensor of its own."""
    stem = name.removesuffix(".scale_D")
    return (
        "norm" in stem.rsplit(".", 1)[-1]
        and norm_scale_leaf(stem, dict(leaves)) == name
        and len(leaves[name].sources) == 1
    )


def scale_layer(index: int, weights: Any, factors: Arrays) -> Any:
    """Multiply a layer's weights by their factors."""

    def times(path, array):
        factor = factors.get(f"{index}.{jax.tree_util.keystr(path, simple=True, separator='.')}")
        return array if factor is None else array * factor

    return jax.tree_util.tree_map_with_path(times, weights)


def divergence(
    factors: Arrays,
    layers: Any,
    head_weights: Any,
    x: Any,
    positions_T: Any,
    target_TD: Any,
    shape: Any,
    config: ModelConfig,
) -> Any:
    """The mean over tokens of KL(dense || quantised); `target_TD`: the dense last hidden states."""

    def layer_function(index: int):
        def run(factors, weights, state):
            batch = whole.Batch(shape, positions_T, *state).run_layer(
                index, scale_layer(index, weights, factors), config
            )
            return batch.x, batch.cache

        return jax.checkpoint(run)  # recomputes activations in the backward pass

    state = x, {}
    for index, weights in enumerate(layers):
        state = layer_function(index)(factors, weights, state)

    def log_probs(x_TD):
        return jax.nn.log_softmax(
            decoder.logits(head_weights, decoder.final_norm(head_weights, x_TD, config), config)
        )

    dense_TV = log_probs(target_TD)
    predicted_TV = log_probs(state[0][0])
    live_T = positions_T >= 0
    divergence_T = (jnp.exp(dense_TV) * (dense_TV - predicted_TV)).sum(1)
    return jnp.where(live_T, divergence_T, 0).sum() / live_T.sum()


def adam(state: TuningState, grads: Arrays, rate: Any, number: Any) -> TuningState:
    """One step of Adam (arXiv 1412.6980); `number` counts from 1."""
    a, b = DECAYS
    first_moment = jax.tree.map(lambda mean, g: a * mean + (1 - a) * g, state.first_moment, grads)
    second_moment = jax.tree.map(
        lambda mean, g: b * mean + (1 - b) * jnp.square(g), state.second_moment, grads
    )

    def moved(factor, mean, square):
        return factor - rate * (mean / (1 - a**number)) / (
            jnp.sqrt(square / (1 - b**number)) + LEAST
        )

    return TuningState(
        jax.tree.map(moved, state.factors, first_moment, second_moment), first_moment, second_moment
    )


@partial(jax.jit, static_argnames=("shape", "config"))
def step(
    state: TuningState, layers: Any, head_weights: Any, x: Any, positions_T: Any, target_TD: Any,
    shape: tuple[int, int], rate: Any, number: Any, config: ModelConfig,
) -> TuningState:  # fmt: skip
    grads = jax.grad(divergence)(
        state.factors, layers, head_weights, x, positions_T, target_TD, shape, config
    )
    return adam(state, grads, rate, number)


def changed_tensors(
    source: CheckpointSource,
    quantised: Mapping[str, Tensor],
    leaves: Sequence[Mapping[str, Leaf]],
    factors: Arrays,
) -> dict[str, np.ndarray]:
    """The tensors that fine-tuning changed, by their names in files."""
    changed: dict[str, np.ndarray] = {}
    for index, layer_leaves in enumerate(leaves):
        for name, leaf in layer_leaves.items():
            factor = (
                np.asarray(factors[f"{index}.{name}"]) if f"{index}.{name}" in factors else None
            )
            if factor is not None and leaf.rounded:
                for tensor_name, factor_by_output in leaf_to_tensors(
                    leaf.sources, np.broadcast_to(factor, leaf.spec.shape)
                ).items():
                    scale = source.tensors[tensor_name].name.removesuffix(".weight") + SCALE
                    old_scale = quantised[scale].read()
                    factor_by_output = factor_by_output[:, 0].reshape(
                        -1, *(1,) * (old_scale.ndim - 1)
                    )
                    changed[scale] = (old_scale.astype(np.float32) * factor_by_output).astype(
                        old_scale.dtype
                    )
            elif factor is not None:
                (stored,) = divide_norm(source, leaf, 1 / factor)[0].items()
                changed[source.tensors[stored[0]].name] = stored[1]
    return changed
