"""Parsers of answers: whatever the slices, the same pieces; arguments as they were written; nothing
lost.
"""

import json
import time
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.serving import parsing
from quire.serving.parsing.custom import CustomCalls
from quire.serving.parsing.forced import Forced
from quire.serving.parsing.pieces import Arguments, CallStart, Said, Thought
from quire.serving.protocol.answers.answer import ToolCall
from quire.serving.protocol.answers.choices import collect
from quire.tests.support.cases import cases

MARKERS = (
    "<tool_call> </tool_call> <think> </think> [TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> "
    "<|start|> <|channel|> <|constrain|> <|message|> <|end|> <|call|> <|return|>"
).split()
PARSERS = {
    "plain": partial(parsing.make_parser, None, None, {}),
    "hermes": partial(parsing.make_parser, "hermes", None, {}),
    "llama3_json": partial(parsing.make_parser, "llama3_json", None, {}),
    "mistral": partial(parsing.make_parser, "mistral", None, {}),
    "openai": partial(parsing.make_parser, "openai", "openai_gptoss", {}),
    "qwen3": partial(parsing.make_parser, "hermes", "qwen3", {}),
    "deepseek_r1": partial(parsing.make_parser, "mistral", "deepseek_r1", {}),
    "no tools": partial(parsing.make_parser, "hermes", "qwen3", None),
}
HEAD = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@dataclass(frozen=True)
class Words:
    """A part of an answer that is text."""

    text: str


@dataclass(frozen=True)
class Wanted:
    """A part of an answer that is a call: its arguments stand from `start` on, a closing marker
    from `end` on.
    """

    text: str
    name: str
    arguments: str
    start: int
    end: int


@dataclass
class Result:
    """What the pieces come to, without the ids, which are random."""

    said: str
    thought: str
    calls: list[tuple[str, str]]


def joined(pieces) -> Result:
    result = Result("", "", [])
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(result.calls) and piece.id
            result.calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            assert piece.text and piece.index == len(result.calls) - 1
            result.calls[-1] = (result.calls[-1][0], result.calls[-1][1] + piece.text)
        elif isinstance(piece, Said):
            assert piece.text
            result.said += piece.text
        else:
            assert isinstance(piece, Thought) and piece.text
            result.thought += piece.text
    return result


def read(make, *slices: str) -> Result:
    parser = make()
    pieces = [piece for part in slices for piece in parser.push(part)]
    pieces += parser.finish()
    for reader in getattr(parser, "parsers", [parser]):
        assert next(reader._steps, "done") == "done"  # none waits for more
    return joined(pieces)


def expected(parts: list[Words | Wanted], length: int) -> Result:
    """What the first characters of an answer come to, known from how it was made."""
    said = ""  # the tail is the text since the last call
    tail = ""
    calls = []
    for part in parts:
        text = part.text[:length]
        length -= len(text)
        if isinstance(part, Words) or len(text) <= part.start:
            tail += text
        else:
            calls.append((part.name, part.arguments[: len(text) - part.start]))
            said = said + tail.rstrip()
            tail = text[part.end :] if len(text) < len(part.text) else ""
    return Result(said + tail if tail.strip() or not calls else said, "", calls)


def agrees_everywhere(make, parts, result=expected):
    """One push, a push a character, every cut in two and every truncation, against how the answer
    was made.
    """
    answer = "".join(part.text for part in parts)
    whole = result(parts, len(answer))
    assert read(make, answer) == whole
    parser = make()
    pieces = []
    for at, char in enumerate(answer, start=1):
        pieces += parser.push(char)
        # Arguments come at once, and never more than the arguments.
        assert joined(pieces).calls == result(parts, at).calls
    assert joined(pieces + parser.finish()) == whole
    for at in range(len(answer)):
        assert read(make, answer[:at], answer[at:]) == whole
        assert read(make, answer[:at]) == result(parts, at), answer[:at]


