"""Stored files: the requests of batches, uploaded by clients, and their results."""

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..api.validation import shown
from .errors import HttpError
from .storage import EntryKey, Storage

FILE = "file"  # kinds of entries
BATCH = "batch"
KINDS = FILE, BATCH
PIECE = 1 << 20  # bytes of one stored piece of a file


@dataclass(frozen=True)
class StoredFile:
    id: str
    name: str
    purpose: str
    size: int
    created: int
    expires: int | None = None
    # Hidden from clients: a batch still writes it, or still reads it after its deletion.
    is_hidden: bool = False

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
    """The files of all tenants; with batches at most `max_bytes` together. Thread-safe."""

    def __init__(self, max_bytes: int, storage: Storage | None = None):
        self.max_bytes = max_bytes
        self.storage = storage or Storage()
        self.users: Counter[EntryKey] = Counter()  # how many batches read or write each file

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
        """Store a file.

        Args:
            key: The tenant.
            name: The file name that clients see.
            purpose: As in OpenAI's interface, such as `batch`.
            pieces: The content.
            seconds: The file expires after so many; None: never.
            is_hidden: Whether clients cannot see the file.
            param: The field of the request that errors name.
        """
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

    def write(
        self,
        key: str | None,
        file: StoredFile,
        data_parts: Iterable[tuple[int, bytes]] | None = None,
    ) -> None:
        self.storage.put(file_key(key, file.id), dict(vars(file)), data_parts, file.expires)

    def check_room(self, size: int, param: str = "file") -> None:
        """Raise HttpError if `size` more bytes do not fit."""
        free = max(self.max_bytes - self.storage.usage(*KINDS).bytes, 0)
        if size > free:
            free_space = f"{free} of {self.max_bytes} bytes (--max-file-bytes) are free"
            raise HttpError(
                413,
                f"{param}: has {size} bytes, and {free_space}; delete files",
                param,
                "store_full",
            )

    def append(self, key: str | None, name: str, data_parts: Iterable[tuple[int, bytes]]) -> None:
        """Add numbered parts to a hidden file."""
        added = list(data_parts)
        size = sum(len(data) for _, data in added)
        with self.storage.transaction():
            self.check_room(size)
            file = self.get(key, name, hidden=True)
            self.storage.add_parts(file_key(key, name), added)
            self.write(key, replace(file, size=file.size + size))

    def publish(self, key: str | None, name: str) -> None:
        """Show a finished file to clients; its expiry is counted from now."""
        file = self.get(key, name, hidden=True)
        now = int(time.time())
        expires = None if file.expires is None else file.expires - file.created + now
        self.write(key, replace(file, is_hidden=False, created=now, expires=expires))

    def pieces(self, key: str | None, name: str) -> Iterator[bytes]:
        return self.storage.parts(file_key(key, name))

    def part_numbers(self, key: str | None, name: str) -> list[int]:
        return self.storage.part_numbers(file_key(key, name))

    def use(self, key: str | None, name: str) -> None:
        """Keep a file's content until `release`, also if its client deletes it."""
        self.users[file_key(key, name)] += 1

    def release(self, key: str | None, name: str) -> None:
        entry_key = file_key(key, name)
        self.users[entry_key] -= 1
        if not self.users[entry_key]:
            del self.users[entry_key]
            entry = self.storage.get(entry_key)
            if entry is not None and entry["is_hidden"]:
                self.storage.delete(entry_key)

    def forget_expired(self, now: float) -> None:
        for entry_key in self.storage.expired(FILE, now):
            if not self.users[entry_key]:
                self.storage.delete(entry_key)

    def forget_unused(self) -> None:
        """Delete hidden files that no batch uses, which a killed server may have left."""
        for entry_key, entry in self.storage.entries([FILE]):
            if entry["is_hidden"] and not self.users[entry_key]:
                self.storage.delete(entry_key)

    def get(
        self, key: str | None, name: str, param: str = "id", hidden: bool = False
    ) -> StoredFile:
        self.forget_expired(time.time())
        entry = self.storage.get(file_key(key, name))
        if entry is None or (entry["is_hidden"] and not hidden):
            raise HttpError(
                404, f"{param}: there is no file {shown(name)}", param, "file_not_found"
            )
        return StoredFile(**entry)

    def delete(self, key: str | None, name: str) -> None:
        file = self.get(key, name)
        if self.users[file_key(key, name)]:
            self.write(key, replace(file, is_hidden=True))
        else:
            self.storage.delete(file_key(key, name))

    def of(self, key: str | None) -> list[StoredFile]:
        """A tenant's files, oldest first."""
        self.forget_expired(time.time())
        files = [StoredFile(**entry) for entry in self.storage.bodies(key, FILE)]
        return [file for file in files if not file.is_hidden]


def file_key(key: str | None, name: str) -> EntryKey:
    return EntryKey(key, FILE, name)


def split_pieces(data: bytes) -> Iterator[bytes]:
    """Split the content of a file into pieces of PIECE bytes."""
    return (data[start : start + PIECE] for start in range(0, len(data), PIECE))
