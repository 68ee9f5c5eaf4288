"""The kernel of the delta rule: a program has the memories of a head or two of a sequence, and goes
through its rows.

Each thread has a column of a memory, in its registers as far as they reach: all that adds up to a
number of a value is its own, so nothing is exchanged. Rows are copied into shared memory a few
ahead. The memory that is kept replaces the one before in place. Letters beside the package's: G
heads of a program, which share a key.
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


class Refs(NamedTuple):
    """References."""

    q: Any
    k: Any
    v: Any
    decay: Any
    beta: Any
    starts: Any
    slots: Any
    begins: Any
    kept: Any
    memory: Any  # changed in place
    out: Any
    own_q: Any  # in shared memory, as what follows; of STAGES rows
    own_k: Any
    own_v: Any
    own_decay: Any
    own_beta: Any
    own_memory: Any
    own_out: Any
    here: Any
    memory_here: Any


def delta_rule(
    q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV, rows, corrects, interpret: Any = None
):
    """See `quire.ops.delta_net.delta_rule`."""
    T, N, V = v_TNV.shape
    _, K, H = q_TKH.shape
    by_key = decay_TN.ndim == 3
    shape = MemoryShape(H, V, N // K, by_key, corrects)
    G = shape.heads
    numbers = {
        "starts": rows.starts_B1,
        "slots": rows.slots_B,
        "begins": rows.is_first_step_B,
        "kept": rows.num_kept_B,
    }
    decay = decay_TN if by_key else lined(decay_TN)
    given = {"q": q_TKH, "k": k_TKH, "v": v_TNV, "decay": decay, "beta": lined(beta_TN)}
    given |= {name: x.astype(jnp.int32) for name, x in numbers.items()}
    held = jax.new_ref(memory_BNHV, memory_space=plgpu.GMEM)
    names = [*given, "memory", "out"]
    copied = {
        "q": (H,),
        "k": (H,),
        "v": (G, V),
        "decay": (G, H) if by_key else decay.shape[1:],
        "beta": given["beta"].shape[1:],
    }
    scratch: dict[str, Any] = {
        f"own_{name}": plgpu.SMEM((STAGES, *size), jnp.float32) for name, size in copied.items()
    }
    scratch |= {
        "own_memory": plgpu.SMEM((G, H, V), jnp.float32),
        "own_out": plgpu.SMEM((G, V), jnp.float32),
    }
    scratch["here"] = plgpu.Barrier(num_arrivals=len(copied), num_barriers=STAGES)
    scratch["memory_here"] = plgpu.Barrier()

    def body(*refs) -> None:
        named = dict(zip(names, refs, strict=True))
        tiles = Tiles(interpret is not None)
        pl.run_scoped(lambda **shared: run(shape, tiles, Refs(**named, **shared)), **scratch)

    out_TNV = pl.kernel(
        body,
        jax.ShapeDtypeStruct((T, N, V), jnp.float32),
        mesh=plgpu.Mesh(grid=(rows.slots_B.shape[0], N // G), grid_names=("sequence", "heads")),
        # Lines are loaded and stored in one layout, so a thread meets its own numbers alone; a
        # commit or a wait of all threads comes before every copy from shared memory and over it. So
        # no store needs a barrier.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=False if interpret is None else interpret,
        name="delta_rule",
    )(*given.values(), held)
    live_T = jnp.arange(T) < rows.starts_B1[-1]
    return jnp.where(live_T[:, None, None], out_TNV, 0), jax.freeze(held)


def lined(x_TN):
    """A row's numbers as a copy brings them."""
    return jnp.pad(x_TN, ((0, 0), (0, -x_TN.shape[1] % LINE)))


def run(shape: MemoryShape, tiles: Tiles, refs: Refs) -> None:
    """What is done with some heads of a sequence."""
    b = lax.axis_index("sequence")
    n = lax.axis_index("heads") * shape.heads
    heads = pl.ds(n, shape.heads)
    first = refs.starts[b]
    count = refs.starts[b + 1] - first

    @pl.when(count > 0)
    def _():
        kept = refs.kept[b]
        own = refs.memory.at[refs.slots[b], heads]
        for stage in range(STAGES):
            pl.when(stage < count)(lambda stage=stage: fetch(shape, refs, n, first + stage, stage))
        memory = begin(shape, tiles, refs, own, b)
        pl.when(kept == 0)(lambda: keep(shape, tiles, refs, own, memory))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def turn(i, memory):
            stage = lax.rem(i, STAGES)
            plgpu.barrier_wait(refs.here.at[stage])
            memory, out_GV = step(shape, tiles, refs, n, stage, memory)
            tiles.store(refs.own_out, out_GV, False)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.own_out, refs.out.at[first + i, heads])
            pl.when(i + STAGES < count)(lambda: fetch(shape, refs, n, first + i + STAGES, stage))
            pl.when(i + 1 == kept)(lambda: keep(shape, tiles, refs, own, memory))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return memory

        lax.fori_loop(0, count, turn, memory)
        plgpu.wait_smem_to_gmem(0)


