"""One layer, rounded by a method that knows what its matrices meet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from ...ops import quant
from ...ops.quant import Scheme
from ..checkpoint.published import CodesWriter, round_matrix, writer_for
from ..checkpoint.published.matrix import specs_of
from ..config import ModelError
from ..stored_format import StoredFormat, StoredGroup
from . import awq, smoothquant
from .folds import Fold, divide_norm, divisors, folds
from .gptq import gptq
from .grid import Coded, Grid, grid_of
from .inputs import Inputs
from .quip import quip
from .source import Key, Leaf, Source

# Of the matrices that share inputs: those, or by weight [O, I] what the loss hears of it.
Met = Inputs | np.ndarray
METHODS = ("gptq", "awq", "smoothquant", "squeezellm", "quip")
# Formats that a method is for, where these are not those of whole numbers.
FOR: dict[str, tuple[str, Callable[[Scheme], bool]]] = {
    "smoothquant": ("that round activations", lambda scheme: scheme.activations is not None),
    "squeezellm": ("whose outputs have tables of their own", lambda scheme: scheme.weights["type"] == "codebook"),
    "quip": ("of points of a lattice", lambda scheme: scheme.weights["type"] == "lattice"),
}


@dataclass(frozen=True)
class Method:
    """One of METHODS, and the format that it rounds to."""

    name: str
    stored: StoredFormat
    act_order: bool = True  # of gptq

    def __post_init__(self):
        if self.name not in METHODS:
            raise ModelError(f"method is {self.name!r}; it can be rtn, {', '.join(METHODS)}")
        if self.name not in FOR:
            grid_of(self.quant)  # refuses formats that it cannot round to
            return
        (words, fits), schemes = FOR[self.name], quant.stored_schemes()
        if not fits(schemes[quant.stored_name(self.quant)]):
            right = ", ".join(name for name, scheme in schemes.items() if fits(scheme))
            raise ModelError(
                f"method is {self.name!r}, which is for formats {words}: {right}; quantization is {self.quant!r}"
            )

    @property
    def quant(self) -> str:
        assert self.stored.quant is not None
        return self.stored.quant

    @property
    def folds(self) -> bool:
        return self.name in ("awq", "smoothquant")

    @property
    def by_gradients(self) -> bool:
        """Whether it asks what the loss hears of each weight, and not what the matrices meet."""
        return self.name == "squeezellm"

    @property
    def grid(self) -> Grid:
        return grid_of(self.quant)

    def group_of(self, tensor: str) -> StoredGroup | None:
        """How a matrix is to be kept; None: as it is."""
        module = tensor.removesuffix(".weight")
        return self.stored.groups[0] if len(self.stored.groups) == 1 else self.stored.group_of(module)

    def scales(self, W: np.ndarray, inputs: Inputs, fold: Fold) -> np.ndarray:
        """By what the inputs of W [O, I] are to be divided."""
        if self.name == "awq":
            return awq.scales(W, inputs.H, fold.tied(inputs.total, np.mean), self.grid)
        return smoothquant.scales(fold.tied(inputs.top, np.max), fold.tied(np.abs(W).max(0), np.max))

    def tensors(self, matrices: Sequence[np.ndarray], met: Met, group: StoredGroup) -> list[dict[str, np.ndarray]]:
        """What a checkpoint keeps of each of the matrices [O, I] that share inputs, by the endings of the names.

        Outputs are rounded each by itself, so that all of them go together.
        """
        W, ends = np.concatenate(matrices), np.cumsum([len(matrix) for matrix in matrices])[:-1]
        specs = partial(specs_like, group)
        if not isinstance(met, Inputs):
            pairs = zip(matrices, np.split(met, ends), strict=True)
            return [specs(matrix).fitted(matrix, own).parts(group.form) for matrix, own in pairs]
        if self.name == "gptq":
            coded = gptq(W, met.H, grid_of(group.quant), self.act_order)
            each = zip(*(np.split(field, ends) for field in coded), strict=True)
            return [stored_tensors(Coded(*fields), self.stored, group) for fields in each]
        if self.name == "quip":
            codes, scale = quip(W, met.H, specs(W).bits)
            each = zip(matrices, np.split(codes, ends, axis=1), np.split(scale, ends), strict=True)
            return [specs(matrix).made(code, own).parts(group.form) for matrix, code, own in each]
        W = awq.clipped(W, met.H, self.grid) if self.name == "awq" else W
        largest = float(np.abs(W).max())
        return [round_matrix(matrix, self.stored, group, lambda: largest) for matrix in np.split(W, ends)]


def specs_like(group: StoredGroup, matrix: np.ndarray) -> Any:
    """The specs of a matrix [O, I]."""
    return specs_of(group, *matrix.shape)


def stored_tensors(coded: Coded, stored: StoredFormat, group: StoredGroup) -> dict[str, np.ndarray]:
    node = specs_of(group, *coded.codes.shape).coded(coded.codes.T, coded.scales.T, coded.zeros.T)
    return cast(CodesWriter, writer_for(stored)).parts(node, group)


def round_layer(source: Source, index: int, met: Mapping[Key, Met], method: Method) -> dict[str, np.ndarray]:
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
    met = dict(met)
    for fold in folds(source.config, index, leaves) if method.folds else ():
        W, met, more = folded(source, leaves, fold, W, met, method)
        others |= more
    out = {source.tensors[name].name: value for name, value in others.items()}
    sharing: dict[Key, list[str]] = {}
    for leaf in leaves.values():
        for part in leaf.parts if leaf.rounded else ():
            sharing.setdefault(leaf.key(part), []).append(part.name)
    for key, names in sharing.items():
        group, matrices = method.group_of(source.tensors[names[0]].name), [W.pop(name) for name in names]
        if group is None:
            continue
        for name, made in zip(names, method.tensors(matrices, met[key], group), strict=True):
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
