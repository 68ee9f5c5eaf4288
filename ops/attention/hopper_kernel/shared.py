"""The shared memory of a processor, and the barriers that guard it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .task import ROWS, STAGED, STATS, KernelShape


class SharedMemory(NamedTuple):
    """References and barriers; None for those that a shape does not use.

    A `_full` barrier says that copies have arrived; an `_empty` one that a buffer may be reused.
    """

    q_ref: Any  # the queries of each tile, and later its results
    k_ref: Any  # blocks of keys
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    q_tile: Any = None  # queries in the layout of products
    v_ref: Any = None
    v_full: Any = None
    v_empty: Any = None
    k_scale: Any = None
    v_scale: Any = None
    k_tile: Any = None  # a decoded block
    v_tile: Any = None
    all_warpgroups: Any = None  # barrier of the multiplying warpgroups
    weights: Any = None  # of a block, if each warpgroup computes the weights of some of its keys
    row_exchange: Any = None  # a number for each row, which warpgroups exchange
    turn: Any = None  # barriers that say whose turn it is to multiply
    sums: Any = None  # staging buffer of each warpgroup for some columns of a span that is saved
    stats: Any = None  # staging buffer for its largest score and its sum of weights


def shared_types(shape: KernelShape, dtype) -> dict[str, Any]:
    """The types of the arrays and barriers of a `SharedMemory`."""
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    swizzle_width = min(shape.width, 128)  # codes, of a byte each, in a swizzled line
    swizzled_codes = (
        plgpu.TilingTransform((8, swizzle_width)),
        plgpu.SwizzleTransform(swizzle_width),
    )
    J = shape.block
    H = shape.width
    stages = shape.stages
    is_quantised = shape.codes is not None
    queries = (shape.tiles, ROWS, H)
    stage_dtype, layout = (jnp.int8, swizzled_codes) if is_quantised else (dtype, swizzled)
    stage = plgpu.SMEM((stages, J, H), stage_dtype, transforms=layout)
    copies_per_block = J // shape.piece * (2 if is_quantised else 1)
    types: dict[str, Any] = {
        "q_ref": plgpu.SMEM(queries, dtype, transforms=swizzled if shape.swizzles_queries else ()),
        "k_ref": stage,
        "q_full": plgpu.Barrier(num_arrivals=shape.positions * shape.tiles),
        "q_empty": plgpu.Barrier(num_arrivals=shape.warpgroups),
        "k_full": plgpu.Barrier(num_arrivals=copies_per_block, num_barriers=stages),
        "k_empty": plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=stages),
    }
    if not shape.queries_in_registers and not shape.swizzles_queries:
        types["q_tile"] = plgpu.SMEM(queries, dtype, transforms=swizzled)
    if shape.latent:
        half_swizzle = (
            plgpu.TilingTransform((8, shape.keys)),
            plgpu.SwizzleTransform(2 * shape.keys),
        )
        types["weights"] = plgpu.SMEM((ROWS, J), dtype, transforms=half_swizzle)
        types["row_exchange"] = plgpu.SMEM((shape.warpgroups, ROWS), jnp.float32)
    else:
        types |= {"v_ref": stage, "v_full": types["k_full"], "v_empty": types["k_empty"]}
    if is_quantised:
        scales = plgpu.SMEM((stages, J), jnp.float32)
        tile = plgpu.SMEM((1, J, H), dtype, transforms=swizzled)
        types |= {"k_scale": scales, "v_scale": scales, "k_tile": tile, "v_tile": tile}
    if shape.stages_saved_sums:
        for name, columns in (("sums", STAGED), ("stats", STATS)):
            types[name] = plgpu.SMEM((shape.warpgroups, ROWS, columns), jnp.float32)
    if shape.ping_pong:
        types["turn"] = plgpu.Barrier(num_arrivals=1, num_barriers=shape.warpgroups)
    if shape.warpgroups > 1:
        types["all_warpgroups"] = plgpu.Barrier(num_arrivals=shape.warpgroups)
    return types
