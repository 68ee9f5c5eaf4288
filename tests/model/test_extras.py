"""Errors for missing optional libraries name the extra that installs them."""

import sys
import tomllib
from pathlib import Path

import pytest

from quire import ModelError
from quire.__main__ import main
from quire.model.checkpoint import orbax
from quire.model.extras import import_extra
from quire.tests.support import tiny

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def command_error(monkeypatch, capsys, *command: str) -> str:
    monkeypatch.setattr(sys, "argv", ["quire", *command])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("library", "extra", "command"),
    [
        ("orbax.checkpoint", "convert", "convert {model} {out}"),
        ("optax", "train", "train-heads {model} {out}"),
        ("orbax.checkpoint", "train", "train-heads {model} {out}"),
        ("matplotlib", "plots", "bench simulate --plot {out}.png"),
    ],
)
def test_command_error_names_the_extra(monkeypatch, capsys, tmp_path, library, extra, command):
    """The error comes before anything is read or written."""
    tiny.write(tmp_path / "model")
    monkeypatch.setitem(sys.modules, library, None)
    error = command_error(
        monkeypatch, capsys, *command.format(model=tmp_path / "model", out=tmp_path / "out").split()
    )
    assert f"pip install 'quire[{extra}]'" in error
    assert not (tmp_path / "out").exists()
    name = library.partition(".")[0]
    assert any(name in requirement for requirement in EXTRAS[extra])


def test_converted_folder_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(
        ModelError, match="is a converted checkpoint, which needs orbax: pip install 'quire"
    ):
        orbax.load_weights(tmp_path, {}, lambda count: None)


def test_test_extra_includes_all_other_extras():
    """The extras of JAX have the version range of Quire's JAX requirement."""
    assert "quire[convert,images,plots,train]" in EXTRAS["test"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (jax_requirement,) = [
        requirement for requirement in project["dependencies"] if requirement.startswith("jax")
    ]
    for extra in ("cuda", "cuda12", "tpu"):
        requirement = EXTRAS[extra][0]
        assert requirement.partition("]")[2] == jax_requirement.removeprefix("jax")


def test_installed_library_is_imported():
    assert import_extra("json", "none", "this") is sys.modules["json"]
