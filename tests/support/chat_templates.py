"""Chat templates like those of well-known families, with conversations and expected prompts."""

# ruff: noqa: E501 - a prompt is one line, however long

from typing import Any, NamedTuple

SYSTEM = {"role": "system", "content": " Be brief. "}
ASK = {"role": "user", "content": "Hi <you> & é\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}
AGAIN = {"role": "user", "content": "More?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The "weather" <now>',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "integer", "default": 3},
                "unit": {"type": "string", "enum": ["c", "f"]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}},
        }
    ],
}
SUNNY = {"role": "tool", "content": "sunny"}
WARM = {"role": "tool", "content": "20 °C"}

LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- if system or tools is not none %}
    {{- "<|header|>system<|/header|>\\n\\n" }}
    {%- if tools is not none %}
        {{- "Tools:\\n\\n" }}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) }}
            {{- "\\n\\n" }}
        {%- endfor %}
    {%- endif %}
    {{- system + "<|eot|>" }}
{%- endif %}
{%- for message in rest %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("One tool call at a time!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|header|>assistant<|/header|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- else %}
        {{- "<|header|>ipython<|/header|>\\n\\n" ~ message.content ~ "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not message.content.startswith('<r>') %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role }}
        {%- if loop.index0 > ns.last and thought %}
            {{- '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n' }}
        {%- endif %}
        {{- '\\n' + content }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '<call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<r>' + message.content + '</r>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate: user, assistant, user, ...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("No content") }}
    {%- endif -%}
    {{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<turn>model\\n' }}
{%- endif -%}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, user and assistant must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "[/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[CALLS] " ~ message.tool_calls | map(attribute="function") | map("tojson") | join(", ") ~ eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] in ("tool", "tool_results") %}
        {{- '[RESULTS] {"content": ' + message.content|string + "}[/RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, got " + message["role"]) }}
    {%- endif %}
{%- endfor %}
"""

PHI = (
    "{% for message in messages %}{% if message['role'] in ['system', 'user'] and "
    "message['content'] %}{{'<|' + message['role'] + '|>\n' + message['content'] + "
    "'<|end|>\n'}}{% elif message['role'] == 'assistant' %}{% generation "
    "%}{{'<|assistant|>\n'}}{{ message['content'] }}{{'<|end|>\n'}}{%- endgeneration %}{% endif "
    "%}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token "
    "}}{% endif %}"
)

HARMONY = """\
{#- Types of a JSON schema as TypeScript writes them. #}
{%- macro type_of(spec, required, indent=1) -%}
    {%- if spec.type == "array" -%}
        {{- type_of(spec["items"], []) + "[]" if spec["items"] else "any[]" -}}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(" | ") -}}
    {%- elif spec.enum -%}
        {{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- elif spec.type in ["integer", "number"] -%}
        {{- "number" -}}
    {%- elif spec.type == "object" -%}
        {{- "{\\n" -}}
        {%- for name, each in spec.properties.items() -%}
            {%- if each.description -%}
                {{- "  " * indent + "// " + each.description + "\\n" -}}
            {%- endif -%}
            {{- "  " * indent + name -}}
            {%- if name not in (required or []) -%}
                {{- "?" -}}
            {%- endif -%}
            {{- ": " -}}
            {{- type_of(each, each.required or [], indent=indent + 1) -}}
            {{- "," -}}
            {%- if each.default is defined %}{{ " // default: " ~ each.default }}{% endif -%}
            {{- "\\n" -}}
        {%- endfor -%}
        {{- "}" -}}
    {%- else -%}
        {{- spec.type or "any" -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro tools_of(name, tools) -%}
    {{- "## " + name + "\\n\\nnamespace " + name + " {\\n\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: " }}
        {{- type_of(tool.parameters, tool.parameters.required) }}
        {{- ") => any;\\n\\n" }}
    {%- endfor %}
    {{- "} // namespace " + name }}
{%- endmacro -%}
{%- set year = strftime_now("%Y") | int %}
{{- "<|start|>system<|message|>Year: " + ("known" if year > 2000 else "lost") + "\\nReasoning: " }}
{{- (reasoning_effort if reasoning_effort is defined else "medium") + "<|end|>" }}
{%- set developer = "" %}
{%- set loop_messages = messages %}
{%- if messages[0].role in ("developer", "system") %}
    {%- set developer = messages[0].content | trim %}
    {%- set loop_messages = messages[1:] %}
{%- endif %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" + developer }}
    {%- if tools -%}
        {{- "\\n\\n# Tools\\n\\n" + tools_of("functions", tools) }}
    {%- endif -%}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(tool=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == "assistant" -%}
        {%- if "tool_calls" in message -%}
            {%- set call = message.tool_calls[0].function %}
            {{- "<|start|>assistant to=functions." + call.name + "<|message|>" + call.arguments|tojson + "<|call|>" }}
            {%- set last.tool = call.name %}
        {%- else -%}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content.split("</think>") | last | trim + "<|end|>" }}
            {%- set last.tool = none %}
        {%- endif -%}
    {%- elif message.role == "tool" -%}
        {%- if last.tool is none %}
            {{- raise_exception("A tool's result has no call before it!") }}
        {%- endif %}
        {{- "<|start|>functions." + last.tool + "<|message|>" + message.content | tojson + "<|end|>" }}
    {%- else -%}
        {{- "<|start|>" ~ message.role ~ "<|message|>" ~ message.content ~ "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""

WEATHER_JSON = (
    '{"type": "function", "function": {"name": "weather", "description": "The \\"weather\\" <now>", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer", '
    '"default": 3}, "unit": {"type": "string", "enum": ["c", "f"]}, "tags": {"type": "array", "items": {"type": '
    '"string"}}}, "required": ["city"]}}}'
)


class Case(NamedTuple):
    template: str
    messages: list[dict[str, Any]]
    expected: str
    variables: dict[str, Any] = {}
    add_generation_prompt: bool = True


CASES = {
    "llama": Case(
        LLAMA,
        [SYSTEM, ASK, ANSWER, AGAIN],
        "<s><|header|>system<|/header|>\n\nBe brief.<|eot|><|header|>user<|/header|>\n\nHi <you> "
        "& "
        "é<|eot|><|header|>assistant<|/header|>\n\n<think>\nhm\n</think>\n\nHello<|eot|><|header|>user<|/header|>\n\nMore?<|eot|><|header|>assistant<|/header|>\n\n",
    ),
    "llama without a generation prompt": Case(
        LLAMA,
        [ASK],
        "<s><|header|>user<|/header|>\n\nHi <you> & é<|eot|>",
        add_generation_prompt=False,
    ),
    "llama with tools": Case(
        LLAMA,
        [ASK, CALL, SUNNY],
        '<s><|header|>system<|/header|>\n\nTools:\n\n{\n    "name": "now",\n    "é": [\n        1,\n        null\n    ]\n}'
        "\n\n<|eot|><|header|>user<|/header|>\n\nHi <you> & é<|eot|><|header|>assistant<|/header|>\n\n"
        '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}<|eot|>'
        "<|header|>ipython<|/header|>\n\nsunny<|eot|><|header|>assistant<|/header|>\n\n",
        {"tools": [{"name": "now", "é": [1, None]}]},
    ),
    "chatml": Case(
        CHATML,
        [SYSTEM, ASK, ANSWER, AGAIN],
        "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi <you> & "
        "é\n<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "chatml with a thought": Case(
        CHATML,
        [ASK, ANSWER],
        "<|im_start|>user\nHi <you> & "
        "é\n<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        {"enable_thinking": False},
    ),
    "chatml with tools": Case(
        CHATML,
        [ASK, CALL, SUNNY, WARM],
        f"<|im_start|>system\n<tools>\n{WEATHER_JSON}\n</tools><|im_end|>\n<|im_start|>user\nHi <you> & é\n<|im_end|>\n"
        '<|im_start|>assistant\n<call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</call><|im_end|>\n'
        "<|im_start|>user\n<r>sunny</r>\n<r>20 °C</r><|im_end|>\n<|im_start|>assistant\n",
        {"tools": [WEATHER]},
    ),
    "gemma": Case(
        GEMMA,
        [
            SYSTEM,
            ASK,
            ANSWER,
            {
                "role": "user",
                "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}],
            },
        ],
        "<s><turn>user\n Be brief. \n\nHi <you> & "
        "é</turn>\n<turn>model\n<think>\nhm\n</think>\n\nHello</turn>\n<turn>user\nonetwo</turn>\n<turn>model\n",
    ),
    "mistral": Case(
        MISTRAL,
        [SYSTEM, ASK, ANSWER, AGAIN],
        "<s>[INST] Hi <you> & é\n[/INST] <think>\nhm\n</think>\n\nHello</s>[INST]  Be brief. "
        "\n\nMore?[/INST]",
    ),
    "mistral with tools": Case(
        MISTRAL,
        [ASK, CALL, SUNNY],
        '<s>[TOOLS] [{"type": "function", "function": {"name": "now", "parameters": {"a": 1.5}}}][/TOOLS]'
        '[INST] Hi <you> & é\n[/INST][CALLS] {"name": "weather", "arguments": {"city": "Paris", "days": 2}}</s>'
        '[RESULTS] {"content": sunny}[/RESULTS]',
        {"tools": [{"function": {"name": "now", "parameters": {"a": 1.5}, "return": 1}}]},
    ),
    "phi": Case(
        PHI,
        [SYSTEM, AGAIN, {"role": "assistant", "content": "Yes"}, AGAIN],
        "<|system|>\n Be brief. "
        "<|end|>\n<|user|>\nMore?<|end|>\n<|assistant|>\nYes<|end|>\n<|user|>\nMore?<|end|>\n<|assistant|>\n",
    ),
    "phi without a generation prompt": Case(
        PHI, [AGAIN], "<|user|>\nMore?<|end|>\n</s>", add_generation_prompt=False
    ),
    "harmony": Case(
        HARMONY,
        [SYSTEM, AGAIN, ANSWER, AGAIN],
        "<|start|>system<|message|>Year: known\nReasoning: "
        "high<|end|><|start|>developer<|message|>Be "
        "brief.<|end|><|start|>user<|message|>More?<|end|><|start|>assistant<|channel|>final<|message|>Hello<|end|><|start|>user<|message|>More?<|end|><|start|>assistant",
        {"reasoning_effort": "high"},
    ),
    "harmony with tools": Case(
        HARMONY,
        [AGAIN, CALL, SUNNY],
        "<|start|>system<|message|>Year: known\nReasoning: medium<|end|><|start|>developer<|message|>\n\n# Tools\n\n"
        '## functions\n\nnamespace functions {\n\n// The "weather" <now>\ntype weather = (_: {\n  // Where\n  city: string,\n'
        '  days?: number, // default: 3\n  unit?: "c" | "f",\n  tags?: string[],\n}) => any;\n\n} // namespace functions<|end|>'
        "<|start|>user<|message|>More?<|end|>"
        '<|start|>assistant to=functions.weather<|message|>{"city": "Paris", "days": 2}<|call|>'
        '<|start|>functions.weather<|message|>"sunny"<|end|><|start|>assistant',
        {"tools": [WEATHER]},
    ),
}
