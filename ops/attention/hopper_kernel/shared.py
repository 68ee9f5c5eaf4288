"""The shared memory of a processor, and the barriers that guard it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .task import NUMBERS, ROWS, STAGED, KernelShape


class SharedMemory(NamedTuple):
    """References; None where a shape does not use one."""

    q_ref: Any  # the queries of each tile, and later its results
    k_ref: Any  # blocks of keys
    q_here: Any
    q_free: Any
    k_here: Any
    k_free: Any
    q_tile: Any = None  # queries laid out for products
    v_ref: Any = None
    v_here: Any = None
    v_free: Any = None
    k_scale: Any = None
    v_scale: Any = None
    k_tile: Any = None  # a decoded block
    v_tile: Any = None
    together: Any = None  # where warpgroups wait for each other
    # of a block, where each warpgroup computes those of some keys and needs all
    weights: Any = None
    numbers_of_rows: Any = None  # which warpgroups tell each other
    turn: Any = None  # whose turn it is to multiply
    sums: Any = None  # some columns of a span that is saved, of each warpgroup
    numbers: Any = None  # its largest score and its sum of weights


def shared_types(shape: KernelShape, dtype) -> dict[str, Any]:
    """What to allocate for a `SharedMemory`."""
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    line = min(shape.width, 128)  # codes, of a byte each, that are swizzled together
    swizzled_codes = (plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line))
    J = shape.block
    H = shape.width
    stages = shape.stages
    coded = shape.codes is not None
    queries = (shape.tiles, ROWS, H)
    kind, layout = (jnp.int8, swizzled_codes) if coded else (dtype, swizzled)
    stage = plgpu.SMEM((stages, J, H), kind, transforms=layout)
    pieces = J // shape.piece * (2 if coded else 1)
    found: dict[str, Any] = {
        "q_ref": plgpu.SMEM(queries, dtype, transforms=swizzled if shape.straight else ()),
        "k_ref": stage,
        "q_here": plgpu.Barrier(num_arrivals=shape.positions * shape.tiles),
        "q_free": plgpu.Barrier(num_arrivals=shape.warpgroups),
        "k_here": plgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=stages),
    }
    if not shape.in_registers and not shape.straight:
        found["q_tile"] = plgpu.SMEM(queries, dtype, transforms=swizzled)
    if shape.latent:
        half = (plgpu.TilingTransform((8, shape.keys)), plgpu.SwizzleTransform(2 * shape.keys))
        found["weights"] = plgpu.SMEM((ROWS, J), dtype, transforms=half)
        found["numbers_of_rows"] = plgpu.SMEM((shape.warpgroups, ROWS), jnp.float32)
    else:
        found |= {"v_ref": stage, "v_here": found["k_here"], "v_free": found["k_free"]}
    if coded:
        scales = plgpu.SMEM((stages, J), jnp.float32)
        tile = plgpu.SMEM((1, J, H), dtype, transforms=swizzled)
        found |= {"k_scale": scales, "v_scale": scales, "k_tile": tile, "v_tile": tile}
    if shape.staged:
        for name, columns in (("sums", STAGED), ("numbers", NUMBERS)):
            found[name] = plgpu.SMEM((shape.warpgroups, ROWS, columns), jnp.float32)
    if shape.turns:
        found["turn"] = plgpu.Barrier(num_arrivals=1, num_barriers=shape.warpgroups)
    if shape.warpgroups > 1:
        found["together"] = plgpu.Barrier(num_arrivals=shape.warpgroups)
    return found
