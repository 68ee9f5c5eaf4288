"""Names of models: bundled, folders, and a Hub that is a small server of our own."""

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


def test_bundled():
    here = Path(quire.model.__file__).parent
    assert hub.resolve(None) == hub.resolve("quill") == here / "quill"
    assert hub.resolve("quill-draft") == here / "quill_draft"
    assert hub.resolve("quill-eagle") == here / "quill_eagle"


def test_folders(tmp_path, monkeypatch):
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve(str(tmp_path)) == tmp_path
    for name in ("some/model", "./some/model", "~/some/model"):
        assert hub.resolve(name).samefile(tmp_path / "some" / "model")


@pytest.mark.parametrize(
    "name",
    [
        "", "nothing", "a/b/c", "/no/such/folder", "./a", "../a/b", "a b/c", "http://localhost/a", "owner/", "/owner",
        "a/b\n", "ä/ö", "-a/b",
    ],
)  # fmt: skip
def test_names_that_mean_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="owner/name") as caught:
        hub.resolve(name)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="not a folder"):
        hub.resolve(str(file))


@pytest.fixture
def server(tmp_path):
    """(its address, the paths that were asked for).

    `good/model` is there, in two revisions, and `good/gguf` has GGUF files alone; the others are
    not to be had.
    """
    folder = tmp_path / "there"
    asked = []
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
            asked.append(self.path)
            if self.path.startswith("/api/models/good/model/revision/nowhere"):
                return self.answer(404, b'{"error": "no"}', **{"X-Error-Code": "RevisionNotFound"})
            if self.path.startswith("/api/models/good/gguf"):
                named = [
                    {"rfilename": n, "path": n, "type": "file", "size": len(data), "oid": "0" * 40}
                    for n, data in ggufs.items()
                ]
                body = (
                    named
                    if "/tree/" in self.path
                    else {"id": "good/gguf", "sha": COMMIT, "siblings": named}
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

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()
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
def child(tmp_path):
    """Runs `resolve` and loads, in a process of its own: huggingface_hub reads its settings when it
    is imported.
    """

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
        done = subprocess.run(
            [sys.executable, "-c", CHILD, name, json.dumps(options or {})],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | settings | environment,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1
        return done.stdout

    return run


@pytest.mark.slow
def test_fetch(server, child):
    """What is needed comes, nothing else does, and from then on no network is needed."""
    address, asked = server
    found = child("good/model", address)
    assert found.startswith("loaded")
    folder = Path(found.split(maxsplit=1)[1].strip())
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "1_Pooling/config.json",
    }
    assert not [path for path in asked if path.endswith((".py", ".bin", ".md"))]
    asked.clear()
    assert child("good/model", address, HF_HUB_OFFLINE="1") == found
    assert not asked
    assert child("good/model", "http://127.0.0.1:9") == found


@pytest.mark.slow
def test_a_revision_in_a_folder_of_the_users(server, child, tmp_path):
    address, asked = server
    chosen = {"revision": "v1", "download_dir": str(tmp_path / "mine")}
    found = child("good/model", address, chosen).split(maxsplit=1)[1].strip()
    assert Path(found).is_relative_to(tmp_path / "mine") and Path(found).name == OLDER
    assert not (tmp_path / "cache").exists() or not [
        *(tmp_path / "cache").rglob("model.safetensors")
    ]
    asked.clear()
    assert found in child("good/model", address, chosen, HF_HUB_OFFLINE="1")
    assert not asked
    assert "no revision 'nowhere'" in child("good/model", address, {"revision": "nowhere"})


def test_without_weights(server, child):
    """Random weights need none."""
    address, asked = server
    found = child("good/model", address, {"files": hub.WITHOUT_WEIGHTS})
    assert "holds no *.safetensors" in found
    assert not [path for path in asked if path.endswith(".safetensors")]


def test_a_revision_of_a_folder(tmp_path):
    for name in ("quill", str(tmp_path)):
        with pytest.raises(ModelError, match="revision is 'v1', and .* only the Hub has revisions"):
            hub.resolve(name, revision="v1")


def test_what_the_hub_has_in_another_format(server, child):
    address, _ = server
    assert "holds GGUF files: name one, by its path, or on the Hub" in child("good/gguf", address)
    assert "owner/name:Q4_K_M" in child("good/gguf", address)


NAMES = ["good/gguf:Q4_K_M", "good/gguf:q4_k_m", "good/gguf/good-Q4_K_M.gguf"]


@pytest.mark.parametrize("name", thinned(NAMES, NAMES[1:]))
@pytest.mark.slow
def test_one_gguf_file(server, child, tmp_path, name):
    """By its path, or by what its name ends in; nothing else of the model is fetched, and offline
    it is found again.
    """
    address, asked = server
    found = child(name, address, XDG_CACHE_HOME=str(tmp_path / "made"))
    assert found.startswith("loaded") and str(tmp_path / "made") in found
    assert not [
        path
        for path in asked
        if path.endswith((".json", ".bin", ".md", "Q8_0.gguf")) and "/resolve/" in path
    ]
    assert child(name, address, XDG_CACHE_HOME=str(tmp_path / "made"), HF_HUB_OFFLINE="1") == found


@pytest.mark.slow
def test_a_gguf_file_that_is_not_there(server, child):
    address, _ = server
    assert "has no GGUF files whose name ends in Q5_K" in child("good/gguf:Q5_K", address)
    assert "has no GGUF files whose name is other.gguf" in child("good/gguf/other.gguf", address)


@pytest.mark.slow
def test_models_that_are_not_to_be_had(server, child):
    address, _ = server
    assert "neither a folder here nor a public model" in child("other/model", address)
    assert "licence" in child("gated/model", address)
    assert "does not answer" in child("broken/model", address)
    assert "does not answer" in child("other/model", "http://127.0.0.1:9")
    assert "HF_HUB_OFFLINE" in child("other/model", address, HF_HUB_OFFLINE="1")


@pytest.mark.slow
def test_pull_list_and_rm(server, tmp_path):
    """A model comes into the cache, is listed by the name that it was asked for, and goes again."""
    address, asked = server
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    settings |= {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    settings["XDG_CACHE_HOME"] = str(tmp_path / "xdg")

    def run(*line: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "quire", *line], capture_output=True, text=True, timeout=600,
            env=os.environ | settings,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "good/model: " in run("pull", "good/model", "hf.co/good/gguf:good-Q4_K_M.gguf")
    assert [path for path in asked if path.endswith("good-Q4_K_M.gguf")]
    assert not [path for path in asked if path.endswith("good-Q8_0.gguf")]
    assert "neither a folder here nor a public model on the Hub" in run("pull", "bad/model", code=2)
    asked.clear()
    listed = run("list")
    assert [line.split()[0] for line in listed.splitlines()[5:]] == [
        "good/gguf:Q4_K_M",
        "good/model",
    ]
    assert "deleted good/model: " in run("rm", "-y", "good/model")
    assert "good/model" not in run("list") and not asked
