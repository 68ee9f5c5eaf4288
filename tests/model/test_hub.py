"""Resolving model names: bundled models, folders, and repositories on a fake Hub server."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import quire.model
from quire.model.checkpoint import hub
from quire.model.config import ModelError
from quire.tests.support import tiny, tiny_gguf
from quire.tests.support.cases import thinned

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"  # the revision v1


def test_bundled_models_resolve_by_name():
    model_package = Path(quire.model.__file__).parent
    assert hub.resolve(None) == hub.resolve("quill") == model_package / "quill"
    assert hub.resolve("quill-draft") == model_package / "quill_draft"
    assert hub.resolve("quill-eagle") == model_package / "quill_eagle"


def test_folder_paths_resolve(tmp_path, monkeypatch):
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve(str(tmp_path)) == tmp_path
    for name in ("some/model", "./some/model", "~/some/model"):
        assert hub.resolve(name).samefile(tmp_path / "some" / "model")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nothing",
        "a/b/c",
        "/no/such/folder",
        "./a",
        "../a/b",
        "a b/c",
        "http://localhost/a",
        "owner/",
        "/owner",
        "a/b\n",
        "ä/ö",
        "-a/b",
    ],
)
def test_invalid_model_names_are_rejected(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="owner/name") as caught:
        hub.resolve(name)
    assert "\n" not in str(caught.value)


def test_safetensors_file_instead_of_folder_is_rejected(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="not a folder"):
        hub.resolve(str(file))


@pytest.fixture
def server(tmp_path):
    """(address, requested paths) of a fake Hub.

    `good/model` exists in two revisions, and `good/gguf` has only GGUF files.
    """
    folder = tmp_path / "there"
    requested_paths = []
    tiny.write(folder)
    extra = [
        "modeling.py",
        "pytorch_model.bin",
        "README.md",
        "original/consolidated.safetensors",
        "onnx/config.json",
    ]
    for name in (
        *extra,
        "tokenizer.json",
        "1_Pooling/config.json",
        "chat_template.jinja",
        "consolidated.safetensors",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    tiny_gguf.write(tmp_path / "tiny.gguf", "Q4_K")
    ggufs = {
        "README.md": b"",
        "good-Q4_K_M.gguf": (tmp_path / "tiny.gguf").read_bytes(),
        "good-Q8_0.gguf": b"GGUF",
    }

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            requested_paths.append(self.path)
            if self.path.startswith("/api/models/good/model/revision/nowhere"):
                return self.answer(404, b'{"error": "no"}', **{"X-Error-Code": "RevisionNotFound"})
            if self.path.startswith("/api/models/good/gguf"):
                entries = [
                    {"rfilename": n, "path": n, "type": "file", "size": len(data), "oid": "0" * 40}
                    for n, data in ggufs.items()
                ]
                body = (
                    entries
                    if "/tree/" in self.path
                    else {"id": "good/gguf", "sha": COMMIT, "siblings": entries}
                )
                return self.answer(200, json.dumps(body).encode())
            if self.path.startswith("/api/models/good/model"):
                listing = [
                    {"rfilename": name, "path": name, "type": "file", "size": len(files[name])}
                    for name in files
                ]
                listing = [entry | {"oid": "0" * 40} for entry in listing]
                sha = OLDER if "/revision/v1" in self.path else COMMIT
                body = (
                    listing
                    if "/tree/" in self.path
                    else {"id": "good/model", "sha": sha, "siblings": listing}
                )
                return self.answer(200, json.dumps(body).encode())
            sha = OLDER if OLDER in self.path else COMMIT
            name = self.path.split(f"/resolve/{sha}/")[-1]
            if self.path.startswith("/good/gguf/resolve/") and name in ggufs:
                return self.answer(
                    200, ggufs[name], ETag=f'"{hash(name)}"', **{"X-Repo-Commit": sha}
                )
            if self.path.startswith("/good/model/resolve/") and name in files:
                return self.answer(
                    200, files[name], ETag=f'"{hash(name)}"', **{"X-Repo-Commit": sha}
                )
            code = {"gated": "GatedRepo", "broken": "Other"}.get(
                self.path.split("/")[3], "RepoNotFound"
            )
            status = {"GatedRepo": 403, "Other": 500}.get(code, 404)
            return self.answer(
                status, b'{"error": "no"}', **{"X-Error-Code": code, "X-Error-Message": "no"}
            )

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}", requested_paths
        http_server.shutdown()
        thread.join()


CHILD = """
import json
import sys
from quire.model.checkpoint import hub
from quire.model.config import ModelError

try:
    folder = hub.resolve(sys.argv[1], **json.loads(sys.argv[2]))
    from quire.model.checkpoint.loader import load_weights, read_config

    load_weights(folder, read_config(folder))
    print("loaded", folder)
except ModelError as error:
    print("error", error)
