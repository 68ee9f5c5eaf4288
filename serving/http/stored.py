"""Stored responses and conversations, which clients can read again and continue."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..api.errors import RequestError
from ..api.validation import shown
from .errors import HttpError
from .recording import Recording
from .storage import EntryKey, Storage, StorageFailed

log = logging.getLogger("quire")

RESPONSE = "response"  # kinds of entries, and the `object` of their bodies
CONVERSATION = "conversation"
KINDS = RESPONSE, CONVERSATION
OPEN = ("queued", "in_progress")  # statuses of an unfinished response
RESTARTED = {
    "code": "server_error",
    "message": "the server was restarted before this response was over; it can be sent again",
    "param": None,
}


class Missing(NamedTuple):
    """The error for an id that is not stored."""

    kind: str
    status: int
    param: str
    code: str


MISSING = Missing(RESPONSE, 404, "id", "response_not_found")
NO_CONVERSATION = Missing(CONVERSATION, 404, "conversation", "conversation_not_found")
NO_PREVIOUS = Missing(RESPONSE, 400, "previous_response_id", "previous_response_not_found")


@dataclass(eq=False)
class StoredResponse:
    """A response or conversation with its input items.

    `task` computes it and is None afterwards.
    """

    body: dict[str, Any]
    items: list[dict[str, Any]]
    previous: str | None
    task: asyncio.Task | None = None
    recording: Recording | None = None  # its events, if it was requested as a stream

    def entry(self) -> dict[str, Any]:
        return {"body": self.body, "items": self.items, "previous": self.previous}


class StoredResponses:
    """A least-recently-used store of at most `max_entries` and `max_bytes`. Any thread may read."""

    def __init__(self, max_entries: int, most_bytes: int, storage: Storage | None = None):
        self.max_entries = max_entries
        self.most_bytes = most_bytes
        self.storage = storage or Storage()
        self.running: dict[EntryKey, StoredResponse] = {}  # unfinished ones
        for key, entry in self.storage.entries([RESPONSE]):
            if entry["body"]["status"] in OPEN:  # an earlier server was answering it
                entry["body"] |= {"status": "failed", "error": RESTARTED}
                self.storage.put(key, entry)
        self.make_room()  # an earlier server may have had higher limits

    def check_unused(self, key: str | None, name: str) -> None:
        """Refuse an id that is stored already: chains of responses could become cycles."""
        if EntryKey(key, RESPONSE, name) in self.storage:
            raise RequestError(
                "request_id", f"makes the id {name}, which a stored response has; ids must differ"
            )

    def put(self, key: str | None, name: str, stored: StoredResponse, is_new: bool = False) -> bool:
        """Store a response or conversation; return False, and change nothing, if there is no room.

        With `is_new` it also returns False, instead of replacing, if the id is stored already.
        """
        entry_key = EntryKey(key, stored.body["object"], name)
        data_parts = None
        if stored.task is None and stored.recording is not None:  # it is over
            data_parts = [(0, b"".join(stored.recording.events))]
        try:
            with self.storage.transaction():
                if is_new and entry_key in self.storage:
                    return False
                self.storage.put(entry_key, stored.entry(), data_parts)
                self.storage.touch(entry_key)
                if not self.make_room(spared=entry_key):
                    raise NoRoom
        except NoRoom:
            return False
        if stored.task is not None:
            self.running[entry_key] = stored
        return True

    def put_answer(
        self, key: str | None, name: str, stored: StoredResponse, is_new: bool = False
    ) -> bool:
        """As `put`, but log a storage failure and return False, since the answer is still valid."""
        try:
            return self.put(key, name, stored, is_new)
        except StorageFailed:
            log.exception("response %s cannot be stored", name)
            return False

    def finish(self, key: str | None, name: str, stored: StoredResponse) -> None:
        """Store a finished background response, with its events if they fit."""
        entry_key = EntryKey(key, RESPONSE, name)
        if self.running.get(entry_key) is stored:  # else it was deleted
            stored.task = None
            self.put_answer(key, name, stored)
            del self.running[entry_key]

    async def wait_until_idle(self) -> None:
        """Wait for the background responses."""
        while tasks := [
            stored.task
            for stored in self.running.values()
            if stored.task is not None and not stored.task.done()
        ]:
            await asyncio.wait(tasks)

    def interrupt(self) -> None:
        """Cancel the background responses; their entries stay unfinished in the storage."""
        interrupted = list(self.running.values())
        self.running.clear()
        for stored in interrupted:
            if stored.task is not None:
                stored.task.cancel()

    def make_room(self, spared: EntryKey | None = None) -> bool:
        """Delete the least recently used entries until the others fit; return whether they do."""
        for entry_key in self.storage.least_recently_used(KINDS):
            if self.fits():
                return True
            if entry_key not in self.running and entry_key != spared:
                self.storage.delete(entry_key)
        return self.fits()

    def fits(self) -> bool:
        used = self.storage.usage(*KINDS)
        return used.entries <= self.max_entries and used.bytes <= self.most_bytes

    def get(self, key: str | None, name: str, missing: Missing = MISSING) -> StoredResponse:
        """A tenant's response or conversation.

        `missing` says which, and the error if it is not stored.
        """
        entry_key = EntryKey(key, missing.kind, name)
        if (running := self.running.get(entry_key)) is not None:
            return running
        entry = self.storage.get(entry_key)
        if entry is None:
            kind = missing.kind.capitalize()
            reason = (
                f"{kind} with id {shown(name)} not found: it was not stored, or others have "
                "taken its place"
            )
            raise HttpError(
                missing.status, f"{missing.param}: {reason}", missing.param, missing.code
            )
        try:
            self.storage.touch(entry_key)
        except StorageFailed as error:  # reading still works
            log.warning("the use of %s cannot be noted: %s", name, error)
        return StoredResponse(**entry)

    def recording(self, key: str | None, name: str) -> Recording | None:
        """The events of a response; None if it was not requested as a stream."""
        entry_key = EntryKey(key, RESPONSE, name)
        if (running := self.running.get(entry_key)) is not None:
            return running.recording
        data = b"".join(self.storage.parts(entry_key))
        if not data:
            return None
        recording = Recording()
        recording.add(data)
        recording.end()
        return recording

    def delete(self, key: str | None, name: str, missing: Missing = MISSING) -> None:
        stored = self.get(key, name, missing)
        if stored.task is not None:
            stored.task.cancel()
        entry_key = EntryKey(key, missing.kind, name)
        self.running.pop(entry_key, None)
        self.storage.delete(entry_key)

    def forget(self, key: str | None, name: str) -> None:
        """Delete a response without ending its computation or its readers."""
        entry_key = EntryKey(key, RESPONSE, name)
        self.running.pop(entry_key, None)
        self.storage.delete(entry_key)

    def history(self, key: str | None, name: str, field: str) -> list[dict[str, Any]]:
        """The items of a conversation, or of a response and all its predecessors, oldest first.

        `field` is the request's field that names it: `conversation` or `previous_response_id`.
        """
        if field == "conversation":
            return self.get(key, name, NO_CONVERSATION).items
        return [
            item for stored in reversed(list(self.chain(key, name))) for item in turn_items(stored)
        ]

    def chain(self, key: str | None, name: str | None) -> Iterator[StoredResponse]:
        """Yield a response and its predecessors, newest first."""
        visited: set[str] = set()
        while name is not None:
            if name in visited:
                raise RequestError(
                    "previous_response_id", f"leads to {shown(name)} twice; the chain must end"
                )
            visited.add(name)
            stored = self.get(key, name, NO_PREVIOUS)
            if stored.body["status"] in OPEN:
                raise RequestError(
                    "previous_response_id", f"is {shown(name)}, which is not answered yet"
                )
            yield stored
            name = stored.previous


class NoRoom(Exception):
    """There is no room for an entry."""


def turn_items(stored: StoredResponse) -> list[dict[str, Any]]:
    """The input and output items of a response."""
    return stored.items + finished_items(stored.body)


def finished_items(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The output items of a response, without a call that was cut off."""
    return [
        item
        for item in body["output"]
        if (item["type"], item["status"]) != ("function_call", "incomplete")
    ]
