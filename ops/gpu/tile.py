"""Operations on tiles, for the GPU and for the interpreter on a CPU.

The interpreter supports neither layouts nor products with an operand in registers or transposed, so
it gets plain ones. It reads shared memory at the same places as the GPU, so that it finds the same
races.
"""

import functools
import operator

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
        """A tile in registers, as products take it; from plain memory its threads wait for each
        other.
        """
        return self.load_as(ref, plgpu.Layout.WGMMA, swizzled)

    def load_rows(self, ref):
        """One number for each row."""
        return self.load_as(ref, plgpu.Layout.WGMMA.reduce(1))

    def load_columns(self, ref):
        """One number for each column."""
        return self.load_as(ref, plgpu.Layout.WGMMA.reduce(0))

    def load_line(self, ref):
        """64, or a multiple of 128, numbers side by side."""
        return self.load_as(ref, line(ref.shape[0]))

    def full_line(self, size: int, value):
        """As many of one number."""
        found = jnp.full((size,), value, jnp.float32)
        return found if self.interpreted else plgpu.layout_cast(found, line(size))

    def load_as(self, ref, layout, optimized: bool = False):
        if self.interpreted:
            return ref[...]
        # later versions take it in the reference
        index = [()] if jax.__version_info__ < (0, 11) else []
        return plgpu.load(ref, *index, layout=layout, optimized=optimized)

    def store(self, ref, tile, swizzled: bool) -> None:
        """To shared memory; to plain memory its threads wait for each other."""
        if self.interpreted or not hasattr(plgpu, "store"):
            ref[...] = tile  # earlier versions choose by themselves
        else:
            plgpu.store(ref, tile, optimized=swizzled)

    def decode(self, codes: str, codes_JH_ref, out_JH_ref) -> None:
        """Codes as numbers, exactly; a code for NaN becomes some number."""
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
        """A float32 tile, or one number for each of its rows."""
        found = jnp.full(shape, value, jnp.float32)
        if self.interpreted:
            return found
        return plgpu.layout_cast(
            found, plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
        )

    def index(self, shape, axis: int, layout=plgpu.Layout.WGMMA):
        if self.interpreted:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def scores(self, q_MH, k_JH_ref, begun=lambda: None):
        """q @ k.T, of a tile in registers or shared memory and one in shared memory; `begun` is
        called beside it.
        """
        if self.interpreted:
            begun()
            return jnp.dot(self.operand(q_MH), self.operand(k_JH_ref).T)

        def multiply(sum_ref):
            plgpu.wgmma(sum_ref, q_MH, k_JH_ref.transpose((1, 0)))
            begun()
            return sum_ref[...]

        return pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((q_MH.shape[0], k_JH_ref.shape[0]), jnp.float32)
        )

    def arrive(self, ref, count, all_of_them):
        """Adds to a number in the card's memory: whether it is `all_of_them` by that, and zero
        again.

        Whoever adds the last finds what the others wrote before they added.
        """
        if self.interpreted:  # which computes one processor after the other
            found = ref[()] + count
            ref[()] = jnp.where(found == all_of_them, 0, found)
            return found == all_of_them
        number = plgpu.Layout.WG_SPLAT(())
        there = plgpu.ShapeDtypeStruct((), jnp.int32, number)
        arrive = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), number, number), return_type=there)(
            add_to
        )
        return arrive(ref, count, all_of_them) != 0

    def from_float8(self, bits, shift=operator.lshift):
        """The numbers of the bits of float8_e4m3fn, as int16; NaN becomes 480."""
        return self.times_power(shift(bits, 8) & -0x8000 | shift(bits, 4) & 0x7F0, 120)

    def times_power(self, bits, power: int):
        """The number of a bfloat16's bits times a power of two; subnormal ones count, which XLA
        drops on a CPU.
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
        """uint8 numbers as int16."""
        if self.interpreted:
            return codes.astype(jnp.int16)
        there = plgpu.ShapeDtypeStruct(codes.shape, jnp.int16, layout)
        return plgpu.inline_mgpu(arg_types=(layout,), return_type=there)(widen_words)(codes)

    def shift_pairs(self, layout, bits, count: int):
        """int16 numbers to the left, two in one instruction: what leaves the lower one of two
        enters the upper one.
        """
        if self.interpreted:
            return bits << count
        there = plgpu.ShapeDtypeStruct(bits.shape, bits.dtype, layout)
        return plgpu.inline_mgpu(arg_types=(layout,), return_type=there)(
            functools.partial(shift_words, count)
        )(bits)

    def operand(self, x):
        """An operand in the interpreter. wgmma reads shared memory as copies do and needs no fence;
        a load does.
        """
        read = x[...].astype(jnp.float32)
        plgpu.commit_smem()
        return read

    def add_product(self, sum_MH, p_MJ, v_JH_ref):
        """sum + p @ v."""
        if self.interpreted:
            return sum_MH + jnp.dot(self.operand(p_MJ), self.operand(v_JH_ref))

        def multiply(sum_ref):
            plgpu.wgmma(sum_ref, p_MJ, v_JH_ref)

        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(sum_MH))


def widen_words(context, codes):
    """The instructions of `Tiles.widen`, one for two numbers: the upper byte of each is one of
    zero's.
    """
    del context
    word = ir.IntegerType.get_signless(32)
    pairs = ir.VectorType.get((4,), ir.IntegerType.get_signless(16))

    def widened(register):
        four = mgpu.utils.bitcast(register, word)
        found = llvm.mlir_undef(ir.VectorType.get((2,), word))
        for n, bytes_of in enumerate(("0x4140", "0x4342")):
            two = llvm.inline_asm(word, [four], f"prmt.b32 $0, $1, 0, {bytes_of};", "=r,r")
            found = llvm.insertelement(found, two, arith.constant(word, n))
        return vector.bitcast(pairs, found)

    return of_registers(widened, codes)


def shift_words(count: int, context, bits):
    """The instructions of `Tiles.shift_pairs`."""
    del context
    word = ir.IntegerType.get_signless(32)

    def shifted(register):
        words = ir.VectorType.get((register.type.shape[0] // 2,), word)
        by = arith.constant(
            words, ir.DenseElementsAttr.get_splat(words, ir.IntegerAttr.get(word, count))
        )
        return vector.bitcast(register.type, arith.shli(vector.bitcast(words, register), by))

    return of_registers(shifted, bits)


def of_registers(function, x):
    """A tile of what a function makes of each register, as signed numbers."""
    registers = np.vectorize(function, otypes=[object])(x.registers)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True)


def add_to(context, ref, count, all_of_them):
    """The instructions of `Tiles.arrive`: one thread adds, and a barrier tells the others of its
    warpgroup.

    It releases what its warpgroup has written, which has waited for its copies together, and
    acquires what others have.
    """
    del context
    number = ir.IntegerType.get_signless(32)
    # its own: zero is for all
    barrier = arith.addi(mgpu.utils.warpgroup_idx(sync=False), mgpu.utils.c(1, number))
    one = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
    operands = [
        mgpu.utils.memref_ptr(ref),
        *(x.registers.item() for x in (count, all_of_them)),
        one,
        barrier,
    ]
    found = llvm.inline_asm(number, operands, ADD, "=r,l,r,r,b,r,~{memory}", has_side_effects=True)
    return mgpu.FragmentedArray.splat(found, (), is_signed=True)


ADD = """{
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
    """The layout of numbers side by side."""
    return (
        plgpu.Layout.WGMMA.reduce(1)
        if size == 64
        else plgpu.Layout.WG_STRIDED((size,), min(size // 128, 4))
    )


def words(width: int):
    """How bytes in rows of 64 or 128 are decoded: a thread has four of them side by side, and of
    few columns.

    The bytes that a warp loads at once are neighbours, whatever their swizzle.
    """
    if width == 128:
        return plgpu.Layout.TILED(plgpu.Tiling(((4, 128), (4,))), (-3,), (-2,), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (2, 64), (4,))), (-5,), (-3, -2), -1)


def along_rows(x_M, shape):
    """One number for each row, as a tile."""
    return jax.lax.broadcast_in_dim(x_M, shape, [0])


def along_columns(x_J, shape):
    """One number for each column, as a tile."""
    return jax.lax.broadcast_in_dim(x_J, shape, [1])