def fetch(shape: MemoryShape, refs: Refs, n, row, stage) -> None:
    """Copy what a row has for these heads."""
    key = lax.div(n, jnp.int32(shape.shared))
    heads = pl.ds(n, shape.heads)
    copies = [
        (refs.q.at[row, key], refs.own_q),
        (refs.k.at[row, key], refs.own_k),
        (refs.v.at[row, heads], refs.own_v),
        (refs.decay.at[row, heads] if shape.by_key else refs.decay.at[row], refs.own_decay),
        (refs.beta.at[row], refs.own_beta),
    ]
    for far, own in copies:
        plgpu.copy_gmem_to_smem(far, own.at[stage], refs.here.at[stage])


def begin(shape: MemoryShape, tiles: Tiles, refs: Refs, own, b) -> tuple:
    """The memories that a sequence goes on from, number by number of the key; of the first those in
    registers.
    """
    plgpu.copy_gmem_to_smem(own, refs.own_memory, refs.memory_here)
    plgpu.barrier_wait(refs.memory_here)
    goes_on = refs.begins[b] == 0

    def first(h):
        return jnp.where(goes_on, load_line(shape, tiles, refs, h), 0.0)

    each_beyond(shape, lambda h, _: store_line(shape, tiles, refs, h, first(h)), None)
    return tuple(first(h) for h in range(shape.held))


def keep(shape: MemoryShape, tiles: Tiles, refs: Refs, own, memory) -> None:
    """Replace what the slot holds."""
    for h, line_GV in enumerate(memory):
        store_line(shape, tiles, refs, h, line_GV)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.own_memory, own)


def line_of(shape: MemoryShape, refs: Refs, h):
    """What the memories have for a number of the key, as [G, V]; Mosaic takes a single head's only
    if it is one run.
    """
    return refs.own_memory.at[0, pl.ds(h, 1)] if shape.heads == 1 else refs.own_memory.at[:, h]


def load_line(shape: MemoryShape, tiles: Tiles, refs: Refs, h):
    return tiles.load_as(line_of(shape, refs, h), column(shape))


def store_line(shape: MemoryShape, tiles: Tiles, refs: Refs, h, line_GV) -> None:
    tiles.store(line_of(shape, refs, h), line_GV, False)


def each_beyond(shape: MemoryShape, do, carry):
    """`carry = do(h, carry)` for the numbers of the key of which no registers hold the memory, a
    few at a time.
    """

    def some(i, carry):
        for j in range(SUMS):
            carry = do(shape.held + i * SUMS + j, carry)
        return carry

    if shape.keys == shape.held:
        return carry
    return lax.fori_loop(0, (shape.keys - shape.held) // SUMS, some, carry)


def step(shape: MemoryShape, tiles: Tiles, refs: Refs, n, stage, memory):
    """(memory, what it says of the query) after a row."""
    q, k, beta, decay = (
        scalars(tiles, x.at[stage]) for x in (refs.own_q, refs.own_k, refs.own_beta, refs.own_decay)
    )
    each = functools.partial(by_head, shape, tiles)
    decay_GV = None if shape.by_key else each(lambda g: decay(n + g))

    def fade(line_GV, h):
        return line_GV * (each(lambda g: decay(g, h)) if shape.by_key else decay_GV)

    def faded(h):
        return fade(load_line(shape, tiles, refs, h), h)

    memory = [fade(line_GV, h) for h, line_GV in enumerate(memory)]
    error_GV = tiles.load_as(refs.own_v.at[stage], column(shape))
    if shape.corrects:
        known_GV = total(line_GV * k(h) for h, line_GV in enumerate(memory))
        error_GV = error_GV - each_beyond(
            shape, lambda h, sum_GV: sum_GV + faded(h) * k(h), known_GV
        )
    error_GV = error_GV * each(lambda g: beta(n + g))
    plgpu.commit_smem()  # the key is read again: the registers do not hold it beside the memory
    memory = [line_GV + error_GV * k(h) for h, line_GV in enumerate(memory)]

    def learn(h, out_GV):
        line_GV = faded(h) + error_GV * k(h)
        store_line(shape, tiles, refs, h, line_GV)
        return out_GV + line_GV * q(h)

    return tuple(memory), each_beyond(
        shape, learn, total(line_GV * q(h) for h, line_GV in enumerate(memory))
    )


def by_head(shape: MemoryShape, tiles: Tiles, number):
    """A number of each head of the program, for its threads."""
    found = number(0)
    size = (shape.heads, shape.values)
    for g in range(1, shape.heads):
        found = jnp.where(tiles.index(size, 0, column(shape)) < g, found, number(g))
    return found


def column(shape: MemoryShape):
    """Each thread has one of the values, in their order."""
    size = (shape.heads, shape.values)
    warps = (-3,) if shape.heads == 1 else (-4, -3)
    return plgpu.Layout.TILED(plgpu.Tiling((size, (LANES,), (1,))), warps, (-2,), -1)


def total(parts: Iterator):
    """Their sum: of every SUMS-th of them, then of these.

    Each is added as it comes, or the registers would not do.
    """
    sums = [next(parts) for _ in range(SUMS)]
    for at, part in enumerate(parts):
        sums[at % SUMS] = sums[at % SUMS] + part
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def scalars(tiles: Tiles, ref):
    """The numbers of a reference, one at a time."""
    if not tiles.interpreted:
        return lambda *at: ref[at]
    whole = ref[...]
    return lambda *at: whole[at]
