"""CODEBOOK: each output has a codebook of 16 or 8 values, and a few weights that are not quantised.

As in SqueezeLLM (arXiv 2306.07629), except that all outputs keep the same number of unquantised
weights, so that the shapes follow from the sizes. In a checkpoint the indices into the codebook are
packed like integers.

    weight_packed   int32 [out, in / 8], or ten indices of three bits per word
    weight_shape    out, in
    weight_table    float16 [out, 2 ** bits]: the codebook of each output
    weight_apart    float16 [out, apart]: the unquantised weights
    weight_columns  int32 [out, apart]: their inputs
"""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..linear.cpu import has_dense_product, keeps_floats
from ..linear.cpu_layout import pack_dense
from ..linear.weight import Weight
from . import clusters, four_bits
from .compressed import (
    FormatError,
    Layout,
    Rounded,
    Scheme,
    decoded_product,
    join_codes,
    log_widened,
    split,
    split_words,
    words,
)

BITS = ("4", "3")
SHARE = 0.0045  # the fraction of unquantised weights of an output, as in the paper

CHOICES = "codebook-4 or codebook-3"
HEAD = "int8-weights"
SPLITS = False
METHOD = None
MULTIPLE = 1
STORED = {
    f"codebook-{bits}": Scheme(
        {
            "type": "codebook",
            "num_bits": int(bits),
            "strategy": "channel",
            "symmetric": True,
            "dynamic": False,
        },
        None,
        ("codebook-sparse",),
        "quire",
    )
    for bits in BITS
}


class Codebook(Rounded):
    """weight = table[code], except for the unquantised weights."""

    codes: Any  # uint8 [four_bits.count(K), O]
    table: Any  # float16 [2 ** bits, *out]
    apart: Any  # float16 [apart, *out]
    columns: Any  # int32 [apart, *out]
    bits: int = struct.field(pytree_node=False)
    lists = ("table", "apart", "columns")

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        return decoded_product(self, self.dense(), subscripts, x, bias, dtype)

    def dense(self):
        """The weight as one float32 matrix [K, O]."""
        codes_KO = four_bits.split(self.codes, math.prod(self.into)).astype(jnp.int32)
        table, apart, columns = (
            jnp.reshape(x, (len(x), -1)) for x in (self.table, self.apart, self.columns)
        )
        weight_KO = jnp.take_along_axis(table.astype(jnp.float32), codes_KO, axis=0, mode="clip")
        return weight_KO.at[columns, jnp.arange(weight_KO.shape[1])].set(apart.astype(jnp.float32))

    def for_kernels(self, rows: str) -> Weight:
        dtype = "float32" if keeps_floats(rows) else "bfloat16"
        if not has_dense_product(dtype):
            return self
        log_widened(f"codebook-{self.bits}", dtype)
        fields = {"codes": four_bits.split(self.codes, math.prod(self.into)).T}
        fields |= {
            name: np.reshape(getattr(self, name), (len(getattr(self, name)), -1)).T
            for name in self.lists
        }
        dense_KO = self.decode(fields).T.astype(dtype)
        return pack_dense((0,), dense_KO).replace(into=self.into, out=self.out, inputs=self.inputs)

    def quantize(self, weight: np.ndarray) -> "Codebook":
        """Quantise by k-means with equal masses; the largest weights stay unquantised."""
        K = math.prod(self.into)
        return self.fit(weight.astype(np.float32).reshape(K, -1).T, None)

    def fit(self, W: np.ndarray, sensitivity: np.ndarray | None) -> "Codebook":
        """Quantise W [O, K] so that the sum of sensitivity * error^2 is small; without sensitivity
        all weights count the same.
        """
        columns = choose_apart(W, sensitivity, self.apart.shape[0])
        is_coded = np.ones(W.shape, bool)
        np.put_along_axis(is_coded, columns, False, 1)
        mass = np.ones_like(W) if sensitivity is None else sensitivity
        shape = len(W), -1
        table = clusters.means(
            W[is_coded].reshape(shape), mass[is_coded].reshape(shape), 1 << self.bits
        )
        table = np.sort(table.astype(np.float16), 1)
        fields = {"codes": clusters.nearest(W, table), "table": table, "columns": columns}
        fields["apart"] = np.take_along_axis(W, columns, 1).astype(np.float16)
        return self.join({name: value.T.reshape(-1, *self.out) for name, value in fields.items()})

    def layout(self, rows: int, columns: int, form: str) -> Layout:
        size = 1 << self.bits
        apart = num_apart(columns)
        if columns % 2 or columns <= size:
            raise FormatError(
                f"has {columns} inputs; codebook-{self.bits} needs an even number above {size}"
            )
        lists = {
            ".weight_table": (("float16",), ((rows, size),)),
            ".weight_apart": (("float16",), ((rows, apart),)),
        }
        return (
            words(rows, columns, self.bits)
            | lists
            | {".weight_columns": (("int32",), ((rows, apart),))}
        )

    def fields(
        self, tensors: dict[str, np.ndarray], columns: int, form: str
    ) -> dict[str, np.ndarray]:
        if (tensors[".weight_columns"] < 0).any() or (tensors[".weight_columns"] >= columns).any():
            raise FormatError(f"keeps weights apart of inputs that it has not: there are {columns}")
        codes = split_words(tensors[".weight_packed"], self.bits)[:, :columns]
        return {"codes": codes} | {name: tensors[f".weight_{name}"] for name in self.lists}

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        weight = np.take_along_axis(
            fields["table"].astype(np.float32), fields["codes"].astype(np.int64), 1
        )
        apart = num_apart(weight.shape[1])
        np.put_along_axis(
            weight, fields["columns"][:, :apart], fields["apart"][:, :apart].astype(np.float32), 1
        )
        return weight

    def join(self, fields: dict[str, np.ndarray]) -> "Codebook":
        codes = fields["codes"].astype(np.uint8)
        dtypes = {name: getattr(self, name).dtype for name in self.lists}
        lists = {
            name: fields[name].astype(dtype).reshape(-1, *self.out)
            for name, dtype in dtypes.items()
        }
        return self.replace(codes=four_bits.join(codes.reshape(len(codes), -1)), **lists)

    def parts(self, form: str) -> dict[str, np.ndarray]:
        (columns,) = self.into
        (rows,) = self.out
        codes = join_codes(four_bits.split(self.codes, columns).T, self.bits)
        tensors = {".weight_packed": codes, ".weight_shape": np.array([rows, columns])}
        return tensors | {f".weight_{name}": getattr(self, name).T for name in self.lists}


