"""Parsers of model answers: results do not depend on slicing, arguments stay as written, and no
text is lost.
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
from quire.serving.parsing.pieces import Arguments, CallStart, ReasoningPiece, TextPiece
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
HARMONY_CALL_HEAD = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@dataclass(frozen=True)
class TextPart:
    """A part of an answer that is text."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """A part of an answer that is a call. `start` is the offset of its arguments, `end` that of its
    closing marker.
    """

    text: str
    name: str
    arguments: str
    start: int
    end: int


@dataclass
class Result:
    """The joined pieces without call ids, which are random."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def join_pieces(pieces) -> Result:
    result = Result("", "", [])
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(result.calls) and piece.id
            result.calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            assert piece.text and piece.index == len(result.calls) - 1
            result.calls[-1] = (result.calls[-1][0], result.calls[-1][1] + piece.text)
        elif isinstance(piece, TextPiece):
            assert piece.text
            result.content += piece.text
        else:
            assert isinstance(piece, ReasoningPiece) and piece.text
            result.reasoning += piece.text
    return result


def parse_slices(make, *slices: str) -> Result:
    parser = make()
    pieces = [piece for slice_ in slices for piece in parser.push(slice_)]
    pieces += parser.finish()
    for reader in getattr(parser, "parsers", [parser]):
        assert next(reader._steps, "done") == "done"  # no parser expects more text
    return join_pieces(pieces)


def expected_result_at(answer_parts: list[TextPart | CallPart], length: int) -> Result:
    """The result of an answer's first `length` characters, computed from its parts."""
    content = ""
    tail = ""
    calls = []
    for answer_part in answer_parts:
        text = answer_part.text[:length]
        length -= len(text)
        if isinstance(answer_part, TextPart) or len(text) <= answer_part.start:
            tail += text
        else:
            calls.append((answer_part.name, answer_part.arguments[: len(text) - answer_part.start]))
            content = content + tail.rstrip()
            tail = text[answer_part.end :] if len(text) < len(answer_part.text) else ""
    return Result(content + tail if tail.strip() or not calls else content, "", calls)


def check_all_splits(make, answer_parts, result=expected_result_at):
    """Compare with the expected result: one push, a push per character, every split in two and
    every truncation.
    """
    answer = "".join(answer_part.text for answer_part in answer_parts)
    expected_result = result(answer_parts, len(answer))
    assert parse_slices(make, answer) == expected_result
    parser = make()
    pieces = []
    for at, char in enumerate(answer, start=1):
        pieces += parser.push(char)
        # Arguments are sent immediately, without text that follows them.
        assert join_pieces(pieces).calls == result(answer_parts, at).calls
    assert join_pieces(pieces + parser.finish()) == expected_result
    for at in range(len(answer)):
        assert parse_slices(make, answer[:at], answer[at:]) == expected_result
        assert parse_slices(make, answer[:at]) == result(answer_parts, at), answer[:at]


marker_fragments = st.sampled_from(
    [*MARKERS, "{", "}", '"', "\\", '\\"', "]", "<", "é", "😀", "\n", "\u2028"]
)
strings = st.lists(st.text(max_size=5) | marker_fragments, max_size=4).map("".join)
json_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | strings
)
json_values = st.recursive(
    json_leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
)
json_objects = st.dictionaries(strings, json_values, max_size=3)
function_names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
white_space = st.text(" \n\t", max_size=3)
plain_texts = (st.text(max_size=12) | white_space).filter(
    lambda text: not any(marker in text for marker in MARKERS)
)


@st.composite
def written_json(draw, value) -> str:
    """A JSON value in one of the styles in which models write it."""
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]))
    indent = draw(st.sampled_from([None, None, 1]))
    return json.dumps(value, ensure_ascii=draw(st.booleans()), separators=separators, indent=indent)


