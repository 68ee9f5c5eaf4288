"""Third-party clients, each in its own virtual environment: `make test-clients`.

The head of each program lists its dependencies as inline script metadata.
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
ENVIRONMENTS = Path(sys.prefix) / "clients"
SCRIPT_HEAD = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)


def make_environment(program: Path) -> Path:
    """The Python of the program's environment, which is created if missing or if its dependencies
    have changed.
    """
    script_head = SCRIPT_HEAD.search(program.read_text())
    assert script_head, f"{program.name} does not list its dependencies"
    dependencies = tomllib.loads(re.sub(r"^# ?", "", script_head[1], flags=re.MULTILINE))[
        "dependencies"
    ]
    folder = ENVIRONMENTS / program.stem.removeprefix("use_")
    python = folder / "bin" / "python"
    stamp = folder / hashlib.sha256(str(dependencies).encode()).hexdigest()[:16]
    if not stamp.is_file():
        venv.create(folder, clear=True, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
        subprocess.run([*pip, "install", "--quiet", "--no-compile", *dependencies], check=True)
        stamp.touch()
    return python


@pytest.fixture(scope="module")
def urls():
    with scripted_server(FORMATS) as scripted, bundled_server() as bundled:
        yield scripted.url, bundled.url


@pytest.mark.parametrize("name", thinned(PROGRAMS, ["langchain", "litellm", "llm"]))
def test_client_program(name, urls, tmp_path):
    """The program asserts what it must see."""
    program = PROGRAMS[name]
    clean_environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "JAX", "XLA", "HF"))
    }
    process = subprocess.run(
        [make_environment(program), program, *urls],
        env=clean_environment | {"HOME": str(tmp_path), "PYTHONUTF8": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
