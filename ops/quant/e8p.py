"""E8P: two bits a weight. Eight neighbouring inputs are a point near one of the lattice E8, after a
Hadamard transform.

QuIP#'s codebook (arXiv 2402.04396) and its transform of the inputs (`hadamard.py`). Its transform
of the outputs, which evens out how large they are, is a scale an output here: outputs of several
matrices lie in one weight, in any order.

A code has an index into a table of 256 points with positive coordinates (`TABLE`), the signs of the
first seven coordinates, and whether a quarter is added to all of them or taken off. The last sign
makes the sum even.

    weight_packed  int16 [out, in / 8]: index in bits 0 to 7, signs (1 is minus) in 8 to 14, 15 says
    plus a quarter weight_shape   out, in weight_scale   float32 [out]

With four bits a weight a second code stands for what the first one left, four times as fine:

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

from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..linear.cpu import has_product
from ..linear.weight import Weight, check_subscripts
from . import four_bits
from .compressed import FormatError, Layout, Rounded, Scheme, multiply, split
from .grouped import STEP, Grouped, TiledGroups
from .hadamard import restored, rotated

SIZE = 8  # inputs of a point
EXTRA = 29  # points of the next shell, which fill the table up
FINER = 4  # how much the second code's steps are finer
SIZES = (256, 4096)  # how many points are rounded together: few programs are compiled
# a scale in roots of an output's mean square: the best for normal numbers
WIDTH = {"2": 0.97, "4": 1.12}

CHOICES = "e8p-2 or e8p-4"
HEAD = "int8"
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
    """The points with positive coordinates, [256, 8]: halves of odd numbers.

    Ordered by their squares, and those as large as dictionaries order words: 227 of at most 10, and
    of the 56 that have five times 3/2 each (56 i / 29)-th.
    """
    points = np.array(list(product((0.5, 1.5, 2.5), repeat=SIZE)), np.float32)
    square = np.square(points).sum(1)
    inner = points[square <= 10][np.argsort(square[square <= 10], kind="stable")]
    shell = points[(square == 12) & (points.max(1) == 1.5)]
    return np.concatenate([inner, shell[np.arange(EXTRA) * len(shell) // EXTRA]])


def points(codes):
    """The points [..., 8] of codes of numpy or JAX, four times as large: whole odd numbers from -11
    to 11.
    """
    xp = jnp if isinstance(codes, jax.Array) else np
    codes = codes.astype(np.int32)
    sizes = xp.take(xp.asarray((4 * table()).astype(np.int32)), codes & 255, axis=0)
    odd = xp.take(xp.asarray(table().sum(1).astype(np.int32) & 1), codes & 255, axis=0)
    minus = codes[..., None] >> np.arange(8, 15, dtype=np.int32) & 1
    last = (minus.sum(-1) + odd) & 1
    minus = xp.concatenate([minus, last[..., None]], axis=-1)
    return xp.where(minus == 1, -sizes, sizes) + (2 * (codes >> 15 & 1) - 1)[..., None]


@jax.jit
def nearest(values):
    """The code (uint16) of the point nearest to each of [R, 8], and the point."""
    found = []
    for plus in (0, 1):
        u = values - (0.25 if plus else -0.25)
        size = jnp.abs(u)
        minus = u < 0
        T = table()
        wrong = (minus.sum(1)[:, None] + T.sum(1).astype(np.int32)) & 1
        # Of a point whose signs are those of the values: twice the product less the square. Where
        # their number is not even enough, one sign is turned where that costs least.
        score = 2 * sum(size[:, i : i + 1] * T[:, i] for i in range(SIZE)) - np.square(T).sum(1)
        turn = size[:, 0:1] * T[:, 0]
        for i in range(1, SIZE):
            turn = jnp.minimum(turn, size[:, i : i + 1] * T[:, i])
        score = jnp.where(wrong == 1, score - 4 * turn, score)
        best = jnp.argmax(score, 1)
        cost = size * jnp.asarray(T)[best]
        turned = (jnp.argmin(cost, 1)[:, None] == np.arange(SIZE)) & (
            jnp.take_along_axis(wrong, best[:, None], 1) == 1
        )
        bits = ((minus ^ turned)[:, : SIZE - 1] << np.arange(8, 15)).sum(1)
        found.append((jnp.max(score, 1) - jnp.square(u).sum(1), best + bits + (plus << 15)))
    (low, below), (high, above) = found
    codes = jnp.where(high > low, above, below)
    return codes.astype(jnp.uint16), points(codes).astype(jnp.float32) / 4


def rounded(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes [stages, R, K / 8], what they stand for) of values [R, K] in units of an output's
    scale.
    """
    flat = values.astype(np.float32).reshape(-1, SIZE)
    each = [stages(flat[at : at + SIZES[-1]], bits) for at in range(0, len(flat), SIZES[-1])]
    codes, found = (
        np.concatenate(part, axis)
        for part, axis in zip(zip(*each, strict=True), (1, 0), strict=True)
    )
    return codes.reshape(len(codes), len(values), -1), found.reshape(values.shape)