@st.composite
def call_object(
    draw, prefix: str = "", suffix: str = "", key: str = "arguments", late_name: bool = False
) -> CallPart:
    """A call `{"name": ..., "arguments": {...}}` with further members, between the format's prefix
    and suffix.
    """
    name = draw(function_names)
    arguments = draw(written_json(draw(json_objects)))
    other_members = [
        f"{json.dumps(member_name)}:{draw(white_space)}{draw(written_json(value))}"
        for member_name, value in draw(st.dictionaries(strings, json_values, max_size=2)).items()
        if member_name not in ("name", "arguments", "parameters")
    ]
    at = draw(st.integers(0, len(other_members)))
    members_before_name = other_members[:at]
    members_after_name = other_members[at:]
    name_member = (
        f'{draw(white_space)}"name"{draw(white_space)}:'
        f"{draw(white_space)}{json.dumps(name)}{draw(white_space)}"
    )
    if late_name:
        head = f"{prefix}{{" + "".join(f"{item}," for item in members_before_name) + f'"{key}": '
        text = (
            head
            + arguments
            + draw(white_space)
            + ","
            + ",".join([*members_after_name, name_member])
        )
        return CallPart(text + "}" + suffix, name, arguments, len(text) - 1, len(text) + 1)
    head = (
        f"{prefix}{{"
        + "".join(f"{item}," for item in [*members_before_name, name_member])
        + f'{draw(white_space)}"{key}"{draw(white_space)}:'
    )
    head += draw(white_space)
    text = (
        head
        + arguments
        + draw(white_space)
        + "".join(f",{draw(white_space)}{item}" for item in members_after_name)
    )
    return CallPart(text + "}" + suffix, name, arguments, len(head), len(text) + 1)


@st.composite
def hermes_answers(draw) -> list[TextPart | CallPart]:
    prefix = "<tool_call>" + draw(white_space)
    answer_parts = [TextPart(draw(plain_texts))]
    for _ in range(draw(st.integers(0, 2))):
        answer_parts += [
            draw(call_object(prefix, draw(white_space) + "</tool_call>")),
            TextPart(draw(plain_texts)),
        ]
    return answer_parts


@st.composite
def llama3_answers(draw) -> list[TextPart | CallPart]:
    answer_parts = [TextPart(draw(white_space))]
    for _ in range(draw(st.integers(0, 2))):
        prefix = draw(st.sampled_from(["", "<|python_tag|>", "\n", " <|python_tag|>\n"]))
        suffix = draw(st.sampled_from([";", "", "\n;"]))
        answer_parts.append(
            draw(call_object(prefix, suffix, draw(st.sampled_from(["parameters", "arguments"]))))
        )
    return (
        [*answer_parts, TextPart(draw(white_space) + "." + draw(plain_texts))]
        if draw(st.booleans())
        else answer_parts
    )


@st.composite
def mistral_list_answers(draw) -> list[TextPart | CallPart]:
    answer_parts: list[TextPart | CallPart] = [TextPart(draw(plain_texts))]
    count = draw(st.integers(1, 2))
    for i in range(count):
        prefix = draw(white_space) + "," if i else f"[TOOL_CALLS]{draw(white_space)}["
        answer_parts.append(
            draw(
                call_object(
                    prefix + draw(white_space), draw(white_space) + "]" if i == count - 1 else ""
                )
            )
        )
    return [*answer_parts, TextPart(draw(plain_texts))]


@st.composite
def mistral_named_answers(draw) -> list[TextPart | CallPart]:
    answer_parts: list[TextPart | CallPart] = [TextPart(draw(plain_texts))]
    for _ in range(draw(st.integers(0, 2))):
        name = draw(function_names)
        arguments = draw(written_json(draw(json_objects)))
        separator = draw(st.sampled_from(["", "[ARGS]", "[ARGS] ", "[CALL_ID]aB3456789[ARGS]"]))
        head = f"[TOOL_CALLS]{name}{separator}"
        text = head + arguments
        answer_parts += [
            CallPart(text, name, arguments, len(head), len(text)),
            TextPart(draw(plain_texts)),
        ]
    return answer_parts


