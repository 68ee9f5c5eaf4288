"""Compares dequantised weights with those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.model.families.gpt_oss import packed_source

torch = pytest.importorskip("torch")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


@pytest.mark.parametrize(("num_inputs", "output_shape"), [(64, (2, 48)), (96, (40,))])
def test_mxfp4_weights_are_dequantised_like_transformers(num_inputs, output_shape):
    """Dequantises blocks and scales of a checkpoint to dense matrices."""
    rng = np.random.default_rng(0)
    E = 3
    rows = int(np.prod(output_shape))
    stored_tensors = {
        "x_blocks": rng.integers(0, 256, (E, rows, num_inputs // 32, 16), np.uint8),
        "x_scales": rng.integers(1, 252, (E, rows, num_inputs // 32), np.uint8),
    }
    expected = mxfp4.convert_moe_packed_tensors(
        *(torch.tensor(value) for value in stored_tensors.values()), dtype=torch.float32
    )
    node = jax.tree.map(
        lambda source: jnp.asarray(source.parts[0].transform(stored_tensors[source.parts[0].name])),
        packed_source("mxfp4", "x", E, num_inputs, *output_shape),
    )
    actual = np.stack([np.asarray(node[e], np.float32) for e in range(E)])
    assert actual.shape == (E, num_inputs, *output_shape)
    if len(output_shape) == 2:  # the file interleaves gate and up
        actual = actual.swapaxes(2, 3).reshape(E, num_inputs, rows)
    np.testing.assert_array_equal(actual, expected.numpy())
