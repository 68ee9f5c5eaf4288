"""docs/tools.md: the formats of tool calls and of reasoning, written from their descriptions.

`python tests/support/tools_page.py > docs/tools.md` writes it; a test compares.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from quire.serving.parsing import (
    REASONING,
    REFUSED_REASONING,
    REFUSED_TOOLS,
    TOOL_FORMS,
    harmony,
    mistral,
)
from quire.serving.parsing.form import Form, split_template
from quire.serving.parsing.thoughts import Thoughts

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"
HEAD = """\
# Formats of tool calls and reasoning

Written by `python tests/support/tools_page.py > docs/tools.md`; do not edit.

A chat template shows what its model writes, and `quire serve` reads answers so: `--tool-call-parser` and
`--reasoning-parser` name another format, with vLLM's names, or `none`. In `auto`, the default, the template that a
request brings counts, if there is one.

- Text before a call comes as it is written, and so do arguments: what a client gets, joined, is the same however the
  answer was cut. Between tags a string comes character by character, another value when it is whole.
- Between tags a value has the type that the tool's schema says: "123" stays a text where the schema says `string`.
  What is of no such type is a text. Python's `True`, `False`, `None` and lists are read too.
- What cannot be a call is text. What breaks within a call ends it, and the rest is text.
- Qwen2.5-Coder leaves out the marks of `hermes`: an answer that begins with the bare object, or with a fence
  that holds nothing but such objects, is a call too, if the function exists and the arguments fit its schema. It
  is held back until that is known. Behind other text, in a list, or where the request asks for JSON
  (`response_format`), calls need their marks.
- `tool_choice: required` or a function's name: a grammar of the same description holds the answer to the model's own
  format and to the tools' schemas; a thought may come first where the model has them. What a format's own texts cannot
  be held to (`format`, `minProperties`, alternatives of whole objects, a pattern with lookaround) is asked for as JSON
  instead, and so it is where the template shows no format. The client sees the same calls.
- A tool's schema that cannot be kept at all ([structured.md](structured.md) says what can) is refused by name where the
  tool is `strict`. Otherwise the values of its arguments are open, under `tool_choice: required` as under `auto`.
- `strict: true` of every tool that may be called: under `tool_choice: auto` text is free, and a call that begins keeps
  to its schema. Where that cannot be (formats without a mark of their own, as Llama 3's; gpt-oss; schemas as above; a
  form of the answer beside it) arguments are as the model writes them.
- Where the prompt ends with the text that opens a thought, the answer begins within it; where it ends with the one that
  closes it (`enable_thinking: false` in many templates), there is none.

"""
MODELS = {
    "apertus": "Apertus",
    "cohere_command3": "Command A, Command R7B",
    "deepseek_v3": "DeepSeek V3, R1",
    "deepseek_v31": "DeepSeek V3.1",
    "deepseek_v32": "DeepSeek V3.2",
    "deepseek_v4": "DeepSeek V4",
    "functiongemma": "FunctionGemma",
    "gemma4": "Gemma 4",
    "gigachat3": "GigaChat 3.1",
    "glm45": "GLM-4.5 to 4.7, Laguna",
    "granite": "Granite 3",
    "granite-20b-fc": "Granite 20B functioncalling",
    "harmony": "gpt-oss",
    "hermes": "Hermes, Qwen 2.5 and 3, Granite 4, ERNIE 4.5, SmolLM3",
    "hunyuan_a13b": "Hunyuan A13B, Jamba",
    "internlm": "InternLM 2.5 and 3",
    "kimi_k2": "Kimi K2",
    "lfm2": "LFM2",
    "llama3_json": "Llama 3.1 to 3.3",
    "llama4_pythonic": "Llama 4, Llama 3.2 and ToolACE",
    "longcat": "LongCat",
    "mimo": "Qwen3-Coder, Qwen 3.5, Nemotron 3 Nano, Step 3.5, MiMo",
    "minimax": "MiniMax M1",
    "minimax_m2": "MiniMax M2",
    "mistral": "Mistral; before its tokenizer v11 a list of objects",
    "nemotron_json": "Nemotron Nano v2",
    "olmo3": "OLMo 3",
    "phi4_mini_json": "Phi-4-mini",
    "seed_oss": "Seed-OSS",
    "solar_open2": "Solar Open 2",
    "step3": "Step-3",
    "xlam": "xLAM",
}
VALUES = {"city": "Bern", "days": 2}
# Greedy answers to the prompts of tests/real/tool_prompts.py, counted by `count_outcomes` there.
RATES = {
    "Qwen2.5-Coder 0.5B (Q4_K_M)": {"right": 40, "other": 5, "text": 5, "false": 7},
    "Qwen2.5-Coder 1.5B (Q4_K_M)": {"right": 45, "other": 0, "text": 5, "false": 10},
}


def main_form(name: str) -> Form:
    form = TOOL_FORMS[name]
    return (
        form
        if isinstance(form, Form)
        else harmony.call_form(())
        if form == ".harmony"
        else mistral.NAMED
    )


def sample(form: Form) -> str:
    """A call as a model writes it."""
    pairs = [
        (key, str(value), "true" if isinstance(value, str) else "false")
        for key, value in VALUES.items()
    ]
    inner = [
        "".join(
            text or {"key": key, "value": value, "kind": kind}[hole]
            for hole, text in split_template(form.parameter)
        )
        for key, value, kind in pairs
    ]
    holes = {
        "name": "weather",
        "id": "functions.weather:0",
        "object": f'{{"{form.keys[0]}": "weather", "{form.keys[1]}": {json.dumps(VALUES)}}}',
        "arguments": json.dumps(VALUES),
        "parameters": "".join(inner),
        "keywords": ", ".join(f"{key}={value!r}" for key, value in VALUES.items()),
        "fields": f"{{city:{form.quote}Bern{form.quote},days:2}}",
    }
    return form.begin + "".join(text or holes[hole] for hole, text in form.parts) + form.end


def code(text: str) -> str:
    """A text as code in a table; line breaks become ⏎."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text.strip().replace(chr(10), '⏎').replace('|', chr(92) + '|')}{fence}"


