"""Images from URLs: allowed hosts and folders only, within limits of size and time."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.model.config import ModelError
from quire.serving import media_fetcher
from quire.serving.api.errors import RequestError
from quire.serving.api.options import make_options
from quire.serving.media_fetcher import MediaFetcher, is_public

CONTENT = bytes(range(256)) * 4


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append((self.path, self.headers["Host"]))
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/image")
            self.end_headers()
        elif self.path == "/slow":
            for _ in range(100):  # a header, byte by byte
                self.wfile.write(b"x")
                time.sleep(0.05)
        elif self.path == "/drip":  # a body without a length
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.05)
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "99999")
            self.end_headers()
            self.wfile.write(CONTENT)
        elif self.path == "/missing":
            self.send_error(404)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(CONTENT)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[ThreadingHTTPServer]:
    """A server at `images.example`, whose address counts as public."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.requests = []
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(
        media_fetcher.socket,
        "getaddrinfo",
        lambda host, port, *_, **__: [(2, 1, 6, "", ("127.0.0.1", port))],
    )
    monkeypatch.setattr(media_fetcher, "is_public", lambda address: True)
    yield server
    server.shutdown()
    server.server_close()


def url_of(server, path: str = "/image", host: str = "images.example") -> str:
    return f"http://{host}:{server.server_port}{path}"


def fetcher_for(server) -> MediaFetcher:
    return MediaFetcher([f"Images.example:{server.server_port}"])


def test_allowed_host_is_fetched(server):
    fetcher = fetcher_for(server)
    assert fetcher.fetch("url", url_of(server, "/a?size=1", "IMAGES.example")) == CONTENT
    assert server.requests == [("/a?size=1", f"images.example:{server.server_port}")]


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example:{port}/image",
        "http://images.example/image",  # another port
        "http://images.example.evil.example:{port}/image",
        "http://images.example:{port}@evil.example/image",
        "{http}user@images.example:{port}/image",
        "http://127.0.0.1:{port}/image",
        "http://[::1]:{port}/image",
        "ftp://images.example:{port}/image",
        "http://images.example:99999/image",
        "http:///image",
        "file:///etc/passwd",
    ],
)
def test_other_urls_are_not_fetched(server, url):
    with pytest.raises(RequestError, match="^messages.0.: "):
        fetcher_for(server).fetch(
            "messages[0]", url.format(port=server.server_port, http="http://")
        )
    assert server.requests == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/moved", "it answered 302; redirects are not followed"),
        ("/missing", "it answered 404"),
        ("/short", "it ended early"),
        ("/slow", "it takes more than 0.5 s"),
        ("/drip", "it takes more than 0.5 s"),
        ("/b\u00e9e", "'ascii' codec can't encode"),
    ],
)
def test_failed_downloads_say_why(server, monkeypatch, path, message):
    monkeypatch.setattr(media_fetcher, "SECONDS", 0.5)
    with pytest.raises(RequestError, match=f"cannot be fetched from images.example: {message}"):
        fetcher_for(server).fetch("url", url_of(server, path))


def test_downloads_are_bounded(server, monkeypatch):
    monkeypatch.setattr(media_fetcher, "MAX_BYTES", len(CONTENT) - 1)
    with pytest.raises(RequestError, match="it has more than 0 MiB"):
        fetcher_for(server).fetch("url", url_of(server))


def test_unencrypted_server_is_no_https_server(server):
    with pytest.raises(RequestError, match="cannot be fetched from images.example"):
        fetcher_for(server).fetch("url", url_of(server).replace("http:", "https:"))
    assert server.requests == []


def test_host_with_a_private_address_is_not_fetched(server, monkeypatch):
    monkeypatch.setattr(media_fetcher, "is_public", is_public)
    with pytest.raises(RequestError, match="its address 127.0.0.1 is not public"):
        fetcher_for(server).fetch("url", url_of(server))
    assert server.requests == []


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0",
     "100.64.0.1", "224.0.0.1", "::1", "::", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1"],
)  # fmt: skip
def test_private_addresses(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_public_addresses(address):
    assert is_public(address)


def test_files_of_the_allowed_folder_are_read(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "an image.png").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "images2").mkdir()
    (tmp_path / "images2" / "secret").write_bytes(b"secret")
    fetcher = MediaFetcher(folder=str(folder))
    assert fetcher.fetch("url", f"file://{folder}/an%20image.png") == CONTENT
    assert fetcher.fetch("url", f"file://localhost{folder}/an%20image.png") == CONTENT
    for path in (
        f"{tmp_path}/secret", f"{folder}/../secret", f"{folder}/%2e%2e/secret", f"{folder}/link",
        f"{tmp_path}/images2/secret", f"{folder}", f"{folder}/missing", f"{folder}/a%00b",
        "/proc/self/environ", "/dev/zero",
    ):  # fmt: skip
        with pytest.raises(RequestError, match="url: is no readable file of the allowed folder"):
            fetcher.fetch("url", f"file://{path}")
    with pytest.raises(RequestError, match="the server opens no such files"):
        fetcher.fetch("url", f"file://elsewhere{folder}/an%20image.png")


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_media_domains": "images.example"},
        {"allowed_media_domains": ["https://images.example"]},
        {"allowed_media_domains": ["*.images.example"]},
        {"allowed_media_domains": ["images.example:http"]},
        {"allowed_local_media_path": 5},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ModelError, match=next(iter(options))):
        make_options(None, **options)
