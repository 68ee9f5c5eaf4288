"""The formats of tool calls: answers that were recorded in each, however they are cut; the types of arguments; what
breaks; and which format a chat template shows."""

import json
from functools import partial
from random import Random

import pytest
from recorded_calls import ALONE, RECORDED, TOOLS, TRAINS, joined, read

from quire.serving import parsing


def maker(name: str, tools=TOOLS, reasoning: str | None = None):
    return partial(parsing.make_parser, name.partition(",")[0], reasoning, tools)


def slices_of(random: Random, text: str) -> list[str]:
    at = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_calls_however_they_are_cut(name):
    text, make, random = RECORDED[name], maker(name), Random(3)
    text = text if name in ALONE else f"Let me look. {text}"
    whole = read(make, text)
    said, _, calls = whole
    assert [call for call, _ in calls] == ["find_trains", "now"]
    assert [json.loads(arguments) for _, arguments in calls] == [TRAINS, {}]
    assert said.strip() == ("" if name in ALONE - {"openai"} else "Let me look.")
    assert read(make, *text) == whole
    for at in range(len(text)):
        assert read(make, text[:at], text[at:]) == whole
        cut = read(make, text[:at])[2]
        for (name_cut, part), (full_name, full) in zip(cut, calls, strict=False):
            assert name_cut == full_name and full.startswith(part)
    for _ in range(30):
        assert read(make, *slices_of(random, text)) == whole


def test_every_format_is_recorded():
    assert {name.partition(",")[0] for name in RECORDED} == set(parsing.TOOL_PARSERS) - {"harmony"}


@pytest.mark.parametrize("name", sorted(set(RECORDED) - ALONE))
def test_text_behind_calls_is_text(name):
    said, _, calls = read(maker(name), f"{RECORDED[name]}\nThat is [all] of it, {{really}}.")
    assert len(calls) == 2 and said.strip() == "That is [all] of it, {really}."


STRINGS = ["qwen3_coder", "glm45", "minimax_m2", "seed_oss", "deepseek_v32", "gemma4", "functiongemma", "pythonic"]


@pytest.mark.parametrize("name", [*STRINGS, "olmo3", "hermes", "kimi_k2"])
def test_a_text_streams(name):
    """What a string argument has comes at once, and not when the argument is whole."""
    text, parser = RECORDED[name], maker(name)()
    at = text.index("Zürich") + 4
    assert joined(parser.push(text[:at]))[2][-1][1].endswith('"to": "Züri')
