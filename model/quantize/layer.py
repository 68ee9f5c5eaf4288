"""Quantise one layer by a calibration method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from ...ops import quant
from ...ops.quant import Scheme
from ..checkpoint.published import CodesWriter, round_matrix, writer_for_format
from ..checkpoint.published.matrix import node_specs
from ..config import ModelError
from ..stored_format import StoredFormat, StoredGroup
from . import awq, smoothquant
from .folds import Fold, divide_norm, divisors, find_folds
from .gptq import gptq
from .grid import CodedMatrix, Grid, grid_for_format
from .inputs import Inputs
from .quip import quip
from .source import CheckpointSource, Key, Leaf

# Statistics of the inputs that matrices share, or the sensitivity of each weight [O, I].
CalibrationData = Inputs | np.ndarray
METHODS = ("gptq", "awq", "smoothquant", "squeezellm", "quip")
# The formats that a method supports, if not the integer formats.
METHOD_FORMATS: dict[str, tuple[str, Callable[[Scheme], bool]]] = {
    "smoothquant": ("that round activations", lambda scheme: scheme.activations is not None),
    "squeezellm": (
        "whose outputs have tables of their own",
        lambda scheme: scheme.weights["type"] == "codebook",
    ),
    "quip": ("of points of a lattice", lambda scheme: scheme.weights["type"] == "lattice"),
}


@dataclass(frozen=True)
class Method:
    """A method of METHODS and the format that it quantises to."""

    name: str
    stored: StoredFormat
    act_order: bool = True  # of gptq

    def __post_init__(self):
        if self.name not in METHODS:
            raise ModelError(f"method is {self.name!r}; it can be rtn, {', '.join(METHODS)}")
        if self.name not in METHOD_FORMATS:
            grid_for_format(self.quant)  # rejects unsupported formats
            return
        words, fits = METHOD_FORMATS[self.name]
        schemes = quant.stored_schemes()
        if not fits(schemes[quant.stored_name(self.quant)]):
            right = ", ".join(name for name, scheme in schemes.items() if fits(scheme))
            raise ModelError(
                f"method is {self.name!r}, which is for formats {words}: {right}; quantization is "
                f"{self.quant!r}"
            )

    @property
    def quant(self) -> str:
        assert self.stored.quant is not None
        return self.stored.quant

    @property
    def uses_folds(self) -> bool:
        return self.name in ("awq", "smoothquant")

    @property
    def uses_gradients(self) -> bool:
        """Whether it uses gradients of the loss instead of the matrices' inputs."""
        return self.name == "squeezellm"

    @property
    def grid(self) -> Grid:
        return grid_for_format(self.quant)

    def group_of(self, tensor: str) -> StoredGroup | None:
        """The format group of a matrix; None if it stays unquantised."""
        module = tensor.removesuffix(".weight")
        return (
            self.stored.groups[0] if len(self.stored.groups) == 1 else self.stored.group_of(module)
        )

    def scales(self, W: np.ndarray, inputs: Inputs, fold: Fold) -> np.ndarray:
        """The scales by which the inputs of W [O, I] are divided."""
        if self.name == "awq":
            return awq.scales(W, inputs.H, fold.reduce_heads(inputs.total, np.mean), self.grid)
        return smoothquant.scales(
            fold.reduce_heads(inputs.top, np.max), fold.reduce_heads(np.abs(W).max(0), np.max)
        )

    def tensors(
        self, matrices: Sequence[np.ndarray], statistics: CalibrationData, group: StoredGroup
    ) -> list[dict[str, np.ndarray]]:
        """Quantise matrices [O, I] that share inputs; return each one's tensors, by name ending.

        Outputs are quantised independently, so all matrices are processed together.
        """
        W = np.concatenate(matrices)
        boundaries = np.cumsum([len(matrix) for matrix in matrices])[:-1]
        specs = partial(specs_for_matrix, group)
        if not isinstance(statistics, Inputs):
            pairs = zip(matrices, np.split(statistics, boundaries), strict=True)
            return [
                specs(matrix).fit(matrix, matrix_weights).parts(group.form)
                for matrix, matrix_weights in pairs
            ]
        if self.name == "gptq":
            assert group.quant is not None
            coded = gptq(W, statistics.H, grid_for_format(group.quant), self.act_order)
            fields_by_matrix = zip(*(np.split(field, boundaries) for field in coded), strict=True)
            return [
                stored_tensors(CodedMatrix(*fields), self.stored, group)
                for fields in fields_by_matrix
            ]
        if self.name == "quip":
            codes, scale = quip(W, statistics.H, specs(W).bits)
            fields_by_matrix = zip(
                matrices,
                np.split(codes, boundaries, axis=1),
                np.split(scale, boundaries),
                strict=True,
            )
            return [
                specs(matrix).from_points(code, matrix_scale).parts(group.form)
                for matrix, code, matrix_scale in fields_by_matrix
            ]
        W = awq.clip_weights(W, statistics.H, self.grid) if self.name == "awq" else W
        largest = float(np.abs(W).max())
        return [
            round_matrix(matrix, self.stored, group, lambda: largest)
            for matrix in np.split(W, boundaries)
        ]