spice = st.sampled_from([*MARKERS, "{", "}", '"', "\\", '\\"', "]", "<", "é", "😀", "\n", "\u2028"])
strings = st.lists(st.text(max_size=5) | spice, max_size=4).map("".join)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | strings
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3)
)
objects = st.dictionaries(strings, values, max_size=3)
names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
space = st.text(" \n\t", max_size=3)
words = (st.text(max_size=12) | space).filter(
    lambda text: not any(marker in text for marker in MARKERS)
)


@st.composite
def written(draw, value) -> str:
    """A JSON value, as one model or another would write it."""
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]))
    indent = draw(st.sampled_from([None, None, 1]))
    return json.dumps(value, ensure_ascii=draw(st.booleans()), separators=separators, indent=indent)


@st.composite
def call_object(
    draw, before: str = "", after: str = "", key: str = "arguments", late_name: bool = False
) -> Wanted:
    """{"name": ..., "arguments": {...}} and more, between what the format puts round it."""
    name = draw(names)
    arguments = draw(written(draw(objects)))
    others = [
        f"{json.dumps(other)}:{draw(space)}{draw(written(value))}"
        for other, value in draw(st.dictionaries(strings, values, max_size=2)).items()
        if other not in ("name", "arguments", "parameters")
    ]
    at = draw(st.integers(0, len(others)))
    front = others[:at]
    back = others[at:]
    named = f'{draw(space)}"name"{draw(space)}:{draw(space)}{json.dumps(name)}{draw(space)}'
    if late_name:
        head = f"{before}{{" + "".join(f"{item}," for item in front) + f'"{key}": '
        text = head + arguments + draw(space) + "," + ",".join([*back, named])
        return Wanted(text + "}" + after, name, arguments, len(text) - 1, len(text) + 1)
    head = (
        f"{before}{{"
        + "".join(f"{item}," for item in [*front, named])
        + f'{draw(space)}"{key}"{draw(space)}:'
    )
    head += draw(space)
    text = head + arguments + draw(space) + "".join(f",{draw(space)}{item}" for item in back)
    return Wanted(text + "}" + after, name, arguments, len(head), len(text) + 1)


@st.composite
def hermes(draw) -> list[Words | Wanted]:
    before = "<tool_call>" + draw(space)
    parts = [Words(draw(words))]
    for _ in range(draw(st.integers(0, 2))):
        parts += [draw(call_object(before, draw(space) + "</tool_call>")), Words(draw(words))]
    return parts


@st.composite
def llama3_json(draw) -> list[Words | Wanted]:
    parts = [Words(draw(space))]
    for _ in range(draw(st.integers(0, 2))):
        before = draw(st.sampled_from(["", "<|python_tag|>", "\n", " <|python_tag|>\n"]))
        after = draw(st.sampled_from([";", "", "\n;"]))
        parts.append(
            draw(call_object(before, after, draw(st.sampled_from(["parameters", "arguments"]))))
        )
    return [*parts, Words(draw(space) + "." + draw(words))] if draw(st.booleans()) else parts


@st.composite
def mistral_list(draw) -> list[Words | Wanted]:
    parts: list[Words | Wanted] = [Words(draw(words))]
    count = draw(st.integers(1, 2))
    for i in range(count):
        before = draw(space) + "," if i else f"[TOOL_CALLS]{draw(space)}["
        parts.append(
            draw(call_object(before + draw(space), draw(space) + "]" if i == count - 1 else ""))
        )
    return [*parts, Words(draw(words))]


@st.composite
def mistral_named(draw) -> list[Words | Wanted]:
    parts: list[Words | Wanted] = [Words(draw(words))]
    for _ in range(draw(st.integers(0, 2))):
        name = draw(names)
        arguments = draw(written(draw(objects)))
        between = draw(st.sampled_from(["", "[ARGS]", "[ARGS] ", "[CALL_ID]aB3456789[ARGS]"]))
        head = f"[TOOL_CALLS]{name}{between}"
        text = head + arguments
        parts += [Wanted(text, name, arguments, len(head), len(text)), Words(draw(words))]
    return parts


