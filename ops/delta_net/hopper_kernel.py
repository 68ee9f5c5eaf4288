"""The Hopper kernel of the delta rule. Each program computes one or two heads of a sequence, token
by token.

Each thread holds one column of a memory, in registers as far as they suffice and otherwise in
shared memory. All terms of a value element belong to the same column, so threads exchange nothing.
Tokens are prefetched into shared memory, and memories are updated in place. Additional dimension
letter: G heads of a program, which share a key.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gpu.tile import Tiles
from .shape import LINE, STAGES, SUMS, MemoryShape

LANES = 32  # threads of a warp


class DeltaRefs(NamedTuple):
    """The kernel's references."""

    q: Any
    k: Any
    v: Any
    decay: Any
    beta: Any
    starts: Any
    slots: Any
    is_first_step: Any
    num_kept: Any
    memory: Any  # updated in place
    out: Any
    smem_q: Any  # these are in shared memory, with STAGES tokens each
    smem_k: Any
    smem_v: Any
    smem_decay: Any
    smem_beta: Any
    smem_memory: Any  # the rest has no stages
    smem_out: Any
    token_barriers: Any
    memory_barrier: Any


def delta_rule(
    q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV, rows, corrects, interpret: Any = None
):
    """See `quire.ops.delta_net.delta_rule`."""
    T, N, V = v_TNV.shape
    _, K, H = q_TKH.shape
    by_key = decay_TN.ndim == 3
    shape = MemoryShape(H, V, N // K, by_key, corrects)
    G = shape.heads
    index_arrays = {
        "starts": rows.starts_B1,
        "slots": rows.slots_B,
        "is_first_step": rows.is_first_step_B,
        "num_kept": rows.num_kept_B,
    }
    decay = decay_TN if by_key else pad_to_line(decay_TN)
    inputs = {"q": q_TKH, "k": k_TKH, "v": v_TNV, "decay": decay, "beta": pad_to_line(beta_TN)}
    inputs |= {name: x.astype(jnp.int32) for name, x in index_arrays.items()}
    memory_ref = jax.new_ref(memory_BNHV, memory_space=plgpu.GMEM)
    ref_names = [*inputs, "memory", "out"]
    smem_shapes = {
        "q": (H,),
        "k": (H,),
        "v": (G, V),
        "decay": (G, H) if by_key else decay.shape[1:],
        "beta": inputs["beta"].shape[1:],
    }
    scratch: dict[str, Any] = {
        f"smem_{name}": plgpu.SMEM((STAGES, *size), jnp.float32)
        for name, size in smem_shapes.items()
    }
    scratch |= {
        "smem_memory": plgpu.SMEM((G, H, V), jnp.float32),
        "smem_out": plgpu.SMEM((G, V), jnp.float32),
    }
    scratch["token_barriers"] = plgpu.Barrier(num_arrivals=len(smem_shapes), num_barriers=STAGES)
    scratch["memory_barrier"] = plgpu.Barrier()

    def body(*refs) -> None:
        named = dict(zip(ref_names, refs, strict=True))
        tiles = Tiles(interpret is not None)
        pl.run_scoped(lambda **shared: run(shape, tiles, DeltaRefs(**named, **shared)), **scratch)

    kernel: Any = pl.kernel(
        body,
        jax.ShapeDtypeStruct((T, N, V), jnp.float32),
        mesh=plgpu.Mesh(grid=(rows.slots_B.shape[0], N // G), grid_names=("sequence", "heads")),
        # Stores need no barriers: lines are loaded and stored in the same layout, so a thread reads
        # only what it wrote, and all threads commit or wait before every copy from or to shared
        # memory.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=False if interpret is None else interpret,
        name="delta_rule",
    )
    out_TNV = kernel(*inputs.values(), memory_ref)
    is_token_T = jnp.arange(T) < rows.starts_B1[-1]
    return jnp.where(is_token_T[:, None, None], out_TNV, 0), jax.freeze(memory_ref)


def pad_to_line(x_TN):
    """Pad the last axis to a multiple of LINE, as copies require."""
    return jnp.pad(x_TN, ((0, 0), (0, -x_TN.shape[1] % LINE)))


def run(shape: MemoryShape, tiles: Tiles, refs: DeltaRefs) -> None:
    """The program for some heads of a sequence."""
    b = lax.axis_index("sequence")
    n = lax.axis_index("heads") * shape.heads
    heads = pl.ds(n, shape.heads)
    first = refs.starts[b]
    count = refs.starts[b + 1] - first

    @pl.when(count > 0)
    def _():
        num_kept = refs.num_kept[b]
        slot_memory = refs.memory.at[refs.slots[b], heads]
        for stage in range(STAGES):
            pl.when(stage < count)(
                lambda stage=stage: fetch_token(shape, refs, n, first + stage, stage)
            )
        registers = load_memory(shape, tiles, refs, slot_memory, b)
        pl.when(num_kept == 0)(lambda: store_memory(shape, tiles, refs, slot_memory, registers))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def compute_token(i, registers):
            stage = lax.rem(i, STAGES)
            plgpu.barrier_wait(refs.token_barriers.at[stage])
            registers, out_GV = update_memory(shape, tiles, refs, n, stage, registers)
            tiles.store(refs.smem_out, out_GV, False)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.smem_out, refs.out.at[first + i, heads])
            pl.when(i + STAGES < count)(
                lambda: fetch_token(shape, refs, n, first + i + STAGES, stage)
            )
            pl.when(i + 1 == num_kept)(
                lambda: store_memory(shape, tiles, refs, slot_memory, registers)
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return registers

        lax.fori_loop(0, count, compute_token, registers)
        plgpu.wait_smem_to_gmem(0)


def fetch_token(shape: MemoryShape, refs: DeltaRefs, n, row, stage) -> None:
    """Start copying a token's inputs for these heads to a stage in shared memory."""
    key = lax.div(n, jnp.int32(shape.shared))
    heads = pl.ds(n, shape.heads)
    copies = [
        (refs.q.at[row, key], refs.smem_q),
        (refs.k.at[row, key], refs.smem_k),
        (refs.v.at[row, heads], refs.smem_v),
        (refs.decay.at[row, heads] if shape.by_key else refs.decay.at[row], refs.smem_decay),
        (refs.beta.at[row], refs.smem_beta),
    ]
    for source, destination in copies:
        plgpu.copy_gmem_to_smem(source, destination.at[stage], refs.token_barriers.at[stage])


def load_memory(shape: MemoryShape, tiles: Tiles, refs: DeltaRefs, slot_memory, b) -> tuple:
    """Load the memories of a sequence, or zeros in its first step.

    Returns:
        The lines (one per key element) that are held in registers. The others stay in shared
        memory.
    """
    plgpu.copy_gmem_to_smem(slot_memory, refs.smem_memory, refs.memory_barrier)
    plgpu.barrier_wait(refs.memory_barrier)
    has_state = refs.is_first_step[b] == 0

    def initial_line(h):
        return jnp.where(has_state, load_line(shape, tiles, refs, h), 0.0)

    for_lines_in_smem(shape, lambda h, _: store_line(shape, tiles, refs, h, initial_line(h)), None)
    return tuple(initial_line(h) for h in range(shape.register_keys))


def store_memory(shape: MemoryShape, tiles: Tiles, refs: DeltaRefs, slot_memory, registers) -> None:
    """Write the memories to the sequence's slot."""
    for h, line_GV in enumerate(registers):
        store_line(shape, tiles, refs, h, line_GV)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.smem_memory, slot_memory)


def line_ref(shape: MemoryShape, refs: DeltaRefs, h):
    """The memories' lines for one key element in shared memory, as [G, V].

    For a single head it is a contiguous slice, as Mosaic requires.
    """
    return refs.smem_memory.at[0, pl.ds(h, 1)] if shape.heads == 1 else refs.smem_memory.at[:, h]


def load_line(shape: MemoryShape, tiles: Tiles, refs: DeltaRefs, h):
    return tiles.load_as(line_ref(shape, refs, h), value_layout(shape))


def store_line(shape: MemoryShape, tiles: Tiles, refs: DeltaRefs, h, line_GV) -> None:
    tiles.store(line_ref(shape, refs, h), line_GV, False)


def for_lines_in_smem(shape: MemoryShape, body, carry):
    """Run `carry = body(h, carry)` for the key elements whose lines are in shared memory, unrolled
    by SUMS.
    """

    def chunk(i, carry):
        for j in range(SUMS):
            carry = body(shape.register_keys + i * SUMS + j, carry)
        return carry

    if shape.keys == shape.register_keys:
        return carry
    return lax.fori_loop(0, (shape.keys - shape.register_keys) // SUMS, chunk, carry)


def update_memory(shape: MemoryShape, tiles: Tiles, refs: DeltaRefs, n, stage, registers):
    """Apply a token to the memories: (lines in registers, out_GV)."""
    q, k, beta, decay = (
        scalars(tiles, x.at[stage])
        for x in (refs.smem_q, refs.smem_k, refs.smem_beta, refs.smem_decay)
    )
    expand_heads = functools.partial(per_head, shape, tiles)
    decay_GV = None if shape.by_key else expand_heads(lambda g: decay(n + g))

    def decay_line(line_GV, h):
        return line_GV * (expand_heads(lambda g: decay(g, h)) if shape.by_key else decay_GV)

    def decayed_smem_line(h):
        return decay_line(load_line(shape, tiles, refs, h), h)

    registers = [decay_line(line_GV, h) for h, line_GV in enumerate(registers)]
    error_GV = tiles.load_as(refs.smem_v.at[stage], value_layout(shape))
    if shape.corrects:
        predicted_GV = ordered_sum(line_GV * k(h) for h, line_GV in enumerate(registers))
        error_GV = error_GV - for_lines_in_smem(
            shape, lambda h, sum_GV: sum_GV + decayed_smem_line(h) * k(h), predicted_GV
        )
    error_GV = error_GV * expand_heads(lambda g: beta(n + g))
    plgpu.commit_smem()  # so that the key is read again and not held in registers
    registers = [line_GV + error_GV * k(h) for h, line_GV in enumerate(registers)]

    def update_line(h, out_GV):
        line_GV = decayed_smem_line(h) + error_GV * k(h)
        store_line(shape, tiles, refs, h, line_GV)
        return out_GV + line_GV * q(h)

    return tuple(registers), for_lines_in_smem(
        shape, update_line, ordered_sum(line_GV * q(h) for h, line_GV in enumerate(registers))
    )


def per_head(shape: MemoryShape, tiles: Tiles, value_for_head):
    """Expand a number per head of the program to [G, V]."""
    values = value_for_head(0)
    size = (shape.heads, shape.values)
    for g in range(1, shape.heads):
        values = jnp.where(tiles.index(size, 0, value_layout(shape)) < g, values, value_for_head(g))
    return values


def value_layout(shape: MemoryShape):
    """The layout of [G, V] in which each thread has one element, in order."""
    size = (shape.heads, shape.values)
    warps = (-3,) if shape.heads == 1 else (-4, -3)
    return plgpu.Layout.TILED(plgpu.Tiling((size, (LANES,), (1,))), warps, (-2,), -1)


def ordered_sum(terms: Iterator):
    """Sum the terms in a fixed order: SUMS partial sums of every SUMS-th term, then their sum.

    Every term is added as soon as it is computed, which saves registers.
    """
    sums = [next(terms) for _ in range(SUMS)]
    for index, term in enumerate(terms):
        sums[index % SUMS] = sums[index % SUMS] + term
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def scalars(tiles: Tiles, ref):
    """A function that reads single numbers of a reference."""
    if not tiles.interpreted:
        return lambda *index: ref[index]
    array = ref[...]
    return lambda *index: array[index]