def specs_for_matrix(group: StoredGroup, matrix: np.ndarray) -> Any:
    """The specs of a matrix [O, I]."""
    return node_specs(group, *matrix.shape)


def stored_tensors(
    coded: CodedMatrix, stored: StoredFormat, group: StoredGroup
) -> dict[str, np.ndarray]:
    node = node_specs(group, *coded.codes.shape).from_codes(
        coded.codes.T, coded.scales.T, coded.zeros.T
    )
    return cast(CodesWriter, writer_for_format(stored)).parts(node, group)


def round_layer(
    source: CheckpointSource, index: int, statistics: Mapping[Key, CalibrationData], method: Method
) -> dict[str, np.ndarray]:
    """The tensors of a layer that change, by their names in files.

    These are quantised matrices, and the norms and biases that scales were folded into.
    """
    leaves = source.leaves(index)
    dtype = jnp.dtype(source.config.dtype)
    W = {
        source_tensor.name: source.tensors[source_tensor.name]
        .read()
        .astype(dtype)
        .astype(np.float32)
        for leaf in leaves.values()
        if leaf.rounded
        for source_tensor in leaf.sources
    }
    changed: dict[str, np.ndarray] = {}
    statistics = dict(statistics)
    for fold in find_folds(source.config, index, leaves) if method.uses_folds else ():
        W, statistics, newly_changed = apply_fold(source, leaves, fold, W, statistics, method)
        changed |= newly_changed
    out = {source.tensors[name].name: value for name, value in changed.items()}
    sharing: dict[Key, list[str]] = {}
    for leaf in leaves.values():
        for source_tensor in leaf.sources if leaf.rounded else ():
            sharing.setdefault(leaf.key(source_tensor), []).append(source_tensor.name)
    for key, names in sharing.items():
        group = method.group_of(source.tensors[names[0]].name)
        matrices = [W.pop(name) for name in names]
        if group is None:
            continue
        for name, matrix_tensors in zip(
            names, method.tensors(matrices, statistics[key], group), strict=True
        ):
            stem = source.tensors[name].name.removesuffix(".weight")
            out |= {stem + ending: value for ending, value in matrix_tensors.items()}
    return out


def apply_fold(
    source: CheckpointSource,
    leaves: Mapping[str, Leaf],
    fold: Fold,
    W: dict[str, np.ndarray],
    statistics: dict[Key, CalibrationData],
    method: Method,
) -> tuple[dict[str, np.ndarray], dict[Key, CalibrationData], dict[str, np.ndarray]]:
    """(matrices, statistics, other tensors) after folding scales into the inputs' producer."""
    names = [
        source_tensor.name for reader in fold.readers for source_tensor in leaves[reader].sources
    ]
    inputs: dict[Key, Inputs] = {}
    for reader in fold.readers:
        reader_inputs = statistics[reader, None]
        assert isinstance(reader_inputs, Inputs)
        inputs[reader, None] = reader_inputs
    s = method.scales(
        np.concatenate([W[name] for name in names]), inputs[fold.readers[0], None], fold
    )
    changed: dict[str, np.ndarray] = {}
    if fold.norm is not None:
        changed, s = divide_norm(source, leaves[fold.norm], s)
    else:
        assert fold.matrix is not None
        divisor = fold.by_output(s)
        W = W | {
            name: W[name] / value
            for name, value in divisors(leaves[fold.matrix], fold.outputs, divisor).items()
        }
        if fold.bias is not None and fold.bias in leaves:
            for name, value in divisors(leaves[fold.bias], fold.outputs, divisor).items():
                bias = source.tensors[name].read()
                changed[name] = (bias.astype(np.float32) / value).astype(bias.dtype)
    W = W | {name: W[name] * s for name in names}
    return (
        W,
        statistics | {key: value.divided(s) for key, value in inputs.items()},
        changed,
    )
