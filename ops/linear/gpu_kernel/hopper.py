"""A product of blocks of rows, each with one expert's weight: a producer copies, the other
warpgroups multiply.

Weights are the left operand of the hardware's products and rows the right one, so few rows waste
little. One warpgroup sums all inputs of an output, in one order whatever else is computed: a row's
bits do not depend on its company. Codes become numbers on their way from one place in shared memory
to another: they lie [inputs, outputs], and the hardware turns bfloat16 alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...activation import combine
from ...gpu.tile import Tiles, along_columns, along_rows
from .decode import decode_bytes, decode_packed
from .shape import DECODED, FEATURES, Operands, ProductShape, Task, each_task


def multiply(shape: ProductShape, operands: Operands, *, interpret: Any = None):
    """[blocks * rows, outputs]; blocks that there are not hold anything."""
    dtype = operands.x.dtype
    names = [name for name, x in operands._asdict().items() if x is not None]
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    out_line = 128 // jnp.dtype(shape.out_dtype).itemsize
    stages = shape.stages
    pieces = shape.warpgroups * shape.parts
    piece = (FEATURES, shape.step) if shape.turned else (shape.step, FEATURES)
    coded = (plgpu.TilingTransform((8, FEATURES)), plgpu.SwizzleTransform(FEATURES))
    more = {}
    if shape.codes:
        more["decoded_ref"] = plgpu.SMEM((DECODED, pieces, *piece), dtype, transforms=swizzled)
    if shape.packed:
        piece = shape.step // 2, FEATURES
        more["scale_ref"] = plgpu.SMEM(
            (stages, pieces, shape.groups, FEATURES), operands.group_scale.dtype
        )
    if shape.zeros:
        more["zero_ref"] = plgpu.SMEM(
            (stages, pieces, shape.zero_rows, FEATURES), operands.group_zero.dtype
        )
    kernel = plgpu.kernel(
        functools.partial(run, shape, Tiles(interpret is not None), names),
        out_type=jax.ShapeDtypeStruct((shape.blocks * shape.rows, shape.outputs), shape.out_dtype),
        scratch_types={
            "w_ref": plgpu.SMEM(
                (stages, pieces, *piece),
                operands.weight.dtype,
                transforms=coded if shape.codes else swizzled,
            ),
            "x_ref": plgpu.SMEM((stages, shape.rows, shape.step), dtype, transforms=swizzled),
            "out_ref": plgpu.SMEM(
                (shape.warpgroups, shape.rows, FEATURES),
                shape.out_dtype,
                transforms=(plgpu.TilingTransform((8, out_line)), plgpu.SwizzleTransform(128)),
            ),
            **more,
            "here": plgpu.Barrier(
                num_arrivals=1 + (1 + shape.packed + shape.zeros) * pieces, num_barriers=stages
            ),
            "free": plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=stages),
        },
        grid=(shape.processors,),
        grid_names=("processor",),
        num_threads=shape.warpgroups + 1,
        thread_name="part",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*(x for x in operands if x is not None))


def run(shape: ProductShape, tiles: Tiles, names, *refs, **shared):
    """What one processor does with its share of the tasks."""
    operands = Operands(
        **{**dict.fromkeys(Operands._fields), **dict(zip(names, refs, strict=False))}
    )
    part = lax.axis_index("part")

    @pl.when(part == shape.warpgroups)
    def _():
        plgpu.set_max_registers(40 if shape.warpgroups > 1 else 56, action="decrease")
        fetch_all(shape, operands, shared)

    for own in range(shape.warpgroups):

        @pl.when(part == own)
        def _(own=own):
            plgpu.set_max_registers(232 if shape.warpgroups > 1 else 256, action="increase")
            each_task(
                shape,
                operands,
                functools.partial(compute, shape, tiles, operands, shared, refs[-1], own),
            )
            plgpu.wait_smem_to_gmem(0)


def fetch_all(shape: ProductShape, operands: Operands, shared) -> None:
    """Copy what this processor's tasks need, in their order; return when all of it has been
    used.
    """

    def fetch(task: Task, step):
        def bring(k, step):
            slot = lax.rem(step, jnp.int32(shape.stages))

            @pl.when(step >= shape.stages)
            def _():
                plgpu.barrier_wait(shared["free"].at[slot])

            inputs = step_at(shape, k)
            here = shared["here"].at[slot]
            stored = pl.ds(k * (shape.step // 2), shape.step // 2) if shape.packed else inputs
            columns = inputs
            if shape.summands > 1:
                columns = pl.ds(
                    lax.rem(k, jnp.int32(shape.steps // shape.summands)) * shape.step, shape.step
                )
            rows = operands.x.at[pl.ds(task.row, shape.rows), columns]
            plgpu.copy_gmem_to_smem(rows, shared["x_ref"].at[slot], here)
            for place in range(shape.warpgroups * shape.parts):
                own, part = divmod(place, shape.parts)
                features = pl.ds(task.feature + own * FEATURES, FEATURES)
                at = (features, inputs) if shape.turned else (stored, part, features)
                plgpu.copy_gmem_to_smem(
                    operands.weight.at[task.expert, *at], shared["w_ref"].at[slot, place], here
                )
                if shape.packed:
                    groups = step_at(shape, k, shape.group)
                    scales = operands.group_scale.at[task.expert, groups, part, features]
                    plgpu.copy_gmem_to_smem(scales, shared["scale_ref"].at[slot, place], here)
                if shape.zeros:
                    groups = pl.ds(
                        step_at(shape, k, shape.group).start - zeros_before(shape, k),
                        shape.zero_rows,
                    )
                    zeros = operands.group_zero.at[task.expert, groups, part, features]
                    plgpu.copy_gmem_to_smem(zeros, shared["zero_ref"].at[slot, place], here)
            return step + 1

        return lax.fori_loop(0, shape.steps, bring, step)

    step = each_task(shape, operands, fetch)
    for slot in range(shape.stages):

        @pl.when(step > slot)
        def _(slot=slot):
            plgpu.barrier_wait(shared["free"].at[slot])


def step_at(shape: ProductShape, k, each: int = 1):
    """Where a step lies along an axis that has one place for so many inputs: the last step ends
    with them.
    """
    at = k * (shape.step // each)
    if shape.again:
        at = jnp.where(k == shape.steps - 1, (shape.inputs - shape.step) // each, at)
    return pl.ds(at, shape.step // each)


def zeros_before(shape: ProductShape, k):
    """Zeros that are copied before a step's own: its last one's come with those of the step
    before.
    """
    return jnp.where(k == shape.steps - 1, jnp.int32(shape.zero_rows - shape.groups), 0)


def compute(
    shape: ProductShape, tiles: Tiles, operands: Operands, shared, out, own: int, task: Task, step
):
    """One warpgroup's part of a task. Returns `step`, the number of copies so far."""
    stages = jnp.int32(shape.stages)

    def pieces(step, k):
        """References to a step's weights, of each part, and rows, once they are there."""
        slot = lax.rem(step, stages)
        plgpu.barrier_wait(shared["here"].at[slot])
        weights = [shared["w_ref"].at[slot, own * shape.parts + p] for p in range(shape.parts)]
        if shape.codes:
            codes = weights
            at = lax.rem(step, jnp.int32(DECODED))
            weights = [
                shared["decoded_ref"].at[at, own * shape.parts + p] for p in range(shape.parts)
            ]
            for p, (codes_ref, w_ref) in enumerate(zip(codes, weights, strict=True)):
                if shape.packed:
                    place = own * shape.parts + p
                    scale_ref = shared["scale_ref"].at[slot, place]
                    zero_ref = None
                    if shape.zeros:
                        zero_ref = shared["zero_ref"].at[
                            slot, place, pl.ds(zeros_before(shape, k), shape.groups)
                        ]
                    # What the last step holds once more was multiplied in the step before.
                    kept = jnp.where(k == shape.steps - 1, 0.0, 1.0) if shape.again else None
                    decode_packed(shape.codes, tiles, codes_ref, scale_ref, zero_ref, w_ref, kept)
                else:
                    decode_bytes(shape.codes, tiles, codes_ref, w_ref)
        return weights, shared["x_ref"].at[slot]

    def free(step):
        plgpu.barrier_arrive(shared["free"].at[lax.rem(step, stages)])

    if tiles.interpreted:

        def add(k, sums):
            w_refs, x_ref = pieces(step + k, k)
            x_NK = tiles.operand(x_ref)
            weights = [tiles.operand(w_ref) for w_ref in w_refs]
            free(step + k)
            weights = [w if shape.turned else w.T for w in weights]
            return [sum_in_order(total, w, x_NK) for total, w in zip(sums, weights, strict=True)]

        nothing = [jnp.zeros((FEATURES, shape.rows), jnp.float32)] * shape.parts
        sums = lax.fori_loop(0, shape.steps, add, nothing)
    else:

        def sum_all(*sum_refs):
            def add(k, _):
                w_refs, x_ref = pieces(step + k, k)
                for sum_ref, w_ref in zip(sum_refs, w_refs, strict=True):
                    w_ref = w_ref if shape.turned else w_ref.transpose((1, 0))
                    plgpu.wgmma(sum_ref, w_ref, x_ref.transpose((1, 0)))
                plgpu.wgmma_wait(shape.parts)  # the step before this one is done

                @pl.when(k > 0)
                def _():
                    free(step + k - 1)

            lax.fori_loop(0, shape.steps, add, None)
            return [sum_ref[...] for sum_ref in sum_refs]

        sum_refs = [plgpu.WGMMAAccumulatorRef((FEATURES, shape.rows), jnp.float32)] * shape.parts
        sums = pl.run_scoped(sum_all, *sum_refs)
        free(step + shape.steps - 1)

    write(
        shape,
        tiles,
        operands,
        shared["out_ref"].at[own],
        out,
        task,
        task.feature + own * FEATURES,
        sums,
    )
    return step + shape.steps


