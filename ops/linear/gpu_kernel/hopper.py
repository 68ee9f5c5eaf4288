"""The product kernel for Hopper, in Mosaic GPU: blocks of rows times one expert's weight each.

One warpgroup is the producer, which copies operands to shared memory; the others multiply.

Weights are the left operand of the hardware's products and rows the right one, so that blocks of
few rows waste little. One warpgroup sums all inputs of an output in a fixed order, so results are
batch-invariant. Codes are decoded from one shared memory buffer to another: they lie [inputs,
outputs], and the hardware can transpose bfloat16 operands only.
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
    """Compute the product: [blocks * rows, outputs]. Blocks not in use have undefined results."""
    dtype = operands.x.dtype
    names = [name for name, x in operands._asdict().items() if x is not None]
    swizzled_layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    out_line = 128 // jnp.dtype(shape.out_dtype).itemsize
    stages = shape.stages
    pieces = shape.warpgroups * shape.projections
    piece = (FEATURES, shape.step) if shape.transposed else (shape.step, FEATURES)
    coded_layout = (plgpu.TilingTransform((8, FEATURES)), plgpu.SwizzleTransform(FEATURES))
    optional_scratch = {}
    if shape.codes:
        optional_scratch["decoded_ref"] = plgpu.SMEM(
            (DECODED, pieces, *piece), dtype, transforms=swizzled_layout
        )
    if shape.packed:
        piece = shape.step // 2, FEATURES
        optional_scratch["scale_ref"] = plgpu.SMEM(
            (stages, pieces, shape.groups, FEATURES), operands.group_scale.dtype
        )
    if shape.zeros:
        optional_scratch["zero_ref"] = plgpu.SMEM(
            (stages, pieces, shape.zero_rows, FEATURES), operands.group_zero.dtype
        )
    kernel = plgpu.kernel(
        functools.partial(run, shape, Tiles(interpret is not None), names),
        out_type=jax.ShapeDtypeStruct((shape.blocks * shape.rows, shape.outputs), shape.out_dtype),
        scratch_types={
            "w_ref": plgpu.SMEM(
                (stages, pieces, *piece),
                operands.weight.dtype,
                transforms=coded_layout if shape.codes else swizzled_layout,
            ),
            "x_ref": plgpu.SMEM(
                (stages, shape.rows, shape.step), dtype, transforms=swizzled_layout
            ),
            "out_ref": plgpu.SMEM(
                (shape.warpgroups, shape.rows, FEATURES),
                shape.out_dtype,
                transforms=(plgpu.TilingTransform((8, out_line)), plgpu.SwizzleTransform(128)),
            ),
            **optional_scratch,
            "full": plgpu.Barrier(
                num_arrivals=1 + (1 + shape.packed + shape.zeros) * pieces, num_barriers=stages
            ),
            "empty": plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=stages),
        },
        grid=(shape.processors,),
        grid_names=("processor",),
        num_threads=shape.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*(x for x in operands if x is not None))


def run(shape: ProductShape, tiles: Tiles, names, *refs, **shared):
    """The kernel's body: the work of one warpgroup of one processor."""
    operands = Operands(
        **{**dict.fromkeys(Operands._fields), **dict(zip(names, refs, strict=False))}
    )
    thread = lax.axis_index("warpgroup")

    @pl.when(thread == shape.warpgroups)
    def _():
        plgpu.set_max_registers(40 if shape.warpgroups > 1 else 56, action="decrease")
        fetch_all(shape, operands, shared)

    for warpgroup in range(shape.warpgroups):

        @pl.when(thread == warpgroup)
        def _(warpgroup=warpgroup):
            plgpu.set_max_registers(232 if shape.warpgroups > 1 else 256, action="increase")
            each_task(
                shape,
                operands,
                functools.partial(compute, shape, tiles, operands, shared, refs[-1], warpgroup),
            )
            plgpu.wait_smem_to_gmem(0)