FORMATS = {
    "hermes": ("hermes", hermes()),
    "llama3_json": ("llama3_json", llama3_json()),
    "mistral, a list": ("mistral", mistral_list()),
    "mistral, named": ("mistral", mistral_named()),
}


@pytest.mark.random
@pytest.mark.parametrize("name", FORMATS)
def test_calls_come_as_written_however_the_answer_is_cut(name):
    parser, answers = FORMATS[name]

    @settings(max_examples=cases(25))
    @given(answers)
    def check(parts):
        assume(sum(len(part.text) for part in parts) < 500)
        agrees_everywhere(PARSERS[parser], parts)
        for part in parts:
            if isinstance(part, Wanted):
                json.loads(part.arguments)

    check()


@settings(max_examples=cases(20))
@given(
    st.lists(call_object("<tool_call>\n", "\n</tool_call>", late_name=True), min_size=1, max_size=2)
)
def test_arguments_before_the_name_wait_for_it(parts):
    """They come with the name; a truncation before it leaves the text as it is."""
    answer = "".join(part.text for part in parts)
    whole = Result("", "", [(part.name, part.arguments) for part in parts])
    assert read(PARSERS["hermes"], answer) == read(PARSERS["hermes"], *answer) == whole
    for at in range(len(answer)):
        assert read(PARSERS["hermes"], answer[:at], answer[at:]) == whole
        cut = read(PARSERS["hermes"], answer[:at])
        assert cut.calls == whole.calls[: len(cut.calls)]
        if at < len(parts[0].text) and not cut.calls:
            assert cut.said == answer[:at]


@settings(max_examples=cases(30))
@given(objects, st.booleans(), st.booleans(), st.booleans())
def test_arguments_in_a_string_are_what_it_holds(value, inner_ascii, outer_ascii, late_name):
    arguments = json.dumps(value, ensure_ascii=inner_ascii)
    pair = [('"name"', '"f"'), ('"arguments"', json.dumps(arguments, ensure_ascii=outer_ascii))]
    items = ", ".join(f"{key}: {item}" for key, item in (reversed(pair) if late_name else pair))
    answer = "<tool_call>{" + items + "}</tool_call>"
    whole = Result("", "", [("f", arguments)])
    assert read(PARSERS["hermes"], answer) == read(PARSERS["hermes"], *answer) == whole
    for at in range(len(answer)):
        assert read(PARSERS["hermes"], answer[:at], answer[at:]) == whole
        for _, so_far in read(PARSERS["hermes"], answer[:at]).calls:
            assert arguments.startswith(so_far)


@dataclass(frozen=True)
class Message:
    """One of harmony: its header, what it is and what it says, and its end."""

    head: str
    kind: str  # said, thought, or the name of a function
    body: str
    end: str


@st.composite
def harmony(draw) -> list[Message]:
    messages = []
    count = draw(st.integers(1, 3))
    for i in range(count):
        kind = draw(st.sampled_from(["said", "thought", "call"]))
        body = draw(written(draw(objects))) if kind == "call" else draw(words).strip() or "x"
        head = "<|start|>assistant" if i else ""
        end = "<|end|>"
        if kind == "call":
            kind = draw(names)
            assume(kind not in ("said", "thought"))
            to = f"to=functions.{kind}"
            between = draw(st.sampled_from([" ", ""]))
            end = "<|call|>"
            head += draw(
                st.sampled_from(
                    [
                        f"<|channel|>commentary {to} <|constrain|>json<|message|>",
                        f"<|channel|>analysis {to} code<|message|>{between}",
                        f" {to}<|channel|>commentary{between}<|constrain|>json<|message|>",
                    ]
                )
            )
        elif kind == "thought":
            head += "<|channel|>analysis<|message|>"
        else:
            head += f"<|channel|>{draw(st.sampled_from(['final', 'commentary']))}<|message|>"
            end = draw(st.sampled_from(["<|end|>", "<|return|>"]))
        messages.append(
            Message(head, kind, body, end if i < count - 1 or draw(st.booleans()) else "")
        )
    return messages


