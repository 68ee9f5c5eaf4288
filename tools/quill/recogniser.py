"""Story recognition: decides whether quill's story grammar could have generated a text."""

from __future__ import annotations

import re
from functools import cache

from .stories import PLOTS, SLOTS, article, consistent, derived


@cache
def _parts(template: str) -> tuple[str, ...]:
    return tuple(re.split(r"\{(\w+)\}", template))  # literals at even, slots at odd indices


def _match(pieces: tuple[str, ...], text: str, at: int, bound: dict[str, str]):
    """All (end, slot bindings) with which the template matches the text from position `at`."""
    states = [(at, bound)]
    for i, piece in enumerate(pieces):
        following = []
        for at, bound in states:
            if i % 2 == 0:
                options = [(piece, bound)]
            elif piece in bound:
                options = [(bound[piece], bound)]
            elif piece in SLOTS:
                options = [(value, bound | {piece: value}) for value in SLOTS[piece]]
            elif piece[2:] in SLOTS and piece[2:] not in bound:
                options = [
                    (article(value), bound | {piece[2:]: value}) for value in SLOTS[piece[2:]]
                ]
            else:
                options = [(derived(piece, bound), bound)]
            following += [
                (at + len(word), b)
                for word, b in options
                if text.startswith(word, at) and consistent(b)
            ]
        states = following
    return states


def recognise(text: str, bound: dict[str, str] | None = None) -> bool:
    """Whether the grammar could have generated exactly this story with the given slot bindings."""
    for plot in PLOTS:
        steps = [
            ("\n\n" if p and s == 0 else " " if s else "", step)
            for p, paragraph in enumerate(plot)
            for s, step in enumerate(paragraph)
        ]
        states = [(0, dict(bound or {}))]
        for joint, step in steps:
            states = [
                state
                for at, b in states
                if text.startswith(joint, at)
                for template in step
                for state in _match(_parts(template), text, at + len(joint), b)
            ]
        if any(at == len(text) for at, _ in states):
            return True
    return False
