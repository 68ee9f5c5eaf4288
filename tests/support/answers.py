"""Answers made up for tests, whole and cut into parts anyhow, and what clients make of bodies and
events.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import httpx2
import msgspec
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from quire.serving.api.outputs import Logprob
from quire.serving.parsing.pieces import Arguments, CallStart, Piece, Said, Thought
from quire.serving.protocol.answers.answer import ChoicePart, FinishedChoice, ToolCall
from quire.serving.protocol.answers.choices import collect

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["\n\n", "data: x\r\n", "event: error", "\u2028", "é" * 5, "\x00"]
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT
JSON = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(TEXT, PLAIN, max_size=2)
ARGUMENTS = st.builds(
    lambda given, plain: json.dumps(given, ensure_ascii=plain),
    st.dictionaries(TEXT, JSON, max_size=2),
    st.booleans(),
)
ENDS = (
    ("stop", None),
    ("stop", "END"),
    ("stop", 7),
    ("length", None),
    ("timeout", None),
    ("abort", None),
)


@dataclass(frozen=True)
class Written:
    """One answer: in parts, whole, and as (kind, text or call) with neighbours of a kind made
    one.
    """

    parts: list[ChoicePart]
    answer: FinishedChoice
    blocks: list[tuple[str, Any]]


def joined(pieces: Iterable[Piece]) -> list[tuple[str, Any]]:
    """What a reader of pieces sees: empty ones are nothing."""
    found: list[tuple[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            found.append(("call", ToolCall(piece.id, piece.name, "")))
        elif isinstance(piece, Arguments):
            _, call = found.pop()
            found.append(("call", ToolCall(call.id, call.name, call.arguments + piece.text)))
        elif piece.text:
            kind = "said" if isinstance(piece, Said) else "thought"
            if found and found[-1][0] == kind:
                found[-1] = (kind, found[-1][1] + piece.text)
            else:
                found.append((kind, piece.text))
    return found


def token(i: int) -> dict[int, Logprob]:
    return {
        i: Logprob(-float("inf") if i % 5 == 0 else -i / 7, 2, f"t{i}" if i % 3 else None),
        99: Logprob(-0.1, 1, "\ufffd"),
    }


def cuts(random: Random, whole: Any, most: int) -> list[Any]:
    """A text or a list in up to `most` slices, some of them empty."""
    at = sorted(random.randint(0, len(whole)) for _ in range(random.randrange(most)))
    return [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]


CONTENTS = st.tuples(st.sampled_from(["said", "thought"]), TEXT) | st.tuples(
    st.just("call"), ARGUMENTS
)


@st.composite
def written(
    draw: st.DrawFn, ordered: bool = False, calls: bool = True, scored: bool = False
) -> Written:
    """`ordered`: thoughts, then text, then calls, as an answer that is told whole has them."""
    chosen = [
        (kind, text)
        for kind, text in draw(st.lists(CONTENTS, max_size=6))
        if calls or kind != "call"
    ]
    if ordered:
        chosen.sort(key=lambda content: ["thought", "said", "call"].index(content[0]))
    random = Random(draw(st.integers(0, 2**32)))
    pieces: list[Piece] = []
    number = 0
    for kind, text in chosen:
        if kind == "call":
            pieces.append(CallStart(number, f"call_{number}", random.choice(["look_up", "add"])))
            pieces += [Arguments(number, part) for part in cuts(random, text, 5)]
            number += 1
        else:
            pieces += [
                (Said if kind == "said" else Thought)(part) for part in cuts(random, text, 5)
            ]
    reason, stop = draw(st.sampled_from(ENDS))
    reason = "tool_calls" if number and reason == "stop" else reason
    parts = []
    count = 0
    slices = cuts(random, pieces, 8)
    for i, part in enumerate(slices):
        tokens = list(range(count, count + random.randrange(3)))
        count += len(tokens)
        end = (reason, stop) if i == len(slices) - 1 else (None, None)
        parts.append(
            ChoicePart(0, part, *end, tokens, [token(i) for i in tokens] if scored else None)
        )
    content, reasoning, found = collect(pieces)
    logprobs = [token(i) for i in range(count)] if scored else None
    return Written(
        parts,
        FinishedChoice(0, content, reason, reasoning, found, stop, range(count), logprobs),
        joined(pieces),
    )


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events as the standard for them reads: a name, and data on one line."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@cache
def adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def strange(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(strange, value))
    if not isinstance(value, BaseModel):
        return set()
    inner = [getattr(value, name) for name in type(value).model_fields]
    return set(value.model_extra or ()).union(*map(strange, inner))


def strangers(kind: Any, value: Any) -> set[str]:
    """Names of fields that a client's own type does not have; it must take the value without a
    conversion.
    """
    return strange(adapter(kind).validate_json(msgspec.json.encode(value), strict=True))


class Server:
    """What a client talks to: it says `data` and keeps what it was asked."""

    def __init__(self, data: bytes, status: int = 200):
        self.data = data
        self.status = status
        self.asked: Any = None
        self.http = httpx2.Client(transport=httpx2.MockTransport(self.answer))

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked = json.loads(request.content)
        kind = "application/json" if self.data.startswith(b"{") else "text/event-stream"
        return httpx2.Response(self.status, content=self.data, headers={"content-type": kind})


def spoil(data: st.DataObject, body: Any) -> None:
    """Replace one place of a body by anything."""
    place = body
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON | st.floats() | st.just(2**70) | st.just("\ud800"))
