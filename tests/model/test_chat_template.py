"""Chat templates: published prompts, Python methods, one-line errors and hostile templates."""

# ruff: noqa: E501 - templates read better on one line

import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from quire.model.text.chat_template import OWN_SECONDS, REQUEST_SECONDS, ChatTemplate, PromptError
from quire.tests.support.chat_templates import CASES
from quire.tests.support.template_features import EXPRESSED, EXPRESSIONS, FEATURES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ALL_CASES = CASES | FEATURES


@pytest.fixture(scope="module")
def render():
    """A function that renders a template source, with one worker for all tests."""
    template = ChatTemplate("", SPECIAL, seconds=REQUEST_SECONDS)

    def run(source: str, messages=(), **variables) -> str:
        template.source = source
        return template.render(list(messages), **variables)

    return run


@pytest.mark.parametrize("case", ALL_CASES.values(), ids=ALL_CASES)
def test_templates_of_model_families(render, case):
    text = render(
        case.template,
        case.messages,
        add_generation_prompt=case.add_generation_prompt,
        **case.variables,
    )
    assert text == case.expected


@pytest.mark.parametrize("line_end", ["\r\n", "\r"])
def test_line_endings_of_the_template_are_normalized(render, line_end):
    for case in ALL_CASES.values():
        template = case.template.replace("\n", line_end)
        assert (
            render(
                template,
                case.messages,
                add_generation_prompt=case.add_generation_prompt,
                **case.variables,
            )
            == case.expected
        )
    assert render(f"a{line_end}{{{{ messages[0] }}}}{line_end}", ["b\r\nc"]) == "a\nb\r\nc"


@pytest.mark.parametrize("without_content", [{}, {"content": None}])
def test_null_content_is_undefined(render, without_content):
    """As in transformers; an empty text only if the template fails otherwise."""
    messages = [{"role": "assistant", "tool_calls": [1]} | without_content]
    loop = "{%% for m in messages %%}%s{%% endfor %%}"
    assert (
        render(loop % "{{ m.content is defined }}{{ 'content' in m }}<{{ m.content }}>", messages)
        == "FalseFalse<>"
    )
    assert render(loop % "{{ '<' + m.content + '>' + m.content|tojson }}", messages) == '<>""'


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_python_expressions_unknown_to_minijinja(render, source):
    assert render(source, EXPRESSED) == EXPRESSIONS[source]


@pytest.mark.parametrize(
    "source", ["{{ messages[0].foo.zfill(3) }}", "{{ messages.rsplit() }}", "{{ {}.index('a') }}"]
)
def test_string_methods_require_a_string(render, source):
    with pytest.raises(PromptError, match="object has no attribute '(zfill|rsplit|index)'"):
        render(source, EXPRESSED)


