"""Chat templates with rare features, conversations that use them, and the prompts that transformers
renders.
"""

# ruff: noqa: E501 - a prompt is one line, however long

from typing import Any

from quire.tests.support.chat_templates import AGAIN, ASK, CALL, SUNNY, SYSTEM, WARM, WEATHER, Case

# Reasoning is read from `thinking`, and only beside tool calls.
CHANNELS = """\
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {%- if "tool_calls" in message -%}
            {%- if message.content and message.thinking %}
                {{- raise_exception("Say it in content or in thinking, not in both!") }}
            {%- elif message.content or message.thinking %}
                {{- "<a>analysis<m>" ~ (message.content or message.thinking) ~ "<e>" }}
            {%- endif -%}
            {%- for call in message.tool_calls -%}
                {{- "<a>to=" ~ call.function.name ~ "<m>" ~ call.function.arguments | tojson ~ "<e>" }}
            {%- endfor -%}
        {%- else -%}
            {%- if message.thinking and loop.last and not add_generation_prompt %}
                {{- "<a>analysis<m>" ~ message.thinking ~ "<e>" }}
            {%- endif -%}
            {{- "<a>final<m>" ~ message.content ~ "<e>" }}
        {%- endif -%}
    {%- else -%}
        {{- "<" ~ message.role[0] ~ "><m>" ~ message.content ~ "<e>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<a>" }}{% endif -%}
"""

# A field whose value is None counts as missing.
FIELDS = """\
{%- for message in messages %}
    {{- "<" + message.role + (":" + message.name if message.name is defined else "") + ">" }}
    {%- if "reasoning_content" in message %}{{ "<think>" + message.reasoning_content | trim + "</think>" }}{% endif %}
    {{- (message.content or "-") + ("|" ~ message.tool_calls | length if "tool_calls" in message else "") + "</>" }}
{%- endfor %}
"""

# The template tests an undefined name, which is an empty iterable in Jinja.
PARTS = """\
{%- macro typed(value) -%}
    {%- if value is iterable and value is not string -%}
        {%- set found = namespace(all=true) -%}
        {%- for item in value if 'type' not in item -%}{%- set found.all = false -%}{%- endfor -%}
        {{ found.all }}
    {%- else -%}
        {{ false }}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{- '<' ~ message.role ~ '>' -}}
    {%- if message.content is string -%}
        {{- message.content | trim -}}
    {%- elif typed(parts) == 'True' -%}
        {%- for part in message.content -%}
            {{- part.text | trim if part.type == 'text' else '<' ~ part.type ~ '/>' -}}
        {%- endfor -%}
    {%- else -%}
        {{- message.content | tojson -}}
    {%- endif -%}
    {{- "'is iterable'" if tools is not iterable else '' -}}
{%- endfor -%}
"""

# Arguments are formatted as by Python.
PRINTED = """\
{%- for message in messages if message.tool_calls -%}
    {%- for call in message.tool_calls -%}
        {%- for name, value in call.function.arguments | items -%}
            {%- set shown = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string -%}
            {{- '<' ~ name ~ '>' ~ shown ~ (' #' if value is number) ~ (' .' if value is float) }}
{% endfor -%}
        {{- call.function.arguments }}
    {%- endfor -%}
{%- endfor -%}
"""

# Line breaks are raw text.
RAW = """\
{% for message in messages %}{% if loop.first and message.role != 'system' %}{% raw %}<s>system
You help. {{ so }}</s>
{% endraw %}{% endif %}<s>{{ message.role }}{% raw %}
{% endraw %}{{ message.content }}</s>{% raw %}
{% endraw %}{% endfor %}
  {% raw -%}
  <s>assistant
  {%- endraw %}
"""

THOUGHT = CALL | {"content": None, "reasoning_content": "Where? In Paris."}
NUMBERS: dict[str, Any] = {
    "large": 1e22, "small": -2.5e-7, "plain": 0.25, "whole": 3, "on": True, "none": None,
    "list": [1e16, "a", None], "object": {"é": 1e-5}, "text": "1e5",
}  # fmt: skip
NUMBERED = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": NUMBERS}}],
}
PARTED = {
    "role": "user",
    "content": [
        {"type": "image"},
        {"type": "text", "text": " one "},
        {"type": "text", "text": "two"},
    ],
}

FEATURES = {
    "a thought beside a call": Case(
        CHANNELS,
        [AGAIN, THOUGHT, SUNNY],
        '<u><m>More?<e><a>analysis<m>Where? In Paris.<e><a>to=weather<m>{"city": "Paris", "days": 2}<e><t><m>sunny<e><a>',
    ),
    "a thought by its other name": Case(
        CHANNELS,
        [AGAIN, {"role": "assistant", "content": "Yes", "reasoning": "Hm."}],
        "<u><m>More?<e><a>analysis<m>Hm.<e><a>final<m>Yes<e>",
        add_generation_prompt=False,
    ),
    "fields that are None": Case(
        FIELDS,
        [
            AGAIN | {"name": None},
            THOUGHT,
            SUNNY | {"tool_calls": None},
            {"role": "assistant", "content": "So", "thinking": " Hm"},
        ],
        "<user>More?</><assistant><think>Where? In "
        "Paris.</think>-|1</><tool>sunny</><assistant><think>Hm</think>So</>",
    ),
    "parts and what is not defined": Case(
        PARTS,
        [SYSTEM, PARTED, SUNNY | {"content": [{"type": "text", "text": "20 °C"}]}],
        "<system>Be brief.'is iterable'<user><image/>onetwo'is iterable'<tool>20 °C'is iterable'",
    ),
    "parts and tools": Case(PARTS, [PARTED], "<user><image/>onetwo", {"tools": [WEATHER]}),
    "numbers": Case(
        PRINTED,
        [ASK, NUMBERED],
        "<large>1e+22 # .\n<small>-2.5e-07 # .\n<plain>0.25 # .\n<whole>3 #\n<on>True #\n<none>None\n"
        '<list>[1e+16, "a", null]\n<object>{"é": 1e-05}\n<text>1e5\n'
        "{'large': 1e+22, 'small': -2.5e-07, 'plain': 0.25, 'whole': 3, 'on': True, 'none': None, "
        "'list': [1e+16, 'a', None], 'object': {'é': 1e-05}, 'text': '1e5'}",
    ),
    "raw line breaks": Case(
        RAW,
        [AGAIN, WARM],
        "<s>system\nYou help. {{ so }}</s>\n<s>user\nMore?</s>\n<s>tool\n20 °C</s>\n<s>assistant",
    ),
}

