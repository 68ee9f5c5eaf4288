"""Answers with tool calls in every format, as the models write them."""

from typing import Any

from quire.serving.parsing.pieces import Arguments, CallStart, ReasoningPiece, TextPiece

TOOLS: dict[str, Any] = {
    "find_trains": {
        "type": "object",
        "properties": {
            "to": {"type": "string"},
            "seats": {"type": "integer"},
            "first": {"type": "boolean"},
            "via": {"type": "array", "items": {"type": "string"}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["to"],
    },
    "now": {"type": "object", "properties": {}},
}
TRAINS: dict[str, Any] = {
    "to": 'Zürich "HB"\n12',
    "seats": 2,
    "first": True,
    "via": ["Olten", "Aarau"],
    "note": None,
}
JSON = '{"to": "Zürich \\"HB\\"\\n12", "seats": 2, "first": true, "via": ["Olten", "Aarau"], "note": null}'
OBJECTS = f'{{"name": "find_trains", "arguments": {JSON}}}', '{"name": "now", "arguments": {}}'
PARAMETERS = tuple(
    zip(TRAINS, ['Zürich "HB"\n12', "2", "true", '["Olten", "Aarau"]', "null"], strict=True)
)
PYTHON = (
    'find_trains(to="Zürich \\"HB\\"\\n12", seats=2, first=True, via=[\'Olten\', "Aarau"], note=None)',
    "now()",
)


def tags(opening: str, separator: str, closing: str) -> str:
    return "".join(f"{opening}{key}{separator}{value}{closing}" for key, value in PARAMETERS)


def dsml(block: str) -> str:
    inner = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(key == "to").lower()}">{value}</｜DSML｜parameter>\n'
        for key, value in PARAMETERS
    )
    return (
        f'\n\n<｜DSML｜{block}>\n<｜DSML｜invoke name="find_trains">\n{inner}</｜DSML｜invoke>\n'
        f'<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{block}>'
    )


def gemma(start: str, quote: str, end: str) -> str:
    stops = f"[{quote}Olten{quote},{quote}Aarau{quote}]"
    fields = f'first:true,note:null,seats:2,to:{quote}Zürich "HB"\n12{quote},via:{stops}'
    return f"{start}call:find_trains{{{fields}}}{end}{start}call:now{{}}{end}"


