"""Arrays that lie in a buffer of words: as a naive loop reads them, by the kernel and by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops import native
from quire.ops.native import unpack as module

SHAPES = [(5,), (3, 4), (), (0,), (2, 0, 3), (1, 1, 7), (257,)]
DTYPES = ["int32", "uint32", "float32", "bool"]


@pytest.fixture(params=["kernel", "XLA"])
def unpack(request, monkeypatch):
    if request.param == "XLA":
        monkeypatch.setattr(module, "has", lambda *names: False)
    elif not native.has("unpack"):
        pytest.skip("no compiler")
    return jax.jit(lambda words, like: module.unpack(words, like), static_argnums=1)


class Like(tuple):
    """Arrays that a jitted function can be told of."""

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other


@pytest.mark.parametrize("seed", range(5))
def test_as_a_loop_reads_them(unpack, seed):
    random = np.random.default_rng(seed)
    like = Like(
        np.zeros(SHAPES[random.integers(len(SHAPES))], str(random.choice(DTYPES)))
        for _ in range(20)
    )
    words = random.integers(-(2**31), 2**31, sum(array.size for array in like)).astype(np.int32)
    words[random.random(words.size) < 0.3] = 0
    rest = iter(words.tolist())
    for found, array in zip(unpack(words, like), like, strict=True):
        own = np.array([next(rest) for _ in range(array.size)], np.int32)
        want = own != 0 if array.dtype == bool else own.view(array.dtype)
        assert found.dtype == array.dtype and found.shape == array.shape
        assert np.asarray(found).tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("words", "like", "wrong"), [(3, np.zeros(4), "shorter"), (5, np.zeros(4), "longer")]
)
def test_another_size_is_refused(words, like, wrong):
    if not native.has("unpack"):
        pytest.skip("no compiler")
    with pytest.raises(jax.errors.JaxRuntimeError, match=wrong):
        module.unpack(jnp.zeros(words, jnp.int32), [like.astype(np.float32)])[0].block_until_ready()
