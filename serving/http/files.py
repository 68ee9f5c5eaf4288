"""Files that clients send and fetch, kept in memory: a server that ends keeps none of them."""

import secrets
import time
from dataclasses import dataclass
from typing import Any

from ..api.validation import shown
from .errors import HttpError


@dataclass(frozen=True)
class StoredFile:
    id: str
    name: str
    purpose: str
    data: bytes
    created: int
    expires: int | None = None

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.data),
            "created_at": self.created,
            "expires_at": self.expires,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class StoredFiles:
    """The files of all tenants, so many bytes in all. One event loop uses it."""

    def __init__(self, most: int):
        self.most = most  # bytes
        self.kept: dict[tuple[str | None, str], StoredFile] = {}  # by tenant and id

    def put(self, key: str | None, name: str, purpose: str, data: bytes, seconds: int | None = None) -> StoredFile:
        """Keep a file of a tenant, for so many seconds if that is said."""
        now = int(time.time())
        self.forget(now)
        used = sum(len(file.data) for file in self.kept.values())
        if used + len(data) > self.most:
            left = f"{max(self.most - used, 0)} of {self.most} bytes (--max-file-bytes) are free"
            raise HttpError(413, f"file: has {len(data)} bytes, and {left}; delete files", "file", "store_full")
        found = StoredFile(
            f"file-{secrets.token_hex(12)}", name, purpose, data, now, None if seconds is None else now + seconds
        )
        self.kept[key, found.id] = found
        return found

    def forget(self, now: float) -> None:
        """Those whose time is over."""
        for place in [place for place, file in self.kept.items() if file.expires is not None and file.expires <= now]:
            del self.kept[place]

    def get(self, key: str | None, name: str, param: str = "id") -> StoredFile:
        self.forget(time.time())
        if (found := self.kept.get((key, name))) is None:
            raise HttpError(404, f"{param}: there is no file {shown(name)}", param, "file_not_found")
        return found

    def delete(self, key: str | None, name: str) -> None:
        self.get(key, name)
        del self.kept[key, name]

    def of(self, key: str | None) -> list[StoredFile]:
        """The files of a tenant, the oldest first."""
        self.forget(time.time())
        return [file for (owner, _), file in self.kept.items() if owner == key]
