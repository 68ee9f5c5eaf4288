"""Arrays of zeros whose memory is committed only when it is written."""

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from quire.model.config import CACHES
from quire.ops import native
from quire.ops.attention import page_dtype
from quire.ops.native import blank as native_blank
from quire.ops.native.blank import blank

MIB = 1 << 20

if not native.has("blank"):
    pytest.skip("no compiler", allow_module_level=True)

PAGE_DTYPES = {page_dtype(jnp.dtype(dtype or "bfloat16")).name for dtype in CACHES.values()}
DTYPES = sorted(PAGE_DTYPES | {"bfloat16", "bool", "float32", "int32"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_blank_returns_zeros(dtype):
    """Also of an odd size."""
    array = blank((3, 1021, 1031), dtype)
    expected = np.zeros((3, 1021, 1031), dtype)
    assert array.dtype == expected.dtype and array.shape == expected.shape
    assert np.asarray(array).tobytes() == expected.tobytes()


def test_reused_memory_is_zeroed(monkeypatch):
    """For small and large sizes, aligned to pages or not."""
    monkeypatch.setattr(native_blank, "SMALL", 0)
    for size in [1, 5, 1000, 4095, 4096, 4097, 12289, MIB, 40 * MIB + 3]:
        for _ in range(3):  # the allocator returns the memory that was freed last
            jax.block_until_ready(jnp.full(size, 255, jnp.uint8) + jnp.uint8(0)).delete()
            array = blank((size,), jnp.uint8)
            assert not np.asarray(array).any(), size
            array.delete()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blank_leaves_neighbouring_arrays_alone(dtype):
    """Arrays before and after the blank one keep their values."""
    neighbours = [jnp.ones((4, MIB), jnp.uint8) + jnp.uint8(1) for _ in range(9)]
    jax.block_until_ready(neighbours)
    for array in neighbours[1::2]:
        array.delete()
    size = 4 * MIB // np.dtype(dtype).itemsize
    blank_arrays = [jax.block_until_ready(blank((size,), dtype)) for _ in neighbours[1::2]]
    assert all((np.asarray(array) == 2).all() for array in neighbours[::2])
    assert not any(np.asarray(array).view(np.uint8).any() for array in blank_arrays)


def test_sub_byte_dtypes_are_zeros_of_xla():
    assert not np.asarray(blank((4, MIB), jnp.int4)).any()


def test_unwritten_memory_is_not_committed():
    """Only the written part of a gigabyte is resident; the rest stays zero."""
    write = jax.jit(lambda x: x.at[5].set(1), donate_argnums=0)
    write(blank((8, MIB // 2)))
    process = psutil.Process()
    rss_before = process.memory_info().rss
    pool = jax.block_until_ready(blank((512, MIB // 2)))
    assert process.memory_info().rss - rss_before < 64 * MIB
    pool = jax.block_until_ready(write(pool))
    assert process.memory_info().rss - rss_before < 128 * MIB
    assert float(pool[5].sum()) == MIB // 2 and float(pool[6].sum()) == 0


def test_two_blank_arrays_in_one_program_are_distinct():
    """XLA must not merge the two calls."""

    @jax.jit
    def make():
        return blank((MIB,)), blank((MIB,))

    a, b = make()
    assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()
    assert not np.asarray(a).any() and not np.asarray(b).any()


def test_without_kernels_xla_returns_zeros(monkeypatch):
    """XLA's zeros are the fallback."""
    monkeypatch.setattr(native_blank, "has", lambda *names: False)
    assert not np.asarray(blank((MIB,))).any()
