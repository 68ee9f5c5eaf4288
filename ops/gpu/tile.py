"""Operations on tiles of Mosaic GPU kernels, for the GPU and for the interpreter on a CPU.

The interpreter supports neither layouts nor products whose operand is in registers or transposed,
so it computes the same with plain arrays. It reads shared memory at the same points of the program
as the GPU, so that it detects the same races.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

LOG2_E = 1.4426950408889634


class Tiles:
    """Products, constants and indices of tiles of 64 rows."""

    def __init__(self, interpreted: bool):
        self.interpreted = interpreted

    def load(self, ref, swizzled: bool = False):
        """Load a tile to registers in the layout of products.

        If the memory is not swizzled, the warpgroup synchronises.
        """
        return self.load_as(ref, plgpu.Layout.WGMMA, swizzled)

    def load_rows(self, ref):
        """Load a vector with one number for each row of a tile."""
        return self.load_as(ref, plgpu.Layout.WGMMA.reduce(1))

    def load_columns(self, ref):
        """Load a vector with one number for each column of a tile."""
        return self.load_as(ref, plgpu.Layout.WGMMA.reduce(0))

    def load_line(self, ref):
        """Load a vector of 64 or a multiple of 128 numbers, for elementwise work."""
        return self.load_as(ref, line(ref.shape[0]))

    def full_line(self, size: int, value):
        """A vector of equal numbers in the layout of `load_line`."""
        values = jnp.full((size,), value, jnp.float32)
        return values if self.interpreted else plgpu.layout_cast(values, line(size))

    def load_as(self, ref, layout, optimized: bool = False):
        if self.interpreted:
            return ref[...]
        # JAX 0.11 and later take no index beside the reference
        index = [()] if jax.__version_info__ < (0, 11) else []
        return plgpu.load(ref, *index, layout=layout, optimized=optimized)

    def store(self, ref, tile, swizzled: bool) -> None:
        """Store a tile to shared memory; if that is not swizzled, the warpgroup synchronises."""
        if self.interpreted or not hasattr(plgpu, "store"):
            ref[...] = tile  # earlier versions of JAX choose the instructions themselves
        else:
            plgpu.store(ref, tile, optimized=swizzled)  # pyright: ignore[reportAttributeAccessIssue]

    def decode(self, codes: str, codes_JH_ref, out_JH_ref) -> None:
        """Convert int8 or float8 codes to the dtype of `out_JH_ref`, both in shared memory.

        The conversion is exact, except that NaN becomes some number.
        """
        size = min(codes_JH_ref.shape[1], 128)
        for c in range(0, codes_JH_ref.shape[1], size):
            codes_JC = self.load_as(codes_JH_ref.at[:, pl.ds(c, size)], words(size), True)
            if codes != "int8":
                bits_JC = self.widen(words(size), jax.lax.bitcast_convert_type(codes_JC, jnp.uint8))
                codes_JC = self.from_float8(
                    bits_JC, functools.partial(self.shift_pairs, words(size))
                )
            out_JH_ref[:, pl.ds(c, size)] = codes_JC.astype(out_JH_ref.dtype)
        plgpu.commit_smem()

    def full(self, shape, value):
        """A constant float32 tile, or a constant vector with one number for each row of a tile."""
        values = jnp.full(shape, value, jnp.float32)
        if self.interpreted:
            return values
        return plgpu.layout_cast(
            values, plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
        )

    def index(self, shape, axis: int, layout: Any = plgpu.Layout.WGMMA):
        """A tile with each element's index along an axis."""
        if self.interpreted:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def scores(self, q_MH, k_JH_ref, on_start=lambda: None):
        """q @ k.T; q is in registers or shared memory, k is in shared memory.

        `on_start` is called after the product has been issued, and runs while it is computed.
        """
        if self.interpreted:
            on_start()
            return jnp.dot(self.operand(q_MH), self.operand(k_JH_ref).T)

        def multiply(sum_ref):
            plgpu.wgmma(sum_ref, q_MH, k_JH_ref.transpose((1, 0)))
            on_start()
            return sum_ref[...]

        return pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((q_MH.shape[0], k_JH_ref.shape[0]), jnp.float32)
        )

    def arrive(self, ref, count, expected_count):
        """Atomically add to a counter in global memory; true for the caller that completes it.

        The counter is complete when it reaches `expected_count`, and is then reset to zero. The
        caller that completes it sees all that the other callers wrote before they arrived.
        """
        if self.interpreted:  # processors run one after the other
            count_so_far = ref[()] + count
            ref[()] = jnp.where(count_so_far == expected_count, 0, count_so_far)
            return count_so_far == expected_count
        number = plgpu.Layout.WG_SPLAT(())
        result_type = plgpu.ShapeDtypeStruct((), jnp.int32, number)
        arrive = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), number, number), return_type=result_type
        )(arrive_instructions)
        return arrive(ref, count, expected_count) != 0

    def from_float8(self, bits, shift=operator.lshift):
        """bfloat16 numbers from the bits of float8_e4m3fn, held in int16; NaN becomes 480.

        `shift` shifts int16 bits to the left; bits that cross into a neighbour are masked.
        """
        return self.times_power(shift(bits, 8) & -0x8000 | shift(bits, 4) & 0x7F0, 120)

    def times_power(self, bits, power: int):
        """Multiply bfloat16 numbers, given as int16 bits, by 2**power.

        Subnormal inputs are kept; the interpreter needs another way, as XLA flushes them on CPUs.
        """
        if not self.interpreted:
            return jax.lax.bitcast_convert_type(bits, jnp.bfloat16) * jnp.bfloat16(2.0**power)
        size = bits & 0x7FFF
        normal = jax.lax.bitcast_convert_type(size + (power << 7), jnp.bfloat16)
        number = jnp.where(
            size < 128, size.astype(jnp.bfloat16) * jnp.bfloat16(2.0 ** (power - 133)), normal
        )
        return jnp.where(bits < 0, -number, number)

    def widen(self, layout, codes):
        """Convert uint8 to int16."""
        if self.interpreted:
            return codes.astype(jnp.int16)
        result_type = plgpu.ShapeDtypeStruct(codes.shape, jnp.int16, layout)
        return plgpu.inline_mgpu(arg_types=(layout,), return_type=result_type)(widen_instructions)(
            codes
        )

    def shift_pairs(self, layout, bits, count: int):
        """Shift int16 numbers to the left, two by one 32-bit instruction.

        Bits that leave the lower number of a pair enter the upper one; the caller masks them.
        """
        if self.interpreted:
            return bits << count
        result_type = plgpu.ShapeDtypeStruct(bits.shape, bits.dtype, layout)
        return plgpu.inline_mgpu(arg_types=(layout,), return_type=result_type)(
            functools.partial(shift_instructions, count)
        )(bits)

    def operand(self, x):
        """An operand as a float32 array, for the interpreter.

        wgmma reads shared memory through the asynchronous proxy, as copies do, and needs no fence;
        the interpreter's load needs one.
        """
        values = x[...].astype(jnp.float32)
        plgpu.commit_smem()
        return values

    def add_product(self, sum_MH, p_MJ, v_JH_ref):
        """sum + p @ v; p is in registers, v is in shared memory."""
        if self.interpreted:
            return sum_MH + jnp.dot(self.operand(p_MJ), self.operand(v_JH_ref))

        def multiply(sum_ref):
            plgpu.wgmma(sum_ref, p_MJ, v_JH_ref)

        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(sum_MH))


