"""Matrices of quantised checkpoints as their tools write them, and what a loaded model's nodes mean in float64."""

from pathlib import Path

import ml_dtypes
import numpy as np
import tiny

from quire.model.checkpoint.loader import load_weights, read_config
from quire.ops.quant import four_bits
from quire.ops.quant.fp8 import Fp8
from quire.ops.quant.grouped import CODES, Grouped
from quire.ops.quant.int4 import Int4
from quire.ops.quant.int8 import Int8

D, F, N, K, H = 256, 384, 8, 4, 32
LLAMA = tiny.LLAMA | {
    "hidden_size": D, "intermediate_size": F, "num_attention_heads": N, "num_key_value_heads": K,
}  # fmt: skip
FLOAT8 = ml_dtypes.float8_e4m3fn


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, ...] in int32 words [n * bits / 32, ...], a bit at a time: the first code in the lowest bits."""
    n = len(codes)
    found = np.zeros((n * bits // 32, *codes.shape[1:]), np.uint32)
    for i in range(n * bits):
        bit = (codes[i // bits].astype(np.uint32) >> (i % bits)) & 1
        found[i // 32] |= bit << np.uint32(i % 32)
    return found.view(np.int32)


def gptq(rng, stem: str, shape, bits=4, group=128, sym=False, order=False, version=1, **_):
    """A matrix as GPTQModel writes it, and what it means in float64."""
    rows, columns = shape
    size = columns if group == -1 else group
    groups, top = columns // size, 1 << bits
    codes = rng.integers(0, top, (columns, rows))
    zeros = np.full((groups, rows), top // 2) if sym else rng.integers(1, top, (groups, rows))
    scales = rng.uniform(0.001, 0.02, (groups, rows)).astype(np.float16)
    index = np.arange(columns) // size
    if order:
        index = rng.permutation(index)
    dense = (codes - zeros[index]) * scales.astype(np.float64)[index]
    stored = zeros - (version == 1)
    tensors = {
        f"{stem}.qweight": words(codes, bits), f"{stem}.qzeros": np.ascontiguousarray(words(stored.T, bits).T),
        f"{stem}.scales": scales, f"{stem}.g_idx": index.astype(np.int32),
        f"{stem}.bias": np.zeros(rows, np.float16),
    }  # fmt: skip
    return tensors, dense.T


def awq(rng, stem: str, shape, group=128, **_):
    """A matrix as AutoAWQ writes it."""
    rows, columns = shape
    size = columns if group == -1 else group
    groups = columns // size
    codes, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (groups, rows))
    scales = rng.uniform(0.001, 0.02, (groups, rows)).astype(np.float16)

    def packed(values):
        found = np.zeros((len(values), rows // 8), np.uint32)
        for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            found |= values[:, place::8].astype(np.uint32) << np.uint32(4 * i)
        return found.view(np.int32)

    index = np.arange(columns) // size
    dense = (codes - zeros[index]) * scales.astype(np.float64)[index]
    return {f"{stem}.qweight": packed(codes), f"{stem}.qzeros": packed(zeros), f"{stem}.scales": scales}, dense.T


def fp8(rng, stem: str, shape, scales="blocks", name="weight_scale_inv", **_):
    """A matrix of floats of eight bits, subnormal ones too."""
    rows, columns = shape
    codes = (rng.standard_normal(shape) * rng.choice([1e-3, 1, 100], shape)).clip(-448, 448).astype(FLOAT8)
    if scales == "blocks":
        scale = rng.uniform(0.0005, 0.0015, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
        each = scale.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    else:
        size = {"one": (), "outputs": (rows, 1), "flat": (rows,)}[scales]
        scale = np.asarray(rng.uniform(0.0005, 0.0015, size), np.float32)
        each = np.broadcast_to(scale.reshape(-1, 1), shape)
    return {f"{stem}.weight": codes, f"{stem}.{name}": scale}, codes.astype(np.float64) * each.astype(np.float64)


def read(folder: Path, **options):
    return load_weights(folder, read_config(folder, **options), put=lambda spec, leaf: leaf)


def dense_of(leaf) -> np.ndarray:
    """[*into, *out] in float64 by the format's definition, from a node's own arrays."""
    if isinstance(leaf, Fp8):
        return leaf.codes.view(FLOAT8).astype(np.float64) * leaf.scale
    if isinstance(leaf, Int8):
        return leaf.codes.astype(np.float64) * leaf.scale
    if isinstance(leaf, Grouped):
        K = int(np.prod(leaf.into))
        codes = four_bits.split(leaf.codes, K) if leaf.packed else leaf.codes.reshape(K, -1)
        scale = leaf.scale.reshape(len(leaf.scale), -1).astype(np.float64).repeat(leaf.group, 0)[:K]
        found = CODES[leaf.code].numbers.astype(np.float64)[codes] * scale
        if leaf.least is not None:
            found -= leaf.least.reshape(len(leaf.least), -1).astype(np.float64).repeat(leaf.group, 0)[:K]
        return found.reshape(*leaf.into, *leaf.out)
    if not isinstance(leaf, Int4):
        return leaf.astype(np.float64)
    K = int(np.prod(leaf.into))
    zero = 8.0 if leaf.zero is None else leaf.zero.repeat(leaf.group, 0)[:K].astype(np.float64)
    scale = leaf.scale.astype(np.float64).repeat(leaf.group, 0)[:K]
    return ((four_bits.split(leaf.nibbles, K) - zero) * scale).reshape(*leaf.into, *leaf.out)


def assert_is(weights, expected: dict[str, np.ndarray], rtol: float = 0.0, atol: float = 0.0) -> None:
    for i, layer in enumerate(weights.layers):
        names = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
        q, k, v, o, gate, up, down = (expected[f"model.layers.{i}.{name}.weight"].T for name in names)
        qkv = np.concatenate([q.reshape(D, N, H), k.reshape(D, K, H), v.reshape(D, K, H)], axis=1)
        found = layer.attention.qkv_DGH, layer.attention.out_NHD, layer.mlp.up_DGF, layer.mlp.down_FD
        for leaf, right in zip(found, (qkv, o.reshape(N, H, D), np.stack([gate, up], axis=1), down), strict=True):
            np.testing.assert_allclose(dense_of(leaf), right, rtol=rtol, atol=atol)