def group_names(names: Iterable[tuple[str, object]]) -> dict[object, list[str]]:
    names_by_value: dict[object, list[str]] = {}
    for name, value in names:
        names_by_value.setdefault(value, []).append(name)
    return names_by_value


def rates() -> list[str]:
    """The table of recognised calls of real models that leave out the marks."""
    head = [
        (
            "Calls without marks, by real models. Of fifty prompts that want a call: those "
            "answered by a call of the"
        ),
        (
            "right function with arguments that fit it, by one of another function, and by text "
            "(of a function that"
        ),
        (
            "does not exist). Of fifty that ask for JSON with tools beside it: those that the "
            "model answers by nothing"
        ),
        (
            "but a call of one of the tools, which the server cannot tell from one that is wanted. "
            "Before, no answer"
        ),
        "had a call. `python tests/real/tool_prompts.py MODEL` counts.",
        "",
        "| model | right call | another call | text | a call where JSON was asked for |",
        "|---|---|---|---|---|",
    ]
    return head + [
        f"| {model} | {' | '.join(map(str, counts.values()))} |" for model, counts in RATES.items()
    ]


def document() -> str:
    lines = [HEAD + "## Tool calls", "", "| name | models | a call |", "|---|---|---|"]
    for names in group_names((name, main_form(name)) for name in TOOL_FORMS).values():
        models = next(MODELS[name] for name in names if name in MODELS)
        lines.append(
            f"| {', '.join(map('`{}`'.format, names))} | {models} | "
            f"{code(sample(main_form(names[0])))} |"
        )
    lines += ["", *rates(), "", "## Reasoning", "", "| name | a thought |", "|---|---|"]
    for parser, names in group_names(REASONING.items()).items():
        description = (
            "nothing is a thought"
            if parser is None
            else code("<|channel|>analysis<|message|>...<|end|>")
        )
        if isinstance(parser, Thoughts):
            description = code(f"{parser.opens[0]}...{parser.closes[0]}")
            description += (
                "; every answer begins within one, unless the prompt has closed it"
                if parser.starts_inside
                else ""
            )
            if parser.answer:
                description += (
                    f"; {code(parser.answer[0])} and {code(parser.answer[1])} round the answer are "
                    "left out"
                )
            description += (
                f"; ends before {code(parser.other_closes[0])} too" if parser.other_closes else ""
            )
            description += "; stays a part of the answer" if parser.is_kept else ""
        lines.append(f"| {', '.join(map('`{}`'.format, names))} | {description} |")
    lines += ["", "## Refused", "", "Names that vLLM has too.", "", "| name | why |", "|---|---|"]
    refused = group_names(
        [
            *REFUSED_TOOLS.items(),
            *(refusal for refusal in REFUSED_REASONING.items() if refusal[0] not in REFUSED_TOOLS),
        ]
    )
    lines += [
        f"| {', '.join(map('`{}`'.format, names))} | {reason} |"
        for reason, names in refused.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