def harmony_expected(messages: list[Message], length: int) -> Result:
    result = Result("", "", [])
    texts = []
    for message in messages:
        head = message.head[:length]
        body = message.body
        end = message.end
        body = body[: max(0, length - len(head))]
        end = end[: max(0, length - len(head) - len(body))]
        length -= len(head) + len(body) + len(end)
        if message.kind not in ("said", "thought"):
            texts.append(("said", head if not body else "" if end == message.end else end))
            result.calls += [(message.kind, body)] if body else []
        elif head != message.head:
            texts.append(("said", head))
        else:
            texts.append((message.kind, body if end == message.end else body + end))
    result.said = "".join(text for kind, text in texts if kind == "said")
    result.thought = "".join(text for kind, text in texts if kind == "thought")
    return result


@settings(max_examples=cases(25))
@given(harmony())
def test_harmony_comes_as_written_however_the_answer_is_cut(messages):
    parts = [Words(message.head + message.body + message.end) for message in messages]
    agrees_everywhere(
        PARSERS["openai"], parts, lambda _, length: harmony_expected(messages, length)
    )


@settings(max_examples=cases(25))
@given(words, hermes(), st.booleans(), space)
def test_thoughts_come_before_the_rest(thought, parts, opened, gap):
    """White space beside the tags is dropped; the rest is read as if it stood alone."""
    thought = thought.strip()
    answer = "".join(part.text for part in parts).lstrip()
    assume(not answer.startswith("<think"))
    rest = read(PARSERS["hermes"], answer)
    make = partial(parsing.make_parser, "hermes", "qwen3", {}, opened)
    text = ("" if opened else f"{gap}<think>{gap}") + f"{thought}{gap}</think>{gap}{answer}"
    whole = Result(rest.said, thought, rest.calls)
    assert read(make, text) == read(make, *text) == whole
    for at in range(len(text)):
        assert read(make, text[:at], text[at:]) == whole
        cut = read(make, text[:at])
        assert thought.startswith(cut.thought.rstrip()) or "</think>".startswith(
            cut.thought[len(thought) :].strip()
        )


@pytest.mark.random
@pytest.mark.parametrize("name", PARSERS)
def test_any_text_is_read_the_same_however_it_is_cut(name):
    """Markers in any order, JSON or none: no error, and one result."""
    pieces_of_json = [
        '{"name": "f", "arguments": {"a": 1',
        '{"name": "f"',
        '"arguments": "',
        "}",
        "null",
        ",",
        ":",
    ]
    others = [
        "functions.f",
        "to=functions.g",
        "analysis",
        "final",
        "assistant",
        "\\u12",
        "\\ud83d",
        "abcdefghi",
        "; ",
    ]

    @settings(max_examples=cases(100))
    @given(
        st.lists(
            st.sampled_from([*MARKERS, *pieces_of_json, *others]) | spice | st.text(max_size=4),
            max_size=12,
        )
    )
    def check(parts):
        text = "".join(parts)
        whole = read(PARSERS[name], text)
        assert read(PARSERS[name], *text) == read(PARSERS[name], *parts) == whole
        for at in range(len(text)):
            assert read(PARSERS[name], text[:at], text[at:]) == whole
            read(PARSERS[name], text[:at])

    check()


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.text())
def test_text_without_markers_is_text(name, text):
    assume(not any(marker in text for marker in MARKERS))
    thinks = name == "deepseek_r1"
    whole = Result("" if thinks else text, text if thinks else "", [])
    assert read(PARSERS[name], text) == read(PARSERS[name], *text) == whole


