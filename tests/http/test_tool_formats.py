"""Tool call formats: recorded answers with any slicing, argument types, malformed calls, and
detection from chat templates.
"""

import json
import time
from functools import partial
from random import Random

import pytest

from quire.model.config import ModelError
from quire.serving import parsing
from quire.serving.http.settings import Formats
from quire.serving.parsing.form import Form
from quire.serving.parsing.pieces import CallStart
from quire.serving.parsing.thoughts import Thoughts
from quire.tests.support import tools_page
from quire.tests.support.cases import cases
from quire.tests.support.recorded_calls import ALONE, RECORDED, TOOLS, TRAINS, joined, read


def parser_factory(name: str, tools=TOOLS, reasoning: str | None = None):
    return partial(parsing.make_parser, name.partition(",")[0], reasoning, tools)


def random_slices(random: Random, text: str) -> list[str]:
    at = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_calls_do_not_depend_on_slicing(name):
    text = RECORDED[name]
    make = parser_factory(name)
    random = Random(3)
    text = text if name in ALONE else f"Let me look. {text}"
    expected = read(make, text)
    content, _, calls = expected
    assert [call for call, _ in calls] == ["find_trains", "now"]
    assert [json.loads(arguments) for _, arguments in calls] == [TRAINS, {}]
    assert content.strip() == ("" if name in ALONE - {"openai"} else "Let me look.")
    assert read(make, *text) == expected
    for at in range(len(text)):
        assert read(make, text[:at], text[at:]) == expected
        truncated_calls = read(make, text[:at])[2]
        for (truncated_name, partial_arguments), (full_name, full_arguments) in zip(
            truncated_calls, calls, strict=False
        ):
            assert truncated_name == full_name and full_arguments.startswith(partial_arguments)
    for _ in range(30):
        assert read(make, *random_slices(random, text)) == expected


FRAGMENTS = [
    '{"name": "f", "arguments": {"a": 1',
    '"arguments": "',
    "}",
    "{",
    "null",
    ",",
    ":",
    '"',
    "\\",
    "'",
    "]",
    "[",
    "(",
    ")",
    "=",
    "f",
    "f(a=",
    "functions.f:0",
    "True",
    "12",
    "\n",
    " ",
    "<",
    "</",
    "```",
    "é",
    "😀",
    "x y",
    "a:",
    ">",
    "/>",
]
FORMS = {name: form for name, form in parsing.TOOL_FORMS.items() if isinstance(form, Form)}


@pytest.mark.random
@pytest.mark.parametrize("name", FORMS)
def test_arbitrary_marks_do_not_depend_on_slicing(name):
    """Marks in any order with fragments between them raise no error, end, and give one result."""
    form = FORMS[name]
    random = Random(7)
    whole_marks = [mark for mark in (form.begin, form.end, *form.prefixes) if mark]
    marks = [
        *form.head,
        *form.closing,
        *whole_marks,
        *form.parameter.replace("{", " {").split(),
        form.quote or "<",
    ]
    for reasoning in (None, "qwen3"):
        make = parser_factory(name, {"f": TOOLS["find_trains"]}, reasoning)
        for _ in range(cases(60)):
            slices = [
                random.choice(marks if random.random() < 0.6 else FRAGMENTS)
                for _ in range(random.randrange(1, 14))
            ]
            if random.random() < 0.5:  # the start of a recorded call, then fragments
                text = RECORDED[name]
                slices = [text[: random.randrange(len(text))], *slices]
            text = "".join(slices)
            expected = read(make, text)
            assert read(make, *text) == read(make, *slices) == expected
            for at in random.sample(range(len(text) + 1), min(8, len(text))):
                assert read(make, text[:at], text[at:]) == expected


LONG_ANSWERS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=to>\n" + "x\n<" * 60_000,
    "glm45": "<tool_call>f\n" + "<arg_key>to</arg_key>\n<arg_value>x</arg_value>\n" * 5_000,
    "pythonic": "[" + "f(to='x'), " * 15_000,
    "gemma4": "<|tool_call>call:f{via:" + "[" * 100_000,
    "lfm2": "<|tool_call_start|>[f(via=" + "[" * 100_000,
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>" * 4_000,
    "minimax_m2": "<minimax:tool_call>\n" * 10_000,
}


