"""Files that clients send and fetch: those of batches, and of their results."""

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..api.validation import shown
from .errors import HttpError
from .storage import EntryKey, Storage

FILE, BATCH = "file", "batch"  # kinds of entries
KINDS = FILE, BATCH
PIECE = 1 << 20  # bytes of a file that are read at once


@dataclass(frozen=True)
class StoredFile:
    id: str
    name: str
    purpose: str
    size: int
    created: int
    expires: int | None = None
    is_hidden: bool = False  # from clients: a batch writes it, or reads it though it was deleted

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "expires_at": self.expires,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class StoredFiles:
    """The files of all tenants, so many bytes in all, batches included. Any thread may use it."""

    def __init__(self, most: int, storage: Storage | None = None):
        self.most = most  # bytes
        self.storage = storage or Storage()
        self.users: Counter[EntryKey] = Counter()  # batches that read or write a file

    def put(
        self,
        key: str | None,
        name: str,
        purpose: str,
        pieces: Iterable[bytes],
        seconds: int | None = None,
        is_hidden: bool = False,
        param: str = "file",
    ) -> StoredFile:
        """Store a file of a tenant, for `seconds` if given; `param` is the field that holds it."""
        now = int(time.time())
        data = list(pieces)
        expires = None if seconds is None else now + seconds
        size = sum(map(len, data))
        file_id = f"file-{secrets.token_hex(12)}"
        file = StoredFile(file_id, name, purpose, size, now, expires, is_hidden)
        with self.storage.transaction():
            self.forget_expired(now)
            self.check_room(size, param)
            self.write(key, file, enumerate(data))
        return file

    def write(self, key: str | None, file: StoredFile, parts: Iterable[tuple[int, bytes]] | None = None) -> None:
        self.storage.put(place(key, file.id), dict(vars(file)), parts, file.expires)

    def check_room(self, size: int, param: str = "file") -> None:
        """Refuse bytes that do not fit."""
        free = max(self.most - self.storage.usage(*KINDS).bytes, 0)
        if size > free:
            left = f"{free} of {self.most} bytes (--max-file-bytes) are free"
            raise HttpError(413, f"{param}: has {size} bytes, and {left}; delete files", param, "store_full")

    def append(self, key: str | None, name: str, parts: Iterable[tuple[int, bytes]]) -> None:
        """Add numbered parts to a file that is written."""
        added = list(parts)
        size = sum(len(data) for _, data in added)
        with self.storage.transaction():
            self.check_room(size)
            found = self.get(key, name, hidden=True)
            self.storage.add_parts(place(key, name), added)
            self.write(key, replace(found, size=found.size + size))

    def publish(self, key: str | None, name: str) -> None:
        """A file is written: clients see it from now on, and its time begins."""
        found = self.get(key, name, hidden=True)
        now = int(time.time())
        expires = None if found.expires is None else found.expires - found.created + now
        self.write(key, replace(found, is_hidden=False, created=now, expires=expires))

    def pieces(self, key: str | None, name: str) -> Iterator[bytes]:
        return self.storage.parts(place(key, name))

    def part_numbers(self, key: str | None, name: str) -> list[int]:
        return self.storage.part_numbers(place(key, name))

    def use(self, key: str | None, name: str) -> None:
        """A file stays, whatever its client does, until `release`."""
        self.users[place(key, name)] += 1

    def release(self, key: str | None, name: str) -> None:
        where = place(key, name)
        self.users[where] -= 1
        if not self.users[where]:
            del self.users[where]
            found = self.storage.get(where)
            if found is not None and found["is_hidden"]:
                self.storage.delete(where)

    def forget_expired(self, now: float) -> None:
        for where in self.storage.expired(FILE, now):
            if not self.users[where]:
                self.storage.delete(where)

    def forget_unused(self) -> None:
        """Delete files that no client sees and no batch uses, as a killed server leaves them."""
        for where, entry in self.storage.entries([FILE]):
            if entry["is_hidden"] and not self.users[where]:
                self.storage.delete(where)

    def get(self, key: str | None, name: str, param: str = "id", hidden: bool = False) -> StoredFile:
        self.forget_expired(time.time())
        entry = self.storage.get(place(key, name))
        if entry is None or (entry["is_hidden"] and not hidden):
            raise HttpError(404, f"{param}: there is no file {shown(name)}", param, "file_not_found")
        return StoredFile(**entry)

    def delete(self, key: str | None, name: str) -> None:
        found = self.get(key, name)
        if self.users[place(key, name)]:
            self.write(key, replace(found, is_hidden=True))
        else:
            self.storage.delete(place(key, name))

    def of(self, key: str | None) -> list[StoredFile]:
        """The files of a tenant, the oldest first."""
        self.forget_expired(time.time())
        found = [StoredFile(**entry) for entry in self.storage.bodies(key, FILE)]
        return [file for file in found if not file.is_hidden]


def place(key: str | None, name: str) -> EntryKey:
    return EntryKey(key, FILE, name)


def pieces_of(data: bytes) -> Iterator[bytes]:
    """A file in pieces."""
    return (data[start : start + PIECE] for start in range(0, len(data), PIECE))