@pytest.mark.parametrize("name", PARSERS)
def test_text_is_not_held_back(name):
    """A character that is neither white space nor the head of a marker comes at once."""
    parser = PARSERS[name]()
    text = "Well: f(x) < 3 [sic], {a}. <|x|> </thin> <tool>"
    so_far = ""
    for at, char in enumerate(text, start=1):
        result = joined(parser.push(char))
        so_far += result.said + result.thought
        assert so_far == text[:at] or not char.isalnum() or text[:at].rpartition(" ")[2][:1] == "<"
    result = joined(parser.finish())
    assert so_far + result.said + result.thought == text


BROKEN = {  # parser, answer: content, calls
    ("hermes", "<tool_call>no JSON</tool_call>"): ("<tool_call>no JSON</tool_call>", []),
    ("hermes", 'a <tool_call>\n{"arguments": {}}\n</tool_call> '): (
        'a <tool_call>\n{"arguments": {}}\n</tool_call> ',
        [],
    ),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}'): (
        '<tool_call>{"name": "", "arguments": {}}',
        [],
    ),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}'): (
        '<tool_call>{"name": 3, "arguments": {}}',
        [],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}'): (
        '<tool_call>{"name": "f", "arguments": [1]}',
        [],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": 12}'): (
        '<tool_call>{"name": "f", "arguments": 12}',
        [],
    ),
    ("hermes", '<tool_call>{"x": ][, "name": "f"}'): ('<tool_call>{"x": ][, "name": "f"}', []),
    ("hermes", '<tool_call>{"name": "\\x"}'): ('<tool_call>{"name": "\\x"}', []),
    ("hermes", '<tool_call>{"name": "f" <tool_call>{"name": "g"}'): (
        '<tool_call>{"name": "f" ',
        [("g", "{}")],
    ),
    ("hermes", '<<tool_call>{"name": "f"}<</tool_call>'): ("<<", [("f", "{}")]),
    ("openai", "<|<|channel|>final<|message|>a<|<|end|>"): ("<|a<|", []),
    ("hermes", "<tool_call><tool_call>{'name': 1}"): ("<tool_call><tool_call>{'name': 1}", []),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'): (None, [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}',
    ): (
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("hermes", '<tool_call>{"arguments": "{\\"a\\":\n1}", "name": "f"}'): (
        None,
        [("f", '{"a":\n1}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}'): (None, [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>'): (None, [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments": null, "name": "f"}</tool_call>'): (None, [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>'): (None, [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}'): (None, [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f\\u00e9", "arguments": {}, }'): (None, [("fé", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}, "name": "g"}'): (
        None,
        [("f", "{}")],
    ),
    # What breaks after the call began ends it there.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": </tool_call>b'): (
        "b",
        [("f", '{"a": ')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>b'): ("b", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>b'): ("}b", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\x"}</tool_call>'): ('x"}', [("f", "{")]),
    ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "g"}b</tool_call></tool_call>'): (
        "b</tool_call>",
        [("f", "{}"), ("g", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>\\"}</tool_call>"}}'): (
        None,
        [("f", '{"a": "<tool_call>\\"}</tool_call>"}')],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}'): ('{"name": "Bob", "age": 3}', []),
    ("llama3_json", ' {"answer": 42}\n'): (' {"answer": 42}\n', []),
    ("llama3_json", '<|python_tag|>{"name": "f"}'): (None, [("f", "{}")]),
    ("llama3_json", '<|python_tag|>f.call(query="x")'): ('<|python_tag|>f.call(query="x")', []),
    ("llama3_json", '<|py{"name": "f", "parameters": {}}'): (
        '<|py{"name": "f", "parameters": {}}',
        [],
    ),
    ("llama3_json", 'See {"name": "f", "parameters": {}}'): (
        'See {"name": "f", "parameters": {}}',
        [],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g"}'): (
        ' {"name": "g"}',
        [("f", "{}")],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}};\n'): (None, [("f", "{}")]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}'): (None, [("f", "{}")]),
    ("mistral", "[TOOL_CALLS][]"): ("[TOOL_CALLS][]", []),
    ("mistral", '[TOOL_CALLS] [{"name": "f"}, {"no": 1}] b'): (', {"no": 1}] b', [("f", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "f"} b'): (" b", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f[ARGS]12"): ("[TOOL_CALLS]f[ARGS]12", []),
    ("mistral", "[TOOL_CALLS]f[AR{}"): ("[TOOL_CALLS]f[AR{}", []),
    ("mistral", "[TOOL_CALLS]f g[ARGS]{}"): ("[TOOL_CALLS]f g[ARGS]{}", []),
    ("mistral", "[TOOL_CALLS]{}"): ("[TOOL_CALLS]{}", []),
    ("mistral", "[TOOL_CALLS][ARGS]{}"): ("[TOOL_CALLS][ARGS]{}", []),
    ("mistral", '[TOOL_CALLS]f[ARGS]"{}"'): (None, [("f", "{}")]),
    ("openai", "<|start|>assistant<|channel|>final<|message|>a"): ("a", []),
    ("openai", "<|message|>a"): ("a", []),
    ("openai", "<|channel|>final, <|message|>a"): ("<|channel|>final, <|message|>a", []),
    (
        "openai",
        "<|channel|>final<|message|>a<|end|> \n<|start|>assistant<|channel|>final<|message|>b",
    ): ("ab", []),
    ("openai", "<|channel|>final<|message|>a<|channel|>commentary<|message|>b"): ("ab", []),
    ("openai", HEAD + "<|call|>"): (None, [("f", "{}")]),
    ("openai", HEAD + "12<|call|>"): (HEAD + "12", []),
    ("openai", HEAD + '{"a": "<|call|>"} x<|call|>y'): (" xy", [("f", '{"a": "<|call|>"}')]),
    ("openai", "<|channel|>commentary to=python code<|message|>1 + 1<|call|>"): ("1 + 1", []),
    ("openai", "to=func and so on"): ("to=func and so on", []),
    ("qwen3", "See <think>a</think>"): ("See <think>a</think>", []),
    ("qwen3", "<think>\n\n</think>\n\nb"): ("b", []),
    ("qwen3", "</think>b"): ("</think>b", []),
    ("qwen3", '\n<tool_call>{"name": "f"}'): (None, [("f", "{}")]),
    ("deepseek_r1", "</think>b"): ("b", []),
    ("deepseek_r1", "<think></think>\n[TOOL_CALLS]f{}"): (None, [("f", "{}")]),
    ("no tools", '<think></think><tool_call>{"name": "f"}'): ('<tool_call>{"name": "f"}', []),
}


@pytest.mark.parametrize(("name", "answer"), BROKEN)
def test_what_is_no_call_is_text_and_what_breaks_ends_the_call(name, answer):
    content, calls = BROKEN[name, answer]
    for slices in [(answer,), tuple(answer)]:
        assert read(PARSERS[name], *slices) == Result(content or "", "", calls)


def test_a_thought_may_begin_like_a_tag():
    answer = "</thx> <think> is\n</think> b"
    for slices in [(answer,), tuple(answer)]:
        assert read(PARSERS["deepseek_r1"], *slices) == Result("b", "</thx> <think> is", [])


def test_half_a_character_in_a_string_stays_an_escape():
    """UTF-8 could not carry it; JSON can."""
    for escapes, text in {
        "\\ud83d": "\\ud83d",
        "\\ude00": "\\ude00",
        "\\ud83d\\ude00": "😀",
        "\\uD83D\\uD83D\\uDE00": "\\ud83d😀",
        "\\ud83dx": "\\ud83dx",
        "\\ud83d\\n": "\\ud83d\n",
    }.items():
        for items in [
            f'"name": "f", "arguments": "{escapes}"',
            f'"arguments": "{escapes}", "name": "f"',
        ]:
            answer = "<tool_call>{" + items + "}"
            for slices in [(answer,), tuple(answer)]:
                assert read(PARSERS["hermes"], *slices).calls == [("f", text)]


def test_harmony_without_tools_and_within_a_thought():
    answer = HEAD + "{}<|call|>"
    assert read(partial(parsing.make_parser, "openai", None, None), answer) == Result("{}", "", [])
    inside = partial(parsing.make_parser, None, "openai_gptoss", {}, True)
    assert read(inside, "hm<|end|><|start|>assistant" + answer) == Result("", "hm", [("f", "{}")])


LONG = {
    "arguments": (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"a":"' + "x" * 10**6 + '"}}</tool_call>',
    ),
    "early arguments": (
        "hermes",
        '<tool_call>{"arguments":{"a":"' + "x" * 500_000 + '"},"name":"f"}</tool_call>',
    ),
    "string": ("hermes", '<tool_call>{"name":"f","arguments":"' + "\\ud83d" * 80_000),
    "brackets": ("hermes", '<tool_call>{"name":"f","arguments":{"a":' + "[" * 500_000),
    "tags": ("hermes", "<tool_call>" * 45_000),
    "space": ("qwen3", " " * 500_000),
    "heads": ("deepseek_r1", "</ " * 160_000),
    "object": ("llama3_json", '{"a": "' + "x" * 500_000),
    "list": ("mistral", '[TOOL_CALLS][{"name":"f"},' + '{"name":"f"},' * 40_000),
    "header": ("openai", "<|channel|>" * 45_000),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.slow
def test_a_long_answer_takes_time_in_proportion(name):
    """Half a million characters, one by one, cost each about what they do in short answers."""
    parser, answer = LONG[name]

    def seconds(answer: str) -> float:
        reader = PARSERS[parser]()
        start = time.process_time()
        for char in answer:
            reader.push(char)
        reader.finish()
        return time.process_time() - start

    short = len(answer) // 20
    assert seconds(answer) < 4 * 20 * sum(seconds(answer[:short]) for _ in range(4)) / 4


def test_ids():
    """Mistral's templates take nine letters and digits; what the model gives is kept."""
    for make, answer in [
        (PARSERS["mistral"], "[TOOL_CALLS]f{}[TOOL_CALLS]g{}"),
        (PARSERS["mistral"], '[TOOL_CALLS][{"name": "f"}, {"name": "g"}]'),
        (PARSERS["mistral"], "[TOOL_CALLS]f[CALL_ID]x[ARGS]{}[TOOL_CALLS]g{}"),
    ]:
        ids = [piece.id for piece in make().push(answer) if isinstance(piece, CallStart)]
        assert len(set(ids)) == 2 and all(
            len(each) == 9 and each.isascii() and each.isalnum() for each in ids
        )
    call = PARSERS["mistral"]().push("[TOOL_CALLS]f[CALL_ID]aB3456789[ARGS]{}")[0]
    assert call == CallStart(0, "aB3456789", "f")
    ids = [
        piece.id
        for piece in PARSERS["hermes"]().push('<tool_call>{"name":"f"}' * 2)
        if isinstance(piece, CallStart)
    ]
    assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)


def test_collect():
    assert collect([]) == (None, None, [])
    pieces = [
        Thought("h"),
        Thought("m"),
        Said("a"),
        CallStart(0, "x", "f"),
        Arguments(0, "{"),
        CallStart(1, "y", "g"),
    ]
    assert collect([*pieces, Arguments(1, "{}"), Arguments(0, "}"), Said("b")]) == (
        "ab",
        "hm",
        [ToolCall("x", "f", "{}"), ToolCall("y", "g", "{}")],
    )


def test_which_parsers_keep_special_tokens():
    keeps = {name: make().keeps_special for name, make in PARSERS.items()}
    assert [name for name, kept in keeps.items() if not kept] == ["plain", "no tools"]
    assert not parsing.make_parser("mistral", "qwen3", None).keeps_special
    assert parsing.make_parser("openai", None, None).keeps_special


@pytest.mark.parametrize(
    ("template", "found"),
    {
        "{{ message.content }}": (None, None),
        "<tool_call>\n{{ call }}\n</tool_call>": ("hermes", None),
        "{{ content.split('</think>')[-1] }}<tool_call>": ("hermes", "qwen3"),
        "<tool_call>\n<function={{ name }}>": ("qwen3_coder", None),
        "<tool_call>{{ name }}<arg_key>": ("glm45", None),
        "[TOOL_CALLS][{{ calls }}]": ("mistral", None),
        "<|python_tag|>": ("llama3_json", None),
        "<|start_header_id|>ipython<|end_header_id|>": ("llama3_json", None),
        "<|start|>assistant<|channel|>analysis<|message|>": ("openai", "openai_gptoss"),
        "<think>\n": (None, "qwen3"),
    }.items(),
)
def test_detect(template, found):
    assert parsing.detect(template) == found
    parsing.make_parser(*found, tools={})


def test_a_prompt_that_opens_the_thought():
    assert parsing.opens_thought("<|im_start|>assistant\n<think>\n")
    assert not parsing.opens_thought("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "pair",
    [(name, None) for name in parsing.TOOL_PARSERS]
    + [(None, name) for name in parsing.REASONING_PARSERS],
)
def test_every_name_makes_a_parser(pair):
    begins_within = pair[1] in ("deepseek_r1", "minimax_m2", "olmo3", "step3", "step3p5")
    said = (
        "<think>Hello!"
        if pair[1] == "minimax_m2_append_think"
        else ""
        if begins_within
        else "Hello!"
    )
    assert read(partial(parsing.make_parser, *pair, {}), "Hello!") == Result(
        said, "Hello!" if begins_within else "", []
    )


def test_unknown_names_are_refused():
    with pytest.raises(
        ValueError, match=r"tool parser is 'x'; it can be apertus, cohere_command3, deep"
    ):
        parsing.make_parser("x", None, {})
    with pytest.raises(
        ValueError, match=r"reasoning parser is 'x'; it can be cohere_command3, deepseek_r1"
    ):
        parsing.make_parser(None, "x", {})
    for pair in [("hermes", "openai_gptoss"), ("openai", "qwen3")]:
        with pytest.raises(ValueError, match="do not go together"):
            parsing.make_parser(*pair, {})


@pytest.mark.parametrize("each", [1, 3, 1000])
def test_calls_of_tools_that_take_a_text(each):
    """It comes whole, as its text; one that breaks its form is text, and the calls after it have
    its number.
    """

    def read(answer: str, bare: bool = False) -> list:
        inner = Forced("sums") if bare else parsing.make_parser("hermes", None, {})
        parser = CustomCalls(inner, "input", {"sums": str.isdigit}, bare)
        pieces = [
            piece
            for at in range(0, len(answer), each)
            for piece in parser.push(answer[at : at + each])
        ]
        content, _, calls = collect([*pieces, *parser.finish()])
        return [content, *((call.name, call.arguments) for call in calls)]

    def call(name: str, **arguments: object) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    assert read("So " + call("sums", input="12")) == ["So", ("sums", "12")]
    mixed = (
        call("sums", input="x") + call("f", a=1) + call("sums", input="7") + call("sums", text="7")
    )
    assert read(mixed) == ['x{"text": "7"}', ("f", '{"a": 1}'), ("sums", "7")]
    assert read("12", bare=True) == [None, ("sums", "12")]
    assert read("1b", bare=True) == ["1b"]
