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

RESPONSE, CONVERSATION = "response", "conversation"  # kinds of entries, and the `object` of their bodies
KINDS = RESPONSE, CONVERSATION
OPEN = ("queued", "in_progress")  # of a response that is being answered
RESTARTED = {
    "code": "server_error",
    "message": "the server was restarted before this response was over; it can be sent again",
    "param": None,
}


class Missing(NamedTuple):
    """How an id that names nothing of its kind is refused."""

    kind: str
    status: int
    param: str
    code: str


MISSING = Missing(RESPONSE, 404, "id", "response_not_found")
NO_CONVERSATION = Missing(CONVERSATION, 404, "conversation", "conversation_not_found")
NO_PREVIOUS = Missing(RESPONSE, 400, "previous_response_id", "previous_response_not_found")


@dataclass(eq=False)
class StoredResponse:
    """A response and what was asked; while `task` is there, it is being answered."""

    body: dict[str, Any]
    items: list[dict[str, Any]]
    previous: str | None
    task: asyncio.Task | None = None
    recording: Recording | None = None  # of its events, if it may be read as a stream

    def entry(self) -> dict[str, Any]:
        return {"body": self.body, "items": self.items, "previous": self.previous}


class StoredResponses:
    """At most so many, and so many bytes: what was used longest ago goes first. Any thread may read."""

    def __init__(self, most: int, most_bytes: int, storage: Storage | None = None):
        self.most, self.most_bytes = most, most_bytes
        self.storage = storage or Storage()
        self.running: dict[EntryKey, StoredResponse] = {}  # those that are being answered
        for key, entry in self.storage.entries([RESPONSE]):
            if entry["body"]["status"] in OPEN:  # the server that answered it is gone
                entry["body"] |= {"status": "failed", "error": RESTARTED}
                self.storage.put(key, entry)
        self.make_room()  # the limits may be lower than those of the server before

    def check_unused(self, key: str | None, name: str) -> None:
        """Refuse a chosen id that a stored response has: chains of responses could cycle."""
        if EntryKey(key, RESPONSE, name) in self.storage:
            raise RequestError("request_id", f"makes the id {name}, which a stored response has; ids must differ")

    def put(self, key: str | None, name: str, stored: StoredResponse, is_new: bool = False) -> bool:
        """Store a response or conversation; False where there is no room, and then nothing changes.

        A new one (`is_new`) never takes the place of another with the same id.
        """
        place = EntryKey(key, stored.body["object"], name)
        is_over = stored.task is None and stored.recording is not None
        parts = [(0, b"".join(stored.recording.events))] if is_over else None
        try:
            with self.storage.transaction():
                if is_new and place in self.storage:
                    return False
                self.storage.put(place, stored.entry(), parts)
                self.storage.touch(place)
                if not self.make_room(spared=place):
                    raise NoRoom
        except NoRoom:
            return False
        if stored.task is not None:
            self.running[place] = stored
        return True

    def put_answer(self, key: str | None, name: str, stored: StoredResponse, is_new: bool = False) -> bool:
        """The same for an answer that is not to fail where it cannot be stored."""
        try:
            return self.put(key, name, stored, is_new)
        except StorageFailed:
            log.exception("response %s cannot be stored", name)
            return False

    def finish(self, key: str | None, name: str, stored: StoredResponse) -> None:
        """Store a response that was answered in the background, with its events if they fit."""
        place = EntryKey(key, RESPONSE, name)
        if self.running.get(place) is stored:  # it was not deleted
            stored.task = None
            self.put_answer(key, name, stored)
            del self.running[place]

    def make_room(self, spared: EntryKey | None = None) -> bool:
        """Delete what was used longest ago until the rest fits; whether it does."""
        for place in self.storage.least_recently_used(KINDS):
            if self.fits():
                return True
            if place not in self.running and place != spared:
                self.storage.delete(place)
        return self.fits()

    def fits(self) -> bool:
        used = self.storage.usage(*KINDS)
        return used.entries <= self.most and used.bytes <= self.most_bytes

    def get(self, key: str | None, name: str, missing: Missing = MISSING) -> StoredResponse:
        """The response or conversation that this tenant keeps under a name."""
        place = EntryKey(key, missing.kind, name)
        if (running := self.running.get(place)) is not None:
            return running
        entry = self.storage.get(place)
        if entry is None:
            kind = missing.kind.capitalize()
            why = f"{kind} with id {shown(name)} not found: it was not stored, or others have taken its place"
            raise HttpError(missing.status, f"{missing.param}: {why}", missing.param, missing.code)
        try:
            self.storage.touch(place)
        except StorageFailed as error:  # what is stored can be read all the same
            log.warning("the use of %s cannot be noted: %s", name, error)
        return StoredResponse(**entry)

    def recording(self, key: str | None, name: str) -> Recording | None:
        """The events of a response, if they may be read as a stream."""
        place = EntryKey(key, RESPONSE, name)
        if (running := self.running.get(place)) is not None:
            return running.recording
        data = b"".join(self.storage.parts(place))
        if not data:
            return None
        recording = Recording()
        recording.add(data)
        recording.end()
        return recording

    def delete(self, key: str | None, name: str, missing: Missing = MISSING) -> None:
        found = self.get(key, name, missing)
        if found.task is not None:
            found.task.cancel()
        place = EntryKey(key, missing.kind, name)
        self.running.pop(place, None)
        self.storage.delete(place)

    def forget(self, key: str | None, name: str) -> None:
        """Store a response no longer; whoever reads its events goes on."""
        place = EntryKey(key, RESPONSE, name)
        self.running.pop(place, None)
        self.storage.delete(place)

    def history(self, key: str | None, name: str, field: str) -> list[dict[str, Any]]:
        """The items of a response and of all before it, in their order; or those of a conversation."""
        if field == "conversation":
            return self.get(key, name, NO_CONVERSATION).items
        return [item for stored in reversed(list(self.chain(key, name))) for item in turn(stored)]

    def chain(self, key: str | None, name: str | None) -> Iterator[StoredResponse]:
        """A response and those before it, the newest first."""
        visited: set[str] = set()
        while name is not None:
            if name in visited:
                raise RequestError("previous_response_id", f"leads to {shown(name)} twice; the chain must end")
            visited.add(name)
            found = self.get(key, name, NO_PREVIOUS)
            if found.body["status"] in OPEN:
                raise RequestError("previous_response_id", f"is {shown(name)}, which is not answered yet")
            yield found
            name = found.previous


class NoRoom(Exception):
    """An entry does not fit beside those that stay."""


def turn(stored: StoredResponse) -> list[dict[str, Any]]:
    """What was asked and answered."""
    return stored.items + finished(stored.body)


def finished(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of a response; a call that was cut off is none."""
    return [item for item in body["output"] if (item["type"], item["status"]) != ("function_call", "incomplete")]
