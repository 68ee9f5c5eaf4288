"""Fine-tuning of what is no code: scales of outputs and norms, so that a rounded model says what the dense one does.

The last step of QuIP# (arXiv 2402.04396): Adam lowers the Kullback-Leibler divergence of the next token's probabilities
from those of the dense model, over the calibration text. Codes stay as they are.
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
from ..checkpoint.dense_leaf import unread_leaf
from ..checkpoint.published import writer_for
from ..checkpoint.safetensors import Tensor, read_header, write_whole
from ..config import ModelConfig, ModelError
from ..stored_format import StoredFormat
from . import whole
from .folds import divide_norm, norm_of
from .source import Leaf, Source

SCALE = ".weight_scale"
RATE, WARM = 1e-2, 0.1  # Adam's largest step, of a factor that begins at 1; the share of steps that lead up to it
ROWS = 1024  # tokens of a step, where a sequence is no longer
DECAYS, LEAST = (0.9, 0.95), 1e-8
Arrays = dict[str, Any]  # by layer and leaf


@struct.dataclass
class State:
    """Factors of scales and norms, and Adam's moving means of their gradients and of the squares of these."""

    factors: Arrays
    first: Arrays
    second: Arrays

    @classmethod
    def of(cls, factors: Arrays) -> "State":
        return cls(factors, *({name: np.zeros_like(x) for name, x in factors.items()} for _ in range(2)))

    @classmethod
    def read(cls, file: Path) -> "State":
        found: list[Arrays] = [{}, {}, {}]
        for name, tensor in read_header(file).items():
            number, leaf = name.split("/")
            found[int(number)][leaf] = tensor.read()
        return cls(*found)

    def write(self, file: Path) -> None:
        parts = enumerate((self.factors, self.first, self.second))
        write_whole(file, {f"{number}/{name}": np.asarray(x) for number, part in parts for name, x in part.items()})


def check(stored: StoredFormat) -> None:
    """Refuse forms without a scale in floating point that multiplies an output's codes."""
    for group in stored.groups:
        found = writer_for(stored).layout("a.weight", group, (256, 256)).get(SCALE)
        if found is None or found[0][0] not in ("float32", "float16", "bfloat16") or found[1][0][:1] != (256,):
            raise ModelError(
                "fine_tune_epochs is for formats whose outputs have scales in floating point, such as e8p-2, or "
                f"int4-64 laid out as compressed-tensors; quantization is {group.quant!r}, laid out as {stored.method}"
            )


def tuned(
    source: Source,
    made: Mapping[str, Tensor],
    samples: Sequence[Sequence[int]],
    epochs: int,
    folder: Path,
    progress: Callable[[int], None],
) -> dict[str, Tensor]:
    """What was `made` of the layers, with other scales and norms; `progress` is told how many epochs are done.

    The rounded model is in memory in float32, all layers of it, and of the dense one what leaves its last layer for
    every token. A file in `folder` keeps each epoch, from which a run that was stopped goes on.
    """
    config, count = source.dense, len(source.config.layers)
    tensors = {name: made.get(tensor.name, tensor) for name, tensor in source.tensors.items()}
    own = replace(source, tensors=tensors)  # with the norms that a method may have changed
    leaves = [own.leaves(index) for index in range(count)]
    done = [number for number in range(epochs + 1) if file_of(folder, number).exists()]
    state = State.read(file_of(folder, done[-1])) if done else State.of(ones(leaves))
    if (begin := done[-1] if done else 0) < epochs:
        entering = whole.embedded(source.embedding(), samples, config, ROWS)
        leaving = entering
        for index in range(count):
            weights = source.layer(index)
            leaving = [batch.through(index, weights, config) for batch in leaving]
        ends, layers = source.ends(), [source.layer(index, made) for index in range(count)]
        wanted = [batch.x[0] for batch in leaving]
        for epoch in range(begin, epochs):
            order = list(range(len(entering)))
            Random(epoch).shuffle(order)
            for number, place in enumerate(order, epoch * len(order)):
                rate = rate_of(number, epochs * len(order))
                batch = entering[place]
                where = batch.x, batch.positions_T, wanted[place], batch.shape
                try:
                    state = step(state, layers, ends, *where, rate, number + 1, config)
                except (NotImplementedError, ValueError) as error:
                    raise ModelError(
                        f"fine-tuning needs gradients, and this model of the family {config.family} has none: {error}"
                    ) from None
            state.write(file_of(folder, epoch + 1))
            progress(epoch + 1)
    write_whole(folder / "fine-tuned.safetensors", written(own, made, leaves, state.factors))
    return {**made, **read_header(folder / "fine-tuned.safetensors")}


def file_of(folder: Path, epoch: int) -> Path:
    return folder / f"fine-tuned-{epoch:05}.safetensors"