@pytest.mark.parametrize("name", LONG_ANSWERS)
def test_parse_time_is_linear_in_answer_length(name):
    def parse_seconds(answer: str) -> float:
        parser = parser_factory(name, {"f": TOOLS["find_trains"]})()
        start = time.process_time()
        for char in answer:
            parser.push(char)
        parser.finish()
        return time.process_time() - start

    short_length = len(LONG_ANSWERS[name]) // 20
    assert (
        parse_seconds(LONG_ANSWERS[name])
        < 4 * 20 * sum(parse_seconds(LONG_ANSWERS[name][:short_length]) for _ in range(4)) / 4
    )


def test_every_tool_format_is_recorded():
    assert {name.partition(",")[0] for name in RECORDED} == set(parsing.TOOL_PARSERS) - {"harmony"}


@pytest.mark.parametrize("name", sorted(set(RECORDED) - ALONE))
def test_text_after_calls_is_content(name):
    content, _, calls = read(
        parser_factory(name), f"{RECORDED[name]}\nThat is [all] of it, {{really}}."
    )
    assert len(calls) == 2 and content.strip() == "That is [all] of it, {really}."


STRING_FORMATS = [
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "seed_oss",
    "deepseek_v32",
    "gemma4",
    "functiongemma",
    "pythonic",
]


@pytest.mark.parametrize("name", [*STRING_FORMATS, "olmo3", "hermes", "kimi_k2"])
def test_string_arguments_are_streamed(name):
    """String arguments are sent before they are complete."""
    text = RECORDED[name]
    parser = parser_factory(name)()
    at = text.index("Zürich") + 4
    assert joined(parser.push(text[:at]))[2][-1][1].endswith('"to": "Züri')


TYPES_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "any": {},
        "whole": {"type": "integer"},
        "real": {"type": "number"},
        "yes": {"type": "boolean"},
        "list": {"type": "array"},
        "map": {"$ref": "#/$defs/map"},
        "none": {"type": "null"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "named": {"enum": ["1", "two", 2]},
    },
    "$defs": {"map": {"type": "object"}},
}
TYPED_VALUES = [  # (property, text, JSON)
    ("text", "123", '"123"'),
    ("text", "null", '"null"'),
    ("text", ' {"a": 1}', '" {\\"a\\": 1}"'),
    ("text", "", '""'),
    ("any", "123", '"123"'),
    ("other", "[1]", '"[1]"'),
    ("whole", "12", "12"),
    ("whole", " 12 ", "12"),
    ("whole", "12.0", "12.0"),
    ("whole", "12.5", '"12.5"'),
    ("whole", "123456789012345678901234567890", "123456789012345678901234567890"),
    ("whole", "twelve", '"twelve"'),
    ("real", "1.50", "1.50"),
    ("real", "3", "3"),
    ("real", "NaN", '"NaN"'),
    ("yes", "true", "true"),
    ("yes", "True", "true"),
    ("yes", "yes", '"yes"'),
    ("list", "[1, 'a', None]", '[1, "a", null]'),
    ("list", '["</parameter>"]', '["</parameter>"]'),
    ("list", "[1,", '"[1,"'),
    ("map", '{"a": {"b": []}}', '{"a": {"b": []}}'),
    ("map", "{'a': True}", '{"a": true}'),
    ("none", "null", "null"),
    ("maybe", "None", "null"),
    ("maybe", "3", "3"),
    ("either", "3", "3"),
    ("either", "3 cm", '"3 cm"'),
    ("either", "true", '"true"'),
    ("named", "1", '"1"'),
    ("named", "2", "2"),
    ("named", "three", '"three"'),
]


@pytest.mark.parametrize(("key", "text", "json_value"), TYPED_VALUES)
def test_tagged_values_get_the_schema_type(key, text, json_value):
    answer = f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert read(parser_factory("qwen3_coder", {"f": TYPES_SCHEMA}), answer) == (
        "",
        "",
        [("f", f'{{"{key}": {json_value}}}')],
    )


