"""Formats of tool calls by vLLM's names: a form, or the module that reads the format."""

from .form import Form

QWEN_PARAMETER = "<parameter={key}>\n{value}\n</parameter>\n"
GLM = Form(
    "<tool_call>{name}\n{parameters}</tool_call>",
    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
)
DSML_CALL = '<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'
DSML_PARAMETER = '<｜DSML｜parameter name="{key}" string="{kind}">{value}</｜DSML｜parameter>\n'
HERMES = Form("<tool_call>\n{object}\n</tool_call>", unmarked=True)
LLAMA = Form(
    "{object}",
    separator=";",
    keys=("name", "parameters"),
    starts_answer=True,
    prefixes=("<|python_tag|>",),
)
PYTHONIC = Form(
    "{name}({keywords})",
    "[",
    ", ",
    "]",
    starts_answer=True,
    prefixes=("<|python_start|>",),
    suffixes=("<|python_end|>",),
)
QWEN = Form(
    "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
    parameter=QWEN_PARAMETER,
    other_openings=("<function=",),
)
TOOL_FORMS: dict[str, Form | str] = {
    "apertus": Form('{"{name}": {arguments}}', "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "cohere_command3": Form(
        "{object}", "<|START_ACTION|>[", ", ", "]<|END_ACTION|>", keys=("tool_name", "parameters")
    ),
    "deepseek_v3": Form(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Form(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": Form(
        DSML_CALL,
        "<｜DSML｜function_calls>\n",
        end="</｜DSML｜function_calls>",
        parameter=DSML_PARAMETER,
    ),
    "deepseek_v4": Form(
        DSML_CALL, "<｜DSML｜tool_calls>\n", end="</｜DSML｜tool_calls>", parameter=DSML_PARAMETER
    ),
    "ernie45": HERMES,
    "functiongemma": Form(
        "<start_function_call>call:{name}{fields}<end_function_call>", quote="<escape>"
    ),
    "gemma4": Form("<|tool_call>call:{name}{fields}<tool_call|>", quote='<|"|>'),
    "gigachat3": Form("<|function_call|>{object}"),
    "glm45": GLM,
    "glm47": GLM,
    "granite": Form("{object}", "<|tool_call|>[", ", ", "]", other_openings=("<tool_call>[",)),
    "granite-20b-fc": Form("<function_call> {object}"),
    "granite4": HERMES,
    "harmony": ".harmony",
    "hermes": HERMES,
    "hunyuan_a13b": Form("{object}", "<tool_calls>[", ", ", "]</tool_calls>"),
    "internlm": Form(
        "<|action_start|><|plugin|>{object}<|action_end|>", keys=("name", "parameters")
    ),
    "jamba": Form("{object}", "<tool_calls>[", ", ", "]</tool_calls>"),
    "kimi_k2": Form(
        "<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "lfm2": Form("{name}({keywords})", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "llama4_pythonic": PYTHONIC,
    "longcat": Form("<longcat_tool_call>\n{object}\n</longcat_tool_call>"),
    "mimo": QWEN,
    "minimax": Form("{object}", "<tool_calls>\n", "\n", "\n</tool_calls>"),
    "minimax_m2": Form(
        '<invoke name="{name}">\n{parameters}</invoke>\n',
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        parameter='<parameter name="{key}">{value}</parameter>\n',
    ),
    "mistral": ".mistral",
    "nemotron_json": Form("{object}", "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "olmo3": Form("{name}({keywords})", "<function_calls>", "\n", "</function_calls>"),
    "openai": ".harmony",
    "phi4_mini_json": Form("{object}", "functools[", ", ", "]"),
    "poolside_v1": GLM,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN,
    "qwen3_xml": QWEN,
    "seed_oss": Form(
        "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
        parameter="<parameter={key}>{value}</parameter>\n",
        other_openings=("<function=",),
    ),
    "solar_open2": Form(
        "<|tool_call:start|>{name}\n{parameters}<|tool_call:end|>",
        parameter="<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>\n",
    ),
    "step3": Form(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{parameters}</steptml:invoke>'
        "<｜tool_call_end｜>",
        begin="<｜tool_calls_begin｜>",
        end="<｜tool_calls_end｜>",
        parameter='<steptml:parameter name="{key}">{value}</steptml:parameter>',
    ),
    "step3p5": QWEN,
    "xlam": Form(
        "{object}",
        "[",
        ", ",
        "]",
        starts_answer=True,
        prefixes=("```json", "<tool_call>"),
        suffixes=("```", "</tool_call>"),
    ),
}
REFUSED_TOOLS = {  # vLLM's name -> why it is not supported
    "cohere_command4": "its format is defined only in a library of Cohere",
    "hy_v3": (
        "its tags have a suffix that only its tokenizer defines; hunyuan_a13b supports "
        "earlier models"
    ),
    "inkling": "its format is not supported yet",
    "kimi_k3": "its format is not supported yet; kimi_k2 supports earlier models",
    "minicpm5": "its strings may be CDATA sections, which are not supported yet",
    "minimax_m3": (
        "its parameters are nested XML, which is not supported yet; minimax_m2 supports earlier models"
    ),
}
# Markers that a chat template of the format contains; the first line with all markers present
# counts.
SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>",), "openai"),
    (("[TOOL_CALLS]",), "mistral"),
    (("｜DSML｜function_calls",), "deepseek_v32"),
    (("｜DSML｜tool_calls",), "deepseek_v4"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<steptml:",), "step3"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tool_call>", "call:"), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call:start|>",), "solar_open2"),
    (("<function=",), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|action_start|>",), "internlm"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool|>",), "phi4_mini_json"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_call|>",), "granite"),
    (("<|function_call|>",), "gigachat3"),
    (("<tool_calls>", "<|bom|>"), "jamba"),
    (("<tool_calls>", "<end_of_sentence>"), "minimax"),
    (("<tool_calls>",), "hunyuan_a13b"),
    (("<function_calls>",), "olmo3"),
    (("<function_call>",), "granite-20b-fc"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("ipython",), "llama3_json"),
)
