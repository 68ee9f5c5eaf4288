"""Step sizes: a short list, with a size for every step within the limits."""

import numpy as np
import pytest

from quire.model.config import ModelError
from quire.serving.api.options import EngineOptions
from quire.serving.device.step_shape import StepShape, choose, sizes


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("seqs", "rows"), [(1, 1), (1, 512), (2, 2), (3, 7), (4, 4), (32, 32), (32, 512), (256, 8192)]
)
def test_every_step_within_the_limits_has_a_size(seqs, rows, platform):
    options = sizes(StepShape.largest(seqs, rows, 16), platform)
    assert len(options) <= (6 if platform == "cpu" else 10)
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, seqs + 1))
        decode = choose(options, count, count, count, decodes=True)
        assert decode.rows == decode.seqs
        size = choose(
            options,
            int(rng.integers(count, rows + 1)),
            count,
            int(rng.integers(0, max(seqs, 16) + 1)),
            False,
        )
        assert size.rows != size.seqs
        assert size.samples >= max(seqs, 16)


def test_smallest_sufficient_size_is_chosen():
    options = sizes(StepShape.largest(32, 512, 32))
    assert choose(options, 3, 3, 3, True).rows == 4
    assert choose(options, 5, 5, 5, True).rows == 16
    assert choose(options, 40, 2, 2, False).rows == 64
    assert choose(options, 65, 2, 2, False).rows == 512


def test_gpu_step_sizes():
    options = sizes(StepShape.largest(256, 8192, 256), "gpu")
    decode = [size.rows for size in options if size.rows == size.seqs]
    assert decode == [16, 32, 64, 128, 256]
    assert [size.rows for size in options if size.rows != size.seqs] == [512, 2048, 8192]


def test_gpu_verify_sizes_are_multiples_of_product_tiles():
    """Sizes have room for all tokens of a step, and fit whole tiles of the products."""
    options = sizes(StepShape.largest(256, 2048, 256, max_drafts=4), "gpu")
    for size in options:
        assert size.rows <= 64 or size.rows % 128 == 0
    for seqs in (1, 2, 16, 17, 33, 64, 100, 256):
        rows = 5 * seqs
        size = choose(options, rows, seqs, rows, True)
        assert size.samples == size.rows >= rows
    shape = StepShape.largest(64, 300, 64, max_drafts=4)
    verify_rows = [size.rows for size in sizes(shape, "gpu") if size.samples == size.rows]
    assert max(verify_rows) == 300 and {*verify_rows} <= {16, 32, 64, 128, 256, 300}


@pytest.mark.parametrize(
    ("platform", "limits"), [("cpu", (32, 512)), ("tpu", (32, 512)), ("gpu", (256, 8192))]
)
def test_default_limits_depend_on_the_platform(platform, limits):
    options = EngineOptions().on(platform)
    assert (options.max_num_seqs, options.max_num_batched_tokens) == limits
    options = EngineOptions(max_num_seqs=3, data_parallel_size=2).on(platform)
    assert (options.max_num_seqs, options.max_num_batched_tokens, options.max_running) == (
        3,
        limits[1],
        6,
    )
    with pytest.raises(
        ModelError, match="max_num_batched_tokens is 8; it must be at least max_num_seqs"
    ):
        EngineOptions(max_num_batched_tokens=8).on(platform)


def test_step_larger_than_all_sizes_is_an_error():
    with pytest.raises(ValueError, match="600 rows"):
        choose(sizes(StepShape.largest(4, 512, 16)), 600, 1, 1, False)