MALFORMED_ANSWERS = [  # (parser, answer, content, calls)
    ("qwen3_coder", "<tool_call>no</tool_call> x", "<tool_call>no</tool_call> x", []),
    ("qwen3_coder", "<tool_call>\n<function=f>\nhm", "<tool_call>\n<function=f>\nhm", []),
    (
        "qwen3_coder",
        "<tool_call>\n<function=>\n</function>",
        "<tool_call>\n<function=>\n</function>",
        [],
    ),
    # without the tags around it, or those that end a value or the call
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
        "",
        [("f", '{"a": "1"}')],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</function> x",
        " x",
        [("f", '{"a": "1", "b": "2"}')],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>1</parameter></tool_call>x",
        "x",
        [("f", '{"a": "1"}')],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>1</parameter> or x",
        " or x",
        [("f", '{"a": "1"}')],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\n\nx\n\n</parameter>",
        "",
        [("f", '{"a": "\\nx\\n"')],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\na <b> </i> </para",
        "",
        [("f", '{"a": "a <b> </i> ')],
    ),
    ("glm45", "<tool_call>what is this</tool_call>", "<tool_call>what is this</tool_call>", []),
    ("glm45", "<tool_call>f</tool_call>", "", [("f", "{}")]),
    (
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key>x</tool_call>",
        "<arg_key>a</arg_key>x",
        [("f", "{}")],
    ),
    ("pythonic", "[1](see x)", "[1](see x)", []),
    ("pythonic", "[see(it)]", "[see(it)]", []),
    ("pythonic", "f(a=1)", "f(a=1)", []),
    ("pythonic", "Well [f(a=1)]", "Well [f(a=1)]", []),
    (
        "pythonic",
        "[f(a=0x10, b=1_000, c=-.5, d=1., e=007)]",
        "",
        [("f", '{"a": 16, "b": 1000, "c": -0.5, "d": 1.0, "e": 7}')],
    ),
    ("pythonic", "[f(a={'b': (1, None)}, c=[],)]", "", [("f", '{"a": {"b": [1, null]}, "c": []}')]),
    ("pythonic", "[f(a='\\x41\\u00e9\\'\\q')]", "", [("f", '{"a": "Aé\'\\\\q"}')]),
    ("pythonic", "[f(a=g(1))] x", "(1))] x", [("f", '{"a": ')]),
    ("pythonic", "[f(a='x', b=1)", "", [("f", '{"a": "x", "b": 1}')]),
    ("olmo3", "<function_calls>\nf(a=1)\nThat is it", "\nThat is it", [("f", '{"a": 1}')]),
    ("gemma4", "<|tool_call>call:f<tool_call|>", "<|tool_call>call:f<tool_call|>", []),
    (
        "gemma4",
        "<|tool_call>call:f{a:{b:[1,{c:true}]},d:x y}<tool_call|>",
        "",
        [("f", '{"a": {"b": [1, {"c": true}]}, "d": "x y"}')],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{<|"|>a b<|"|>:<|"|>}<|"|>}<tool_call|>',
        "",
        [("f", '{"a b": "}"}')],
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>hm", "<｜tool▁calls▁begin｜>hm", []),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_call_end|>",
        [],
    ),
    ("granite", "<|tool_call|>[]", "<|tool_call|>[]", []),
    ("granite", '<|tool_call|>[{"name": "f"}, {"no": 1}] b', ' {"no": 1}] b', [("f", "{}")]),
    ("apertus", '<|tools_prefix|>[{"f": 1}]', '<|tools_prefix|>[{"f": 1}]', []),
    ("xlam", "[1, 2]", "[1, 2]", []),
    ("xlam", '[{"name": "Bob"}]', '[{"name": "Bob"}]', []),
]


@pytest.mark.parametrize(("name", "answer", "text", "calls"), MALFORMED_ANSWERS)
def test_malformed_calls_become_text_or_end_early(name, answer, text, calls):
    for slices in [(answer,), tuple(answer)]:
        assert read(parser_factory(name, {}), *slices) == (text, "", calls)


def test_kimi_call_ids_come_from_the_model():
    pieces = parser_factory("kimi_k2")().push(RECORDED["kimi_k2"])
    assert [piece.id for piece in pieces if isinstance(piece, CallStart)] == [
        "functions.find_trains:0",
        "functions.now:1",
    ]


