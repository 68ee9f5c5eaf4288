"""Images on the command line, with a tiny model."""

import io
import json
import sys

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.__main__ import main
from quire.tests.support import tiny_vision

pytest.importorskip("PIL")

OPTIONS = ["--max-model-len", "400", "--kv-cache-memory-bytes", "8M", "--max-tokens", "8"]
OPTIONS += ["--temperature", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vision.write(tmp_path_factory.mktemp("vision"), "qwen3_vl")


@pytest.fixture(scope="module")
def image_file(tmp_path_factory):
    from PIL import Image

    path = tmp_path_factory.mktemp("images") / "a picture.png"
    Image.fromarray(tiny_vision.random_image(np.random.default_rng(0))).save(path)
    return path


@pytest.fixture(scope="module")
def expected(folder, image_file):
    """The answers to the prompt in a chat, without and with the image."""
    from PIL import Image

    text = {"type": "text", "text": "Hi"}
    image = {"type": "image_pil", "image_pil": Image.open(image_file)}
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(folder), max_model_len=400, max_num_seqs=1, kv_cache_memory_bytes=8 << 20) as llm:
        chats = [[{"role": "user", "content": content}] for content in ("Hi", [image, text])]
        chat = [output.outputs[0].text for output in llm.chat(chats, params)]
        prompt = {
            "prompt": tiny_vision.PLACEHOLDER + "Hi",
            "multi_modal_data": {"image": image_file.read_bytes()},
        }
        (output,) = llm.generate([prompt], params)
    assert chat[0] != chat[1]
    return {"text": chat[0], "image": chat[1], "generate": output.outputs[0].text}


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quire", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as leaving:
            main()
        return (leaving.value.code or 0, *capsys.readouterr())

    return call


def test_generate_reads_image_files(run, folder, image_file, expected):
    for prompt in ("Hi", tiny_vision.PLACEHOLDER + "Hi"):
        arguments = "--prompt", prompt, "--image", image_file, *OPTIONS
        code, out, _ = run("generate", folder, *arguments)
        assert (code, out) == (0, expected["generate"] + "\n")


def test_run_reads_image_files(run, folder, image_file, expected):
    code, out, err = run("run", folder, "Hi", "--image", image_file, *OPTIONS)
    assert (code, out.strip()) == (0, expected["image"].strip()), err


def test_chat_attaches_images_and_saves_them(run, folder, image_file, expected, tmp_path):
    saved = tmp_path / "talk.json"
    lines = ["Hi", "/reset", f"/image {image_file}", "Hi", f"/save {saved}", "/image missing.png"]
    code, out, err = run("chat", folder, *OPTIONS, stdin="\n".join(lines))
    assert code == 0
    assert out.index(expected["text"].strip()) < out.index(expected["image"].strip())
    assert "missing.png cannot be read: No such file or directory" in err
    conversation = json.loads(saved.read_text())["messages"]
    assert [part["type"] for part in conversation[0]["content"]] == ["image_url", "text"]
    assert run("chat", folder, "--resume", saved, *OPTIONS, stdin="Again")[0] == 0


def test_images_for_a_text_model_are_refused(run, folder, image_file):
    for command in (("generate", folder, "--prompt", "Hi"), ("run", folder, "Hi")):
        arguments = "--image", image_file, "--language-model-only", *OPTIONS
        code, _, err = run(*command, *arguments)
        assert code == 2 and "error: --image is given, and the model reads text only" in err
    code, _, err = run("chat", folder, "--language-model-only", *OPTIONS, stdin="/image a.png")
    assert code == 0 and "the model reads text only" in err
