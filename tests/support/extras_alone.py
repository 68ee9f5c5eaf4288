"""Environments with what `quire` and one of its extras declare, and nothing else.

Every installed distribution in the closure of the requirements is linked into a virtual
environment, without those of the tests and of other extras, as on a user's machine.
"""

import csv
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: tuple(lines) for name, lines in PROJECT["optional-dependencies"].items()}
# Wheels of device drivers and runtimes, installed only on machines with such a device.
FOR_DEVICES = "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "flashinfer-python"
GPU_COMPILER = Path(sys.prefix, "gpu-compiler")  # where `make gpu-compiler` installs
IMPORTS = """
import importlib, json, sys
errors = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        errors[name] = str(error)
print(json.dumps(errors))
"""


def requirements(extra: str | None) -> list[str]:
    """Requirements of `quire[extra]`."""
    return [*PROJECT["dependencies"], *(EXTRAS[extra] if extra else ())]


def closure(lines: Iterable[str]) -> tuple[dict[str, importlib.metadata.Distribution], set[str]]:
    """The closure of requirements: installed distributions by name, and names of missing ones."""
    distributions: dict[str, importlib.metadata.Distribution] = {}
    missing: set[str] = set()
    visited: set[tuple[str, str]] = set()
    todo = [(Requirement(line), "") for line in lines]
    while todo:
        requirement, of_extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in distributions:
            try:
                distributions[name] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                missing.add(name)
                continue
        assert requirement.specifier.contains(distributions[name].version, prereleases=True), (
            f"{requirement} is not met"
        )
        for extra in {"", *requirement.extras}:
            if (name, extra) not in visited:
                visited.add((name, extra))
                todo += [(Requirement(line), extra) for line in distributions[name].requires or ()]
    return distributions, missing


def make(folder: Path, *extras: str) -> Path:
    """A virtual environment of `quire` with these extras; returns its Python."""
    lines = requirements(None) + [line for extra in extras for line in EXTRAS[extra]]
    distributions, missing = closure(lines)
    assert missing <= {*FOR_DEVICES}, f"{sorted(missing - {*FOR_DEVICES})} are not installed here"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    link(distributions.values(), site)
    (site / "quire").symlink_to(ROOT)
    if GPU_COMPILER.is_dir():
        (folder / GPU_COMPILER.name).symlink_to(GPU_COMPILER)
    return folder / "bin" / "python"


def link(distributions: Iterable[importlib.metadata.Distribution], site: Path) -> None:
    """Link the files of distributions; whole folders where no other distribution shares them."""
    count = Counter(
        top
        for distribution in importlib.metadata.distributions()
        for top in {file[0] for file in files(distribution)}
    )
    for distribution in distributions:
        source = Path(distribution.locate_file(""))
        for path in {
            Path(file[0]) if count[file[0]] == 1 else Path(*file) for file in files(distribution)
        }:
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            if not (
                site / path
            ).exists():  # two distributions may share a file of a namespace package
                (site / path).symlink_to(source / path)


def files(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, ...]]:
    """Path components of its files below site-packages, without compiled modules."""
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        components = tuple(row[0].split("/"))
        if components[0] != ".." and "__pycache__" not in components:
            yield components


def import_errors(python: Path, modules: Iterable[str]) -> dict[str, str]:
    """Import modules in such an environment, all in one process; returns errors by module."""
    completed = run(python, IMPORTS, *modules)
    assert not completed.returncode, completed.stderr[-2000:]
    return json.loads(completed.stdout.splitlines()[-1])


def run(python: Path, code: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    """Run code in such an environment, without inherited paths to other packages."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    command = [str(python), "-c", code, *args]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=300)