REASONING_ANSWERS = [  # (parser, whether the prompt opens reasoning, answer, reasoning, content)
    ("qwen3", None, "<think>\na\n</think>\n\nb", "a", "b"),
    ("qwen3", True, "a\n</think>\n\nb", "a", "b"),
    ("qwen3", False, "b", "", "b"),
    ("qwen3", None, "b", "", "b"),
    ("deepseek_r1", None, "a</think>b", "a", "b"),
    ("deepseek_r1", False, "b", "", "b"),
    ("minimax_m2", None, "a\n</think>\n\nb", "a", "b"),
    ("minimax_m2_append_think", None, "a\n</think>\n\nb", "", "<think>a\n</think>\n\nb"),
    ("identity", None, "<think>a</think>b", "", "<think>a</think>b"),
    ("granite", None, "Here is my thought process:\na.\nHere is my response:\nb", "a.", "b"),
    (
        "granite",
        None,
        "Here's my thought process: Here it is. Here's my response: b",
        "Here it is.",
        "b",
    ),
    ("granite", None, "Here is my answer", "", "Here is my answer"),
    ("hunyuan_a13b", None, "<think>\na\n</think>\n<answer>\nb\n</answer>", "a", "b"),
    ("hunyuan_a13b", None, "<think>\n\n</think>\n<answer>\nb <i>\n</answer>", "", "b <i>"),
    ("ernie45", True, "a\n</think>\n\n<response>\nb\n</response>\n", "a", "b"),
    ("ernie45", True, "a\n</think>\nb", "a", "b"),
    ("mistral", None, "[THINK]a[/THINK]b", "a", "b"),
    ("seed_oss", None, "<seed:think>a</seed:think>b", "a", "b"),
    ("gemma4", None, "<|channel>thought\na<channel|>b", "a", "b"),
    (
        "cohere_command3",
        None,
        "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",
        "a",
        "b",
    ),
    ("kimi_k2", True, "a</think>b", "a", "b"),
    ("openai_gptoss", True, "a<|end|><|start|>assistant<|channel|>final<|message|>b", "a", "b"),
]


@pytest.mark.parametrize(("name", "opened", "answer", "reasoning", "content"), REASONING_ANSWERS)
def test_reasoning_does_not_depend_on_slicing(name, opened, answer, reasoning, content):
    make = partial(parsing.make_parser, None, name, None, opened)
    assert read(make, answer) == read(make, *answer) == (content, reasoning, [])
    for at in range(len(answer)):
        assert read(make, answer[:at], answer[at:]) == (content, reasoning, [])


PARSER_PAIRS = [
    ("qwen3_coder", "qwen3"),
    ("glm45", "glm45"),
    ("deepseek_v31", "deepseek_v3"),
    ("kimi_k2", "kimi_k2"),
    ("minimax_m2", "minimax_m2"),
    ("seed_oss", "seed_oss"),
    ("gemma4", "gemma4"),
    ("ernie45", "ernie45"),
    ("pythonic", "nemotron_v3"),
    ("granite", "granite"),
    ("mistral", "mistral"),
    ("hunyuan_a13b", "hunyuan_a13b"),
]


@pytest.mark.parametrize(("tool", "reasoning"), PARSER_PAIRS)
def test_reasoning_before_tool_calls(tool, reasoning):
    described = parsing.REASONING[reasoning]
    assert isinstance(described, Thoughts)
    make = parser_factory(tool, reasoning=reasoning)
    text = f"{described.opens[0]}\nSo.{described.closes[0]}\n\n{RECORDED[tool]}"
    expected = read(make, text)
    assert expected[0].strip() == "" and expected[1] == "So."
    assert [json.loads(arguments) for _, arguments in expected[2]] == [TRAINS, {}]
    assert read(make, *text) == expected
    for at in range(0, len(text), 3):
        assert read(make, text[:at], text[at:]) == expected


def test_kimi_call_ends_reasoning():
    text = f"So.{RECORDED['kimi_k2']}"
    content, reasoning, calls = read(
        partial(parsing.make_parser, "kimi_k2", "kimi_k2", TOOLS, True), text
    )
    assert (content, reasoning, len(calls)) == ("", "So.", 2)


