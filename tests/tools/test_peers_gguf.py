"""What the comparison with llama.cpp counts, and that Quire's half of it runs."""

from quire.tests.support import tiny_gguf
from tools.peers.gguf import alike, run


def test_tokens_are_counted_up_to_the_first_that_differs():
    assert alike([1, 2, 3], [1, 2, 3]) == 3
    assert alike([1, 2, 3], [1, 4, 3]) == 1
    assert alike([], []) == 0


def test_what_quire_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_gguf.write(tmp_path / "model.gguf", "Q8_0")
    found = run(tmp_path / "model.gguf", ["a story", "rain"], 60, "auto")
    assert [len(answer) for answer in found["answers"]] == [60, 60]
    assert found["asked"][0][0] == 1 and found["asked"][0] != found["asked"][1]
    assert found["pace"] > 0 and found["start"] > 0
