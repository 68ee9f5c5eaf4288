"""The comparison with llama.cpp: counting equal tokens, and a run of Quire's side."""

from quire.tests.support import tiny_gguf
from tools.peers.gguf import alike, run


def test_alike_counts_the_common_prefix_of_tokens():
    assert alike([1, 2, 3], [1, 2, 3]) == 3
    assert alike([1, 2, 3], [1, 4, 3]) == 1
    assert alike([], []) == 0


def test_quires_side_of_the_gguf_comparison_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_gguf.write(tmp_path / "model.gguf", "Q8_0")
    result = run(tmp_path / "model.gguf", ["a story", "rain"], 60, "auto")
    assert [len(answer) for answer in result["answers"]] == [60, 60]
    assert result["asked"][0][0] == 1 and result["asked"][0] != result["asked"][1]
    assert result["pace"] > 0 and result["start"] > 0
