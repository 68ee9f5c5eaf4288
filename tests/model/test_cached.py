"""`quire list` and `quire rm` with a cache in the Hub's format."""

import json
import os
import sys
from pathlib import Path

import pytest

from quire.__main__ import main
from quire.model.checkpoint import cached
from quire.model.checkpoint.hub import BUNDLED
from quire.tests.support import tiny, tiny_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_snapshot(cache: Path, name: str, files: dict[str, bytes], commit: str = COMMIT) -> None:
    """Write a repository in huggingface_hub's format: blobs, and a snapshot of links."""
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "blobs").mkdir(parents=True, exist_ok=True)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    for path, data in files.items():
        blob = repo / "blobs" / f"{abs(hash(data)):040x}"
        blob.write_bytes(data)
        link = repo / "snapshots" / commit / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


@pytest.fixture
def cache(tmp_path):
    folder = tmp_path / "model"
    cache_folder = tmp_path / "cache"
    tiny.write(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_snapshot(cache_folder, "good/model", files)
    write_snapshot(
        cache_folder,
        "odd/model",
        files | {"config.json": json.dumps({"model_type": "unheard-of"}).encode()},
    )
    write_snapshot(cache_folder, "no/weights", {"config.json": files["config.json"]})
    ggufs = {}
    for kind in ("Q4_K", "Q8_0"):
        tiny_gguf.write(tmp_path / "tiny.gguf", kind)
        ggufs[f"good-{kind}.gguf"] = (tmp_path / "tiny.gguf").read_bytes()
    write_snapshot(
        cache_folder, "good/gguf", ggufs | {"README.md": b"a page", "broken-Q2_K.gguf": b"GGUF"}
    )
    return cache_folder


@pytest.fixture
def run_quire(monkeypatch, capsys, cache):
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quire", *arguments, "--download-dir", str(cache)])
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        return (int(code), *capsys.readouterr())

    return call


def names(cache: Path) -> list[str]:
    return [model.name for model in cached.cached_models(cache)[0]]


def test_list_shows_models_with_size_and_format(cache, run_quire):
    models, num_others = cached.cached_models(cache)
    assert [model.name for model in models] == [
        "good/gguf:Q4_K",
        "good/gguf:Q8_0",
        "good/model",
    ] and num_others == 2
    sizes = {model.name: model.size for model in models}
    snapshots = cache / "models--good--model" / "snapshots" / COMMIT
    assert sizes["good/model"] == sum(path.stat().st_size for path in snapshots.iterdir())
    assert [model.format for model in models] == ["GGUF Q4_K", "GGUF Q8_0", "float32"]
    code, out, err = run_quire("list")
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["NAME", "SIZE", "FORMAT", "MODIFIED"]
    assert [line.split()[0] for line in lines[1:]] == [*BUNDLED, *sizes] and "2 more" in err
    assert cached.cached_models(cache / "nothing") == ([], 0)


def test_rm_deletes_one_gguf_file_of_several(cache, run_quire):
    """The other GGUF files and the shared files stay."""
    code, out, _ = run_quire("rm", "-y", "hf.co/good/gguf:Q4_K")
    assert code == 0 and out.startswith("deleted good/gguf:Q4_K: ")
    assert names(cache) == ["good/gguf:Q8_0", "good/model"]
    repo = cache / "models--good--gguf"
    assert len([*(repo / "blobs").iterdir()]) == 3 and not [
        link for link in repo.rglob("*") if not link.exists()
    ]


def test_rm_deletes_a_repository(cache, run_quire):
    assert run_quire("rm", "good/model", "-y")[0] == 0
    assert not (cache / "models--good--model").exists() and len(names(cache)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rm good/model", "is deleted only when you say so: quire rm -y good/model"),
        ("rm -y quill", "quill came with Quire and stays"),
        ("rm -y ../../etc", "there is no '../../etc' in the cache; there is good/gguf:Q4_K, "),
        ("rm -y good/model nothing", "there is no 'nothing' in the cache"),
    ],
)
def test_rm_rejects_unconfirmed_bundled_and_unknown_models(cache, run_quire, line, message):
    code, _, err = run_quire(*line.split())
    assert code == 2 and message in err
    assert len(names(cache)) == 3
