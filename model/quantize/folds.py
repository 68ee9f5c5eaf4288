"""Where scales of inputs can be taken off before them, so that a layer computes what it did."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checkpoint.dense_leaf import unread_leaf
from ..config import Attention, ModelConfig
from .source import Leaf, Source


@dataclass(frozen=True)
class Fold:
    """Matrices that share their inputs, and what makes these: a norm's scale, or outputs of the matrix before."""

    readers: tuple[str, ...]
    norm: str | None = None
    matrix: str | None = None
    bias: str | None = None  # of that matrix
    outputs: Any = None  # which of that matrix's outputs, as an index
    heads: tuple[int, int, int] | None = None  # key-value heads, query heads that share each, width

    def tied(self, values: np.ndarray, reduce: Any) -> np.ndarray:
        """Numbers by input, the same for inputs that are one output of the matrix before."""
        if self.heads is None:
            return values
        found = reduce(values.reshape(self.heads), axis=1, keepdims=True)
        return np.broadcast_to(found, self.heads).reshape(-1)

    def by_output(self, s: np.ndarray) -> np.ndarray:
        """The scale of each such output."""
        return s if self.heads is None else s.reshape(self.heads)[:, 0]


def folds(config: ModelConfig, index: int, leaves: dict[str, Leaf]) -> list[Fold]:
    """Those of a layer. Inputs that something else reads too, or that pass a function before, have none."""
    layer, found = config.layers[index], []
    a, mlp, qkv, up = layer.attention, layer.mlp, "attention.qkv_DGH", "mlp.up_DGF"
    plain = layer.moe is None and mlp is not None and not mlp.gate
    if isinstance(a, Attention):
        norm = norm_of("pre_attention_norm_D", leaves)
        readers = (qkv, up) if layer.parallel else (qkv,)
        if norm is not None and (plain or not layer.parallel) and not layer.reads_rows:
            found.append(Fold(readers, norm=norm))
        read_by = [owner for owner in config.kv_owner if owner == index]
        if len(read_by) == 1 and a.kv_source is None and not a.tied_kv and not a.v_norm:
            K, heads = a.kv_heads, (a.kv_heads, a.heads // a.kv_heads, a.head_dim)
            found.append(Fold(("attention.out_NHD",), None, qkv, "attention.qkv_bias_GH", np.s_[-K:], heads))
    norm = norm_of("pre_mlp_norm_D", leaves)
    if plain and norm is not None and not layer.parallel:
        found.append(Fold((up,), norm=norm))
    if mlp is not None and mlp.gated:
        found.append(Fold(("mlp.down_FD",), None, up, "mlp.up_bias_GF", np.s_[1]))
    return [fold for fold in found if all(leaves[name].rounded for name in (*fold.readers, fold.matrix) if name)]


def norm_of(name: str, leaves: dict[str, Leaf]) -> str | None:
    """The leaf that is a norm's scale, where the norm adds nothing."""
    parts = [leaf for leaf in leaves if leaf == name or leaf.startswith(f"{name}.")]
    return parts[0] if len(parts) == 1 else None


def divide_norm(source: Source, leaf: Leaf, s: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The norm's tensor with its scale divided by s, and by what it was divided in truth: the tensor's dtype rounds it.

    A scale may be stored less a number, which stays so.
    """
    (part,) = leaf.parts
    tensor = source.tensors[part.name]
    stored = tensor.read()
    offset = part.turn(np.zeros_like(stored)).astype(np.float32)
    scale = part.turn(stored).astype(np.float32)
    stored = (scale / s - offset).astype(tensor.dtype)
    now = part.turn(stored).astype(np.float32)
    exact = np.divide(scale, now, out=np.ones_like(scale), where=(now != 0) & (scale != 0))
    return {part.name: stored}, exact


def divisors(leaf: Leaf, outputs: Any, s: np.ndarray) -> dict[str, np.ndarray]:
    """What the tensors of a leaf are divided by, where `outputs` of it are divided by s."""
    by = np.ones([size for axis, size in enumerate(leaf.spec.shape) if axis not in leaf.spec.inputs], np.float32)
    by[outputs] = s
    return unread_leaf(leaf.parts, np.broadcast_to(by, leaf.spec.shape))