def widen_instructions(context, codes):
    """The instructions of `Tiles.widen`: one `prmt` for two numbers, whose upper bytes are zero."""
    del context
    word = ir.IntegerType.get_signless(32)
    pairs = ir.VectorType.get((4,), ir.IntegerType.get_signless(16))

    def widened(register):
        packed_bytes = mgpu.utils.bitcast(register, word)
        word_pair = llvm.mlir_undef(ir.VectorType.get((2,), word))
        for n, selector in enumerate(("0x4140", "0x4342")):
            halves: Any = llvm.inline_asm(
                word, [packed_bytes], f"prmt.b32 $0, $1, 0, {selector};", "=r,r"
            )
            word_pair = llvm.insertelement(word_pair, halves, arith.constant(word, n))
        return vector.bitcast(pairs, word_pair)

    return map_registers(widened, codes)


def shift_instructions(count: int, context, bits):
    """The instructions of `Tiles.shift_pairs`."""
    del context
    word = ir.IntegerType.get_signless(32)

    def shifted(register):
        words = ir.VectorType.get((register.type.shape[0] // 2,), word)
        counts = arith.constant(
            words, ir.DenseElementsAttr.get_splat(words, ir.IntegerAttr.get(word, count))
        )
        return vector.bitcast(register.type, arith.shli(vector.bitcast(words, register), counts))

    return map_registers(shifted, bits)


def map_registers(function, x):
    """Apply a function to each register of a tile; the results are signed numbers."""
    registers = np.vectorize(function, otypes=[object])(x.registers)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True)


def arrive_instructions(context, ref, count, expected_count):
    """The instructions of `Tiles.arrive`: one thread adds, and a barrier tells its warpgroup.

    The addition releases the warpgroup's writes, for which all its threads have waited before, and
    acquires the writes of other processors.
    """
    del context
    number = ir.IntegerType.get_signless(32)
    # each warpgroup has a barrier of its own; barrier 0 is for the whole block
    barrier = arith.addi(mgpu.utils.warpgroup_idx(sync=False), mgpu.utils.c(1, number))
    is_leader = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
    operands = [
        mgpu.utils.memref_ptr(ref),
        *(x.registers.item() for x in (count, expected_count)),
        is_leader,
        barrier,
    ]
    has_all: Any = llvm.inline_asm(
        number, operands, ARRIVE_PTX, "=r,l,r,r,b,r,~{memory}", has_side_effects=True
    )
    return mgpu.FragmentedArray.splat(has_all, (), is_signed=True)


ARRIVE_PTX = """{
    .reg .pred all;
    .reg .b32 found;
    mov.b32 found, 0;
    setp.ne.u32 all, $2, $2;
    @$4 atom.acq_rel.gpu.global.add.u32 found, [$1], $2;
    @$4 add.u32 found, found, $2;
    @$4 setp.eq.u32 all, found, $3;
    @all st.relaxed.gpu.global.u32 [$1], 0;
    barrier.cta.red.or.pred all, $5, 128, all;
    selp.b32 $0, 1, 0, all;
}"""


def line(size: int):
    """The layout of a vector for elementwise work."""
    return (
        plgpu.Layout.WGMMA.reduce(1)
        if size == 64
        else plgpu.Layout.WG_STRIDED((size,), min(size // 128, 4))
    )


def words(width: int):
    """The layout in which byte codes in rows of 64 or 128 are decoded: 32-bit words of four codes.

    A thread has words of few columns. A warp loads contiguous bytes at once, whatever the swizzle.
    """
    if width == 128:
        return plgpu.Layout.TILED(plgpu.Tiling(((4, 128), (4,))), (-3,), (-2,), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (2, 64), (4,))), (-5,), (-3, -2), -1)


def along_rows(x_M, shape):
    """Broadcast a vector with one number for each row to a tile."""
    return jax.lax.broadcast_in_dim(x_M, shape, [0])


def along_columns(x_J, shape):
    """Broadcast a vector with one number for each column to a tile."""
    return jax.lax.broadcast_in_dim(x_J, shape, [1])
