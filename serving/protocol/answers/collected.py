"""The pieces of an answer put together."""

from collections.abc import Iterable

from ...parsing.pieces import Arguments, CallStart, Piece, Said, Thought
from .answer import ToolCall


def collect(pieces: Iterable[Piece]) -> tuple[str | None, str | None, list[ToolCall]]:
    """(content, reasoning, calls); None where there was no piece of a kind."""
    texts: dict[type, list[str]] = {Said: [], Thought: []}
    calls: list[tuple[CallStart, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append((piece, []))
        elif isinstance(piece, Arguments):
            calls[piece.index][1].append(piece.text)
        else:
            texts[type(piece)].append(piece.text)
    content, reasoning = ("".join(parts) if parts else None for parts in texts.values())
    return content, reasoning, [ToolCall(call.id, call.name, "".join(parts)) for call, parts in calls]
