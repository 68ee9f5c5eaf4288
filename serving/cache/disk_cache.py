"""KV pages in files, which outlive the process. Incomplete files are ignored."""

import hashlib
import logging
import os
import struct
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from ...ops.cache_folder import publish, remove_stale_parts

log = logging.getLogger("quire")

# In version 1 the keys and values of a page's last token could be missing.
PAGE_FORMAT = b"quire KV page 2\n"
HEAD = struct.Struct(
    "<16s32s32sII"
)  # magic, checksum, digest, cache group, number of tokens; then the tokens and the page's bytes
Buffer = Any  # bytes, or an array with the buffer protocol
PAUSE = 60.0  # seconds without writing after a write has failed
STALE_PART = 600.0  # seconds after which an incomplete file belongs to no running process


class DiskCache:
    """A folder of pages in files named after their content, evicted in LRU order.

    Files appear under their names atomically and are verified when read: a process killed during a
    write or a failing disk costs a page and never a wrong token. Thread-safe.
    """

    def __init__(self, folder: Path, capacity: int):
        self.folder = folder
        self.capacity = capacity
        self.lock = threading.Lock()
        self.sizes: OrderedDict[str, int] = OrderedDict()  # by name, least recently used first
        self.total = 0
        self.resumes = 0.0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.scan()

    def scan(self) -> None:
        """Count the pages of earlier processes, and remove incomplete files."""
        remove_stale_parts(self.folder, STALE_PART)
        files = []
        for entry in os.scandir(self.folder):
            try:
                if entry.name.endswith(".page"):
                    files.append((entry.stat().st_mtime_ns, entry.name, entry.stat().st_size))
            except FileNotFoundError:
                continue  # another process removed it
        for _, name, size in sorted(files):
            self.sizes[name] = size
            self.total = self.total + size
        self.trim()

    def __contains__(self, name: str) -> bool:
        return name in self.sizes

    def read(
        self, name: str, digest: bytes, group: int, tokens: bytes, nbytes: int
    ) -> memoryview | None:
        """Read a page; None if the file is missing, damaged or for other tokens."""
        path = self.folder / name
        try:
            raw = path.read_bytes()
            os.utime(path)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("cannot read the KV page %s: %s", path, error.strerror)
            self.drop(name)
            return None
        with self.lock:
            if name in self.sizes:
                self.sizes.move_to_end(name)
        body = memoryview(raw)[HEAD.size :]
        if len(raw) < HEAD.size or raw[: HEAD.size] != page_header(
            *HEAD.unpack_from(raw)[2:], body
        ):
            log.warning("the KV page %s is damaged; it is removed and computed again", path)
            self.discard(name)
            return None
        key = (digest, group, len(tokens) // 4)
        if (
            HEAD.unpack_from(raw)[2:] != key
            or body[: len(tokens)] != tokens
            or len(body) != len(tokens) + nbytes
        ):
            return None  # another page has the same name
        return body[len(tokens) :]

    def write(self, name: str, digest: bytes, group: int, tokens: bytes, data: Buffer) -> bool:
        """Write a page; False if the disk refused it."""
        if name in self.sizes:
            return True
        if time.monotonic() < self.resumes:
            return False
        body = tokens, memoryview(data).cast("B")
        head = page_header(digest, group, len(tokens) // 4, *body)
        try:
            with (
                publish(self.folder / name, durable=False) as temporary,
                open(temporary, "xb", opener=open_private) as file,
            ):
                for piece in (head, *body):
                    file.write(piece)
        except OSError as error:
            self.resumes = time.monotonic() + PAUSE
            log.warning(
                "cannot write KV pages to %s: %s; trying again in %.0f s",
                self.folder,
                error.strerror,
                PAUSE,
            )
            return False
        with self.lock:
            self.sizes[name] = sum(map(len, (head, *body)))
            self.total += self.sizes[name]
        self.trim()
        return True

    def trim(self) -> None:
        """Remove the least recently used files until the total is within the capacity."""
        while True:
            with self.lock:
                if self.total <= self.capacity:
                    return
                name = next(iter(self.sizes))
            self.discard(name)

    def discard(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove the KV page %s: %s", self.folder / name, error.strerror)
        self.drop(name)

    def drop(self, name: str) -> None:
        """Remove a missing file from the index."""
        with self.lock:
            self.total -= self.sizes.pop(name, 0)

    def clear(self) -> None:
        """Remove every page."""
        for name in list(self.sizes):
            self.discard(name)


def page_header(digest: bytes, group: int, num_tokens: int, *body: Buffer) -> bytes:
    """Return the header of a file, with a checksum of everything after it."""
    check = hashlib.blake2b(digest_size=32, key=digest + struct.pack("<II", group, num_tokens))
    for piece in body:
        check.update(piece)
    return HEAD.pack(PAGE_FORMAT, check.digest(), digest, group, num_tokens)


def open_private(path: str, flags: int) -> int:
    """Open a file that no other user may read, because it contains parts of prompts."""
    return os.open(path, flags, 0o600)
