"""Clients that are not OpenAI's or Anthropic's own, each in an environment of its own: `make
test-clients`.

Each program says what it needs in its head, as scripts for Python do.
"""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from quire.tests.support.cases import thinned
from quire.tests.support.served import FORMATS
from quire.tests.support.talk import bundled_server, scripted_server

PROGRAMS = {
    path.stem.removeprefix("use_"): path for path in sorted(Path(__file__).parent.glob("use_*.py"))
}
HOME = Path(sys.prefix) / "clients"
HEAD = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)


def environment(program: Path) -> Path:
    """The Python of a program's environment, which is made where it is missing or its needs are
    others.
    """
    found = HEAD.search(program.read_text())
    assert found, f"{program.name} does not say what it needs"
    needs = tomllib.loads(re.sub(r"^# ?", "", found[1], flags=re.MULTILINE))["dependencies"]
    folder = HOME / program.stem.removeprefix("use_")
    python = folder / "bin" / "python"
    stamp = folder / hashlib.sha256(str(needs).encode()).hexdigest()[:16]
    if not stamp.is_file():
        venv.create(folder, clear=True, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
        subprocess.run([*pip, "install", "--quiet", "--no-compile", *needs], check=True)
        stamp.touch()
    return python


@pytest.fixture(scope="module")
def urls():
    with scripted_server(FORMATS) as scripted, bundled_server() as bundled:
        yield scripted.url, bundled.url


@pytest.mark.parametrize("name", thinned(PROGRAMS, ["langchain", "litellm", "llm"]))
def test_a_client(name, urls, tmp_path):
    """The program asserts what it must see."""
    program = PROGRAMS[name]
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "JAX", "XLA", "HF"))
    }
    done = subprocess.run(
        [environment(program), program, *urls],
        env=plain | {"HOME": str(tmp_path), "PYTHONUTF8": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
