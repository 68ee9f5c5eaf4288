"""Fetches the images of URLs: over HTTP from allowed hosts, and files from an allowed folder."""

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from .api.errors import RequestError
from .api.validation import shown

MAX_BYTES = 20 << 20
SECONDS = 10.0  # for a whole image
CHUNK = 1 << 16
PORTS = {"http": 80, "https": 443}


class MediaFetcher:
    """Reads URLs that the server's owner allows.

    A host's addresses must be public, and the connection goes to the address that was checked, so
    that no name can lead into the private network. Redirects are not followed.

    Args:
        domains: HOST or HOST:PORT; without a port it is the scheme's own.
        folder: Where file: URLs may point to, with all subfolders.
    """

    def __init__(self, domains: Sequence[str] = (), folder: str | None = None):
        self.domains = frozenset(domain.lower() for domain in domains)
        self.folder = None if folder is None else Path(folder).expanduser().resolve()

    def fetch(self, param: str, url: str) -> bytes:
        """The content of a URL; a `RequestError` that names the field if it cannot be had."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise RequestError(param, f"is no valid URL: {shown(url)}") from None
        if parts.scheme == "file":
            return self.read_file(param, parts)
        if parts.scheme not in PORTS or not parts.hostname:
            raise RequestError(
                param, f"must be a data:, https:, http: or file: URL, got {shown(url[:64])}"
            )
        host = parts.hostname.lower()
        own_port = PORTS[parts.scheme]
        port = own_port if port is None else port
        names = {f"{host}:{port}"} | ({host} if port == own_port else set())
        if not names & self.domains or "@" in parts.netloc:
            raise RequestError(
                param,
                f"is a URL of {shown(parts.netloc[:64])}, from which the server fetches nothing; "
                "send a data: URL, or ask its owner for --allowed-media-domains",
            )
        try:
            return download(parts, host, port)
        except (OSError, UnicodeError, http.client.HTTPException, FetchError) as error:
            reason = str(error) or type(error).__name__
            raise RequestError(param, f"cannot be fetched from {host}: {reason:.200}") from None

    def read_file(self, param: str, parts: SplitResult) -> bytes:
        """The content of a file: URL."""
        if self.folder is None or parts.netloc not in ("", "localhost"):
            raise RequestError(
                param,
                "is a file: URL, and the server opens no such files; send a data: URL, or ask its "
                "owner for --allowed-local-media-path",
            )
        refused = RequestError(param, "is no readable file of the allowed folder")
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not path.is_relative_to(self.folder) or not path.is_file():
                raise refused
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except (OSError, ValueError, RuntimeError):
            raise refused from None
        if len(content) > MAX_BYTES:
            raise RequestError(param, f"is a file of more than {MAX_BYTES >> 20} MiB")
        return content


class FetchError(Exception):
    """Why a download was given up."""


def download(parts: SplitResult, host: str, port: int) -> bytes:
    """The body of a GET request to a public address of the host."""
    connection = http.client.HTTPConnection(host, port)
    connection.default_port = PORTS[parts.scheme]
    connection.sock = sock = connect(host, port, parts.scheme == "https")
    # Timeouts of a socket are of each read, and a server may send byte by byte.
    is_late = threading.Event()
    timer = threading.Timer(SECONDS, lambda: (is_late.set(), sock.shutdown(socket.SHUT_RDWR)))
    timer.start()
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"Accept": "image/*", "User-Agent": "quire"}
        connection.request("GET", target, headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            redirected = "; redirects are not followed" if 300 <= response.status < 400 else ""
            raise FetchError(f"it answered {response.status}{redirected}")
        content = bytearray()
        while chunk := response.read1(CHUNK):
            content += chunk
            if len(content) > MAX_BYTES:
                raise FetchError(f"it has more than {MAX_BYTES >> 20} MiB")
        if response.length or is_late.is_set():  # without a length, a shutdown looks like the end
            raise FetchError("it ended early")
        return bytes(content)
    except (OSError, http.client.HTTPException, FetchError):
        if is_late.is_set():
            raise FetchError(f"it takes more than {SECONDS:g} s") from None
        raise
    finally:
        timer.cancel()
        connection.close()


def connect(host: str, port: int, is_encrypted: bool) -> socket.socket:
    """A connection to the first address of a host, all of which must be public."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in entries]
    for address in addresses:
        if not is_public(address):
            raise FetchError(f"its address {address} is not public")
    connection = socket.create_connection((addresses[0], port), timeout=SECONDS)
    if not is_encrypted:
        return connection
    try:
        return ssl.create_default_context().wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


def is_public(address: str) -> bool:
    """Whether an IP address is reachable from everywhere, rather than one of this network."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_global and not parsed.is_multicast
