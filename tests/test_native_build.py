"""Building the kernels: once for each machine, into a private folder, by many processes at once, or not at all."""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops import native
from quire.ops.native import build

try:
    COMMAND = build.compiler()
except NotImplementedError:
    pytest.skip("no compiler", allow_module_level=True)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A library of one short source, so that building it takes no time."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cc").write_text('extern "C" int quire_permitted() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("QUIRE_KERNELS", raising=False)
    build.source_hash.cache_clear()
    yield folder
    build.source_hash.cache_clear()


def test_built_once_and_kept_private(small, monkeypatch):
    isa = build.choices()[0]
    path = build.library(isa)
    state = path.parent.stat()
    assert stat.S_IMODE(state.st_mode) == 0o700 and not list(path.parent.glob("tmp*"))
    monkeypatch.setattr(build, "compile_into", lambda *_: pytest.fail("built twice"))
    assert build.library(isa) == path


def test_another_source_compiler_or_instruction_set_is_another_library(small, monkeypatch):
    isa, *others = build.choices()
    seen = {build.key(COMMAND, isa)}
    for other in others:
        seen.add(build.key(COMMAND, other))
    seen.add(build.key([*COMMAND, "-g"], isa))
    (small / "one.cc").write_text("int other;\n")
    build.source_hash.cache_clear()
    seen.add(build.key(COMMAND, isa))
    assert len(seen) == 3 + len(others)


def test_a_folder_that_others_can_write_to_is_refused(small):
    folder = build.cache_folder()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(NotImplementedError, match="can be written to by others"):
        build.library(build.choices()[0])


def test_a_source_that_does_not_compile(small):
    (small / "one.cc").write_text("int x = oops;\n")
    build.source_hash.cache_clear()
    with pytest.raises(NotImplementedError, match=r"could not compile the kernels: .*error.*oops") as error:
        build.library(build.choices()[0])
    assert "\n" not in str(error.value)
    assert not list(build.cache_folder().rglob("*.so"))


def test_no_compiler_is_one_clear_line(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(NotImplementedError, match="install g\\+\\+ or clang\\+\\+, or name one in CXX"):
        build.compiler()
    with caplog.at_level(logging.WARNING):
        native.explain.cache_clear()
        monkeypatch.setattr(native, "loaded", lambda wish: NotImplementedError("there is no C++ compiler"))
        assert not native.serves() and not native.serves()
    assert [r.message for r in caplog.records] == [
        "native kernels are not in use, XLA's own serve instead: there is no C++ compiler"
    ]


def test_off_is_no_warning(monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_NATIVE", "off")
    assert not native.serves() and not caplog.records


def test_an_instruction_set_that_is_not_there(monkeypatch):
    monkeypatch.setenv("QUIRE_NATIVE", "mmx")
    with pytest.raises(NotImplementedError, match="this processor has no 'mmx'; it can be .*baseline"):
        native.kernels()


CHILD = """
import sys
from pathlib import Path
from quire.ops.native import build
build.SOURCES = Path(sys.argv[1])
print(build.library(build.choices()[0]))
"""


def test_many_processes_at_once(small):
    runs = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(small)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    found = {run.communicate(timeout=300)[0].strip() for run in runs}
    assert all(run.returncode == 0 for run in runs) and len(found) == 1
    path = Path(found.pop())
    assert path.exists() and list(path.parent.iterdir()) == [path]


def test_built_ahead_for_a_place_without_a_compiler(small, tmp_path, monkeypatch):
    isa, ready = build.choices()[0], tmp_path / "ready"
    made = build.built(COMMAND, isa, build.prebuilt(build.private(ready), isa))
    ready.chmod(0o555)
    monkeypatch.setenv("QUIRE_KERNELS", str(ready))
    monkeypatch.setattr(build, "compiler", lambda: pytest.fail("looked for a compiler"))
    assert build.library(isa) == made
    assert os.access(made, os.R_OK)


def test_command_refuses_a_wrong_name(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "quire", "build-kernels", "--out", str(tmp_path), "--isa", "mmx"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 2 and "--isa is 'mmx'; it can be amx" in run.stderr.replace("\n", " ")
