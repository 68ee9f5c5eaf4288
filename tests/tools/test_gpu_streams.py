"""The GPU check's streams through transformers, which a fake replaces."""

import pytest

from quire.scripts.gpu.common import TINY
from quire.scripts.gpu.serving import requests
from tools.peers.gpu_streams import compare

CHECKED = {
    "machine": {"seed": 3},
    "parts": {"serving": {"throughput": {"output_throughput": 250.0}}},
}


class FakePeer:
    def run(self, hf, prompts, answer, streams):
        assert hf is TINY.hf and (answer, streams) == (TINY.answer, TINY.streams)
        assert prompts == [sample.prompt for sample in requests(TINY, 3)]
        yield {"what": "A", "output_throughput": 100.0}
        yield {"what": "B", "output_throughput": 50.0}


def test_peer_gets_the_requests_of_the_check(capsys):
    results = compare(CHECKED, TINY, FakePeer())
    assert results["times"] == 2.5 and set(results) == {"times", "A", "B"}
    assert "2.50 times the best of these" in capsys.readouterr().out


def test_check_without_throughput_is_an_error():
    with pytest.raises(SystemExit, match="run the check with its part `serving`"):
        compare(CHECKED | {"parts": {}}, TINY, FakePeer())