# Expressions that need more than minijinja has, with the messages below, and what transformers
# writes.
EXPRESSED = [
    {"role": "user", "content": "a-b-c", "f": 1.0, "l": [1.0, "x"], "m": {"k": 2.0}, "n": 3}
]
EXPRESSIONS = {
    "{{ messages[0].f|tojson }} {{ messages[0].l|tojson }} {{ messages[0].l[0]|tojson }}": '1.0 [1.0, "x"] 1.0',
    "{% for k, v in messages[0].m.items() %}{{ k ~ v|tojson ~ v }}{% endfor %}": "k2.02.0",
    "{{ messages[0].f is number }} {{ messages[0].f is float }} {{ messages[0].f|string }}": (
        "True True 1.0"
    ),
    "{% for c in 'abc' %}{{ c }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }} {% endfor %}": (
        "aFalse33 bFalse32 cTrue31 "
    ),
    "{% for c in messages[0].content if c != '-' %}{{ c }}{{ ',' if not loop.last }}{% endfor %}": "a,b,c",
    "{% for k, v in messages[0].m|items %}{{ k }}{{ loop.last }}{% endfor %}": "kTrue",
    "{% for c in nothing %}{{ loop.last }}{% else %}none{% endfor %}": "none",
    "{% for c in ('ab' if messages else 'x') %}{{ c ~ loop.last }}{% endfor %}": "aFalsebTrue",
    "{{ messages[0].content.rsplit('-', 1)[0] }}": "a-b",
    "{{ messages[0].content.rsplit('-')|tojson }}": '["a", "b", "c"]',
    "{{ messages[0]['content'].removeprefix('a-').removesuffix('-c') }}": "b",
    "{{ (messages[0].content ~ '!').partition('-')[2] }}": "b-c!",
    "{{ messages[0] . content . rpartition ( '-' ) [ 0 ] }}": "a-b",
    "{{ messages[0].get('content')[2:].rsplit('-')[-1] }}": "c",
    "{{ 'a-b'.partition('-') }}": "('a', '-', 'b')",
    (
        "{{ 'abc'.index('c') }} {{ -'abc'.index('c') }} {{ [1, 2][ 'ab'.index('b') ] }} {{ ['a', "
        "'b'].index('b') }}"
    ): ("2 -2 2 1"),
    "{{ '7'.zfill(3) ~ 'x'.ljust(3) ~ 'y'.rjust(2) ~ 'z'.center(3, '*') }}": "007x   y*z*",
    "{{ 'aB'.swapcase() }}{{ 'ß'.casefold() }}{{ ' '.isspace() }}{{ not 'a'.isspace() }}": "AbssTrueTrue",
    (
        "{% set x = 'a b'.rsplit(' ') %}{{ x[1] }}{% macro f(x) %}{{ x.zfill(2) }}{% endmacro %}{{ "
        "f('1') }}"
    ): "b01",
    "{% raw %}{{ 'a'.zfill(3) }}{% endraw %}{{ 'a'.zfill(3) }}{# 'a'.zfill(3) #}": (
        "{{ 'a'.zfill(3) }}00a"
    ),
    "{{ '.rsplit(' }} {{ '% s' }} {{ '\\'%'|length }}": ".rsplit( % s 2",
    "{{ '%s and %d' % (messages[0].content, 3) }}": "a-b-c and 3",
    "{{ '%05.1f' % 3.14159 }} {{ '%(a)s' % {'a': 3} }} {{ '%s' % messages[0].content|upper }}!": (
        "003.1 3 A-B-C!"
    ),
    "{{ '%s' % 'a' ~ 'b' }} {{ '%s%s' % ('a', 'b') + 'c' }} {{ 7 % 4 }} {{ messages|length % 2 }}": (
        "ab abc 3 1"
    ),
    "{% if '%s' % 'a' == 'a' %}yes{% endif %}": "yes",
    (
        "{{ '<'|safe + '>&' }} {{ '\"' + '<i>'|safe + '!' }} {{ '<'|safe ~ '>' }} {{ 1 + 2 }}{{ "
        "'<'|safe }}"
    ): ("<&gt;&amp; &#34;<i>! <> 3<"),
    "{{ 'a b'|safe|upper }}{{ ' a '|safe|trim }}{{ 'abc'|safe|length }}{{ 'a'|safe is string }}": (
        "A Ba3True"
    ),
}