def fetch_all(shape: ProductShape, operands: Operands, shared) -> None:
    """The producer: copy the operands of this processor's tasks, in order.

    Returns when the multiplying warpgroups have read all of them.
    """

    def fetch(task: Task, step):
        def copy_step(k, step):
            slot = lax.rem(step, jnp.int32(shape.stages))

            @pl.when(step >= shape.stages)
            def _():
                plgpu.barrier_wait(shared["empty"].at[slot])

            inputs = step_at(shape, k)
            full = shared["full"].at[slot]
            stored = pl.ds(k * (shape.step // 2), shape.step // 2) if shape.packed else inputs
            input_columns = inputs
            if shape.summands > 1:
                input_columns = pl.ds(
                    lax.rem(k, jnp.int32(shape.steps // shape.summands)) * shape.step, shape.step
                )
            rows = operands.x.at[pl.ds(task.row, shape.rows), input_columns]
            plgpu.copy_gmem_to_smem(rows, shared["x_ref"].at[slot], full)
            for piece in range(shape.warpgroups * shape.projections):
                warpgroup, projection = divmod(piece, shape.projections)
                features = pl.ds(task.feature + warpgroup * FEATURES, FEATURES)
                source = (features, inputs) if shape.transposed else (stored, projection, features)
                plgpu.copy_gmem_to_smem(
                    operands.weight.at[task.expert, *source],
                    shared["w_ref"].at[slot, piece],
                    full,
                )
                if shape.packed:
                    groups = step_at(shape, k, shape.group)
                    scales = operands.group_scale.at[task.expert, groups, projection, features]
                    plgpu.copy_gmem_to_smem(scales, shared["scale_ref"].at[slot, piece], full)
                if shape.zeros:
                    groups = pl.ds(
                        step_at(shape, k, shape.group).start - zero_offset(shape, k),
                        shape.zero_rows,
                    )
                    zeros = operands.group_zero.at[task.expert, groups, projection, features]
                    plgpu.copy_gmem_to_smem(zeros, shared["zero_ref"].at[slot, piece], full)
            return step + 1

        return lax.fori_loop(0, shape.steps, copy_step, step)

    step = each_task(shape, operands, fetch)
    for slot in range(shape.stages):

        @pl.when(step > slot)
        def _(slot=slot):
            plgpu.barrier_wait(shared["empty"].at[slot])


def step_at(shape: ProductShape, k, inputs_per_entry: int = 1):
    """The slice of step `k` along an axis with one entry for `inputs_per_entry` inputs.

    The last step ends with the axis, and may overlap the step before.
    """
    start = k * (shape.step // inputs_per_entry)
    if shape.repeated_inputs:
        start = jnp.where(
            k == shape.steps - 1, (shape.inputs - shape.step) // inputs_per_entry, start
        )
    return pl.ds(start, shape.step // inputs_per_entry)


def zero_offset(shape: ProductShape, k):
    """Offset of a step's zero points in the copied block; nonzero only in the last step."""
    return jnp.where(k == shape.steps - 1, jnp.int32(shape.zero_rows - shape.groups), 0)


def compute(
    shape: ProductShape,
    tiles: Tiles,
    operands: Operands,
    shared,
    out,
    warpgroup: int,
    task: Task,
    step,
):
    """One warpgroup's share of a task.

    Args:
        step: Number of pipeline steps before this task.

    Returns:
        `step` after the task.
    """
    stages = jnp.int32(shape.stages)

    def wait_for_step(step, k):
        """Wait for a step's copies, and decode its codes.

        Returns:
            (references to the weights of each projection, reference to the rows).
        """
        slot = lax.rem(step, stages)
        plgpu.barrier_wait(shared["full"].at[slot])
        weights = [
            shared["w_ref"].at[slot, warpgroup * shape.projections + p]
            for p in range(shape.projections)
        ]
        if shape.codes:
            code_refs = weights
            buffer = lax.rem(step, jnp.int32(DECODED))
            weights = [
                shared["decoded_ref"].at[buffer, warpgroup * shape.projections + p]
                for p in range(shape.projections)
            ]
            for p, (codes_ref, w_ref) in enumerate(zip(code_refs, weights, strict=True)):
                if shape.packed:
                    piece = warpgroup * shape.projections + p
                    scale_ref = shared["scale_ref"].at[slot, piece]
                    zero_ref = None
                    if shape.zeros:
                        zero_ref = shared["zero_ref"].at[
                            slot, piece, pl.ds(zero_offset(shape, k), shape.groups)
                        ]
                    # The repeated inputs of the last step were multiplied in the step before.
                    overlap_factor = (
                        jnp.where(k == shape.steps - 1, 0.0, 1.0) if shape.repeated_inputs else None
                    )
                    decode_packed(
                        shape.codes, tiles, codes_ref, scale_ref, zero_ref, w_ref, overlap_factor
                    )
                else:
                    decode_bytes(shape.codes, tiles, codes_ref, w_ref)
        return weights, shared["x_ref"].at[slot]

    def free(step):
        plgpu.barrier_arrive(shared["empty"].at[lax.rem(step, stages)])

    if tiles.interpreted:

        def add(k, sums):
            w_refs, x_ref = wait_for_step(step + k, k)
            x_NK = tiles.operand(x_ref)
            weights = [tiles.operand(w_ref) for w_ref in w_refs]
            free(step + k)
            weights = [w if shape.transposed else w.T for w in weights]
            return [sum_in_order(total, w, x_NK) for total, w in zip(sums, weights, strict=True)]

        zeros = [jnp.zeros((FEATURES, shape.rows), jnp.float32)] * shape.projections
        sums = lax.fori_loop(0, shape.steps, add, zeros)
    else:

        def sum_all(*sum_refs):
            def add(k, _):
                w_refs, x_ref = wait_for_step(step + k, k)
                for sum_ref, w_ref in zip(sum_refs, w_refs, strict=True):
                    w_ref = w_ref if shape.transposed else w_ref.transpose((1, 0))
                    plgpu.wgmma(sum_ref, w_ref, x_ref.transpose((1, 0)))
                plgpu.wgmma_wait(shape.projections)  # the products of the step before are done

                @pl.when(k > 0)
                def _():
                    free(step + k - 1)

            lax.fori_loop(0, shape.steps, add, None)
            return [sum_ref[...] for sum_ref in sum_refs]

        sum_refs = [
            plgpu.WGMMAAccumulatorRef((FEATURES, shape.rows), jnp.float32)
        ] * shape.projections
        sums = pl.run_scoped(sum_all, *sum_refs)
        free(step + shape.steps - 1)

    write(
        shape,
        tiles,
        operands,
        shared["out_ref"].at[warpgroup],
        out,
        task,
        task.feature + warpgroup * FEATURES,
        sums,
    )
    return step + shape.steps


def sum_in_order(total_FN, w_FK, x_NK):
    """total + w @ x.T for the interpreter, in an order that does not depend on the sizes."""
    N, K = x_NK.shape
    x_NK = jnp.pad(x_NK, ((0, 128 - N), (0, 0)))
    for k in range(0, K, FEATURES):
        inputs = slice(k, k + FEATURES)
        total_FN = total_FN + jnp.dot(w_FK[:, inputs], x_NK[:, inputs].T)[:, :N]
    return total_FN


def write(
    shape: ProductShape, tiles: Tiles, operands: Operands, out_ref, out, task: Task, feature, sums
) -> None:
    """Apply scales, bias and activation to the sums, and copy the results to global memory."""
    outputs = []
    for projection, y_FN in enumerate(sums):
        if shape.codes and not shape.packed:
            scale_F = tiles.load_rows(
                operands.output_scale.at[task.expert, projection, pl.ds(feature, FEATURES)]
            )
            y_FN = y_FN * along_rows(scale_F, y_FN.shape)
        if shape.rounded:
            scale_N = tiles.load_columns(operands.row_scale.at[pl.ds(task.row, shape.rows)])
            y_FN = y_FN * along_columns(scale_N, y_FN.shape)
        if shape.bias:
            bias_F = tiles.load_rows(
                operands.bias.at[task.expert, projection, pl.ds(feature, FEATURES)]
            )
            y_FN = y_FN + along_rows(bias_F, y_FN.shape)
        outputs.append(y_FN)
    y_FN = (
        outputs[0]
        if shape.projections == 1
        else combine(outputs[0], outputs[1], shape.activation or "", shape.clamp, shape.alpha)
    )
    if shape.weighted:
        scale_N = tiles.load_columns(operands.scale.at[pl.ds(task.row, shape.rows)])
        y_FN = y_FN * along_columns(scale_N, y_FN.shape)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous results have left the buffer
    y_FN = y_FN.astype(shape.out_dtype)
    if tiles.interpreted:
        out_ref[...] = y_FN.T
    else:
        tiles.store(
            out_ref.transpose((1, 0)), plgpu.layout_cast(y_FN, plgpu.Layout.WGMMA_TRANSPOSED), True
        )
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_ref, out.at[pl.ds(task.row, shape.rows), pl.ds(feature, FEATURES)])