FORMATS = {
    "hermes": ("hermes", hermes_answers()),
    "llama3_json": ("llama3_json", llama3_answers()),
    "mistral, a list": ("mistral", mistral_list_answers()),
    "mistral, named": ("mistral", mistral_named_answers()),
}


@pytest.mark.random
@pytest.mark.parametrize("name", FORMATS)
def test_tool_calls_do_not_depend_on_slicing(name):
    parser, answers = FORMATS[name]

    @settings(max_examples=cases(25))
    @given(answers)
    def check_answer(answer_parts):
        assume(sum(len(answer_part.text) for answer_part in answer_parts) < 500)
        check_all_splits(PARSERS[parser], answer_parts)
        for answer_part in answer_parts:
            if isinstance(answer_part, CallPart):
                json.loads(answer_part.arguments)

    check_answer()


@settings(max_examples=cases(20))
@given(
    st.lists(call_object("<tool_call>\n", "\n</tool_call>", late_name=True), min_size=1, max_size=2)
)
def test_arguments_before_the_name_are_held_back(answer_parts):
    """Arguments are sent after the name; an answer truncated before the name stays text."""
    answer = "".join(answer_part.text for answer_part in answer_parts)
    expected_result = Result(
        "", "", [(answer_part.name, answer_part.arguments) for answer_part in answer_parts]
    )
    assert (
        parse_slices(PARSERS["hermes"], answer)
        == parse_slices(PARSERS["hermes"], *answer)
        == expected_result
    )
    for at in range(len(answer)):
        assert parse_slices(PARSERS["hermes"], answer[:at], answer[at:]) == expected_result
        truncated_result = parse_slices(PARSERS["hermes"], answer[:at])
        assert truncated_result.calls == expected_result.calls[: len(truncated_result.calls)]
        if at < len(answer_parts[0].text) and not truncated_result.calls:
            assert truncated_result.content == answer[:at]


@settings(max_examples=cases(30))
@given(json_objects, st.booleans(), st.booleans(), st.booleans())
def test_arguments_in_a_string_are_decoded(value, inner_ascii, outer_ascii, late_name):
    arguments = json.dumps(value, ensure_ascii=inner_ascii)
    pair = [('"name"', '"f"'), ('"arguments"', json.dumps(arguments, ensure_ascii=outer_ascii))]
    items = ", ".join(f"{key}: {item}" for key, item in (reversed(pair) if late_name else pair))
    answer = "<tool_call>{" + items + "}</tool_call>"
    expected_result = Result("", "", [("f", arguments)])
    assert (
        parse_slices(PARSERS["hermes"], answer)
        == parse_slices(PARSERS["hermes"], *answer)
        == expected_result
    )
    for at in range(len(answer)):
        assert parse_slices(PARSERS["hermes"], answer[:at], answer[at:]) == expected_result
        for _, so_far in parse_slices(PARSERS["hermes"], answer[:at]).calls:
            assert arguments.startswith(so_far)


@dataclass(frozen=True)
class Message:
    """A harmony message: header, kind, body and end marker."""

    head: str
    kind: str  # "said", "thought", or a function's name
    body: str
    end: str


