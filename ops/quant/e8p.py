"""E8P: two bits per weight. After a Hadamard transform, every eight neighbouring inputs are
quantised to a point near the lattice E8.

It has QuIP#'s codebook (arXiv 2402.04396) and transform of the inputs (`hadamard.py`). Instead of
QuIP#'s transform of the outputs, which equalises their magnitudes, each output has a scale: a fused
weight has outputs of several matrices, in any order.

A code consists of an index into a table of 256 points with positive coordinates (`table`), the
signs of the first seven coordinates, and whether a quarter is added to all coordinates or
subtracted. The last sign makes the sum even.

    weight_packed  int16 [out, in / 8]: the index in bits 0 to 7, signs (1 is minus) in bits 8 to
                   14, and in bit 15 whether a quarter is added
    weight_shape   out, in
    weight_scale   float32 [out]

With four bits per weight, a second code holds the residual of the first, in steps of a quarter:

    weight_rest    as weight_packed
"""

import math
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding.spec import ArraySpec
from ..linear.cpu import has_product
from ..linear.weight import Weight, check_subscripts
from . import four_bits
from .compressed import FormatError, Layout, Rounded, Scheme, multiply, split
from .grouped import STEP, Grouped, TiledGroups
from .hadamard import restored, rotated

SIZE = 8  # inputs of a point
EXTRA = 29  # points of the next shell, which complete the table
FINER = 4  # ratio of the steps of the first and the second code
SIZES = (256, 4096)  # numbers of points that are rounded together, so that few programs compile
# the scale relative to the RMS of an output, by bits: optimal for normally distributed weights
WIDTH = {"2": 0.97, "4": 1.12}

CHOICES = "e8p-2 or e8p-4"
HEAD = "int8-weights"
SPLITS = False
METHOD = None
MULTIPLE = SIZE
STORED = {
    f"e8p-{bits}": Scheme(
        {
            "type": "lattice",
            "num_bits": int(bits),
            "strategy": "channel",
            "symmetric": True,
            "dynamic": False,
        },
        None,
        ("e8p-hadamard",),
        "quire",
    )
    for bits in WIDTH
}


