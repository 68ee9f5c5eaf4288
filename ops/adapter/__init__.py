"""LoRA and DoRA adapters: (x down) up, with each token's own adapter, is added to a product."""

from typing import Any

import jax
import jax.numpy as jnp

from ...sharding import struct
from .. import linear
from ..implementations import choose
from ..linear.weight import Weight, plain
from ..moe import pick
from ..moe.xla import BLOCK, SortedBlocks

# Tried in order; one that does not support a case raises NotImplementedError with its reasons.
IMPLEMENTATIONS = {"native": ".cpu", "xla": ".xla"}


class AdapterRows(struct.PyTreeNode):
    """The tokens of a step, sorted by adapter slot and cut into blocks of one slot each.

    Tokens without an adapter are in no block. The arrays have room for the largest possible number
    of blocks, C.
    """

    num_blocks: Any
    slots_C: Any  # the adapter slot of each block
    tokens_CQ: Any  # the tokens of each block; T for padding
    offsets_C: Any  # the index of each block's first token among the sorted tokens
    index_T: Any  # each token's index among the sorted tokens; past the end without an adapter
    slots_T: Any  # the adapter slot of each token; the number of slots without an adapter

    @classmethod
    def of(cls, slots_T, num_slots: int) -> "AdapterRows":
        T = slots_T.shape[0]
        blocks = SortedBlocks.of(slots_T, num_slots)
        C = min(T, -(-T // BLOCK) + num_slots)
        slots_C, tokens_CQ, index_CQ = jax.vmap(blocks.at)(jnp.arange(C))
        index_T = (
            jnp.full(T, T + BLOCK, jnp.int32)
            .at[tokens_CQ]
            .set(index_CQ.astype(jnp.int32), mode="drop")
        )
        return cls(blocks.num_blocks, slots_C, tokens_CQ, index_CQ[:, 0], index_T, slots_T)

    def some(self, token_Q, num_slots: int) -> "AdapterRows":
        """The adapter rows of a selection of tokens; an index past the last token is padding."""
        return AdapterRows.of(
            self.slots_T.at[token_Q].get(mode="fill", fill_value=num_slots), num_slots
        )


class Adapted(Weight):
    """A weight with a stack of adapters, one for each slot.

    Tokens without an adapter have the results of the base weight, and read no adapter.

    A fused weight, such as QKV, has an adapter for each matrix that was fused. `output_ranges` are
    their first outputs and the ends of their outputs. Their down matrices lie side by side:

        down    | matrix 0: rank | matrix 1: rank |      all have the same inputs
        up      |    outputs     |    outputs     |

    An adapter is split over devices like its weight. If the inputs are split, each device adds the
    adapter's partial sum to its partial sum of the product.

    If the base is a stack of matrices, such as the experts, every slot has adapters for each.
    """

    base: Any
    # The first axis of these is the slot; if the base is a stack, the second is its matrix.
    down: Any  # [*inputs, len(output_ranges) * rank]
    up: Any  # [rank, *outputs]
    dora_gain: Any  # [*outputs], float32: times the product without bias, added to it (DoRA)
    adapter_rows: AdapterRows | None = None  # set in each step
    matrix: Any = None  # the index of the matrix that was picked from a stack
    output_ranges: tuple[tuple[int, int], ...] = struct.field(pytree_node=False, default=())
    takes_rounded = True

    @property
    def rounds(self) -> str | None:
        return linear.rounds(self.base)

    @property
    def rows(self) -> int:
        return linear.rows(self.base)

    def __getitem__(self, index):
        """Rows of a tied embedding: its adapter applies to the head only, and not to lookups."""
        return self.base[index]

    def for_rows(self, row_Q):
        return (
            self
            if self.adapter_rows is None
            else self.replace(adapter_rows=self.adapter_rows.some(row_Q, len(self.down)))
        )

    def pick(self, e):
        return self.replace(base=pick(self.base, e), matrix=e)

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        out = self.adapt(plain(x), linear.einsum(subscripts, x, self.base, jnp.float32))
        return (out if bias is None else out + bias).astype(dtype or plain(x).dtype)

    def exact(self, subscripts: str, x):
        return self.adapt(x, linear.exact(subscripts, x, self.base))

    def adapt(self, x, out, implementation: str | None = None):
        """Add the adapters' products to the base product `out`.

        The result of a token depends neither on the other tokens nor on the slot. An adapter of
        lower rank than the stack is padded with zeros, which come last in every sum.

        Args:
            x: the inputs of the product, one row per token.
            out: the product with the base weight, in float32 and without bias.
            implementation: the name in IMPLEMENTATIONS of the only one to try.
        """
        if self.adapter_rows is None:
            return out
        T = x.shape[0]
        if len(self.adapter_rows.slots_T) != T:
            raise ValueError(f"{T} rows meet the adapters of {len(self.adapter_rows.slots_T)}")

        def run(module):
            return module.adapt(self, x.reshape(T, -1), out.reshape(T, -1)).reshape(out.shape)

        return choose(IMPLEMENTATIONS, __name__, run, implementation)


def is_adapted(node: Any) -> bool:
    return isinstance(node, Adapted)


def with_rows(weights: Any, slots_T, num_slots: int) -> Any:
    """The weights for a step: each token has the adapter in its slot, or none if that is
    `num_slots`.
    """
    rows = AdapterRows.of(slots_T, num_slots)
    return jax.tree.map(
        lambda node: node.replace(adapter_rows=rows) if is_adapted(node) else node,
        weights,
        is_leaf=is_adapted,
    )


def adapter_stacks(weights: Any) -> list[tuple[Any, Any, Any]]:
    """(down, up, dora_gain) of all weights that have adapters, in tree order."""
    nodes = filter(is_adapted, jax.tree.leaves(weights, is_leaf=is_adapted))
    return [(node.down, node.up, node.dora_gain) for node in nodes]


def with_stacks(weights: Any, stacks: list[tuple[Any, Any, Any]]) -> Any:
    """The weights with these adapter stacks, which are in the order of `adapter_stacks`."""
    remaining_stacks = iter(stacks)

    def replace_stacks(node):
        if not is_adapted(node):
            return node
        down, up, dora_gain = next(remaining_stacks)
        return node.replace(down=down, up=up, dora_gain=dora_gain)

    return jax.tree.map(replace_stacks, weights, is_leaf=is_adapted)


def write_slot(
    stacks: list[tuple[Any, Any, Any]], slot, matrices: list[tuple[Any, Any, Any]]
) -> list[Any]:
    """The stacks after an adapter's matrices were written to a slot."""

    def write(stack, matrix):
        # Updated as integers, and not with `.at[]`: XLA on CPU would convert a whole bfloat16 stack
        # to float32 and back.
        bits_dtype = jnp.uint16 if stack.dtype == jnp.bfloat16 else stack.dtype
        stack_bits, matrix_bits = (
            jax.lax.bitcast_convert_type(array, bits_dtype)
            for array in (stack, jnp.asarray(matrix, stack.dtype))
        )
        return jax.lax.bitcast_convert_type(
            jax.lax.dynamic_update_index_in_dim(stack_bits, matrix_bits, slot, 0), stack.dtype
        )

    return jax.tree.map(write, stacks, matrices)


def weight_of(w) -> Weight:
    """The weight if it has adapters; otherwise NotImplementedError, see `quire.ops.linear`."""
    if not isinstance(w, Adapted):
        raise NotImplementedError("the weight has no adapters")
    return w


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
