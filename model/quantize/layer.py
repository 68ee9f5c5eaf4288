"""One layer, rounded by a method that knows what its matrices meet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax.numpy as jnp
import numpy as np

from ...ops import quant
from ..checkpoint.published import CodesWriter, round_matrix, writer_of
from ..checkpoint.published.matrix import specs_of
from ..config import ModelError
from ..stored_format import StoredFormat
from . import awq, smoothquant
from .folds import Fold, divide_norm, divisors, folds
from .gptq import gptq
from .grid import Coded, Grid, grid_of
from .inputs import Inputs
from .source import Key, Leaf, Source

METHODS = ("gptq", "awq", "smoothquant")


@dataclass(frozen=True)
class Method:
    """One of METHODS, and the format that it rounds to."""

    name: str
    stored: StoredFormat
    act_order: bool = True  # of gptq

    def __post_init__(self):
        if self.name not in METHODS:
            raise ModelError(f"method is {self.name!r}; it can be rtn, {', '.join(METHODS)}")
        if self.name != "smoothquant":
            grid_of(self.quant)  # refuses formats that it cannot round to
        elif quant.example(self.quant).rounds is None:
            schemes = quant.stored_schemes()
            right = ", ".join(name for name, scheme in schemes.items() if scheme.activations is not None)
            raise ModelError(
                f"method is 'smoothquant', which is for formats that round activations: {right}; quantization is "
                f"{self.quant!r}"
            )

    @property
    def quant(self) -> str:
        assert self.stored.quant is not None
        return self.stored.quant

    @property
    def folds(self) -> bool:
        return self.name != "gptq"

    @property
    def grid(self) -> Grid:
        return grid_of(self.quant)

    def scales(self, W: np.ndarray, inputs: Inputs, fold: Fold) -> np.ndarray:
        """By what the inputs of W [O, I] are to be divided."""
        if self.name == "awq":
            return awq.scales(W, inputs.H, fold.tied(inputs.total, np.mean), self.grid)
        return smoothquant.scales(fold.tied(inputs.top, np.max), fold.tied(np.abs(W).max(0), np.max))

    def tensors(self, matrices: Sequence[np.ndarray], inputs: Inputs) -> list[dict[str, np.ndarray]]:
        """What a checkpoint keeps of each of the matrices [O, I] that share inputs, by the endings of the names.

        Outputs are rounded each by itself, so that all of them go together.
        """
        W, ends = np.concatenate(matrices), np.cumsum([len(matrix) for matrix in matrices])[:-1]
        if self.name == "gptq":
            coded = gptq(W, inputs.H, self.grid, self.act_order)
            each = zip(*(np.split(field, ends) for field in coded), strict=True)
            return [stored_tensors(Coded(*fields), self.stored) for fields in each]
        W = awq.clipped(W, inputs.H, self.grid) if self.name == "awq" else W
        largest = float(np.abs(W).max())
        return [round_matrix(matrix, self.stored, lambda: largest) for matrix in np.split(W, ends)]


def stored_tensors(coded: Coded, stored: StoredFormat) -> dict[str, np.ndarray]:
    (group,) = stored.groups
    node = specs_of(group, *coded.codes.shape).coded(coded.codes.T, coded.scales.T, coded.zeros.T)
    return cast(CodesWriter, writer_of(stored.method)).parts(node, group)


def round_layer(source: Source, index: int, inputs: Mapping[Key, Inputs], method: Method) -> dict[str, np.ndarray]:
    """The tensors of a layer that are not as they were, by their names in files.

    These are what its matrices become, and norms and biases that scales were folded into.
    """
    leaves, dtype = source.leaves(index), jnp.dtype(source.config.dtype)
    W = {
        part.name: source.tensors[part.name].read().astype(dtype).astype(np.float32)
        for leaf in leaves.values()
        if leaf.rounded
        for part in leaf.parts
    }
    others: dict[str, np.ndarray] = {}
    inputs = dict(inputs)
    for fold in folds(source.config, index, leaves) if method.folds else ():
        W, inputs, more = folded(source, leaves, fold, W, inputs, method)
        others |= more
    out = {source.tensors[name].name: value for name, value in others.items()}
    sharing: dict[Key, list[str]] = {}
    for leaf in leaves.values():
        for part in leaf.parts if leaf.rounded else ():
            sharing.setdefault(leaf.key(part), []).append(part.name)
    for key, names in sharing.items():
        for name, made in zip(names, method.tensors([W.pop(name) for name in names], inputs[key]), strict=True):
            stem = source.tensors[name].name.removesuffix(".weight")
            out |= {stem + ending: value for ending, value in made.items()}
    return out


def folded(
    source: Source,
    leaves: Mapping[str, Leaf],
    fold: Fold,
    W: dict[str, np.ndarray],
    inputs: dict[Key, Inputs],
    method: Method,
) -> tuple[dict[str, np.ndarray], dict[Key, Inputs], dict[str, np.ndarray]]:
    """(matrices, inputs, other tensors) after a method's scales went from inputs into what they meet."""
    names = [part.name for reader in fold.readers for part in leaves[reader].parts]
    s = method.scales(np.concatenate([W[name] for name in names]), inputs[fold.readers[0], None], fold)
    others: dict[str, np.ndarray] = {}
    if fold.norm is not None:
        others, s = divide_norm(source, leaves[fold.norm], s)
    else:
        assert fold.matrix is not None
        by = fold.by_output(s)
        W = W | {name: W[name] / value for name, value in divisors(leaves[fold.matrix], fold.outputs, by).items()}
        if fold.bias in leaves:
            for name, value in divisors(leaves[fold.bias], fold.outputs, by).items():
                bias = source.tensors[name].read()
                others[name] = (bias.astype(np.float32) / value).astype(bias.dtype)
    W = W | {name: W[name] * s for name in names}
    return W, inputs | {(reader, None): inputs[reader, None].divided(s) for reader in fold.readers}, others