"""


@pytest.fixture
def load_in_child(tmp_path):
    """Resolve and load a model in a new process: huggingface_hub reads its settings at import."""

    def run(name: str, address: str, options: dict | None = None, **environment: str) -> str:
        settings = {
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
        }
        settings |= {
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        process = subprocess.run(
            [sys.executable, "-c", CHILD, name, json.dumps(options or {})],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | settings | environment,
        )
        assert process.returncode == 0, process.stderr
        assert process.stdout.count("\n") == 1
        return process.stdout

    return run


@pytest.mark.slow
def test_fetch_downloads_only_needed_files_and_works_offline(server, load_in_child):
    """The second load makes no request."""
    address, requested_paths = server
    output = load_in_child("good/model", address)
    assert output.startswith("loaded")
    folder = Path(output.split(maxsplit=1)[1].strip())
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "1_Pooling/config.json",
    }
    assert not [path for path in requested_paths if path.endswith((".py", ".bin", ".md"))]
    requested_paths.clear()
    assert load_in_child("good/model", address, HF_HUB_OFFLINE="1") == output
    assert not requested_paths
    assert load_in_child("good/model", "http://127.0.0.1:9") == output


@pytest.mark.slow
def test_revision_is_downloaded_to_download_dir(server, load_in_child, tmp_path):
    address, requested_paths = server
    options = {"revision": "v1", "download_dir": str(tmp_path / "mine")}
    folder = load_in_child("good/model", address, options).split(maxsplit=1)[1].strip()
    assert Path(folder).is_relative_to(tmp_path / "mine") and Path(folder).name == OLDER
    assert not (tmp_path / "cache").exists() or not [
        *(tmp_path / "cache").rglob("model.safetensors")
    ]
    requested_paths.clear()
    assert folder in load_in_child("good/model", address, options, HF_HUB_OFFLINE="1")
    assert not requested_paths
    assert "no revision 'nowhere'" in load_in_child("good/model", address, {"revision": "nowhere"})


def test_dummy_weights_download_no_weights(server, load_in_child):
    """`files=WITHOUT_WEIGHTS` is used for random weights."""
    address, requested_paths = server
    output = load_in_child("good/model", address, {"files": hub.WITHOUT_WEIGHTS})
    assert "holds no *.safetensors" in output
    assert not [path for path in requested_paths if path.endswith(".safetensors")]


def test_revision_of_a_local_folder_is_rejected(tmp_path):
    for name in ("quill", str(tmp_path)):
        with pytest.raises(ModelError, match="revision is 'v1', and .* only the Hub has revisions"):
            hub.resolve(name, revision="v1")


def test_gguf_repository_requires_a_file_name(server, load_in_child):
    address, _ = server
    assert "holds GGUF files: name one, by its path, or on the Hub" in load_in_child(
        "good/gguf", address
    )
    assert "owner/name:Q4_K_M" in load_in_child("good/gguf", address)


GGUF_NAMES = ["good/gguf:Q4_K_M", "good/gguf:q4_k_m", "good/gguf/good-Q4_K_M.gguf"]


@pytest.mark.parametrize("name", thinned(GGUF_NAMES, GGUF_NAMES[1:]))
@pytest.mark.slow
def test_single_gguf_file_is_downloaded(server, load_in_child, tmp_path, name):
    """By path or by the suffix of its name; no other file is downloaded, and it works offline."""
    address, requested_paths = server
    output = load_in_child(name, address, XDG_CACHE_HOME=str(tmp_path / "made"))
    assert output.startswith("loaded") and str(tmp_path / "made") in output
    assert not [
        path
        for path in requested_paths
        if path.endswith((".json", ".bin", ".md", "Q8_0.gguf")) and "/resolve/" in path
    ]
    assert (
        load_in_child(name, address, XDG_CACHE_HOME=str(tmp_path / "made"), HF_HUB_OFFLINE="1")
        == output
    )


@pytest.mark.slow
def test_missing_gguf_file_is_reported(server, load_in_child):
    address, _ = server
    assert "has no GGUF files whose name ends in Q5_K" in load_in_child("good/gguf:Q5_K", address)
    assert "has no GGUF files whose name is other.gguf" in load_in_child(
        "good/gguf/other.gguf", address
    )


@pytest.mark.slow
def test_unavailable_models_are_reported(server, load_in_child):
    address, _ = server
    assert "neither a folder here nor a public model" in load_in_child("other/model", address)
    assert "licence" in load_in_child("gated/model", address)
    assert "does not answer" in load_in_child("broken/model", address)
    assert "does not answer" in load_in_child("other/model", "http://127.0.0.1:9")
    assert "HF_HUB_OFFLINE" in load_in_child("other/model", address, HF_HUB_OFFLINE="1")


@pytest.mark.slow
def test_pull_list_and_rm(server, tmp_path):
    """`quire pull`, `quire list` and `quire rm` with models of the fake Hub."""
    address, requested_paths = server
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    settings |= {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    settings["XDG_CACHE_HOME"] = str(tmp_path / "xdg")

    def run(*line: str, code: int = 0) -> str:
        process = subprocess.run(
            [sys.executable, "-m", "quire", *line],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | settings,
        )
        assert process.returncode == code, process.stderr
        return process.stdout + process.stderr

    assert "good/model: " in run("pull", "good/model", "hf.co/good/gguf:good-Q4_K_M.gguf")
    assert [path for path in requested_paths if path.endswith("good-Q4_K_M.gguf")]
    assert not [path for path in requested_paths if path.endswith("good-Q8_0.gguf")]
    assert "neither a folder here nor a public model on the Hub" in run("pull", "bad/model", code=2)
    requested_paths.clear()
    output = run("list")
    assert [line.split()[0] for line in output.splitlines()[5:]] == [
        "good/gguf:Q4_K_M",
        "good/model",
    ]
    assert "deleted good/model: " in run("rm", "-y", "good/model")
    assert "good/model" not in run("list") and not requested_paths
