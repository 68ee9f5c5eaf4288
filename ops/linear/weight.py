"""The interface of weights: products, lookups and packing, for arrays and quantised formats."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...sharding import struct
from ..activation import glu


class RoundedRows(struct.PyTreeNode):
    """Rows together with their 8-bit quantised values, which some products take instead."""

    rows: Any  # [T, D]
    codes: Any  # [T, D], the quantised values in the dtype of the rows
    scale: Any  # float32 [T]: rows are about codes * scale
    kind: str = struct.field(pytree_node=False)  # type of the codes, as in `Weight.rounds`

    def reshape(self, *shape: int) -> "RoundedRows":
        return self.replace(rows=self.rows.reshape(*shape), codes=self.codes.reshape(*shape))


def plain(x):
    """The unquantised rows of x."""
    return x.rows if isinstance(x, RoundedRows) else x


class GpuMatrix(NamedTuple):
    """A weight, or a stack of weights, as the GPU kernels read it.

    `codes`, `group`, `rounded` and `summands` are fields of `gpu_kernel.shape.ProductShape`.
    """

    array: Any  # bfloat16 values, or codes
    codes: str | None = None
    scale: Any = None  # of codes: for each output, or for each group and output
    group: int = 0
    rounded: bool = False
    zero: Any = None  # zero points of codes, for each group and output
    summands: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """The fields of a `ProductShape` that the weight determines."""
        return {
            "codes": self.codes,
            "group": self.group,
            "zeros": self.zero is not None,
            "rounded": self.rounded,
            "summands": self.summands,
        }

    def scales(self, experts: int, projections: int, outputs: int) -> dict[str, Any]:
        """The scales and zero points as fields of the kernel's `Operands`."""
        if self.scale is None:
            return {}
        if self.group:
            scales_by_name = {"group_scale": self.scale, "group_zero": self.zero}
            axes = experts, -1, projections, outputs
            return {
                name: array.reshape(axes)
                for name, array in scales_by_name.items()
                if array is not None
            }
        return {"output_scale": self.scale.reshape(experts, projections, outputs)}


class Weight(struct.PyTreeNode):
    """A matrix, or a stack of matrices along its first axis, in place of an array.

    Quantised and packed nodes are subclasses, and so is `Dense`, in which `weight_of` wraps arrays,
    so that callers need no knowledge of the form. Subclasses leave out methods that they do not
    need. The leaves of a node are its arrays; `sharding.spec.nbytes` counts their bytes.
    """

    takes_rounded = False  # whether products take `RoundedRows`
    native = False  # whether the arrays are packed for the native kernels, and readable by no other
    has_gpu_kernel = False  # whether `gpu_matrix` is implemented

    @property
    def rounds(self) -> str | None:
        """The type to which products quantise their rows, "int8" or "float8"; None: they do not."""
        return None

    def einsum(self, subscripts: str, x, bias=None, dtype=None) -> Any:
        """The product with x plus `bias`, accumulated in float32 and rounded once to `dtype`.

        Args:
            dtype: dtype of the result; x's by default.
        """
        raise TypeError(f"{type(self).__name__} has no product; pick one of its matrices")

    def exact(self, subscripts: str, x) -> Any:
        """The product in full float32 precision, in float32."""
        return self.einsum(subscripts, x, dtype=jnp.float32)

    def gated(self, subscripts: str, x, activation: str) -> Any:
        """Compute activation(gate) * up.

        The product's last axes are [2, F], gate and up; if they are [1, F], it is activation(up).
        """
        return glu(self.einsum(subscripts, x), activation)

    def __getitem__(self, index) -> Any:
        """Index as an array: look up rows of an embedding, or take one matrix of a stack."""
        raise TypeError(f"{type(self).__name__} is neither an embedding nor a stack")

    @property
    def rows(self) -> int:
        """Number of rows of an embedding on this device."""
        raise TypeError(f"{type(self).__name__} is no embedding")

    def pick(self, e) -> Any:
        """Take one matrix of a stack, in a loop over its matrices."""
        # Without the barrier XLA converts the whole stack to float32 before the loop.
        stack, e = jax.lax.optimization_barrier((self, e))
        return stack[e]

    def for_rows(self, row_Q) -> "Weight":
        """The weight for a subset of the step's rows; differs only if rows select adapters."""
        return self

    def gpu_matrix(self) -> GpuMatrix:
        """The arrays as the GPU kernels read them; NotImplementedError if no kernel does."""
        raise NotImplementedError(
            f"weights must be arrays, int8, int4, fp8 or MXFP4, not {type(self).__name__}"
        )

    def for_kernels(self, rows: str) -> "Weight":
        """Pack the weight for the native kernels, on the host; itself if no kernel takes it.

        Args:
            rows: Type of the rows that will be multiplied: "float32" or "bfloat16"; "int8" for
                bfloat16 and "int8_float32" for float32 rows that the kernel may round to int8.
                "float32" rows keep all their bits in products.
        """
        return self


def check_subscripts(subscripts: str, x, into, out, inputs, stacked: bool = False) -> None:
    """Raise ValueError unless the product is x [*lead, *into] times the weight to [*lead, *out].

    Args:
        into: Sizes of the axes that are summed over.
        out: Sizes of the weight's other axes.
        inputs: Where the summed axes stand in the weight.
        stacked: Whether the weight has a further first axis, which is x's last before `into`.
    """
    operands, _, result = subscripts.partition("->")
    row_letters, _, weight_letters = operands.partition(",")
    stack_letter, weight_letters = (
        (weight_letters[:1], weight_letters[1:]) if stacked else ("", weight_letters)
    )
    summed_letters = "".join(letter for axis, letter in enumerate(weight_letters) if axis in inputs)
    output_letters = "".join(
        letter for axis, letter in enumerate(weight_letters) if axis not in inputs
    )
    lead_letters = row_letters.removesuffix(summed_letters)
    fits = (
        (len(summed_letters), len(output_letters)) == (len(into), len(out))
        and row_letters == lead_letters + summed_letters
        and result == lead_letters + output_letters
        and lead_letters.endswith(stack_letter)
        and len(set(row_letters + output_letters)) == len(row_letters + output_letters)
        and x.shape[len(lead_letters) :] == tuple(into)
    )
    if not fits:
        raise ValueError(
            f"einsum {subscripts!r} with x of shape {list(x.shape)} does not fit "
            f"{'each matrix of ' * stacked}the weight: its axes {list(inputs)}, of sizes "
            f"{list(into)}, are summed over and come last in x, and the others, of sizes "
            f"{list(out)}, come last in the result"
        )
