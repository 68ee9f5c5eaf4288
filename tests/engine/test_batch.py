"""The list of sizes: short, and with room for every step that the limits allow."""

import numpy as np
import pytest

from quire.serving.device.batch import choose, sizes


@pytest.mark.parametrize(("seqs", "rows"), [(1, 1), (1, 512), (2, 2), (3, 7), (4, 4), (32, 32), (32, 512), (256, 2048)])
def test_every_step_within_the_limits_has_a_size(seqs, rows):
    options = sizes(seqs, rows)
    assert len(options) <= 6
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, seqs + 1))
        decode = choose(options, count, count, count, decodes=True)
        assert decode.rows == decode.seqs
        size = choose(
            options, int(rng.integers(count, rows + 1)), count, int(rng.integers(0, max(seqs, 16) + 1)), False
        )
        assert size.rows != size.seqs
        assert size.samples >= max(seqs, 16)


def test_the_smallest_size_is_taken():
    options = sizes(32, 512)
    assert choose(options, 3, 3, 3, True).rows == 4
    assert choose(options, 5, 5, 5, True).rows == 16
    assert choose(options, 40, 2, 2, False).rows == 64
    assert choose(options, 65, 2, 2, False).rows == 512


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="600 rows"):
        choose(sizes(4, 512), 600, 1, 1, False)