def test_arithmetic_with_floats(render):
    messages = [{"f": 1.0, "e": 1e-6}]
    assert render("{{ messages[0].f + 1 }} {{ messages[0].f|tojson }}", messages) == "2.0 1"
    assert render(
        "{{ x + 1 }} {{ y }} {{ messages[0] }}", messages, x=1.0, y=[1e-6, {"z": 2.0}]
    ) == ("2.0 [1e-06, {'z': 2.0}] {'f': 1.0, 'e': 1e-06}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gemma", "Roles must alternate: user, assistant, user, ..."),
        ("mistral", "After the optional system message, user and assistant must alternate"),
    ],
)
def test_raise_exception_becomes_a_prompt_error(render, source, message):
    two_user_messages = [{"role": "user", "content": "a"}] * 2
    with pytest.raises(PromptError) as caught:
        render(CASES[source].template, two_user_messages)
    assert str(caught.value) == f"chat template: {message}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Values print as in Python
        ("{{ none }} {{ true }} {{ false }} {{ 1.0 }} {{ 4 / 2 }} {{ 7 // 2 }} {{ -7 % 3 }}", "None True False 1.0 2.0 3 2"),
        ("{{ {'a': [1, 'x', none, true]} }}", "{'a': [1, 'x', None, True]}"),
        ("{{ '<b> & \"c\"' }}", '<b> & "c"'),
        ("[{{ nothing }}][{{ d.nothing }}][{{ nothing is defined }}]", "[][][False]"),
        ("{% for x in nothing %}a{% else %}none{% endfor %}", "none"),
        ("{{ nothing | length }} {{ 'é日' | length }} {{ d | count }}", "0 2 2"),
        # JSON as in the models' training data
        ("{{ d | tojson }}", '{"b": "é<", "a": [1, 2.5, null, true]}'),
        ("{{ d | tojson(indent=1) }}", '{\n "b": "é<",\n "a": [\n  1,\n  2.5,\n  null,\n  true\n ]\n}'),
        ("{{ d | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}", '{"a":[1,2.5,null,true],"b":"\\u00e9<"}'),
        # Methods of str, dict and list
        (("{{ ' a '.strip() }}|{{ 'xax'.strip('x') }}|{{ ' a'.lstrip() }}|{{ " "'a\\n'.rstrip('\\n') }}"), "a|a|a|a"),
        ("{{ 'a,b,c'.split(',')[-1] }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'a  b'.split() }}", "c|['a', 'b,c']|['a', 'b']"),
        (("{{ 'ab'.startswith('a') }}|{{ 'ab'.endswith(('x', 'b')) }}|{{ " "'abab'.replace('a', 'x', 1) }}"), "True|True|xbab"),
        ("{{ 'a b'.title() }}|{{ 'aB'.upper() }}|{{ 'aB'.lower() }}|{{ 'ab'.capitalize() }}", "A B|AB|ab|Ab"),
        (("{{ 'aab'.count('a') }}|{{ 'ab'.find('b') }}|{{ '12'.isdigit() }}|{{ " "'a\\nb'.splitlines() }}"), "2|1|True|['a', 'b']"),
        ("{{ ', '.join(['a', 'b']) }}|{{ '{} {x}'.format(1, x=2) }}", "a, b|1 2"),
        ("{{ d.get('b') }}|{{ d.get('z') }}|{{ d.get('z', 1) }}|{{ d.keys() | list }}", "é<|None|1|['b', 'a']"),
        ("{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "b=é<;a=[1, 2.5, None, True];"),
        ("{{ l[1:] }} {{ l[:-1] }} {{ l[::-1] }} {{ l[-1] }} {{ 'abc'[1:] }} {{ 'é日本'[1] }}", "[2, 3] [1, 2] [3, 2, 1] 3 bc 日"),
        # Filters and tests
        ("{{ l | map('string') | join('-') }} {{ l | select('odd') | list }} {{ l | sum }}", "1-2-3 [1, 3] 6"),
        (("{{ [{'r': 'u', 'n': 1}, {'r': 'a', 'n': 2}] | selectattr('r', 'equalto', 'a') | " "map(attribute='n') | first }}"), "2"),
        ("{{ 'a\\nb\\n\\nc\\n' | indent(2) }}|{{ 'a\\nb' | indent(2, true) }}", "a\n  b\n\n  c\n|  a\n  b"),
        ("{{ 'a\\n\\nb' | indent('> ', first=true, blank=true) }}", "> a\n> \n> b"),
        (("{{ none is iterable }} {{ l is iterable }} {{ 'a' is iterable }} {{ 1 is " "iterable }}"), "False True True False"),
        (("{{ 'a' is sequence }} {{ d is sequence }} {{ none is sequence }} {{ d is mapping " "}}"), "True True False True"),
        (("{{ nothing is iterable }} {{ d.nothing is not iterable }} {{ nothing is sequence " "}} {{ 'is iterable' }}"), "True False False is iterable"),
        (("{#- it's -#}{% if nothing is not iterable %}a{% else %}is iterable{% endif %} {{ " "'\\'}}' is iterable }}"), "is iterable True"),
        (("{{ 1 is number }} {{ 'a' is string }} {{ none is none }} {{ true is boolean }} " "{{ 'b' in d }}"), "True True True True True"),
        # Statements
        (("{% set ns = namespace(n=0) %}{% for i in l %}{% set ns.n = ns.n + i %}{% endfor " "%}{{ ns.n }}"), "6"),
        (("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break " "%}{% endif %}{{ i }}{% endfor %}"), "02"),
        (("{% for i in l %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.previtem " "}} {% endfor %}"), "1TrueFalse 2FalseFalse1 3FalseTrue2 "),
        ("{% macro f(a, b='y') %}<{{ a }}{{ b }}>{% endmacro %}{{ f('x') + f('z', b='w') }}", "<xy><zw>"),
        ("{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}", "<in>"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}{% filter upper %}b{% endfilter %}", "A1B"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc {# no #}\n{{- 'd' -}}  \ne", "a\nb\nc de"),
        ("a {% raw %}\n{{ b }}\n  {% endraw %}\nc{%- raw -%}\n d{% endraw %}", "a \n{{ b }}\ncd"),
        ("{%- generation -%} a {%- endgeneration -%} b{% generation %}c{% endgeneration %}", "abc"),
    ],
)  # fmt: skip
def test_jinja_features_of_published_templates(render, source, expected):
    assert render(source, d={"b": "é<", "a": [1, 2.5, None, True]}, l=[1, 2, 3]) == expected


