"""Packed weights as transformers widens them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.model.families.gpt_oss import packed_source

torch = pytest.importorskip("torch")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


@pytest.mark.parametrize(("into", "out"), [(64, (2, 48)), (96, (40,))])
def test_mxfp4(into, out):
    """From a file's blocks and scales to dense matrices, by both ways."""
    rng = np.random.default_rng(0)
    E = 3
    rows = int(np.prod(out))
    stored = {
        "x_blocks": rng.integers(0, 256, (E, rows, into // 32, 16), np.uint8),
        "x_scales": rng.integers(1, 252, (E, rows, into // 32), np.uint8),
    }
    theirs = mxfp4.convert_moe_packed_tensors(
        *(torch.tensor(value) for value in stored.values()), dtype=torch.float32
    )
    node = jax.tree.map(
        lambda source: jnp.asarray(source.parts[0].turn(stored[source.parts[0].name])),
        packed_source("mxfp4", "x", E, into, *out),
    )
    ours = np.stack([np.asarray(node[e], np.float32) for e in range(E)])
    assert ours.shape == (E, into, *out)
    if len(out) == 2:  # gate and up take turns in the file
        ours = ours.swapaxes(2, 3).reshape(E, into, rows)
    np.testing.assert_array_equal(ours, theirs.numpy())
