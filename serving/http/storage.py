"""Storage of responses, conversations, files and batches in an SQLite database."""

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...model.config import ModelError

FILE = "state.sqlite"
VERSION = 1  # of the tables
READ = 1 << 20  # bytes of parts that one query reads
TABLES = """
CREATE TABLE entry (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    body BLOB NOT NULL,
    size INTEGER NOT NULL,
    used INTEGER NOT NULL,
    expires INTEGER,
    UNIQUE (tenant, kind, id)
);
CREATE INDEX entry_used ON entry (used);
CREATE INDEX entry_expires ON entry (kind, expires) WHERE expires IS NOT NULL;
CREATE TABLE part (
    entry INTEGER NOT NULL REFERENCES entry ON DELETE CASCADE,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (entry, number)
);
"""


class EntryKey(NamedTuple):
    """Identifies an entry by its tenant, its kind, and its id within both."""

    tenant: str | None
    kind: str
    id: str

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.tenant or "", self.kind, self.id


class StorageUsage(NamedTuple):
    """The number and the size of the entries of some kinds."""

    entries: int
    bytes: int


class StorageFailed(Exception):
    """The database cannot be written, for example because the disk is full."""


class Storage:
    """Entries of JSON, each with numbered parts of bytes. Thread-safe.

    Every method is one transaction. A process that is killed loses nothing that was stored. A
    machine that loses power may lose the last transactions, each as a whole.
    """

    def __init__(self, folder: Path | None = None):
        """`folder` is created if it is missing, and locked; None: store in memory."""
        self.lock = threading.RLock()
        path = ":memory:" if folder is None else str(prepare(folder))
        self.db = sqlite3.connect(path, timeout=0, check_same_thread=False)
        try:
            self.open()
        except sqlite3.DatabaseError as error:
            self.db.close()
            reason = (
                "is used by another server"
                if "locked" in str(error)
                else f"cannot be read: {error}"
            )
            raise ModelError(
                f"state_dir is {str(folder)!r}, whose {FILE} {reason}; use another folder"
            ) from None
        self.usage_by_kind = {
            kind: StorageUsage(entries, size)
            for kind, entries, size in self.db.execute(
                "SELECT kind, COUNT(*), SUM(size) FROM entry GROUP BY kind"
            )
        }
        (self.last_use,) = self.db.execute("SELECT COALESCE(MAX(used), 0) FROM entry").fetchone()

    def open(self) -> None:
        for pragma in (
            "locking_mode=EXCLUSIVE",
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
            "secure_delete=ON",
        ):
            self.db.execute(f"PRAGMA {pragma}")
        (version,) = self.db.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(
                f"it has version {version} of the tables, and this server {VERSION}"
            )
        with self.db:
            self.db.execute("BEGIN EXCLUSIVE")  # locks the file until the server ends
            if version == 0:
                for statement in TABLES.split(";"):
                    self.db.execute(statement)
                self.db.execute(f"PRAGMA user_version={VERSION}")

    def close(self) -> None:
        with self.lock:
            self.db.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Make the changes inside of the `with` together or not at all; transactions nest."""
        with self.lock:
            if self.db.in_transaction:
                yield self.db
                return
            old_usage = dict(self.usage_by_kind)
            try:
                with self.db:
                    self.db.execute("BEGIN")
                    yield self.db
            except sqlite3.Error as error:
                self.usage_by_kind = old_usage
                raise StorageFailed(f"the state cannot be written: {error}") from error
            except BaseException:
                self.usage_by_kind = old_usage
                raise

    def usage(self, *kinds: str) -> StorageUsage:
        with self.lock:
            usages = [self.usage_by_kind.get(kind, StorageUsage(0, 0)) for kind in kinds]
            return StorageUsage(
                sum(usage.entries for usage in usages), sum(usage.bytes for usage in usages)
            )

    def count(self, kind: str, entries: int, size: int) -> None:
        usage = self.usage_by_kind.get(kind, StorageUsage(0, 0))
        self.usage_by_kind[kind] = StorageUsage(usage.entries + entries, usage.bytes + size)

    def put(
        self,
        key: EntryKey,
        body: Any,
        data_parts: Iterable[tuple[int, bytes]] | None = None,
        expires: int | None = None,
    ) -> None:
        """Store an entry, or replace its body, and its parts where some are given.

        `expires`: seconds since the epoch, for `expired`.
        """
        data = msgspec.json.encode(body)
        with self.transaction() as db:
            row = db.execute(
                "SELECT number, LENGTH(body), size FROM entry WHERE tenant=? AND kind=? AND id=?",
                key.columns,
            ).fetchone()
            if row is None:
                entry = None
                old_body = 0
                old_size = 0
            else:
                entry, old_body, old_size = row
            size = old_size - old_body + len(data)
            if entry is None:
                self.last_use += 1
                entry = db.execute(
                    "INSERT INTO entry (tenant, kind, id, body, size, used, expires) VALUES (?, "
                    "?, ?, ?, ?, ?, ?)",
                    (*key.columns, data, size, self.last_use, expires),
                ).lastrowid
                self.count(key.kind, 1, size)
            else:
                db.execute(
                    "UPDATE entry SET body=?, size=?, expires=? WHERE number=?",
                    (data, size, expires, entry),
                )
                self.count(key.kind, 0, size - old_size)
            if data_parts is not None:
                db.execute("DELETE FROM part WHERE entry=?", (entry,))
                db.execute("UPDATE entry SET size=? WHERE number=?", (len(data), entry))
                self.count(key.kind, 0, len(data) - size)
                self.add_parts(key, data_parts)

    def add_parts(self, key: EntryKey, data_parts: Iterable[tuple[int, bytes]]) -> None:
        with self.transaction() as db:
            (entry,) = db.execute(
                "SELECT number FROM entry WHERE tenant=? AND kind=? AND id=?", key.columns
            ).fetchone()
            size = 0
            for number, data in data_parts:
                db.execute(
                    "INSERT INTO part (entry, number, data) VALUES (?, ?, ?)", (entry, number, data)
                )
                size += len(data)
            db.execute("UPDATE entry SET size=size+? WHERE number=?", (size, entry))
            self.count(key.kind, 0, size)

    def get(self, key: EntryKey) -> Any | None:
        """The body of an entry; None if there is no such entry."""
        with self.lock:
            row = self.db.execute(
                "SELECT body FROM entry WHERE tenant=? AND kind=? AND id=?", key.columns
            ).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def __contains__(self, key: EntryKey) -> bool:
        with self.lock:
            rows = self.db.execute(
                "SELECT 1 FROM entry WHERE tenant=? AND kind=? AND id=?", key.columns
            )
            return rows.fetchone() is not None

    def part_numbers(self, key: EntryKey) -> list[int]:
        with self.lock:
            rows = self.db.execute(
                "SELECT part.number FROM part JOIN entry ON entry.number=part.entry "
                "WHERE tenant=? AND kind=? AND id=? ORDER BY part.number",
                key.columns,
            )
            return [number for (number,) in rows]

    def parts(self, key: EntryKey) -> Iterator[bytes]:
        """Yield the parts of an entry in order, small ones joined.

        Stop if the entry is deleted meanwhile.
        """
        last_number = -1
        while True:
            joined: list[bytes] = []
            size = 0
            with self.lock:
                rows = self.db.execute(
                    "SELECT part.number, data FROM part JOIN entry ON entry.number=part.entry "
                    "WHERE tenant=? AND kind=? AND id=? AND part.number>? ORDER BY part.number",
                    (*key.columns, last_number),
                )
                for last_number, data in rows:  # noqa: B007 - the next query starts there
                    joined.append(data)
                    size += len(data)
                    if size >= READ:
                        break
                rows.close()
            if not joined:
                return
            yield b"".join(joined)

    def touch(self, key: EntryKey) -> None:
        """Mark an entry as the most recently used."""
        with self.transaction() as db:
            self.last_use += 1
            db.execute(
                "UPDATE entry SET used=? WHERE tenant=? AND kind=? AND id=?",
                (self.last_use, *key.columns),
            )

    def delete(self, key: EntryKey) -> None:
        with self.transaction() as db:
            row = db.execute(
                "SELECT number, size FROM entry WHERE tenant=? AND kind=? AND id=?", key.columns
            ).fetchone()
            if row is not None:
                db.execute("DELETE FROM entry WHERE number=?", (row[0],))
                self.count(key.kind, -1, -row[1])

    def bodies(self, tenant: str | None, kind: str) -> list[Any]:
        """The bodies of a tenant's entries, oldest first."""
        with self.lock:
            rows = self.db.execute(
                "SELECT body FROM entry WHERE tenant=? AND kind=? ORDER BY number",
                (tenant or "", kind),
            ).fetchall()
        return [msgspec.json.decode(body) for (body,) in rows]

    def entries(self, kinds: Sequence[str]) -> list[tuple[EntryKey, Any]]:
        """All entries of some kinds with their bodies, oldest first."""
        marks = ", ".join("?" * len(kinds))
        with self.lock:
            rows = self.db.execute(
                f"SELECT tenant, kind, id, body FROM entry WHERE kind IN ({marks}) ORDER BY number",
                kinds,
            ).fetchall()
        return [
            (EntryKey(tenant or None, kind, name), msgspec.json.decode(body))
            for tenant, kind, name, body in rows
        ]

    def expired(self, kind: str, now: float) -> list[EntryKey]:
        """The entries that have expired."""
        with self.lock:
            rows = self.db.execute(
                "SELECT tenant, kind, id FROM entry WHERE kind=? AND expires<=?", (kind, now)
            )
            return [EntryKey(tenant or None, kind, name) for tenant, kind, name in rows]

    def least_recently_used(self, kinds: Sequence[str]) -> Iterator[EntryKey]:
        """Yield the entries of some kinds, least recently used first.

        The caller may delete them meanwhile.
        """
        marks = ", ".join("?" * len(kinds))
        last_use = -1
        query = (
            f"SELECT tenant, kind, id, used FROM entry WHERE kind IN ({marks}) AND used>? "
            "ORDER BY used LIMIT 16"
        )
        while True:
            with self.lock:
                rows = self.db.execute(query, (*kinds, last_use)).fetchall()
            if not rows:
                return
            for tenant, kind, name, used in rows:
                yield EntryKey(tenant or None, kind, name)
                last_use = used


def prepare(folder: Path) -> Path:
    """Create the folder and its database file, readable only by this user."""
    path = folder / FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise ModelError(
            f"state_dir is {str(folder)!r}, where nothing can be written: {error}"
        ) from None
    return path