def test_strftime_now(render):
    date_before = datetime.now().strftime("%d %b %Y")
    assert render("{{ strftime_now('%d %b %Y') }}") in (
        date_before,
        datetime.now().strftime("%d %b %Y"),
    )


def test_request_variables_override_special_tokens(render):
    assert render("{{ bos_token }}{{ eos_token }}{{ tools }}{{ documents }}") == "<s></s>NoneNone"
    assert render("{{ bos_token }}{{ tools }}", bos_token="B", tools=[1]) == "B[1]"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for %}", "unexpected end of block, expected in (line 2 of the template)"),
        ("{{ messages.foo() }}", "'list' object has no attribute 'foo'"),
        ("{{ 'a'.foo() }}", "string has no method named foo"),
        ("{{ nothing + 'a' }}", "unsupported types undefined and string"),
        ("{{ 'a' | nothing }}", "filter nothing is unknown"),
        ("{{ d | tojson(colour='red') }}", "colour"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{% include '/etc/passwd' %}", "non-existing template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "undefined value"),
        ("{{ raise_exception.__globals__ }}{{ 1 + none }}", "unsupported types"),
    ],
)
def test_errors_are_one_line(render, source, message):
    with pytest.raises(PromptError) as caught:
        render(source, d={})
    text = str(caught.value)
    assert text.startswith("chat template: ")
    assert message in text
    assert "\n" not in text
    assert "<string>" not in text


def test_messages_must_be_plain_json(render):
    with pytest.raises(PromptError, match="plain JSON.*object is not JSON serializable"):
        render("", [{"role": "user", "content": object()}])
    loop: list = []
    loop.append(loop)
    with pytest.raises(PromptError, match="plain JSON"):
        render("", loop)
    with pytest.raises(PromptError, match="surrogates"):
        render("{{ messages[0] }}", ["\ud83d"])


HOSTILE = {
    "a long string": "{{ 'a' * 10**9 }}",
    "a long list": "{{ ([1] * 10**9) | length }}",
    "a long range": "{% for i in range(10**12) %}{% endfor %}",
    "nested loops": (
        "{% for a in r %}{% for b in r %}{% for c in r %}x{% endfor %}{% endfor %}{% endfor %}"
    ),
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a string doubled": (
        "{% set n = namespace(s='a') %}{% for i in r %}{% set n.s = n.s ~ n.s "
        "%}{% endfor %}{{ n.s | length }}"
    ),
    "a string replaced": (
        "{% set n = namespace(s='aa') %}{% for i in r %}{% set n.s = "
        "n.s.replace('a', 'aaaa') %}{% endfor %}"
    ),
    "a list doubled": (
        "{% set n = namespace(s=[1]) %}{% for i in r %}{% set n.s = n.s + n.s %}{% "
        "endfor %}{{ n.s | list | length }}"
    ),
    "a list of itself": (
        "{% set n = namespace(s=[]) %}{% for i in r %}{% set n.s = [n.s, n.s] "
        "%}{% endfor %}{{ n.s }}"
    ),
    "a namespace in itself": "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
    "a deep list": (
        "{% set n = namespace(s=[]) %}{% for i in range(100000) %}{% set n.s = [n.s] "
        "%}{% endfor %}{{ n.s }}"
    ),
    "a deep expression": "{{ " + "-" * 100_000 + "1 }}",
    "wide output": "{% set s = 'a' * 100000 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
    "a wide format": "{{ '%1000000000d' | format(1) }}",
    "wide JSON": "{{ [1] | tojson(indent=1000000000) }}",
    "a wide indent": "{{ ('a\n' * 10000) | indent(1000000) }}",
    "a slow filter": (
        "{% for i in r %}{{ range(100000) | map('string') | join | length }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.slow
def test_hostile_templates_are_stopped(render, source):
    """Each raises an error, and the next conversation is rendered."""
    with pytest.raises(PromptError) as caught:
        render(source, r=list(range(10_000)))
    assert len(str(caught.value)) < 300
    assert render("{{ messages[0] }}", ["alive"]) == "alive"


def test_steps_bound_every_template_and_time_bounds_request_templates():
    """Own templates get more CPU time, as a busy machine needs more for the same steps."""
    loops = "{% for a in r %}{% for b in r %}{% for c in r %}x{% endfor %}{% endfor %}{% endfor %}"
    for seconds in (OWN_SECONDS, REQUEST_SECONDS):
        template = ChatTemplate("{{ 1 }}", seconds=seconds)
        template.render([])
        process = template.worker.process
        assert process is not None
        assert seconds < resource.prlimit(process.pid, resource.RLIMIT_CPU)[0] <= seconds + 2
    slow_template = ChatTemplate(loops)
    with pytest.raises(PromptError, match="ran for more than 30000000 steps"):
        slow_template.render([], r=list(range(10_000)))
    assert OWN_SECONDS > 10 * REQUEST_SECONDS


@pytest.mark.parametrize("opening", ["{{", '{{"', "{{ '\"\\", "{#", "{{ x is ", "{% '\\\\"])
def test_unclosed_tags_are_parsed_in_linear_time(render, opening):
    with pytest.raises(PromptError) as caught:
        render("{{ 1 is iterable }}" + opening * 9000)
    assert "stopped" not in str(caught.value)  # the error of templates that take too long


def test_long_conversation_is_rendered(render):
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} " * 50} for i in range(2001)
    ]
    for name in ("chatml", "mistral"):
        assert len(render(CASES[name].template, messages)) > 400_000


