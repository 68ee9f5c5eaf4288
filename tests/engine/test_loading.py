"""Progress messages while a model is loaded, and the source of its weights."""

import pytest

from quire import LLM, SamplingParams
from quire.model.checkpoint import hub
from quire.model.config import ModelError
from quire.serving import build
from quire.serving.api.options import EngineOptions
from quire.serving.progress import stages

GREEDY = SamplingParams(temperature=0, max_tokens=8)


class Terminal:
    """A stderr that is a terminal and keeps the text written to it."""

    def __init__(self):
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        pass


def test_loading_stages_are_shown_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with stages(None) as note:
        note("loading weights")
    assert "loading weights" in terminal.text
    notes = []
    text_before = terminal.text
    with stages(notes.append) as note:
        note("reading config")
    assert notes == ["reading config"] and terminal.text == text_before


def test_loading_stages_are_hidden_without_a_terminal(capsys):
    with stages(None) as note:
        note("loading weights")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_first_start", [True, False])
def test_first_start_reports_kernel_compilation(monkeypatch, is_first_start):
    class KernelBuild:
        def result(self) -> bool:
            return is_first_start

    monkeypatch.setattr(build.native, "prepare", lambda *_: KernelBuild())
    notes: list[str] = []
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "load_format": "dummy"}
    llm = LLM(progress=notes.append, **options)
    assert notes[:2] == ["reading config", "loading weights"]
    assert all(
        message.startswith("first start: compiling kernels and the step") == is_first_start
        for message in notes[2:]
    )
    (output,) = llm.generate("Once", GREEDY)
    if is_first_start:  # the weights are random, but the same each time
        assert (
            LLM(**options).generate("Once", GREEDY)[0].outputs[0].token_ids
            == output.outputs[0].token_ids
        )


def test_dummy_load_format_downloads_no_weights(monkeypatch):
    requested_files = []
    monkeypatch.setattr(
        hub, "resolve", lambda model, files, *arguments: requested_files.append(files)
    )
    for load_format in ("auto", "safetensors", "dummy"):
        build.folder_of(EngineOptions(load_format=load_format))
    assert requested_files == [hub.FILES, hub.FILES, hub.WITHOUT_WEIGHTS]


def test_invalid_load_format_and_hf_overrides_are_refused():
    with pytest.raises(
        ModelError, match="load_format is 'gguf'; it can be auto, safetensors, dummy"
    ):
        EngineOptions(load_format="gguf")
    with pytest.raises(ModelError, match="hf_overrides is"):
        EngineOptions(hf_overrides="x")
