"""What the model asks of a weight, whatever form it is kept in."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...sharding import struct
from ..activation import glu


@struct.dataclass
class RoundedRows:
    """Rows beside their codes of eight bits, which products with some weights take in their
    place.
    """

    rows: Any  # [T, D]
    codes: Any  # the same in numbers that codes stand for, in the dtype of the rows
    scale: Any  # float32 [T]: rows = codes * scale, nearly
    kind: str = struct.field(pytree_node=False)  # as `Weight.rounds`

    def reshape(self, *shape: int) -> "RoundedRows":
        return self.replace(rows=self.rows.reshape(*shape), codes=self.codes.reshape(*shape))


def plain(x):
    """The rows themselves."""
    return x.rows if isinstance(x, RoundedRows) else x


class GpuMatrix(NamedTuple):
    """A weight, or a stack of them, as the kernels for GPUs read it."""

    array: Any  # bfloat16, or codes
    # as in `ProductShape` of `gpu_kernel`, and so are `group` and `rounded`
    codes: str | None = None
    scale: Any = None  # of the codes: one for each output, or for each group and output
    group: int = 0
    rounded: bool = False
    zero: Any = None  # of the codes: one for each group and output
    summands: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Of a `ProductShape`."""
        return {
            "codes": self.codes,
            "group": self.group,
            "zeros": self.zero is not None,
            "rounded": self.rounded,
            "summands": self.summands,
        }

    def scales(self, experts: int, parts: int, outputs: int) -> dict[str, Any]:
        """The operands that its scales and zeros are."""
        if self.scale is None:
            return {}
        if self.group:
            named = {"group_scale": self.scale, "group_zero": self.zero}
            axes = experts, -1, parts, outputs
            return {name: each.reshape(axes) for name, each in named.items() if each is not None}
        return {"output_scale": self.scale.reshape(experts, parts, outputs)}


class Weight:
    """A matrix, or a stack of matrices along its first axis, that stands where an array could.

    Quantised and kernel-ready nodes are subclasses, and so is `Dense`, which `weight_of` makes of
    an array: no caller asks what a weight is. A node that has no use for a method leaves it out.
    Bytes are counted by `sharding.spec.nbytes`, since a node's arrays are its leaves.
    """

    takes_rounded = False  # whether its products take `RoundedRows`
    native = False  # whether it is laid out for the native kernels, which alone can read it then
    has_gpu_kernel = False  # whether it has a `gpu_matrix`

    @property
    def rounds(self) -> str | None:
        """The codes that a product makes of the rows that meet it: "int8" or "float8"; None where
        it makes none.
        """
        return None

    def einsum(self, subscripts: str, x, bias=None, dtype=None) -> Any:
        """The product with x, summed in float32, plus `bias`, rounded once to `dtype` (x's by
        default).
        """
        raise TypeError(f"{type(self).__name__} has no product; pick one of its matrices")

    def exact(self, subscripts: str, x) -> Any:
        """The product in float32 of rows and a weight, each with all its bits."""
        return self.einsum(subscripts, x, dtype=jnp.float32)

    def gated(self, subscripts: str, x, activation: str) -> Any:
        """activation(gate) * up of a product whose last axes are [2, F], activation(up) of one
        whose are [1, F].
        """
        return glu(self.einsum(subscripts, x), activation)

    def __getitem__(self, index) -> Any:
        """As of an array: rows of an embedding, or one matrix of a stack."""
        raise TypeError(f"{type(self).__name__} is neither an embedding nor a stack")

    @property
    def rows(self) -> int:
        """How many rows an embedding has here; of one that is split, those of this device."""
        raise TypeError(f"{type(self).__name__} is no embedding")

    def pick(self, e) -> Any:
        """One matrix of a stack, for a product in a loop over them."""
        # Without the barrier XLA widens the whole stack to float32 ahead of the loop.
        stack, e = jax.lax.optimization_barrier((self, e))
        return stack[e]

    def for_rows(self, row_Q) -> "Weight":
        """The same for some of a step's rows; itself where all rows are multiplied alike."""
        return self

    def gpu_matrix(self) -> GpuMatrix:
        """Its arrays as the kernels for GPUs read them; `NotImplementedError` where none does."""
        raise NotImplementedError(
            f"weights must be arrays, int8, int4, fp8 or MXFP4, not {type(self).__name__}"
        )

    def for_kernels(self, rows: str) -> "Weight":
        """The same on the host, laid out for the native kernels; itself where none takes it.

        `rows`: the type of those that it will meet, float32 or bfloat16; "int8" and "int8_float32":
        rows of bfloat16 or of float32 that may be rounded to bytes before. Others in float32 keep
        all their bits in products.
        """
        return self


def check_subscripts(subscripts: str, x, into, out, inputs, stacked: bool = False) -> None:
    """Refuse subscripts other than a weight's own: [*lead, *into] times the weight gives [*lead,
    *out].

    `into` and `out` are the sizes of the axes that are summed over and of the others, `inputs` says
    where the former stand in the weight. The first axis of a weight that is `stacked` is x's last
    but `into`.
    """
    operands, _, result = subscripts.partition("->")
    rows, _, letters = operands.partition(",")
    stack, letters = (letters[:1], letters[1:]) if stacked else ("", letters)
    summed = "".join(letter for axis, letter in enumerate(letters) if axis in inputs)
    kept = "".join(letter for axis, letter in enumerate(letters) if axis not in inputs)
    lead = rows.removesuffix(summed)
    fits = (
        (len(summed), len(kept)) == (len(into), len(out))
        and rows == lead + summed
        and result == lead + kept
        and lead.endswith(stack)
        and len(set(rows + kept)) == len(rows + kept)
        and x.shape[len(lead) :] == tuple(into)
    )
    if not fits:
        raise ValueError(
            f"einsum {subscripts!r} with x of shape {list(x.shape)} does not fit "
            f"{'each matrix of ' * stacked}the weight: its axes {list(inputs)}, of sizes "
            f"{list(into)}, are summed over and come last in x, and the others, of sizes "
            f"{list(out)}, come last in the result"
        )