def test_dead_worker_is_replaced():
    template = ChatTemplate("{{ messages[0] }}")
    assert template.render([1]) == "1"
    assert template.worker.process is not None
    os.kill(template.worker.process.pid, signal.SIGKILL)
    template.worker.process.wait()
    assert template.render([2]) == "2"


def test_threads_share_a_worker():
    template = ChatTemplate("{{ messages[0] }}{{ 'x' * messages[0] }}")
    other_threads = set(threading.enumerate())
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: template.render([n]), range(200)))
    assert answers == [f"{n}{'x' * n}" for n in range(200)]
    # callers wait for the worker's lock; none starts a thread
    assert set(threading.enumerate()) <= other_threads


def test_worker_is_killed_with_its_template():
    template = ChatTemplate("{{ messages }}")
    template.render([])
    process = template.worker.process
    assert process is not None and process.poll() is None
    del template
    assert process.poll() == -signal.SIGKILL


def test_worker_ends_with_the_program():
    """Even if the program is killed: the worker reads the end of its input."""
    code = (
        "import os, signal\nfrom quire.model.text.chat_template import ChatTemplate\n"
        "template = ChatTemplate('{{ 1 }}')\ntemplate.render([])\n"
        "print(template.worker.process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(run.stdout)
    never_set = threading.Event()
    for _ in range(200):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        if "State:\tZ" in status_of(worker):
            return  # a zombie has ended
        never_set.wait(0.05)
    raise AssertionError(f"the worker {worker} lives on")


def status_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/status") as file:
            return file.read()
    except OSError:
        return ""


CALLS_IN_TEMPLATES = {  # how templates render a tool call's arguments
    "{{- '```json\\n' + call['function']['arguments'] + '\\n```' -}}": '```json\n{"to": "Zürich", "n": 2}\n```',
    "{{- call['function']['name'] + '<sep>' + call['function']['arguments'] + '<end>' -}}": (
        'find<sep>{"to": "Zürich", "n": 2}<end>'
    ),
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}": '{"to": "Zürich", "n": 2}',
    (
        "{%- for name, value in call.function.arguments | items %}{{- '<parameter=' ~ name ~ '>' ~ "
        "(value if value is string else value | tojson) ~ '</parameter>' }}{%- endfor %}"
    ): ("<parameter=to>Zürich</parameter><parameter=n>2</parameter>"),
    (
        "{% set _args = call.function.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k "
        "}}</arg_key><arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v "
        "}}</arg_value>{% endfor %}"
    ): "<arg_key>to</arg_key><arg_value>Zürich</arg_value><arg_key>n</arg_key><arg_value>2</arg_value>",
}


@pytest.mark.parametrize("template", CALLS_IN_TEMPLATES)
def test_tool_call_arguments_as_objects_or_json_text(template):
    call = {"type": "function", "function": {"name": "find", "arguments": {"to": "Zürich", "n": 2}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    source = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        + template
        + "{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(source).render(messages) == CALLS_IN_TEMPLATES[template]
    assert call["function"]["arguments"] == {"to": "Zürich", "n": 2}


def test_error_with_both_argument_forms_reports_the_first():
    call = {"type": "function", "function": {"name": "find", "arguments": {"a": 1}}}
    with pytest.raises(PromptError, match="not today"):
        ChatTemplate("{{ raise_exception('not today') }}").render(
            [{"role": "assistant", "tool_calls": [call]}]
        )