@st.composite
def harmony_messages(draw) -> list[Message]:
    messages = []
    count = draw(st.integers(1, 3))
    for i in range(count):
        kind = draw(st.sampled_from(["said", "thought", "call"]))
        body = (
            draw(written_json(draw(json_objects)))
            if kind == "call"
            else draw(plain_texts).strip() or "x"
        )
        head = "<|start|>assistant" if i else ""
        end = "<|end|>"
        if kind == "call":
            kind = draw(function_names)
            assume(kind not in ("said", "thought"))
            recipient = f"to=functions.{kind}"
            separator = draw(st.sampled_from([" ", ""]))
            end = "<|call|>"
            head += draw(
                st.sampled_from(
                    [
                        f"<|channel|>commentary {recipient} <|constrain|>json<|message|>",
                        f"<|channel|>analysis {recipient} code<|message|>{separator}",
                        f" {recipient}<|channel|>commentary{separator}<|constrain|>json<|message|>",
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


def expected_harmony_result(messages: list[Message], length: int) -> Result:
    result = Result("", "", [])
    typed_texts = []
    for message in messages:
        head = message.head[:length]
        body = message.body
        end = message.end
        body = body[: max(0, length - len(head))]
        end = end[: max(0, length - len(head) - len(body))]
        length -= len(head) + len(body) + len(end)
        if message.kind not in ("said", "thought"):
            typed_texts.append(("said", head if not body else "" if end == message.end else end))
            result.calls += [(message.kind, body)] if body else []
        elif head != message.head:
            typed_texts.append(("said", head))
        else:
            typed_texts.append((message.kind, body if end == message.end else body + end))
    result.content = "".join(text for kind, text in typed_texts if kind == "said")
    result.reasoning = "".join(text for kind, text in typed_texts if kind == "thought")
    return result


@settings(max_examples=cases(25))
@given(harmony_messages())
def test_harmony_does_not_depend_on_slicing(messages):
    answer_parts = [TextPart(message.head + message.body + message.end) for message in messages]
    check_all_splits(
        PARSERS["openai"], answer_parts, lambda _, length: expected_harmony_result(messages, length)
    )


@settings(max_examples=cases(25))
@given(plain_texts, hermes_answers(), st.booleans(), white_space)
def test_reasoning_precedes_the_answer(reasoning, answer_parts, prompt_opens_reasoning, gap):
    """White space beside the tags is dropped; the remaining text is parsed as without reasoning."""
    reasoning = reasoning.strip()
    answer = "".join(answer_part.text for answer_part in answer_parts).lstrip()
    assume(not answer.startswith("<think"))
    answer_result = parse_slices(PARSERS["hermes"], answer)
    make = partial(parsing.make_parser, "hermes", "qwen3", {}, prompt_opens_reasoning)
    text = (
        "" if prompt_opens_reasoning else f"{gap}<think>{gap}"
    ) + f"{reasoning}{gap}</think>{gap}{answer}"
    expected_result = Result(answer_result.content, reasoning, answer_result.calls)
    assert parse_slices(make, text) == parse_slices(make, *text) == expected_result
    for at in range(len(text)):
        assert parse_slices(make, text[:at], text[at:]) == expected_result
        truncated_result = parse_slices(make, text[:at])
        assert reasoning.startswith(truncated_result.reasoning.rstrip()) or "</think>".startswith(
            truncated_result.reasoning[len(reasoning) :].strip()
        )


@pytest.mark.random
@pytest.mark.parametrize("name", PARSERS)
def test_arbitrary_markers_do_not_depend_on_slicing(name):
    """Markers in any order, with or without valid JSON, raise no error and give one result."""
    pieces_of_json = [
        '{"name": "f", "arguments": {"a": 1',
        '{"name": "f"',
        '"arguments": "',
        "}",
        "null",
        ",",
        ":",
    ]
    other_texts = [
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
            st.sampled_from([*MARKERS, *pieces_of_json, *other_texts])
            | marker_fragments
            | st.text(max_size=4),
            max_size=12,
        )
    )
    def check_slices(slices):
        text = "".join(slices)
        expected_result = parse_slices(PARSERS[name], text)
        assert (
            parse_slices(PARSERS[name], *text)
            == parse_slices(PARSERS[name], *slices)
            == expected_result
        )
        for at in range(len(text)):
            assert parse_slices(PARSERS[name], text[:at], text[at:]) == expected_result
            parse_slices(PARSERS[name], text[:at])

    check_slices()


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.text())
def test_text_without_markers_is_content(name, text):
    assume(not any(marker in text for marker in MARKERS))
    starts_with_reasoning = name == "deepseek_r1"
    expected_result = Result(
        "" if starts_with_reasoning else text, text if starts_with_reasoning else "", []
    )
    assert (
        parse_slices(PARSERS[name], text) == parse_slices(PARSERS[name], *text) == expected_result
    )


@pytest.mark.parametrize("name", PARSERS)
def test_text_is_streamed_immediately(name):
    """A character is sent at once unless it is white space or may begin a marker."""
    parser = PARSERS[name]()
    text = "Well: f(x) < 3 [sic], {a}. <|x|> </thin> <tool>"
    so_far = ""
    for at, char in enumerate(text, start=1):
        result = join_pieces(parser.push(char))
        so_far += result.content + result.reasoning
        assert so_far == text[:at] or not char.isalnum() or text[:at].rpartition(" ")[2][:1] == "<"
    result = join_pieces(parser.finish())
    assert so_far + result.content + result.reasoning == text


MALFORMED_ANSWERS = {  # (parser, answer): (content, calls)
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
    # A malformed rest ends a call that has begun.
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
    ("openai", HARMONY_CALL_HEAD + "<|call|>"): (None, [("f", "{}")]),
    ("openai", HARMONY_CALL_HEAD + "12<|call|>"): (HARMONY_CALL_HEAD + "12", []),
    ("openai", HARMONY_CALL_HEAD + '{"a": "<|call|>"} x<|call|>y'): (
        " xy",
        [("f", '{"a": "<|call|>"}')],
    ),
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


@pytest.mark.parametrize(("name", "answer"), MALFORMED_ANSWERS)
def test_malformed_calls_become_text_or_end_early(name, answer):
    content, calls = MALFORMED_ANSWERS[name, answer]
    for slices in [(answer,), tuple(answer)]:
        assert parse_slices(PARSERS[name], *slices) == Result(content or "", "", calls)


def test_reasoning_may_start_like_a_tag():
    answer = "</thx> <think> is\n</think> b"
    for slices in [(answer,), tuple(answer)]:
        assert parse_slices(PARSERS["deepseek_r1"], *slices) == Result("b", "</thx> <think> is", [])


def test_lone_surrogate_stays_an_escape():
    """JSON can represent a lone surrogate, UTF-8 cannot."""
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
                assert parse_slices(PARSERS["hermes"], *slices).calls == [("f", text)]


def test_harmony_without_tools_or_inside_reasoning():
    answer = HARMONY_CALL_HEAD + "{}<|call|>"
    assert parse_slices(partial(parsing.make_parser, "openai", None, None), answer) == Result(
        "{}", "", []
    )
    make_in_reasoning = partial(parsing.make_parser, None, "openai_gptoss", {}, True)
    assert parse_slices(make_in_reasoning, "hm<|end|><|start|>assistant" + answer) == Result(
        "", "hm", [("f", "{}")]
    )


LONG_ANSWERS = {
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


@pytest.mark.parametrize("name", LONG_ANSWERS)
@pytest.mark.slow
def test_parse_time_is_linear_in_answer_length(name):
    """Half a million single characters cost about as much per character as a short answer."""
    parser, answer = LONG_ANSWERS[name]

    def parse_seconds(answer: str) -> float:
        reader = PARSERS[parser]()
        start = time.process_time()
        for char in answer:
            reader.push(char)
        reader.finish()
        return time.process_time() - start

    short_length = len(answer) // 20
    assert (
        parse_seconds(answer)
        < 4 * 20 * sum(parse_seconds(answer[:short_length]) for _ in range(4)) / 4
    )


def test_call_ids():
    """Mistral's templates need ids of nine letters and digits; ids that the model writes are
    kept.
    """
    for make, answer in [
        (PARSERS["mistral"], "[TOOL_CALLS]f{}[TOOL_CALLS]g{}"),
        (PARSERS["mistral"], '[TOOL_CALLS][{"name": "f"}, {"name": "g"}]'),
        (PARSERS["mistral"], "[TOOL_CALLS]f[CALL_ID]x[ARGS]{}[TOOL_CALLS]g{}"),
    ]:
        ids = [piece.id for piece in make().push(answer) if isinstance(piece, CallStart)]
        assert len(set(ids)) == 2 and all(
            len(call_id) == 9 and call_id.isascii() and call_id.isalnum() for call_id in ids
        )
    call = PARSERS["mistral"]().push("[TOOL_CALLS]f[CALL_ID]aB3456789[ARGS]{}")[0]
    assert call == CallStart(0, "aB3456789", "f")
    ids = [
        piece.id
        for piece in PARSERS["hermes"]().push('<tool_call>{"name":"f"}' * 2)
        if isinstance(piece, CallStart)
    ]
    assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)


def test_collect_pieces():
    assert collect([]) == (None, None, [])
    pieces = [
        ReasoningPiece("h"),
        ReasoningPiece("m"),
        TextPiece("a"),
        CallStart(0, "x", "f"),
        Arguments(0, "{"),
        CallStart(1, "y", "g"),
    ]
    assert collect([*pieces, Arguments(1, "{}"), Arguments(0, "}"), TextPiece("b")]) == (
        "ab",
        "hm",
        [ToolCall("x", "f", "{}"), ToolCall("y", "g", "{}")],
    )


def test_which_parsers_keep_special_tokens():
    keeps_special_tokens = {name: make().keeps_special for name, make in PARSERS.items()}
    assert [name for name, is_keeping in keeps_special_tokens.items() if not is_keeping] == [
        "plain",
        "no tools",
    ]
    assert not parsing.make_parser("mistral", "qwen3", None).keeps_special
    assert parsing.make_parser("openai", None, None).keeps_special


@pytest.mark.parametrize(
    ("template", "parser_names"),
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
def test_detect_parsers_from_template(template, parser_names):
    assert parsing.detect(template) == parser_names
    parsing.make_parser(*parser_names, tools={})


def test_prompt_opens_reasoning():
    assert parsing.opens_thought("<|im_start|>assistant\n<think>\n")
    assert not parsing.opens_thought("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "pair",
    [(name, None) for name in parsing.TOOL_PARSERS]
    + [(None, name) for name in parsing.REASONING_PARSERS],
)
def test_every_parser_name_is_constructible(pair):
    starts_with_reasoning = pair[1] in ("deepseek_r1", "minimax_m2", "olmo3", "step3", "step3p5")
    content = (
        "<think>Hello!"
        if pair[1] == "minimax_m2_append_think"
        else ""
        if starts_with_reasoning
        else "Hello!"
    )
    assert parse_slices(partial(parsing.make_parser, *pair, {}), "Hello!") == Result(
        content, "Hello!" if starts_with_reasoning else "", []
    )


def test_unknown_parser_names_are_rejected():
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


@pytest.mark.parametrize("slice_length", [1, 3, 1000])
def test_custom_tool_calls_are_parsed_whole(slice_length):
    """A custom call's input is sent whole. An input that violates the tool's format becomes text,
    and the following calls take over its index.
    """

    def parse_calls(answer: str, is_forced: bool = False) -> list:
        inner = Forced("sums") if is_forced else parsing.make_parser("hermes", None, {})
        parser = CustomCalls(inner, "input", {"sums": str.isdigit}, is_forced)
        pieces = [
            piece
            for at in range(0, len(answer), slice_length)
            for piece in parser.push(answer[at : at + slice_length])
        ]
        content, _, calls = collect([*pieces, *parser.finish()])
        return [content, *((call.name, call.arguments) for call in calls)]

    def tool_call_text(name: str, **arguments: object) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    assert parse_calls("So " + tool_call_text("sums", input="12")) == ["So", ("sums", "12")]
    mixed_answer = (
        tool_call_text("sums", input="x")
        + tool_call_text("f", a=1)
        + tool_call_text("sums", input="7")
        + tool_call_text("sums", text="7")
    )
    assert parse_calls(mixed_answer) == ['x{"text": "7"}', ("f", '{"a": 1}'), ("sums", "7")]
    assert parse_calls("12", is_forced=True) == [None, ("sums", "12")]
    assert parse_calls("1b", is_forced=True) == ["1b"]
