"""The declared requirements of `quire` and of each extra suffice in otherwise empty environments."""

import ast
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from quire.ops.attention import hopper
from quire.ops.errors import MissingLibrary
from quire.ops.gpu import self_test
from quire.tests.support import extras_alone

ROOT = Path(__file__).parents[1]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
FOLDERS = [ROOT.joinpath(*package.split(".")[1:]) for package in PACKAGES]
MODULES = {
    ".".join(("quire", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for folder in FOLDERS
    for path in sorted(folder.glob("*.py"))
}
# By extra: the modules that need it (with all their submodules), and the libraries that these
# import.
NEEDED_BY = {
    "cuda": (("ops",), ("jax.experimental.pallas.mosaic_gpu", "jax.experimental.pallas.triton")),
    "cuda12": (("ops",), ("jax.experimental.pallas.mosaic_gpu", "jax.experimental.pallas.triton")),
    "tpu": (("ops.attention.tpu",), ("jax.experimental.pallas.tpu",)),
    "convert": (("model.checkpoint.orbax",), ("orbax.checkpoint",)),
    "images": (("model.images",), ("PIL.Image",)),
    "plots": (("scripts.bench",), ("matplotlib.pyplot",)),
    "train": (("scripts.train_heads",), ("optax", "orbax.checkpoint")),
    "otel": (
        ("serving.http.telemetry",),
        ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    ),
    "ray": (("serving.ray", "scripts.serve"), ("ray.serve",)),
}
# FlashInfer is installed only on machines with a GPU
FLASHINFER = "quire.ops.attention.flashinfer_kernel"
PREFIXES = tuple(f"quire.{name}" for modules, _ in NEEDED_BY.values() for name in modules)


def is_below(module: str, prefixes: tuple[str, ...]) -> bool:
    return f"{module}.".startswith(tuple(f"{prefix}." for prefix in prefixes))


def test_every_extra_is_covered():
    assert {*NEEDED_BY, "flashinfer", "test", "docs", "parity"} == {*extras_alone.EXTRAS}


def test_every_import_is_declared():
    """Imports (also inside functions) are declared by the package or by the module's extra."""
    required, _ = extras_alone.closure(extras_alone.requirements(None))
    provided = {
        file[0].removesuffix(".py")
        for distribution in required.values()
        for file in extras_alone.files(distribution)
    }
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            undeclared = (
                {name.partition(".")[0] for name in names} - sys.stdlib_module_names - provided
            )
            assert not undeclared or is_below(module, PREFIXES), (
                f"{path}: no extra is for {sorted(undeclared)}"
            )


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory):
    return extras_alone.make(tmp_path_factory.mktemp("alone") / "venv")


@pytest.mark.slow
def test_all_modules_import_without_extras(without_extras):
    """Except modules that need an extra, which nothing imports at start."""
    errors = extras_alone.import_errors(without_extras, MODULES)
    assert len(MODULES) > 400
    assert not {module: error for module, error in errors.items() if not is_below(module, PREFIXES)}
    assert "quire.ops.linear.gpu_kernel.hopper" in errors, (
        "the environment has absl, so that this test proves nothing"
    )


@pytest.mark.slow
@pytest.mark.parametrize("extra", NEEDED_BY)
def test_modules_import_with_their_extra_alone(tmp_path, extra):
    prefixes, libraries = NEEDED_BY[extra]
    prefixes = tuple(f"quire.{name}" for name in prefixes)
    modules = [
        name for name in MODULES if is_below(name, prefixes) and not is_below(name, (FLASHINFER,))
    ]
    assert modules
    assert (
        extras_alone.import_errors(
            extras_alone.make(tmp_path / "venv", extra), [*modules, *libraries]
        )
        == {}
    )


ON_HOPPER = """
import sys
from quire.ops.gpu import device
for name, value in {"is_gpu": True, "is_hopper": True, "capability": "9.0", "num_processors": 132}.items():
    setattr(device, name, lambda value=value: value)
from quire.__main__ import main
main()
"""


@pytest.mark.slow
def test_missing_kernel_libraries_on_a_gpu_are_a_startup_error(without_extras, tmp_path):
    """It is not a warning with a fallback to XLA."""
    command = ["generate", "--prompt", "Once", "--max-tokens", "2", "--dtype", "bfloat16"]
    env = {"QUIRE_NATIVE": "off", "XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    failed = extras_alone.run(without_extras, ON_HOPPER, *command, **env)
    assert failed.returncode == 2, (failed.stdout, failed.stderr)
    (line,) = failed.stderr.splitlines()
    assert (
        line.startswith("error: the kernel for ")
        and "No module named 'absl'. pip install 'quire[cuda]'" in line
    )


def test_missing_kernel_library_is_an_error_instead_of_a_fallback(monkeypatch):
    """Unless the kernels are turned off."""
    kernel = replace(hopper.KERNEL, compiler="library_that_is_absent")
    with pytest.raises(
        MissingLibrary, match=r"attention .* No module named 'library_that_is_absent'\. pip install"
    ):
        self_test.require_pass(kernel, {})
    with pytest.raises(
        MissingLibrary,
        match=r"No module named 'trial_that_is_absent'\. pip install 'quire\[cuda\]'",
    ):
        self_test.run_self_test("trial_that_is_absent", "{}")
    monkeypatch.setenv("QUIRE_MOSAIC", "off")
    with pytest.raises(NotImplementedError, match="QUIRE_MOSAIC is off"):
        self_test.require_pass(kernel, {})
