"""Reading a story back: whether quill's grammar could have written it."""

from __future__ import annotations

import re
from functools import cache

from .stories import PLOTS, SLOTS, article, consistent, derived


@cache
def _parts(template: str) -> tuple[str, ...]:
    return tuple(re.split(r"\{(\w+)\}", template))  # literals at even places, slots at odd ones


def _match(parts: tuple[str, ...], text: str, at: int, bound: dict[str, str]):
    """Every (end, bindings) with which the parts match the text at a place."""
    states = [(at, bound)]
    for i, part in enumerate(parts):
        following = []
        for at, bound in states:
            if i % 2 == 0:
                options = [(part, bound)]
            elif part in bound:
                options = [(bound[part], bound)]
            elif part in SLOTS:
                options = [(value, bound | {part: value}) for value in SLOTS[part]]
            elif part[2:] in SLOTS and part[2:] not in bound:
                options = [(article(value), bound | {part[2:]: value}) for value in SLOTS[part[2:]]]
            else:
                options = [(derived(part, bound), bound)]
            following += [
                (at + len(word), b)
                for word, b in options
                if text.startswith(word, at) and consistent(b)
            ]
        states = following
    return states


def recognise(text: str, bound: dict[str, str] | None = None) -> bool:
    """Whether the grammar could have written exactly this story, given what is already known of its
    slots.
    """
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
