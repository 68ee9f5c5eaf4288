"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from collections.abc import Iterator

from .calls import attempt, call, new_id
from .reader import Reader, text

KEEPS_SPECIAL = True  # some models mark these tags as special tokens
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(reader: Reader) -> Iterator[None]:
    called = False  # and not closed yet: other closing tags are text
    while found := (yield from text(reader, (OPEN, CLOSE) if called else (OPEN,))):
        if found == CLOSE:
            reader.drop()
            called = False
        else:
            called = yield from attempt(reader, call(reader, new_id()))
