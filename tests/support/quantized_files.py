"""Matrices of quantised checkpoints as their tools write them, and loaded nodes dequantised to
float64.

Writers return (tensors by name, dequantised matrix in float64).
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.model.checkpoint.loader import load_weights, read_config
from quire.model.config import ModelError
from quire.ops.quant import four_bits
from quire.ops.quant.fp8 import Fp8
from quire.ops.quant.grouped import CODES, Grouped
from quire.ops.quant.int4 import Int4
from quire.ops.quant.int8 import Int8
from quire.tests.support import tiny

D = 256
F = 384
N = 8
K = 4
H = 32
LLAMA = tiny.LLAMA | {
    "hidden_size": D, "intermediate_size": F, "num_attention_heads": N, "num_key_value_heads": K,
}  # fmt: skip
FLOAT8 = ml_dtypes.float8_e4m3fn


def check_damage(
    folder: Path, tensors: dict, name: str, change, message: str, metadata: dict | None = None
) -> None:
    """Change a tensor (or leave it out if `change` returns None): reading must fail."""
    value = change(tensors.pop(name))
    if value is not None:
        tensors[name] = np.ascontiguousarray(value)
    save_file(tensors, folder / "model.safetensors", metadata)
    with pytest.raises(ModelError, match=message):
        read(folder)


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes [n, ...] into int32 words [n * bits / 32, ...], lowest bits first."""
    n = len(codes)
    packed = np.zeros((n * bits // 32, *codes.shape[1:]), np.uint32)
    for i in range(n * bits):
        bit = (codes[i // bits].astype(np.uint32) >> (i % bits)) & 1
        packed[i // 32] |= bit << np.uint32(i % 32)
    return packed.view(np.int32)


def gptq(rng, stem: str, shape, bits=4, group=128, sym=False, order=False, version=1, **_):
    """A matrix as GPTQModel writes it."""
    rows, columns = shape
    size = columns if group == -1 else group
    groups = columns // size
    top = 1 << bits
    codes = rng.integers(0, top, (columns, rows))
    first = int(version == 1)  # version 1 stores zero points minus one
    zeros = (
        np.full((groups, rows), top // 2)
        if sym
        else rng.integers(first, top + first, (groups, rows))
    )
    scales = rng.uniform(0.001, 0.02, (groups, rows)).astype(np.float16)
    index = np.arange(columns) // size
    if order:
        index = rng.permutation(index)
    dense = (codes - zeros[index]) * scales.astype(np.float64)[index]
    stored = zeros - first
    tensors = {
        f"{stem}.qweight": pack_words(codes, bits),
        f"{stem}.qzeros": np.ascontiguousarray(pack_words(stored.T, bits).T),
        f"{stem}.scales": scales,
        f"{stem}.g_idx": index.astype(np.int32),
        f"{stem}.bias": np.zeros(rows, np.float16),
    }
    return tensors, dense.T


def awq(rng, stem: str, shape, group=128, **_):
    """A matrix as AutoAWQ writes it."""
    rows, columns = shape
    size = columns if group == -1 else group
    groups = columns // size
    codes = rng.integers(0, 16, (columns, rows))
    zeros = rng.integers(0, 16, (groups, rows))
    scales = rng.uniform(0.001, 0.02, (groups, rows)).astype(np.float16)

    def packed(values):
        packed_words = np.zeros((len(values), rows // 8), np.uint32)
        for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            packed_words |= values[:, place::8].astype(np.uint32) << np.uint32(4 * i)
        return packed_words.view(np.int32)

    index = np.arange(columns) // size
    dense = (codes - zeros[index]) * scales.astype(np.float64)[index]
    return {
        f"{stem}.qweight": packed(codes),
        f"{stem}.qzeros": packed(zeros),
        f"{stem}.scales": scales,
    }, dense.T


def fp8(rng, stem: str, shape, scales="blocks", name="weight_scale_inv", **_):
    """A matrix in float8_e4m3fn, subnormal numbers included."""
    rows, columns = shape
    codes = (
        (rng.standard_normal(shape) * rng.choice([1e-3, 1, 100], shape))
        .clip(-448, 448)
        .astype(FLOAT8)
    )
    if scales == "blocks":
        scale = rng.uniform(0.0005, 0.0015, (-(-rows // 128), -(-columns // 128))).astype(
            np.float32
        )
        dense_scale = scale.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    else:
        size = {"one": (), "outputs": (rows, 1), "flat": (rows,)}[scales]
        scale = np.asarray(rng.uniform(0.0005, 0.0015, size), np.float32)
        dense_scale = np.broadcast_to(scale.reshape(-1, 1), shape)
    return {f"{stem}.weight": codes, f"{stem}.{name}": scale}, codes.astype(
        np.float64
    ) * dense_scale.astype(np.float64)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack the codes of two neighbouring inputs into a byte, the first in the low half."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def dequantize_groups(codes_OK, scales_OG, table=E2M1) -> np.ndarray:
    """Dequantise codes with a scale per group to float64."""
    return table[codes_OK] * scales_OG.astype(np.float64).repeat(
        codes_OK.shape[1] // scales_OG.shape[1], 1
    )


def nvfp4(
    rng, stem: str, shape, names=("weight_packed", "weight_scale", "weight_global_scale"), **_
):
    """A matrix as llm-compressor writes it: group scales are divided by the global scale. In the
    names of modelopt they are multiplied by it.
    """
    rows, columns = shape
    codes = rng.integers(0, 16, shape)
    scale = rng.uniform(1, 448, (rows, columns // 16)).astype(FLOAT8)
    global_scale = rng.uniform(3e3, 9e3, 1).astype(np.float32)
    if names[0] == "weight":
        global_scale = (1 / global_scale).reshape(())
        dense_scale = scale.astype(np.float32) * global_scale
    else:
        dense_scale = scale.astype(np.float32) / global_scale
    tensors = {
        f"{stem}.{name}": value
        for name, value in zip(names, (pack_nibbles(codes), scale, global_scale), strict=True)
    }
    return tensors, dequantize_groups(codes, dense_scale)


def mxfp4(rng, stem: str, shape, **_):
    rows, columns = shape
    codes = rng.integers(0, 16, shape)
    exponents = rng.integers(115, 122, (rows, columns // 32)).astype(np.uint8)
    tensors = {f"{stem}.weight_packed": pack_nibbles(codes), f"{stem}.weight_scale": exponents}
    return tensors, dequantize_groups(codes, 2.0 ** (exponents.astype(np.float64) - 127))


def pack_quantized(rng, stem: str, shape, bits=8, group=None, zero=False, **_):
    """Packed integers as in llm-compressor's pack-quantized; no group: one scale per output."""
    rows, columns = shape
    middle = 1 << bits - 1
    groups = columns // group if group else 1
    codes = rng.integers(0, 2 * middle, shape)
    zeros = np.full((rows, groups), middle)
    scale = (rng.uniform(0.02, 0.1, (rows, groups)) / middle).astype(ml_dtypes.bfloat16)
    tensors = {
        f"{stem}.weight_packed": np.ascontiguousarray(pack_words(codes.T, bits).T),
        f"{stem}.weight_shape": np.array(shape),
        f"{stem}.weight_scale": scale,
    }
    if zero:
        zeros = rng.integers(0, 2 * middle, (rows, groups))
        tensors[f"{stem}.weight_zero_point"] = pack_words(zeros, bits)
    columns_per_group = columns // groups
    return tensors, (codes - zeros.repeat(columns_per_group, 1)) * scale.astype(np.float64).repeat(
        columns_per_group, 1
    )


NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
FP4 = np.array(
    [0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32
) / np.float32(12)


def bitsandbytes_4bit(rng, stem: str, shape, kind="nf4", nested=False, block=64, **_):
    """A 4-bit matrix as bitsandbytes writes it."""
    count = shape[0] * shape[1]
    codes = rng.integers(0, 16, count)
    table = {"nf4": NF4, "fp4": FP4}[kind]
    absmax = rng.uniform(0.02, 0.1, -(-count // block)).astype(np.float32)
    quant_state = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": list(shape),
    }
    nested_tensors = {}
    if nested:
        absmax_codes = rng.integers(0, 256, len(absmax)).astype(np.uint8)
        nested_absmax = rng.uniform(0.01, 0.03, -(-len(absmax_codes) // 256)).astype(np.float32)
        nested_codebook = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        quant_state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
        nested_tensors = {
            "absmax": absmax_codes,
            "nested_absmax": nested_absmax,
            "nested_quant_map": nested_codebook,
        }
        absmax = nested_codebook[absmax_codes] * nested_absmax.repeat(256)[
            : len(absmax_codes)
        ] + np.float32(0.0625)
    tensors = {"absmax": absmax, "quant_map": table} | nested_tensors | {
        f"quant_state.bitsandbytes__{kind}": np.frombuffer(json.dumps(quant_state).encode(), np.uint8)
    }  # fmt: skip
    dense = table.astype(np.float64)[codes] * absmax.astype(np.float64).repeat(block)[:count]
    packed = (codes[::2] << 4 | codes[1::2]).astype(np.uint8).reshape(-1, 1)
    return {f"{stem}.weight": packed} | {
        f"{stem}.weight.{x}": v for x, v in tensors.items()
    }, dense.reshape(shape)


def bitsandbytes_8bit(rng, stem: str, shape, **_):
    """An 8-bit matrix as bitsandbytes writes it."""
    codes = rng.integers(-127, 128, shape).astype(np.int8)
    row_max = rng.uniform(0.02, 0.1, shape[0]).astype(np.float32)
    tensors = {
        f"{stem}.weight": codes,
        f"{stem}.SCB": row_max,
        f"{stem}.weight_format": np.zeros((), np.uint8),
    }
    return tensors, codes * (row_max / np.float32(127)).astype(np.float64)[:, None]


def hqq(rng, stem: str, shape, bits=4, group=64, axis=1, view=np.uint8, **_):
    """A matrix as HQQ writes it."""
    count = shape[0] * shape[1] // group
    codes_shape, scale_shape = (
        ((count, group), (count, 1)) if axis == 1 else ((group, count), (1, count))
    )
    codes = rng.integers(0, 1 << bits, codes_shape)
    scale, zero = (
        (rng.uniform(0.5, 1, scale_shape) * x / (1 << bits)).astype(np.float16)
        for x in (0.2, 256**0.5 * bits)
    )
    codes_per_word, word = (10, np.int32) if bits == 3 else (8 // bits, np.uint8)
    code_slices = np.pad(codes, ((0, -len(codes) % codes_per_word), (0, 0))).reshape(
        codes_per_word, -1, codes_shape[1]
    )
    packed = np.zeros(code_slices.shape[1:], word)
    for code_slice in code_slices:
        packed = (packed << bits | code_slice).astype(word)
    settings = {"nbits": bits, "group_size": group, "axis": axis}
    tensors = (
        {"W_q": packed.view(view) if bits != 3 else packed, "scale": scale, "zero": zero}
        | {
            "shape": np.array(shape),
            "packing": np.frombuffer(b"4bit_u8", np.uint8),
            "round_zero": np.ones((), np.uint8),
        }
        | {name: np.array(value, np.int32) for name, value in settings.items()}
    )
    dense = (codes - zero.astype(np.float64)) * scale.astype(np.float64)
    return {f"{stem}.{name}": value for name, value in tensors.items()}, dense.reshape(shape)


def read(folder: Path, **options):
    return load_weights(folder, read_config(folder, **options), place=lambda spec, leaf: leaf)


def dense_of(leaf) -> np.ndarray:
    """Dequantise a node to float64 [*into, *out] by the definition of its format."""
    if isinstance(leaf, Fp8):
        return leaf.codes.view(FLOAT8).astype(np.float64) * leaf.scale
    if isinstance(leaf, Int8):
        return leaf.codes.astype(np.float64) * leaf.scale
    if isinstance(leaf, Grouped):
        K = int(np.prod(leaf.into))
        codes = four_bits.split(leaf.codes, K) if leaf.packed else leaf.codes.reshape(K, -1)
        scale = leaf.scale.reshape(len(leaf.scale), -1).astype(np.float64).repeat(leaf.group, 0)[:K]
        values = CODES[leaf.code].numbers.astype(np.float64)[codes] * scale
        if leaf.least is not None:
            values -= (
                leaf.least.reshape(len(leaf.least), -1).astype(np.float64).repeat(leaf.group, 0)[:K]
            )
        return values.reshape(*leaf.into, *leaf.out)
    if not isinstance(leaf, Int4):
        return leaf.astype(np.float64)
    K = int(np.prod(leaf.into))
    zero = 8.0 if leaf.zero is None else leaf.zero.repeat(leaf.group, 0)[:K].astype(np.float64)
    scale = leaf.scale.astype(np.float64).repeat(leaf.group, 0)[:K]
    return ((four_bits.split(leaf.nibbles, K) - zero) * scale).reshape(*leaf.into, *leaf.out)


def assert_dequantized(
    weights, expected: dict[str, np.ndarray], rtol: float = 0.0, atol: float = 0.0
) -> None:
    for i, layer in enumerate(weights.layers):
        names = [f"self_attn.{x}_proj" for x in "qkvo"] + [
            f"mlp.{x}_proj" for x in ("gate", "up", "down")
        ]
        q, k, v, o, gate, up, down = (
            expected[f"model.layers.{i}.{name}.weight"].T for name in names
        )
        qkv = np.concatenate([q.reshape(D, N, H), k.reshape(D, K, H), v.reshape(D, K, H)], axis=1)
        leaves = (
            layer.attention.qkv_DGH,
            layer.attention.out_NHD,
            layer.mlp.up_DGF,
            layer.mlp.down_FD,
        )
        for leaf, expected_values in zip(
            leaves, (qkv, o.reshape(N, H, D), np.stack([gate, up], axis=1), down), strict=True
        ):
            np.testing.assert_allclose(dense_of(leaf), expected_values, rtol=rtol, atol=atol)
