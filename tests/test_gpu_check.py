"""The check for machines with a GPU, as far as it goes without one: its own reference, counts and refusal."""

from functools import partial

import jax
import numpy as np
import pytest

from quire.ops.attention import xla
from quire.scripts import gpu_check
from quire.scripts.gpu_check import RIGHT, Work, arrays, attend, reference


@pytest.mark.parametrize("work", [work for work in RIGHT if work.length < 600], ids=lambda work: work.name)
def test_its_reference_is_what_xla_says(work):
    inputs = arrays(work, 3)
    wanted = reference(work, *inputs)
    out = np.asarray(jax.jit(partial(attend, work, xla.paged_attention))(*inputs), np.float64)
    assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 4e-3


def test_what_it_counts():
    """Bytes and operations of small cases, counted by hand."""
    assert Work("", 2, 10, heads=2, kv_heads=1, width=4).operations == 4 * 2 * 10 * 2 * 4
    assert Work("", 1, 3, rows=3, heads=1, kv_heads=1, width=1).operations == 4 * (1 + 2 + 3)
    assert Work("", 1, 100, heads=1, kv_heads=1, width=1, window=10).operations == 4 * 10
    assert Work("", 1, 100, heads=1, kv_heads=1, width=1, window=10).bytes == 2 * 2 * 10 + 2 * 2
    assert Work("", 2, 100, heads=4, kv_heads=2, width=8).bytes == 2 * (100 * 2 * 8 * 4) + 2 * 2 * 2 * 4 * 8


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == 1 and "no NVIDIA GPU" in capsys.readouterr().err
