"""Places where scales of inputs can be folded into the preceding norm or matrix."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checkpoint.dense_leaf import leaf_to_tensors
from ..config import Attention, ModelConfig
from .source import CheckpointSource, Leaf


@dataclass(frozen=True)
class Fold:
    """Matrices that share inputs, and the norm or matrix that produces these inputs."""

    readers: tuple[str, ...]
    norm: str | None = None
    matrix: str | None = None
    bias: str | None = None  # of `matrix`
    outputs: Any = None  # the outputs of `matrix` that are the inputs, as an index
    heads: tuple[int, int, int] | None = None  # (KV heads, query heads for each, head width)

    def reduce_heads(self, values: np.ndarray, reduce: Any) -> np.ndarray:
        """Reduce values by input over the inputs that are the same output of `matrix`."""
        if self.heads is None:
            return values
        reduced = reduce(values.reshape(self.heads), axis=1, keepdims=True)
        return np.broadcast_to(reduced, self.heads).reshape(-1)

    def by_output(self, s: np.ndarray) -> np.ndarray:
        """The scale of each output of `matrix`."""
        return s if self.heads is None else s.reshape(self.heads)[:, 0]


def find_folds(config: ModelConfig, index: int, leaves: dict[str, Leaf]) -> list[Fold]:
    """The folds of a layer, for inputs without another reader or a function before them."""
    layer = config.layers[index]
    candidates = []
    a = layer.attention
    mlp = layer.mlp
    qkv = "attention.qkv_DGH"
    up = "mlp.up_DGF"
    has_plain_mlp = layer.moe is None and mlp is not None and not mlp.gate
    if isinstance(a, Attention):
        norm = norm_scale_leaf("pre_attention_norm_D", leaves)
        readers = (qkv, up) if layer.parallel else (qkv,)
        if norm is not None and (has_plain_mlp or not layer.parallel) and not layer.reads_rows:
            candidates.append(Fold(readers, norm=norm))
        read_by = [owner for owner in config.kv_owner if owner == index]
        if len(read_by) == 1 and a.kv_source is None and not a.tied_kv and not a.v_norm:
            K = a.kv_heads
            heads = (a.kv_heads, a.heads // a.kv_heads, a.head_dim)
            candidates.append(
                Fold(("attention.out_NHD",), None, qkv, "attention.qkv_bias_GH", np.s_[-K:], heads)
            )
    norm = norm_scale_leaf("pre_mlp_norm_D", leaves)
    if has_plain_mlp and norm is not None and not layer.parallel:
        candidates.append(Fold((up,), norm=norm))
    if mlp is not None and mlp.gated:
        candidates.append(Fold(("mlp.down_FD",), None, up, "mlp.up_bias_GF", np.s_[1]))
    return [
        fold
        for fold in candidates
        if all(leaves[name].rounded for name in (*fold.readers, fold.matrix) if name)
    ]


def norm_scale_leaf(name: str, leaves: dict[str, Leaf]) -> str | None:
    """The leaf with a norm's scale, if the norm has no bias."""
    names = [leaf for leaf in leaves if leaf == name or leaf.startswith(f"{name}.")]
    return names[0] if len(names) == 1 else None


def divide_norm(
    source: CheckpointSource, leaf: Leaf, s: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Divide a norm's scale by s.

    Returns the tensor, and the exact divisors after rounding to its dtype. An offset of the stored
    scale (such as scale - 1) is kept.
    """
    (source_tensor,) = leaf.sources
    tensor = source.tensors[source_tensor.name]
    stored = tensor.read()
    offset = source_tensor.transform(np.zeros_like(stored)).astype(np.float32)
    scale = source_tensor.transform(stored).astype(np.float32)
    stored = (scale / s - offset).astype(tensor.dtype)
    new_scale = source_tensor.transform(stored).astype(np.float32)
    exact = np.divide(
        scale, new_scale, out=np.ones_like(scale), where=(new_scale != 0) & (scale != 0)
    )
    return {source_tensor.name: stored}, exact


def divisors(leaf: Leaf, outputs: Any, s: np.ndarray) -> dict[str, np.ndarray]:
    """The divisors of a leaf's tensors, where its `outputs` are divided by s."""
    divisor = np.ones(
        [size for axis, size in enumerate(leaf.spec.shape) if axis not in leaf.spec.inputs],
        np.float32,
    )
    divisor[outputs] = s
    return leaf_to_tensors(leaf.sources, np.broadcast_to(divisor, leaf.spec.shape))
