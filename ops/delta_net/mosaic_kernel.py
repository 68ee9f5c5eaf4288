"""The kernel of the delta rule: a program has the memory of one head of a sequence, and goes through its rows.

Each thread has a column of the memory in its registers: all that adds up to a number of a value is its own, so nothing
is exchanged. Rows are copied into shared memory a few ahead. The memory that is kept replaces the one before in place.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..attention.mosaic.tile import Tiles
from .shape import LINE, STAGES, SUMS, VALUES, MemoryShape

COLUMN = plgpu.Layout.WG_STRIDED((VALUES,), 1)


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


def delta_rule(q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV, rows, corrects, interpret: Any = None):
    """See `quire.ops.delta_net.delta_rule`."""
    (T, N, V), (_, K, H), by_key = v_TNV.shape, q_TKH.shape, decay_TN.ndim == 3
    shape = MemoryShape(H, N // K, by_key, corrects)
    numbers = {"starts": rows.starts_B1, "slots": rows.slots_B, "begins": rows.begins_B, "kept": rows.kept_B}
    decay = decay_TN if by_key else lined(decay_TN)
    given = {"q": q_TKH, "k": k_TKH, "v": v_TNV, "decay": decay, "beta": lined(beta_TN)}
    given |= {name: x.astype(jnp.int32) for name, x in numbers.items()}
    held = jax.new_ref(memory_BNHV, memory_space=plgpu.GMEM)
    names = [*given, "memory", "out"]
    copied = ("q", "k", "v", "decay", "beta")
    scratch: dict[str, Any] = {
        f"own_{name}": plgpu.SMEM((STAGES, given[name].shape[-1]), jnp.float32) for name in copied
    }
    scratch |= {"own_memory": plgpu.SMEM((H, V), jnp.float32), "own_out": plgpu.SMEM((V,), jnp.float32)}
    scratch["here"] = plgpu.Barrier(num_arrivals=len(copied), num_barriers=STAGES)
    scratch["memory_here"] = plgpu.Barrier()

    def body(*refs) -> None:
        named, tiles = dict(zip(names, refs, strict=True)), Tiles(interpret is not None)
        pl.run_scoped(lambda **shared: run(shape, tiles, Refs(**named, **shared)), **scratch)

    out_TNV = pl.kernel(
        body,
        jax.ShapeDtypeStruct((T, N, V), jnp.float32),
        mesh=plgpu.Mesh(grid=(rows.slots_B.shape[0], N), grid_names=("sequence", "head")),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="delta_rule",
    )(*given.values(), held)
    live_T = jnp.arange(T) < rows.starts_B1[-1]
    return jnp.where(live_T[:, None, None], out_TNV, 0), jax.freeze(held)


def lined(x_TN):
    """A row's numbers as a copy brings them."""
    return jnp.pad(x_TN, ((0, 0), (0, -x_TN.shape[1] % LINE)))


def run(shape: MemoryShape, tiles: Tiles, refs: Refs) -> None:
    """What is done with one head of a sequence."""
    b, n = lax.axis_index("sequence"), lax.axis_index("head")
    first = refs.starts[b]
    count = refs.starts[b + 1] - first

    @pl.when(count > 0)
    def _():
        kept, own = refs.kept[b], refs.memory.at[refs.slots[b], n]
        for stage in range(STAGES):
            pl.when(stage < count)(lambda stage=stage: fetch(shape, refs, n, first + stage, stage))
        memory = begin(shape, tiles, refs, own, b)
        pl.when(kept == 0)(lambda: keep(refs, own, memory))

        def turn(i, memory):
            stage = lax.rem(i, STAGES)
            plgpu.barrier_wait(refs.here.at[stage])
            memory, refs.own_out[...] = step(shape, tiles, refs, n, stage, memory)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.own_out, refs.out.at[first + i, n])
            pl.when(i + STAGES < count)(lambda: fetch(shape, refs, n, first + i + STAGES, stage))
            pl.when(i + 1 == kept)(lambda: keep(refs, own, memory))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return memory

        lax.fori_loop(0, count, turn, memory)
        plgpu.wait_smem_to_gmem(0)


def fetch(shape: MemoryShape, refs: Refs, n, row, stage) -> None:
    """Copy what a row has for this head."""
    key = lax.div(n, jnp.int32(shape.shared))
    copies = [
        (refs.q.at[row, key], refs.own_q), (refs.k.at[row, key], refs.own_k), (refs.v.at[row, n], refs.own_v),
        (refs.decay.at[row, n] if shape.by_key else refs.decay.at[row], refs.own_decay),
        (refs.beta.at[row], refs.own_beta),
    ]  # fmt: skip
    for far, own in copies:
        plgpu.copy_gmem_to_smem(far, own.at[stage], refs.here.at[stage])


def begin(shape: MemoryShape, tiles: Tiles, refs: Refs, own, b) -> tuple:
    """The memory that a sequence goes on from, number by number of the key."""
    plgpu.copy_gmem_to_smem(own, refs.own_memory, refs.memory_here)
    plgpu.barrier_wait(refs.memory_here)
    goes_on = refs.begins[b] == 0
    lines = (tiles.load_as(refs.own_memory.at[h], COLUMN) for h in range(shape.keys))
    return tuple(jnp.where(goes_on, line, 0.0) for line in lines)


def keep(refs: Refs, own, memory) -> None:
    """Replace what the slot holds."""
    for h, line in enumerate(memory):
        refs.own_memory[h] = line
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.own_memory, own)


def step(shape: MemoryShape, tiles: Tiles, refs: Refs, n, stage, memory):
    """(memory, what it says of the query) after a row."""
    q, k, decay = (scalars(tiles, ref.at[stage]) for ref in (refs.own_q, refs.own_k, refs.own_decay))
    memory = [line * decay(h if shape.by_key else n) for h, line in enumerate(memory)]
    error = tiles.load_as(refs.own_v.at[stage], COLUMN)
    if shape.corrects:
        error = error - total(line * k(h) for h, line in enumerate(memory))
    error = error * scalars(tiles, refs.own_beta.at[stage])(n)
    plgpu.commit_smem()  # the key is read again: the registers do not hold it beside the memory
    memory = [line + error * k(h) for h, line in enumerate(memory)]
    return tuple(memory), total(line * q(h) for h, line in enumerate(memory))


def total(parts: Iterator):
    """Their sum: of every SUMS-th of them, then of these. Each is added as it comes, or the registers would not do."""
    sums = [next(parts) for _ in range(SUMS)]
    for at, part in enumerate(parts):
        sums[at % SUMS] = sums[at % SUMS] + part
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def scalars(tiles: Tiles, ref):
    """The numbers of a reference, one at a time."""
    if not tiles.interpreted:
        return lambda h: ref[h]
    whole = ref[...]
    return lambda h: whole[h]