def rate_of(number: int, steps: int) -> float:
    """Up in a line, and down as half a cosine."""
    up = max(1, round(WARM * steps))
    return RATE * min((number + 1) / up, (1 + math.cos(math.pi * max(0, number - up) / max(1, steps - up))) / 2)


def ones(leaves: Sequence[Mapping[str, Leaf]]) -> Arrays:
    """A factor for each output of a rounded matrix, and for each number of a norm."""
    found = {}
    for index, own in enumerate(leaves):
        for name, leaf in own.items():
            if leaf.rounded:
                shape = [1 if axis in leaf.spec.inputs else size for axis, size in enumerate(leaf.spec.shape)]
                found[f"{index}.{name}"] = np.ones(shape, np.float32)
            elif is_norm(name, own):
                found[f"{index}.{name}"] = np.ones(leaf.spec.shape, np.float32)
    return found


def is_norm(name: str, leaves: Mapping[str, Leaf]) -> bool:
    """Whether a leaf is the scale of a norm that adds nothing, in a tensor of its own."""
    stem = name.removesuffix(".scale_D")
    return "norm" in stem.rsplit(".", 1)[-1] and norm_of(stem, dict(leaves)) == name and len(leaves[name].parts) == 1


def scaled(index: int, weights: Any, factors: Arrays) -> Any:
    """A layer's weights times their factors."""

    def times(path, array):
        factor = factors.get(f"{index}.{jax.tree_util.keystr(path, simple=True, separator='.')}")
        return array if factor is None else array * factor

    return jax.tree_util.tree_map_with_path(times, weights)


def divergence(
    factors: Arrays, layers: Any, ends: Any, x: Any, positions_T: Any, wanted_TD: Any, shape: Any, config: ModelConfig
) -> Any:
    """The mean over tokens of KL(dense || rounded), from what leaves the dense model's last layer."""

    def after(index: int):
        def run(factors, weights, state):
            batch = whole.Batch(shape, positions_T, *state).through(index, scaled(index, weights, factors), config)
            return batch.x, batch.cache

        return jax.checkpoint(run)  # what is between is computed again on the way back

    state = x, {}
    for index, weights in enumerate(layers):
        state = after(index)(factors, weights, state)

    def said(x_TD):
        return jax.nn.log_softmax(decoder.logits(ends, decoder.final_norm(ends, x_TD, config), config))

    right_TV, found_TV, live_T = said(wanted_TD), said(state[0][0]), positions_T >= 0
    each_T = (jnp.exp(right_TV) * (right_TV - found_TV)).sum(1)
    return jnp.where(live_T, each_T, 0).sum() / live_T.sum()


def adam(state: State, grads: Arrays, rate: Any, number: Any) -> State:
    """After one step (arXiv 1412.6980); steps count from 1."""
    a, b = DECAYS
    first = jax.tree.map(lambda mean, g: a * mean + (1 - a) * g, state.first, grads)
    second = jax.tree.map(lambda mean, g: b * mean + (1 - b) * jnp.square(g), state.second, grads)

    def moved(factor, mean, square):
        return factor - rate * (mean / (1 - a**number)) / (jnp.sqrt(square / (1 - b**number)) + LEAST)

    return State(jax.tree.map(moved, state.factors, first, second), first, second)


@partial(jax.jit, static_argnames=("shape", "config"))
def step(
    state: State, layers: Any, ends: Any, x: Any, positions_T: Any, wanted_TD: Any, shape: tuple[int, int], rate: Any,
    number: Any, config: ModelConfig,
) -> State:  # fmt: skip
    grads = jax.grad(divergence)(state.factors, layers, ends, x, positions_T, wanted_TD, shape, config)
    return adam(state, grads, rate, number)


def written(
    source: Source, made: Mapping[str, Tensor], leaves: Sequence[Mapping[str, Leaf]], factors: Arrays
) -> dict[str, np.ndarray]:
    """The tensors that are other than they were, by their names in files."""
    found: dict[str, np.ndarray] = {}
    for index, own in enumerate(leaves):
        for name, leaf in own.items():
            factor = np.asarray(factors[f"{index}.{name}"]) if f"{index}.{name}" in factors else None
            if factor is not None and leaf.rounded:
                for part, by in unread_leaf(leaf.parts, np.broadcast_to(factor, leaf.spec.shape)).items():
                    scale = source.tensors[part].name.removesuffix(".weight") + SCALE
                    before = made[scale].read()
                    by = by[:, 0].reshape(-1, *(1,) * (before.ndim - 1))
                    found[scale] = (before.astype(np.float32) * by).astype(before.dtype)
            elif factor is not None:
                (stored,) = divide_norm(source, leaf, 1 / factor)[0].items()
                found[source.tensors[stored[0]].name] = stored[1]
    return found
