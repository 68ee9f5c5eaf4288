"""Adapters of low rank beside a weight: to each row's product its own adapter adds (x down) up."""

from typing import Any

import jax
import jax.numpy as jnp

from ...sharding import struct
from .. import linear
from ..implementations import choose
from ..linear.weight import Weight, plain
from ..moe import pick
from ..moe.xla import BLOCK, Blocks

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with its
# reasons.
IMPLEMENTATIONS = {"native": ".cpu", "xla": ".xla"}


@struct.dataclass
class AdapterRows:
    """The rows of a step by the slot of their adapter, in blocks of one slot each.

    Rows of no adapter are in none.
    """

    num_blocks: Any
    slots_C: Any  # of each block; there are as many as there can be
    rows_CQ: Any  # one past the last in padding
    starts_C: Any  # the place of a block's first row among all rows, sorted by slot
    places_T: Any  # each row's place among them; past the last for rows of none
    slots_T: Any

    @classmethod
    def of(cls, slots_T, num_slots: int) -> "AdapterRows":
        T = slots_T.shape[0]
        blocks = Blocks.of(slots_T, num_slots)
        C = min(T, -(-T // BLOCK) + num_slots)
        slots_C, rows_CQ, places_CQ = jax.vmap(blocks.at)(jnp.arange(C))
        places_T = (
            jnp.full(T, T + BLOCK, jnp.int32)
            .at[rows_CQ]
            .set(places_CQ.astype(jnp.int32), mode="drop")
        )
        return cls(blocks.num_blocks, slots_C, rows_CQ, places_CQ[:, 0], places_T, slots_T)

    def some(self, row_Q, num_slots: int) -> "AdapterRows":
        """The same of some of the rows; of one past the last nothing is computed."""
        return AdapterRows.of(
            self.slots_T.at[row_Q].get(mode="fill", fill_value=num_slots), num_slots
        )


@struct.dataclass
class Adapted(Weight):
    """A weight with a stack of adapters. Rows of none are as without it: no adapter is read for
    them.

    A fused weight has a part for each matrix that it was made of: `parts` says which of its outputs
    are whose.

        down    | part 0: rank | part 1: rank |      the inputs of all parts are the same rows
        up      |   its outputs  | its outputs |

    Over several devices each has the inputs and outputs that it has of the weight. Where inputs are
    split, each adds what its own give, and the sum of their products is that of their adapters too.

    Beside a stack of matrices, such as those of experts, each slot has an adapter's matrices for
    all of them.
    """

    base: Any
    down: Any  # of each slot [*into, parts * rank], or as many of them as the stack has matrices
    up: Any  # of each slot [rank, *out]
    # float32, of each slot [*out]: the part of a product without bias that is added to it (DoRA)
    longer: Any
    rows_of: AdapterRows | None = None  # the step fills it in
    which: Any = None  # the one that is meant of a stack
    parts: tuple[tuple[int, int], ...] = struct.field(pytree_node=False, default=())
    takes_rounded = True

    @property
    def rounds(self) -> str | None:
        return linear.rounds(self.base)

    @property
    def rows(self) -> int:
        return linear.rows(self.base)

    def __getitem__(self, index):
        """Rows of an embedding that is the head too: what is looked up has no adapter."""
        return self.base[index]

    def for_rows(self, row_Q):
        return (
            self
            if self.rows_of is None
            else self.replace(rows_of=self.rows_of.some(row_Q, len(self.down)))
        )

    def pick(self, e):
        return self.replace(base=pick(self.base, e), which=e)

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        out = self.adapt(plain(x), linear.einsum(subscripts, x, self.base, jnp.float32))
        return (out if bias is None else out + bias).astype(dtype or plain(x).dtype)

    def exact(self, subscripts: str, x):
        return self.adapt(x, linear.exact(subscripts, x, self.base))

    def adapt(self, x, out, implementation: str | None = None):
        """`out` and what each row's adapter adds; `implementation` forces one of IMPLEMENTATIONS.

        A row's sums depend neither on the others nor on the slot. Zeros beyond an adapter's own
        rank come last in every sum.
        """
        if self.rows_of is None:
            return out
        T = x.shape[0]
        if len(self.rows_of.slots_T) != T:
            raise ValueError(f"{T} rows meet the adapters of {len(self.rows_of.slots_T)}")

        def run(module):
            return module.adapt(self, x.reshape(T, -1), out.reshape(T, -1)).reshape(out.shape)

        return choose(IMPLEMENTATIONS, __name__, run, implementation)


def is_adapted(node: Any) -> bool:
    return isinstance(node, Adapted)


def with_rows(weights: Any, slots_T, num_slots: int) -> Any:
    """The weights for a step: each row has the adapter in its slot, or with `num_slots` none."""
    rows = AdapterRows.of(slots_T, num_slots)
    return jax.tree.map(
        lambda node: node.replace(rows_of=rows) if is_adapted(node) else node,
        weights,
        is_leaf=is_adapted,
    )


def adapter_stacks(weights: Any) -> list[tuple[Any, Any, Any]]:
    """The stacks of all weights that have adapters, in the order of the tree."""
    nodes = filter(is_adapted, jax.tree.leaves(weights, is_leaf=is_adapted))
    return [(node.down, node.up, node.longer) for node in nodes]


def with_stacks(weights: Any, stacks: list[tuple[Any, Any, Any]]) -> Any:
    """The same weights with other stacks."""
    left = iter(stacks)

    def change(node):
        if not is_adapted(node):
            return node
        down, up, longer = next(left)
        return node.replace(down=down, up=up, longer=longer)

    return jax.tree.map(change, weights, is_leaf=is_adapted)


def write_slot(
    stacks: list[tuple[Any, Any, Any]], slot, matrices: list[tuple[Any, Any, Any]]
) -> list[Any]:
    """The stacks with one adapter in that slot."""

    def write(stack, matrix):
        # As whole numbers, and not by `at`: on a CPU XLA would widen a stack of bfloat16 to
        # float32, and copy it.
        bits = jnp.uint16 if stack.dtype == jnp.bfloat16 else stack.dtype
        held, own = (
            jax.lax.bitcast_convert_type(array, bits)
            for array in (stack, jnp.asarray(matrix, stack.dtype))
        )
        return jax.lax.bitcast_convert_type(
            jax.lax.dynamic_update_index_in_dim(held, own, slot, 0), stack.dtype
        )

    return jax.tree.map(write, stacks, matrices)


def weight_of(w) -> Weight:
    """The weight, if it has adapters."""
    if not isinstance(w, Adapted):
        raise NotImplementedError("the weight has no adapters")
    return w


def varies() -> None:
    """A row's bits are the same in any company."""
