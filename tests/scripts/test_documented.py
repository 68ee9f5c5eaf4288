"""Commands and scripts in README and docs: all parse, and those of the first pages run."""

import ast
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import typer

import quire
from quire.__main__ import app
from quire.serving.api.options import EngineOptions
from quire.tests.support import tiny, tiny_gguf
from quire.tests.support.cases import thinned
from quire.tests.support.talk import bundled_server
from quire.tests.support.violations import require_none

ROOT = Path(quire.__file__).resolve().parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`((?:quire|python -m (?:quire|tools)\.[\w.]+) [^`]+ [^`]+)`")
COMMAND = re.compile(r"(?:^|\| |\$ )((?:quire|python -m (?:quire|tools)\.[\w.]+) .*)")


def code_blocks(page: Path, language: str) -> list[str]:
    return [
        text
        for block_language, text in FENCE.findall(page.read_text())
        if block_language == language
    ]


def documented_commands(page: Path) -> list[str]:
    """Commands in a page's code blocks and, if they have arguments, in backquotes; no comments."""
    lines = [
        line for block in code_blocks(page, "") for line in block.replace("\\\n", " ").splitlines()
    ]
    texts = [match[1] for line in lines if (match := COMMAND.search(line))]
    texts += [
        text for text in QUOTED.findall(FENCE.sub("", page.read_text())) if "COMMAND" not in text
    ]
    return [
        shlex.join(shlex.split(re.sub(r" N$", " 8", text.replace(" ...", "")), comments=True))
        for text in texts
    ]


DOCUMENTED = sorted({(page.name, text) for page in PAGES for text in documented_commands(page)})


def check_usage(command, name: str, words: list[str]) -> None:
    """Parse as the command line does; in a command group the next word names a subcommand."""
    if hasattr(command, "commands"):
        if words and not words[0].startswith("-"):
            assert (inner := command.get_command(None, words[0])) is not None, (
                f"there is no `{name} {words[0]}`"
            )
            check_usage(inner, f"{name} {words[0]}", words[1:])
    else:
        command.make_context(name, words)


def parse_command(text: str) -> None:
    """Parse a documented command; raises where the program would report a usage error."""
    words = shlex.split(text)
    if words[0] == "quire":
        check_usage(typer.main.get_command(app), "quire", words[1:])
    elif "typer.run" in inspect.getsource(module := import_module(words[2])):
        wrapper = typer.Typer()
        wrapper.command()(module.main)
        check_usage(typer.main.get_command(wrapper), words[2], words[3:])
    else:
        flags = {word.split("=")[0] for word in words[3:] if word.startswith("--")}
        unknown = {flag for flag in flags if f'"{flag}"' not in inspect.getsource(module)}
        assert not unknown, f"{words[2]} has no {', '.join(sorted(unknown))}"


def test_documented_commands_parse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").touch()

    def violations() -> Iterator[str]:
        for page, text in DOCUMENTED:
            try:
                parse_command(text)
            except Exception as error:  # whatever a parser or an import raises
                yield f"{page}: `{text}`: {error}"

    require_none(violations(), "Pages show commands and options that exist:")


def test_documentation_has_commands():
    assert len(DOCUMENTED) > 50


def test_documented_engine_options_exist():
    """Keyword arguments of `LLM` and `AsyncLLM`."""
    require_none(
        (
            f"{page.name}: {ast.unparse(call)}: there is no {keyword.arg}"
            for page in PAGES
            for text in code_blocks(page, "python")
            if re.search(r"LLM\(", text)
            for call in ast.walk(
                ast.parse(
                    text if "async for" not in text else f"async def main():\n{indented(text)}"
                )
            )
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in ("LLM", "AsyncLLM")
            for keyword in call.keywords
            if keyword.arg not in EngineOptions.__dataclass_fields__
        ),
        "Pages show options that LLM and AsyncLLM have:",
    )


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


@pytest.fixture(scope="module")
def reader_folder(tmp_path_factory):
    """A folder with the files that the commands name, and a `quire` that runs this package."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "model" / "quill", folder / "path" / "to" / "model")
    sizes = {"vocab_size": 1280, "hidden_size": 64, "intermediate_size": 96}  # whole blocks of Q8_0
    tiny.write(folder / "path" / "to" / "llama", tiny.LLAMA | sizes)
    for file in (ROOT / "model" / "quill").glob("tokenizer*"):
        shutil.copy(file, folder / "path" / "to" / "llama")
    tiny_gguf.write(folder / "model-Q4_K_M.gguf", "Q4_K", v_proj_kind="Q6_K")
    (folder / "prompt.txt").write_text("Once upon a time")
    (folder / "long.txt").write_text("Once upon a time there was a fox. " * 20)
    body = '{"model": "quill", "messages": [{"role": "user", "content": "Sort: 3 1 2"}], "max_tokens": 8}'
    line = f'{{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}'
    (folder / "requests.jsonl").write_text(line + "\n")
    (folder / "quire").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quire "$@"\n')
    (folder / "quire").chmod(0o755)
    return folder


FIRST_PAGES = [ROOT / "docs" / name for name in ("quickstart.md", "offline.md")]
HUB_PREFIX = "Qwen/"  # models of the Hub would be downloaded
RUNNABLE_LINES = [
    line
    for page in (PAGES[0], ROOT / "docs" / "commands.md", *FIRST_PAGES)
    for block in code_blocks(page, "")
    for line in block.splitlines()
    if re.match(r"(cat \S+ \| )?quire ", line) and HUB_PREFIX not in line
]


SLOW_LINES = re.compile("build-kernels|bench throughput|--method gptq")


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    thinned(RUNNABLE_LINES, [line for line in RUNNABLE_LINES if not SLOW_LINES.search(line)]),
)
def test_commands_of_the_first_pages_run(reader_folder, line):
    environment = os.environ | {"PATH": f"{reader_folder}{os.pathsep}{os.environ['PATH']}"}
    if "quire serve" in line:
        line = line.replace("quire serve", "exec quire serve --port 0").replace("32K", "1K")
    process = subprocess.Popen(
        ["bash", "-c", line],
        cwd=reader_folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        if "quire serve" in line:
            assert process.stdout is not None and any(
                text.startswith("ready: ") for text in process.stdout
            ), line
            process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(
            "Sort: 31 4 15\n/exit\n" if "quire chat" in line else "", timeout=900
        )
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, printed
    assert "quire serve" in line or printed or "build-kernels" in line


@pytest.mark.slow
def test_readme_scripts_run(capsys):
    offline, client = code_blocks(PAGES[0], "python")
    with bundled_server() as server:
        names: dict = {}
        exec(client.replace("http://127.0.0.1:8000", server.url), names)
        assert "fox" in capsys.readouterr().out
    exec(offline, {})
    assert "31 52 90" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("page", FIRST_PAGES, ids=lambda page: page.name)
def test_scripts_of_the_first_pages_run(page, capsys, reader_folder, monkeypatch):
    """Each block continues the ones before it."""
    monkeypatch.chdir(reader_folder)
    names: dict = {}
    for block in code_blocks(page, "python"):
        exec(block, names)
    assert "31 52 90" in capsys.readouterr().out