def num_apart(columns: int) -> int:
    """The number of unquantised weights of an output."""
    return math.ceil(SHARE * columns)


def choose_apart(W: np.ndarray, sensitivity: np.ndarray | None, count: int) -> np.ndarray:
    """The sorted inputs [O, count] of weights that stay unquantised: the largest ones and, with
    sensitivity, a ninth by the highest sensitivity.
    """
    size = np.abs(W)
    if sensitivity is not None and (num_sensitive := round(count / 9)):
        top = np.argsort(-sensitivity, axis=1, kind="stable")[:, :num_sensitive]
        np.put_along_axis(size, top, np.inf, 1)
    return np.sort(np.argsort(-size, axis=1, kind="stable")[:, :count], axis=1)


def kernels(*options: str) -> tuple[str, ...]:
    return ("dense_bf16",)


def spec(dense: ArraySpec, *options: str) -> Codebook:
    """See `Format.spec`. The option is the number of bits of an index."""
    if len(options) != 1 or options[0] not in BITS:
        raise FormatError(f"codebook has no option {'-'.join(options)!r}; it must be 4 or 3")
    bits = int(options[0])
    into, out, axes = split(dense)
    K = math.prod(into)
    by_output = axes[len(into) :]
    if K % 2:
        raise FormatError(f"{K} inputs cannot be kept two a byte")

    def list_spec(count: int, dtype: Any, init: str) -> ArraySpec:
        return ArraySpec((count, *out), dtype, (None, *by_output), init, dense.fan_in)

    shape = (four_bits.count(K), math.prod(out))
    over = (axes[0], by_output[0])
    return Codebook(
        codes=replace(dense, shape=shape, axes=over, dtype=jnp.uint8, init="bytes", inputs=()),
        table=list_spec(1 << bits, jnp.float16, "normal"),
        apart=list_spec(num_apart(K), jnp.float16, "normal"),
        columns=list_spec(num_apart(K), jnp.int32, "zeros"),
        bits=bits,
        into=into,
        out=out,
        inputs=dense.inputs,
    )
