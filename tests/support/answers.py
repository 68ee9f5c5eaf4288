"""Random answers, whole and cut into parts, and the types of official clients as a check of bodies
and events.
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
from quire.serving.parsing.pieces import Arguments, CallStart, Piece, ReasoningPiece, TextPiece
from quire.serving.protocol.answers.answer import ChoicePart, FinishedChoice, ToolCall
from quire.serving.protocol.answers.choices import collect

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["\n\n", "data: x\r\n", "event: error", "\u2028", "é" * 5, "\x00"]
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT
JSON = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(TEXT, PLAIN, max_size=2)
ARGUMENTS = st.builds(
    lambda arguments, ascii_only: json.dumps(arguments, ensure_ascii=ascii_only),
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
    """One answer: in parts, whole, and as blocks of adjacent parts: (kind, text or call)."""

    parts: list[ChoicePart]
    answer: FinishedChoice
    blocks: list[tuple[str, Any]]


def joined(pieces: Iterable[Piece]) -> list[tuple[str, Any]]:
    """Merge adjacent pieces of a kind; empty pieces are left out."""
    blocks: list[tuple[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            blocks.append(("call", ToolCall(piece.id, piece.name, "")))
        elif isinstance(piece, Arguments):
            _, call = blocks.pop()
            blocks.append(("call", ToolCall(call.id, call.name, call.arguments + piece.text)))
        elif piece.text:
            kind = "said" if isinstance(piece, TextPiece) else "thought"
            if blocks and blocks[-1][0] == kind:
                blocks[-1] = (kind, blocks[-1][1] + piece.text)
            else:
                blocks.append((kind, piece.text))
    return blocks


def token(i: int) -> dict[int, Logprob]:
    return {
        i: Logprob(-float("inf") if i % 5 == 0 else -i / 7, 2, f"t{i}" if i % 3 else None),
        99: Logprob(-0.1, 1, "\ufffd"),
    }


def cuts(random: Random, sequence: Any, max_slices: int) -> list[Any]:
    """Cut a text or a list into up to `max_slices` slices, some of them empty."""
    bounds = sorted(random.randint(0, len(sequence)) for _ in range(random.randrange(max_slices)))
    return [sequence[a:b] for a, b in zip([0, *bounds], [*bounds, len(sequence)], strict=True)]


CONTENTS = st.tuples(st.sampled_from(["said", "thought"]), TEXT) | st.tuples(
    st.just("call"), ARGUMENTS
)


@st.composite
def written(
    draw: st.DrawFn, ordered: bool = False, calls: bool = True, scored: bool = False
) -> Written:
    """`ordered`: reasoning, then text, then calls, as in an answer that is not streamed."""
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
            pieces += [Arguments(number, piece_slice) for piece_slice in cuts(random, text, 5)]
            number += 1
        else:
            pieces += [
                (TextPiece if kind == "said" else ReasoningPiece)(piece_slice)
                for piece_slice in cuts(random, text, 5)
            ]
    reason, stop = draw(st.sampled_from(ENDS))
    reason = "tool_calls" if number and reason == "stop" else reason
    answer_parts = []
    count = 0
    slices = cuts(random, pieces, 8)
    for i, piece_slice in enumerate(slices):
        tokens = list(range(count, count + random.randrange(3)))
        count += len(tokens)
        end = (reason, stop) if i == len(slices) - 1 else (None, None)
        answer_parts.append(
            ChoicePart(0, piece_slice, *end, tokens, [token(i) for i in tokens] if scored else None)
        )
    content, reasoning, tool_calls = collect(pieces)
    logprobs = [token(i) for i in range(count)] if scored else None
    return Written(
        answer_parts,
        FinishedChoice(0, content, reason, reasoning, tool_calls, stop, range(count), logprobs),
        joined(pieces),
    )


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Parse server-sent events, each of a name and one line of JSON data."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@cache
def adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def extra_fields(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(extra_fields, value))
    if not isinstance(value, BaseModel):
        return set()
    inner = [getattr(value, name) for name in type(value).model_fields]
    return set(value.model_extra or ()).union(*map(extra_fields, inner))


def unknown_client_fields(kind: Any, value: Any) -> set[str]:
    """Names of fields that a client's type lacks; it must validate the value without conversion."""
    return extra_fields(adapter(kind).validate_json(msgspec.json.encode(value), strict=True))


class Server:
    """A fake server: answers every request with `data` and keeps the last request's body."""

    def __init__(self, data: bytes, status: int = 200):
        self.data = data
        self.status = status
        self.asked: Any = None
        self.http = httpx2.Client(transport=httpx2.MockTransport(self.answer))

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked = json.loads(request.content)
        kind = "application/json" if self.data.startswith(b"{") else "text/event-stream"
        return httpx2.Response(self.status, content=self.data, headers={"content-type": kind})


def replace_random_value(data: st.DataObject, body: Any) -> None:
    """Replace one value in a body by any other."""
    place = body
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON | st.floats() | st.just(2**70) | st.just("\ud800"))