def sum_in_order(total_FN, w_FK, x_NK):
    """total + w @ x.T for the interpreter, where a product's order could depend on its sizes: the
    GPU's does not.
    """
    N, K = x_NK.shape
    x_NK = jnp.pad(x_NK, ((0, 128 - N), (0, 0)))
    for k in range(0, K, FEATURES):
        inputs = slice(k, k + FEATURES)
        total_FN = total_FN + jnp.dot(w_FK[:, inputs], x_NK[:, inputs].T)[:, :N]
    return total_FN


def write(
    shape: ProductShape, tiles: Tiles, operands: Operands, out_ref, out, task: Task, feature, sums
) -> None:
    """What comes after the sums, and their way to the card's memory."""
    parts = []
    for part, y_FN in enumerate(sums):
        if shape.codes and not shape.packed:
            scale_F = tiles.load_rows(
                operands.output_scale.at[task.expert, part, pl.ds(feature, FEATURES)]
            )
            y_FN = y_FN * along_rows(scale_F, y_FN.shape)
        if shape.rounded:
            scale_N = tiles.load_columns(operands.row_scale.at[pl.ds(task.row, shape.rows)])
            y_FN = y_FN * along_columns(scale_N, y_FN.shape)
        if shape.bias:
            bias_F = tiles.load_rows(operands.bias.at[task.expert, part, pl.ds(feature, FEATURES)])
            y_FN = y_FN + along_rows(bias_F, y_FN.shape)
        parts.append(y_FN)
    y_FN = (
        parts[0]
        if shape.parts == 1
        else combine(*parts, shape.activation or "", shape.clamp, shape.alpha)
    )
    if shape.weighed:
        scale_N = tiles.load_columns(operands.scale.at[pl.ds(task.row, shape.rows)])
        y_FN = y_FN * along_columns(scale_N, y_FN.shape)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results before these have been read
    y_FN = y_FN.astype(shape.out_dtype)
    if tiles.interpreted:
        out_ref[...] = y_FN.T
    else:
        tiles.store(
            out_ref.transpose((1, 0)), plgpu.layout_cast(y_FN, plgpu.Layout.WGMMA_TRANSPOSED), True
        )
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_ref, out.at[pl.ds(task.row, shape.rows), pl.ds(feature, FEATURES)])
