"""Responses that are kept in memory, so that clients can ask for them again and go on from them."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ..api.errors import RequestError
from ..api.validation import shown
from .errors import HttpError
from .recording import Recording


class Missing(NamedTuple):
    """How an id that names nothing of its kind is refused."""

    kind: str  # the `object` of what is looked for
    status: int
    param: str
    code: str


MISSING = Missing("response", 404, "id", "response_not_found")
NO_CONVERSATION = Missing("conversation", 404, "conversation", "conversation_not_found")
NO_PREVIOUS = Missing("response", 400, "previous_response_id", "previous_response_not_found")


@dataclass(eq=False)
class StoredResponse:
    """A response and what was asked; while `task` is there, it is being answered."""

    body: dict[str, Any]
    items: list[dict[str, Any]]
    previous: str | None
    task: asyncio.Task | None = None
    recording: Recording | None = None  # of its events, if it may be read as a stream
    size: int = 0


class StoredResponses:
    """At most so many, and so many bytes of JSON: what was used longest ago goes first. Any thread may use it."""

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes = most, most_bytes
        self.kept: OrderedDict[tuple[str | None, str], StoredResponse] = OrderedDict()  # by tenant and id
        self.bytes = 0
        self.lock = threading.Lock()

    def check_unused(self, key: str | None, name: str) -> None:
        """Refuse an id that a client has chosen and that a stored response has: chains of responses could cycle."""
        with self.lock:
            is_used = (key, name) in self.kept
        if is_used:
            raise RequestError("request_id", f"makes the id {name}, which a stored response has; ids must differ")

    def put(self, key: str | None, name: str, stored: StoredResponse, is_new: bool = False) -> bool:
        """Keep a response of a tenant, if there is a place: one that is being answered is not given up for it.

        A new one (`is_new`) never takes the place of another with the same id.
        """
        size = len(msgspec.json.encode([stored.body, stored.items]))
        if stored.recording is not None:
            size += size + stored.recording.size  # its last event has the body once more
        if size > self.most_bytes:
            return False
        with self.lock:
            if is_new and (key, name) in self.kept:
                return False
            self.remove((key, name))
            goes = [place for place, one in self.kept.items() if one.task is None]
            while goes and (len(self.kept) >= self.most or self.bytes + size > self.most_bytes):
                self.remove(goes.pop(0))
            if len(self.kept) >= self.most or self.bytes + size > self.most_bytes:
                return False
            stored.size = size
            self.bytes += size
            self.kept[key, name] = stored
            return True

    def remove(self, place: tuple[str | None, str]) -> None:
        if (found := self.kept.pop(place, None)) is not None:
            self.bytes -= found.size

    def get(self, key: str | None, name: str, missing: Missing = MISSING) -> StoredResponse:
        """The response or conversation that this tenant keeps under a name."""
        with self.lock:
            found = self.kept.get((key, name))
            if found is None or found.body["object"] != missing.kind:
                kind = missing.kind.capitalize()
                why = f"{kind} with id {shown(name)} not found: it was not stored, or others have taken its place"
                raise HttpError(missing.status, f"{missing.param}: {why}", missing.param, missing.code)
            self.kept.move_to_end((key, name))
            return found

    def delete(self, key: str | None, name: str, missing: Missing = MISSING) -> None:
        found = self.get(key, name, missing)
        if found.task is not None:
            found.task.cancel()
        with self.lock:
            self.remove((key, name))

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
            if found.task is not None:
                raise HttpError(400, f"previous_response_id: {shown(name)} is not answered yet", "previous_response_id")
            yield found
            name = found.previous


def turn(stored: StoredResponse) -> list[dict[str, Any]]:
    """What was asked and answered."""
    return stored.items + finished(stored.body)


def finished(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of a response; a call that was cut off is none."""
    return [item for item in body["output"] if (item["type"], item["status"]) != ("function_call", "incomplete")]