HERMES = "".join(f"<tool_call>\n{call_object}\n</tool_call>\n" for call_object in OBJECTS)
QWEN = (
    f"<tool_call>\n<function=find_trains>\n{tags('<parameter=', chr(62) + chr(10), chr(10) + '</parameter>' + chr(10))}"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
GLM = (
    f"<tool_call>find_trains\n{tags('<arg_key>', '</arg_key>' + chr(10) + '<arg_value>', '</arg_value>' + chr(10))}"
    "</tool_call>\n<tool_call>now\n</tool_call>"
)
LLAMA = "; ".join(call_object.replace("arguments", "parameters") for call_object in OBJECTS)
PYTHONIC = f"[{', '.join(PYTHON)}]"
BEGIN, CALL, SEP, END, LAST = (
    f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
# Both calls: find_trains(TRAINS) and now(). Formats in ALONE have no text before calls.
RECORDED: dict[str, str] = {
    "apertus": f'<|tools_prefix|>[{{"find_trains": {JSON}}}, {{"now": {{}}}}]<|tools_suffix|>',
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "find_trains", "parameters": '
    f'{JSON}}},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]<|END_ACTION|>',
    "deepseek_v3": f"{BEGIN}{CALL}function{SEP}find_trains\n```json\n{JSON}\n```{END}\n"
    f"{CALL}function{SEP}now\n```json\n{{}}\n```{END}{LAST}",
    "deepseek_v31": f"{BEGIN}{CALL}find_trains{SEP}{JSON}{END}{CALL}now{SEP}{{}}{END}{LAST}",
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "ernie45": HERMES,
    "functiongemma": gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "gemma4": gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "gigachat3": "".join(f"<|function_call|>{call_object}" for call_object in OBJECTS),
    "glm45": GLM,
    "glm47": GLM.replace("</arg_value>\n", "</arg_value>")
    .replace("</arg_key>\n", "</arg_key>")
    .replace("find_trains\n", "find_trains"),
    "granite": f"<|tool_call|>[{', '.join(OBJECTS)}]",
    "granite-20b-fc": "\n".join(f"<function_call> {call_object}" for call_object in OBJECTS),
    "granite4": HERMES,
    "hermes": HERMES,
    "hunyuan_a13b": f"<tool_calls>[{', '.join(OBJECTS)}]</tool_calls>",
    "internlm": "".join(
        f"<|action_start|><|plugin|>\n{call_object.replace('arguments', 'parameters')}<|action_end|>\n"
        for call_object in OBJECTS
    ),
    "jamba": f"<tool_calls>[\n    {OBJECTS[0]},\n    {OBJECTS[1]}\n]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.find_trains:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "lfm2": f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>",
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "llama4_pythonic": f"<|python_start|>{PYTHONIC}<|python_end|>",
    "longcat": "".join(
        f"<longcat_tool_call>\n{call_object}\n</longcat_tool_call>\n" for call_object in OBJECTS
    ),
    "mimo": QWEN,
    "minimax": "<tool_calls>\n" + "\n".join(OBJECTS) + "\n</tool_calls>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="find_trains">\n'
    f"{tags('<parameter name=' + chr(34), chr(34) + '>', '</parameter>' + chr(10))}</invoke>\n"
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "mistral": f"[TOOL_CALLS][{', '.join(OBJECTS)}]",
    "mistral, by name": f"[TOOL_CALLS]find_trains[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}",
    "nemotron_json": f"<TOOLCALL>[{', '.join(OBJECTS)}]</TOOLCALL>",
    "olmo3": "<function_calls>" + "\n".join(PYTHON) + "</function_calls>",
    "openai": (
        "<|channel|>final<|message|>Let me "
        "look.<|end|><|start|>assistant<|channel|>commentary to=functions.find_trains "
        f"<|constrain|>json<|message|>{JSON}<|call|><|start|>assistant<|channel|>commentary "
        "to=functions.now <|constrain|>json<|message|>{}<|call|>"
    ),
    "phi4_mini_json": f"functools[{', '.join(OBJECTS)}]",
    "poolside_v1": GLM,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN,
    "qwen3_xml": QWEN,
    "seed_oss": "<seed:tool_call>\n<function=find_trains>\n"
    f"{tags('<parameter=', '>', '</parameter>' + chr(10))}</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "solar_open2": "<|tool_call:start|>find_trains\n"
    f"{tags('<|tool_arg:start|>', '<|tool_arg:value|>', '<|tool_arg:end|>' + chr(10))}<|tool_call:end|>\n"
    "<|tool_call:start|>now\n<|tool_call:end|>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="find_trains">'
    f"{tags('<steptml:parameter name=' + chr(34), chr(34) + '>', '</steptml:parameter>')}</steptml:invoke>"
    '<｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now"></steptml:invoke>'
    "<｜tool_call_end｜><｜tool_calls_end｜>",
    "step3p5": QWEN,
    "xlam": f"[{', '.join(OBJECTS)}]",
    "xlam, in a fence": f"```json\n[{', '.join(OBJECTS)}]\n```",
}
ALONE = {
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "openai",
    "pythonic",
    "xlam",
    "xlam, in a fence",
}


def joined(pieces) -> tuple[str, str, list[tuple[str, str]]]:
    text = ""
    reasoning = ""
    calls = []
    for piece in pieces:
        if isinstance(piece, TextPiece):
            text += piece.text
        elif isinstance(piece, ReasoningPiece):
            reasoning += piece.text
        elif isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return text, reasoning, calls


def read(make, *slices: str):
    parser = make()
    return joined(
        [*(piece for piece_text in slices for piece in parser.push(piece_text)), *parser.finish()]
    )
