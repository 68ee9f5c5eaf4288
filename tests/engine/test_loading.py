"""What loading says while it goes on, and where it takes the weights from."""

import pytest

from quire import LLM, SamplingParams
from quire.model.checkpoint import hub
from quire.model.config import ModelError
from quire.serving import build
from quire.serving.api.options import EngineOptions
from quire.serving.progress import stages

GREEDY = SamplingParams(temperature=0, max_tokens=8)


class Terminal:
    """A stderr that is one, and remembers what it showed."""

    def __init__(self):
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        pass


def test_a_terminal_shows_each_stage(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with stages(None) as note:
        note("loading weights")
    assert "loading weights" in terminal.text
    told = []
    before = terminal.text
    with stages(told.append) as note:
        note("reading config")
    assert told == ["reading config"] and terminal.text == before


def test_nothing_is_shown_where_nobody_sees_it(capsys):
    with stages(None) as note:
        note("loading weights")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("first", [True, False])
def test_a_first_start_says_that_it_compiles_kernels(monkeypatch, first):
    class Built:
        def result(self) -> bool:
            return first

    monkeypatch.setattr(build.native, "prepare", lambda names: Built())
    told: list[str] = []
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "load_format": "dummy"}
    llm = LLM(progress=told.append, **options)
    assert told[:2] == ["reading config", "loading weights"]
    assert all(
        said.startswith("first start: compiling kernels and the step") == first for said in told[2:]
    )
    (one,) = llm.generate("Once", GREEDY)
    if first:  # the weights are random, but the same each time
        assert (
            LLM(**options).generate("Once", GREEDY)[0].outputs[0].token_ids
            == one.outputs[0].token_ids
        )


def test_random_weights_need_no_files(monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "resolve", lambda model, files, *rest: asked.append(files))
    for load_format in ("auto", "safetensors", "dummy"):
        build.folder_of(EngineOptions(load_format=load_format))
    assert asked == [hub.FILES, hub.FILES, hub.WITHOUT_WEIGHTS]


def test_other_formats_are_named():
    with pytest.raises(
        ModelError, match="load_format is 'gguf'; it can be auto, safetensors, dummy"
    ):
        EngineOptions(load_format="gguf")
    with pytest.raises(ModelError, match="hf_overrides is"):
        EngineOptions(hf_overrides="x")