@cache
def table() -> np.ndarray:
    """The points with positive coordinates, [256, 8], which are odd multiples of 1/2.

    They are sorted by squared norm, then lexicographically: all 227 of squared norm at most 10,
    and every (56 i / 29)-th of the 56 points with five coordinates of 3/2.
    """
    points = np.array(list(product((0.5, 1.5, 2.5), repeat=SIZE)), np.float32)
    square = np.square(points).sum(1)
    inner = points[square <= 10][np.argsort(square[square <= 10], kind="stable")]
    shell = points[(square == 12) & (points.max(1) == 1.5)]
    return np.concatenate([inner, shell[np.arange(EXTRA) * len(shell) // EXTRA]])


def decode_points(codes):
    """Decode NumPy or JAX codes to points [..., 8], times four: odd integers from -11 to 11."""
    xp = jnp if isinstance(codes, jax.Array) else np
    codes = codes.astype(np.int32)
    sizes = xp.take(xp.asarray((4 * table()).astype(np.int32)), codes & 255, axis=0)
    odd = xp.take(xp.asarray(table().sum(1).astype(np.int32) & 1), codes & 255, axis=0)
    is_minus = codes[..., None] >> np.arange(8, 15, dtype=np.int32) & 1
    is_last_minus = (is_minus.sum(-1) + odd) & 1
    is_minus = xp.concatenate([is_minus, is_last_minus[..., None]], axis=-1)
    return xp.where(is_minus == 1, -sizes, sizes) + (2 * (codes >> 15 & 1) - 1)[..., None]


@jax.jit
def nearest_points(values):
    """(codes (uint16), points) of the points nearest to the values [R, 8]."""
    candidates = []
    for is_plus in (0, 1):
        shifted = values - (0.25 if is_plus else -0.25)
        size = jnp.abs(shifted)
        is_minus = shifted < 0
        T = table()
        parity = (is_minus.sum(1)[:, None] + T.sum(1).astype(np.int32)) & 1
        # The score of a point with the signs of the values is 2 * product - square. If the parity
        # of the signs is wrong, the sign is flipped that reduces the score least.
        score = 2 * sum(size[:, i : i + 1] * T[:, i] for i in range(SIZE)) - np.square(T).sum(1)
        flip_cost = size[:, 0:1] * T[:, 0]
        for i in range(1, SIZE):
            flip_cost = jnp.minimum(flip_cost, size[:, i : i + 1] * T[:, i])
        score = jnp.where(parity == 1, score - 4 * flip_cost, score)
        best = jnp.argmax(score, 1)
        cost = size * jnp.asarray(T)[best]
        is_flipped = (jnp.argmin(cost, 1)[:, None] == np.arange(SIZE)) & (
            jnp.take_along_axis(parity, best[:, None], 1) == 1
        )
        bits = ((is_minus ^ is_flipped)[:, : SIZE - 1] << np.arange(8, 15)).sum(1)
        candidates.append(
            (jnp.max(score, 1) - jnp.square(shifted).sum(1), best + bits + (is_plus << 15))
        )
    (low, low_codes), (high, high_codes) = candidates
    codes = jnp.where(high > low, high_codes, low_codes)
    return codes.astype(jnp.uint16), decode_points(codes).astype(jnp.float32) / 4


def quantize_points(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise values [R, K], which are relative to the scales: (codes [stages, R, K / 8],
    dequantised values).
    """
    flat = values.astype(np.float32).reshape(-1, SIZE)
    chunks = [
        round_in_stages(flat[start : start + SIZES[-1]], bits)
        for start in range(0, len(flat), SIZES[-1])
    ]
    codes, values_by_chunk = (
        np.concatenate(arrays, axis)
        for arrays, axis in zip(zip(*chunks, strict=True), (1, 0), strict=True)
    )
    return codes.reshape(len(codes), len(values), -1), values_by_chunk.reshape(values.shape)


def round_in_stages(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    padded_size = next(size for size in SIZES if len(values) <= size)
    residual = np.pad(values, ((0, padded_size - len(values)), (0, 0)))
    codes = []
    factor = 1
    approximation = np.zeros_like(residual)
    for _ in range(bits // 2):
        code, point = nearest_points(residual * factor)
        codes.append(np.asarray(code))
        approximation = approximation + np.asarray(point) / factor
        residual = residual - np.asarray(point) / factor
        factor *= FINER
    return np.stack(codes)[:, : len(values)], approximation[: len(values)]


class E8p(Rounded):
    """rotated(weight) = (point(code) + point(rest) / FINER) * scale."""

    codes: Any  # uint16 [K / 8, O]
    rest: Any  # codes of the residuals; None with two bits
    scale: Any  # float32 [1, *out]

    def inputs_per_value(self, field: str = "codes") -> int:
        return SIZE

    @property
    def bits(self) -> int:
        return 2 if self.rest is None else 4

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        check_subscripts(subscripts, x, self.into, self.out, self.inputs)
        lead = x.shape[: x.ndim - len(self.into)]
        K = math.prod(self.into)
        x_RK = rotated(x.reshape(-1, K).astype(jnp.float32)).astype(x.dtype)
        y_RO = multiply(x_RK, self.numbers())  # small integers, exact in bfloat16
        y = (y_RO * (self.scale.reshape(-1) / self.unit)).reshape(*lead, *self.out)
        return (y if bias is None else y + bias).astype(dtype or x.dtype)

    @property
    def unit(self) -> int:
        """The factor between `numbers` and multiples of the scale."""
        return 4 if self.rest is None else 4 * FINER

    def numbers(self):
        """The rotated weight [K, O] as integers, in multiples of scale / unit."""
        values = decode_points(self.codes)
        if self.rest is not None:
            values = FINER * values + decode_points(self.rest)
        return jnp.swapaxes(values, 1, 2).reshape(-1, values.shape[1])

    def for_kernels(self, rows: str) -> Weight:
        kernel = self.kernel_code
        if not has_product({"uint4": "uint4", "int8": "int8_groups"}[kernel], rows):
            return self
        numbers = np.asarray(self.numbers())
        K = len(numbers)
        scale = self.scale / np.float32(self.unit)
        if kernel == "uint4":  # odd numbers from -11 to 11
            codes, scale, least = (
                four_bits.join(((numbers + 11) // 2).astype(np.uint8)),
                2 * scale,
                11 * scale,
            )
        else:
            codes = numbers.astype(np.int8).view(np.uint8)
            least = None
        sizes = {"into": (K,), "out": (numbers.shape[1],), "inputs": (0,)}
        flat = {
            "scale": np.reshape(scale, (1, -1)),
            "least": None if least is None else np.reshape(least, (1, -1)),
        }
        flat |= {"super_scale": None, "super_least": None}
        node = Grouped(
            codes=codes, **flat, code=kernel, group=-(-K // STEP) * STEP, **sizes
        ).for_kernels(rows)
        assert isinstance(node, TiledGroups)
        tiled_fields = {
            name: getattr(node, name)
            for name in ("tiles", "scale", "least", "code", "int8_activations", "float_rows")
        }
        return TiledE8p(**tiled_fields, into=self.into, out=self.out, inputs=self.inputs)

    @property
    def kernel_code(self) -> str:
        return "uint4" if self.rest is None else "int8"

    def quantize(self, weight: np.ndarray) -> "E8p":
        """Quantise every eight inputs of the rotated weight to the nearest point."""
        W = rotated(weight.astype(np.float32).reshape(math.prod(self.into), -1).T)
        scale = output_scales(W, self.bits)
        return self.from_points(
            quantize_points(np.divide(W, scale, out=np.zeros_like(W), where=scale > 0), self.bits)[
                0
            ],
            scale,
        )

    def from_points(self, codes: np.ndarray, scale: np.ndarray) -> "E8p":
        """A node of these specs from codes [stages, O, K / 8] and scales [O, 1]."""
        rest_field = {} if len(codes) == 1 else {"rest": codes[1].T}
        return self.join({"codes": codes[0].T, "scale": scale.T} | rest_field)

    def layout(self, rows: int, columns: int, form: str) -> Layout:
        if columns % SIZE:
            raise FormatError(f"has {columns} inputs, which do not divide by {SIZE}")
        codes = (("int16",), ((rows, columns // SIZE),))
        rest_layout = {} if self.rest is None else {".weight_rest": codes}
        shape = {".weight_shape": (("int64", "int32"), ((2,),))}
        return (
            {".weight_packed": codes}
            | shape
            | rest_layout
            | {".weight_scale": (("float32",), ((rows,),))}
        )

    def fields(
        self, tensors: dict[str, np.ndarray], columns: int, form: str
    ) -> dict[str, np.ndarray]:
        fields = {
            "codes": tensors[".weight_packed"].view(np.uint16),
            "scale": tensors[".weight_scale"][:, None],
        }
        return (
            fields
            if self.rest is None
            else fields | {"rest": tensors[".weight_rest"].view(np.uint16)}
        )

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        values = decode_points(fields["codes"][:, ::SIZE])
        if self.rest is not None:
            values = FINER * values + decode_points(fields["rest"][:, ::SIZE])
        numbers = values.reshape(fields["codes"].shape).astype(np.float32)
        return restored(numbers * (fields["scale"] / np.float32(self.unit)))

    def join(self, fields: dict[str, np.ndarray]) -> "E8p":
        names = ("codes", "rest")[: len(fields) - 1]
        flat = {
            name: np.ascontiguousarray(fields[name].reshape(len(fields[name]), -1))
            for name in names
        }
        return self.replace(**flat, scale=fields["scale"].reshape(1, *self.out))

    def parts(self, form: str) -> dict[str, np.ndarray]:
        (columns,) = self.into
        (rows,) = self.out
        tensors = {
            ".weight_packed": self.codes.T.view(np.int16),
            ".weight_shape": np.array([rows, columns]),
        }
        rest_tensor = {} if self.rest is None else {".weight_rest": self.rest.T.view(np.int16)}
        return tensors | rest_tensor | {".weight_scale": self.scale.reshape(-1)}


class TiledE8p(TiledGroups):
    """Tiles for the native kernels of four or eight bits, with the points as integers."""

    def prepare_rows(self, x) -> tuple[Any, Any]:
        return rotated(x.astype(jnp.float32)), None


def output_scales(W: np.ndarray, bits: int) -> np.ndarray:
    """The scale of each output of a rotated weight, [O, 1]."""
    return (
        np.sqrt(np.square(W.astype(np.float32)).mean(1, keepdims=True)) * WIDTH[str(bits)]
    ).astype(np.float32)


def kernels(*options: str) -> tuple[str, ...]:
    return ("int8_groups" if "4" in options else "uint4",)


def spec(dense: ArraySpec, *options: str) -> E8p:
    """See `Format.spec`. The option is the number of bits per weight."""
    if len(options) != 1 or options[0] not in WIDTH:
        raise FormatError(f"e8p has no option {'-'.join(options)!r}; it must be 2 or 4")
    into, out, axes = split(dense)
    K = math.prod(into)
    if K % SIZE and K > SIZE:
        raise FormatError(f"{K} inputs do not divide by {SIZE}")
    shape = (-(-K // SIZE), math.prod(out))
    over = (axes[0], axes[len(into)])
    codes = replace(dense, shape=shape, axes=over, dtype=jnp.uint16, init="words", inputs=())
    scale = ArraySpec(
        (1, *out), jnp.float32, (None, *axes[len(into) :]), "scale/1.732", dense.fan_in
    )
    rest_codes = codes if options[0] == "4" else None
    return E8p(codes=codes, rest=rest_codes, scale=scale, into=into, out=out, inputs=dense.inputs)
