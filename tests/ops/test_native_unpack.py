"""Unpacking arrays from a buffer of int32 words, by the kernel and by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops import native
from quire.ops.native import unpack as native_unpack

SHAPES = [(5,), (3, 4), (), (0,), (2, 0, 3), (1, 1, 7), (257,)]
DTYPES = ["int32", "uint32", "float32", "bool"]


@pytest.fixture(params=["kernel", "XLA"])
def unpack(request, monkeypatch):
    if request.param == "XLA":
        monkeypatch.setattr(native_unpack, "has", lambda *names: False)
    elif not native.has("unpack"):
        pytest.skip("no compiler")
    return jax.jit(
        lambda words, templates: native_unpack.unpack(words, templates), static_argnums=1
    )


class ArrayTemplates(tuple):
    """Hashable tuple of arrays for a static argument."""

    def __hash__(self):
        return id(self)

    def __eq__(self, other_templates):
        return self is other_templates


@pytest.mark.parametrize("seed", range(5))
def test_unpacked_arrays_match_a_loop(unpack, seed):
    random = np.random.default_rng(seed)
    templates = ArrayTemplates(
        np.zeros(SHAPES[random.integers(len(SHAPES))], str(random.choice(DTYPES)))
        for _ in range(20)
    )
    words = random.integers(-(2**31), 2**31, sum(array.size for array in templates)).astype(
        np.int32
    )
    words[random.random(words.size) < 0.3] = 0
    remaining_words = iter(words.tolist())
    for actual, array in zip(unpack(words, templates), templates, strict=True):
        array_words = np.array([next(remaining_words) for _ in range(array.size)], np.int32)
        expected = array_words != 0 if array.dtype == bool else array_words.view(array.dtype)
        assert actual.dtype == array.dtype and actual.shape == array.shape
        assert np.asarray(actual).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("words", "template", "message"), [(3, np.zeros(4), "shorter"), (5, np.zeros(4), "longer")]
)
def test_buffer_of_a_wrong_size_is_rejected(words, template, message):
    if not native.has("unpack"):
        pytest.skip("no compiler")
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        native_unpack.unpack(jnp.zeros(words, jnp.int32), [template.astype(np.float32)])[
            0
        ].block_until_ready()
