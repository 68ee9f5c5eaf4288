"""Memory of zeros, whatever lay there before, that is taken only as it is written."""

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from quire.model.config import CACHES
from quire.ops import native
from quire.ops.attention import page_dtype
from quire.ops.native import blank as module
from quire.ops.native.blank import blank

MIB = 1 << 20

if not native.has("blank"):
    pytest.skip("no compiler", allow_module_level=True)

PAGE_DTYPES = {page_dtype(jnp.dtype(dtype or "bfloat16")).name for dtype in CACHES.values()}
DTYPES = sorted(PAGE_DTYPES | {"bfloat16", "bool", "float32", "int32"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros(dtype):
    """As zeros: shape, type and values, of an odd size too."""
    made = blank((3, 1021, 1031), dtype)
    want = np.zeros((3, 1021, 1031), dtype)
    assert made.dtype == want.dtype and made.shape == want.shape
    assert np.asarray(made).tobytes() == want.tobytes()


def test_used_memory(monkeypatch):
    """Memory that held something is empty again, large and small, aligned to pages or not."""
    monkeypatch.setattr(module, "SMALL", 0)
    for size in [1, 5, 1000, 4095, 4096, 4097, 12289, MIB, 40 * MIB + 3]:
        for _ in range(3):  # the allocator gives back what was last let go
            jax.block_until_ready(jnp.full(size, 255, jnp.uint8) + jnp.uint8(0)).delete()
            made = blank((size,), jnp.uint8)
            assert not np.asarray(made).any(), size
            made.delete()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blank_leaves_neighbouring_arrays_alone(dtype):
    """Arrays before and after the cleared one keep what they hold, in memory that is given back to
    the system.
    """
    held = [jnp.ones((4, MIB), jnp.uint8) + jnp.uint8(1) for _ in range(9)]
    jax.block_until_ready(held)
    for array in held[1::2]:
        array.delete()
    size = 4 * MIB // np.dtype(dtype).itemsize
    made = [jax.block_until_ready(blank((size,), dtype)) for _ in held[1::2]]
    assert all((np.asarray(array) == 2).all() for array in held[::2])
    assert not any(np.asarray(array).view(np.uint8).any() for array in made)


def test_types_narrower_than_a_byte_are_zeros_of_xla():
    assert not np.asarray(blank((4, MIB), jnp.int4)).any()


def test_takes_no_memory():
    """A gigabyte that nobody writes to is not there; what a program writes is, and the rest stays
    zero.
    """
    write = jax.jit(lambda x: x.at[5].set(1), donate_argnums=0)
    write(blank((8, MIB // 2)))
    process = psutil.Process()
    before = process.memory_info().rss
    pool = jax.block_until_ready(blank((512, MIB // 2)))
    assert process.memory_info().rss - before < 64 * MIB
    pool = jax.block_until_ready(write(pool))
    assert process.memory_info().rss - before < 128 * MIB
    assert float(pool[5].sum()) == MIB // 2 and float(pool[6].sum()) == 0


def test_in_one_program():
    """Two in one program are two."""

    @jax.jit
    def make():
        return blank((MIB,)), blank((MIB,))

    a, b = make()
    assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()
    assert not np.asarray(a).any() and not np.asarray(b).any()


def test_without_kernels(monkeypatch):
    """Zeros by XLA elsewhere."""
    monkeypatch.setattr(module, "has", lambda *names: False)
    assert not np.asarray(blank((MIB,))).any()