# Excerpts of public chat templates.
TEMPLATES = [
    (
        "{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}<parameter= </think>",
        "qwen3_coder",
        "qwen3",
    ),
    (
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value> <think></think>"),
        "glm45",
        "qwen3",
    ),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>\\n```json",
        "deepseek_v3",
        None,
    ),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜> </think>",
        "deepseek_v31",
        "qwen3",
    ),
    ("<｜DSML｜function_calls><｜DSML｜invoke", "deepseek_v32", None),
    ("<|tool_calls_section_begin|><|tool_call_begin|> <think></think>", "kimi_k2", "kimi_k2"),
    (
        "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name= <think>",
        "minimax_m2",
        "qwen3",
    ),
    ("<seed:tool_call>\n<function=example_function_name> <seed:think>", "seed_oss", "seed_oss"),
    (
        "<|python_start|>[func_name1(params_name1=params_value1)] <|python_end|> ipython",
        "llama4_pythonic",
        None,
    ),
    ("<|tool_call>call:' + function['name'] + '{' <|channel>thought\n", "gemma4", "gemma4"),
    ("<start_function_call>call:", "functiongemma", None),
    (
        "<|tool_call|> followed by a JSON list of tools used. Here is my thought process:",
        "granite",
        "granite",
    ),
    ("return a json object within <tool_call></tool_call> XML tags", "hermes", None),
    ("<|tool|>' + message['tools'] + '<|/tool|>", "phi4_mini_json", None),
    ("<tool_calls>[{...}]</tool_calls> <think></think><answer>", "hunyuan_a13b", "hunyuan_a13b"),
    ("<tool_call>\n{{ call }}\n</tool_call> <think> <response>", "hermes", "ernie45"),
    ("<TOOLCALL>[ </think>", "nemotron_json", "qwen3"),
    ("List of tools: <|tool_list_start|>[", "lfm2", None),
    ("<|action_start|><|plugin|>", "internlm", None),
    ("<functions></functions> <function_calls>", "olmo3", None),
    ("<steptml:invoke name=", "step3", None),
    ("<|START_ACTION|>[ <|START_THINKING|>", "cohere_command3", "cohere_command3"),
    ("<|tools_prefix|>[", "apertus", None),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS] [ARGS] [THINK]", "mistral", "mistral"),
    ("<|bom|><tool_calls>[", "jamba", None),
    ("<|start|>assistant<|channel|>commentary to=functions.", "openai", "openai_gptoss"),
]


@pytest.mark.parametrize(("template", "tool", "reasoning"), TEMPLATES)
def test_detect_parsers_from_template(template, tool, reasoning):
    assert parsing.detect(template) == (tool, reasoning)


def test_prompt_end_opens_reasoning():
    for end, opened in {
        "<think>\n": True,
        "<seed:think>": True,
        "[THINK]": True,
        "<|channel>thought\n": True,
        "<think>\n\n</think>\n\n": False,
        "<|channel>thought\n<channel|>": False,
        "assistant\n": None,
    }.items():
        assert parsing.opens_thought(f"hello{end}") is opened


VLLM_TOOLS = """deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 cohere_command3 cohere_command4 ernie45 glm45 glm47
granite-20b-fc granite granite4 hermes poolside_v1 hunyuan_a13b hy_v3 internlm jamba lfm2 kimi_k2 kimi_k3 llama3_json
llama4_json llama4_pythonic longcat mimo minimax_m2 minimax_m3 minicpm5 mistral olmo3 openai phi4_mini_json pythonic
qwen3_coder qwen3_xml seed_oss step3 step3p5 inkling xlam gigachat3 functiongemma gemma4 apertus solar_open2""".split()
VLLM_REASONING = """deepseek_r1 deepseek_v3 deepseek_v4 poolside_v1 cohere_command3 cohere_command4 ernie45 gemma4 glm45
glm47 openai_gptoss granite holo2 hunyuan_a13b hy_v3 kimi_k2 kimi_k3 mimo minimax_m2 minimax_m2_append_think minimax_m3
mistral nemotron_v3 olmo3 qwen3 seed_oss step3 step3p5 inkling solar_open2""".split()


def test_vllm_parser_names_are_served_or_rejected_with_a_reason():
    for names, served, rejected, field in (
        (VLLM_TOOLS, parsing.TOOL_PARSERS, parsing.REFUSED_TOOLS, "tool_call_parser"),
        (VLLM_REASONING, parsing.REASONING_PARSERS, parsing.REFUSED_REASONING, "reasoning_parser"),
    ):
        assert set(names) <= {*served, *rejected} and not set(served) & set(rejected)
        for name in names:
            if name in served:
                assert getattr(Formats(**{field: name}), field) == name
            else:
                with pytest.raises(ModelError, match=f"{field} '{name}' is not served: .*\\w"):
                    Formats(**{field: name})


def test_tools_page_is_up_to_date():
    assert tools_page.PAGE.read_text() == tools_page.document(), (
        "python tests/support/tools_page.py > docs/tools.md"
    )