def stages(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    whole = next(size for size in SIZES if len(values) <= size)
    left = np.pad(values, ((0, whole - len(values)), (0, 0)))
    codes = []
    factor = 1
    total = np.zeros_like(left)
    for _ in range(bits // 2):
        code, point = nearest(left * factor)
        codes.append(np.asarray(code))
        total = total + np.asarray(point) / factor
        left = left - np.asarray(point) / factor
        factor *= FINER
    return np.stack(codes)[:, : len(values)], total[: len(values)]


@struct.dataclass
class E8p(Rounded):
    """rotated(weight) = point(code) * scale, or (point(code) + point(rest) / FINER) * scale."""

    codes: Any  # uint16 [K / 8, O]
    rest: Any  # the same, or None
    scale: Any  # float32 [1, *out]

    def shared(self, field: str = "codes") -> int:
        return SIZE

    @property
    def bits(self) -> int:
        return 2 if self.rest is None else 4

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        check_subscripts(subscripts, x, self.into, self.out, self.inputs)
        lead = x.shape[: x.ndim - len(self.into)]
        K = math.prod(self.into)
        x_RK = rotated(x.reshape(-1, K).astype(jnp.float32)).astype(x.dtype)
        y_RO = multiply(x_RK, self.numbers())  # whole numbers, which bfloat16 has exactly
        y = (y_RO * (self.scale.reshape(-1) / self.unit)).reshape(*lead, *self.out)
        return (y if bias is None else y + bias).astype(dtype or x.dtype)

    @property
    def unit(self) -> int:
        """How many of `numbers` are one scale."""
        return 4 if self.rest is None else 4 * FINER

    def numbers(self):
        """The rotated weight [K, O] in whole numbers."""
        found = points(self.codes)
        if self.rest is not None:
            found = FINER * found + points(self.rest)
        return jnp.swapaxes(found, 1, 2).reshape(-1, found.shape[1])

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
        own = {
            name: getattr(node, name)
            for name in ("tiles", "scale", "least", "code", "int8_activations", "float_rows")
        }
        return TiledE8p(**own, into=self.into, out=self.out, inputs=self.inputs)

    @property
    def kernel_code(self) -> str:
        return "uint4" if self.rest is None else "int8"

    def quantize(self, weight: np.ndarray) -> "E8p":
        """The nearest point for each eight inputs of the rotated weight."""
        W = rotated(weight.astype(np.float32).reshape(math.prod(self.into), -1).T)
        scale = scales(W, self.bits)
        return self.made(
            rounded(np.divide(W, scale, out=np.zeros_like(W), where=scale > 0), self.bits)[0], scale
        )

    def made(self, codes: np.ndarray, scale: np.ndarray) -> "E8p":
        """A node of these specs from codes [stages, O, K / 8] and scales [O, 1]."""
        rest = {} if len(codes) == 1 else {"rest": codes[1].T}
        return self.join({"codes": codes[0].T, "scale": scale.T} | rest)

    def layout(self, rows: int, columns: int, form: str) -> Layout:
        if columns % SIZE:
            raise FormatError(f"has {columns} inputs, which do not divide by {SIZE}")
        codes = (("int16",), ((rows, columns // SIZE),))
        rest = {} if self.rest is None else {".weight_rest": codes}
        shape = {".weight_shape": (("int64", "int32"), ((2,),))}
        return (
            {".weight_packed": codes} | shape | rest | {".weight_scale": (("float32",), ((rows,),))}
        )

    def fields(
        self, parts: dict[str, np.ndarray], columns: int, form: str
    ) -> dict[str, np.ndarray]:
        found = {
            "codes": parts[".weight_packed"].view(np.uint16),
            "scale": parts[".weight_scale"][:, None],
        }
        return (
            found if self.rest is None else found | {"rest": parts[".weight_rest"].view(np.uint16)}
        )

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        found = points(fields["codes"][:, ::SIZE])
        if self.rest is not None:
            found = FINER * found + points(fields["rest"][:, ::SIZE])
        numbers = found.reshape(fields["codes"].shape).astype(np.float32)
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
        found = {
            ".weight_packed": self.codes.T.view(np.int16),
            ".weight_shape": np.array([rows, columns]),
        }
        rest = {} if self.rest is None else {".weight_rest": self.rest.T.view(np.int16)}
        return found | rest | {".weight_scale": self.scale.reshape(-1)}


@struct.dataclass
class TiledE8p(TiledGroups):
    """For the kernels of four or eight bits, whose codes are whole numbers too."""

    def prepare_rows(self, x) -> tuple[Any, Any]:
        return rotated(x.astype(jnp.float32)), None


def scales(W: np.ndarray, bits: int) -> np.ndarray:
    """Of each output of a rotated weight, [O, 1]."""
    return (
        np.sqrt(np.square(W.astype(np.float32)).mean(1, keepdims=True)) * WIDTH[str(bits)]
    ).astype(np.float32)


def kernels(*options: str) -> tuple[str, ...]:
    return ("int8_groups" if "4" in options else "uint4",)


def spec(dense: ArraySpec, *options: str) -> E8p:
    """The specs of an array kept so; the option is the bits of a weight."""
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
    rest = codes if options[0] == "4" else None
    return E8p(codes=codes, rest=rest, scale=scale, into=into, out=out, inputs=dense.inputs)
