"""docs/vllm.md: every public argument of vLLM, and whether Quire applies, ignores or rejects it.

`python tests/support/vllm_table.py > docs/vllm.md` writes the page. The names come from
vllm_names.txt, the verdicts from the declarations of options and parameters, from
`serving/api/vllm_names.py` and, for flags, from the message of `quire serve` itself.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import typer

from quire.__main__ import app
from quire.serving.api.options import EngineOptions
from quire.serving.api.params import SamplingParams
from quire.serving.api.vllm_names import ENGINE, SAMPLING, UnsupportedArgument

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
NAMES = Path(__file__).with_name("vllm_names.txt")
GUESSES = "Possible options", "Did you mean"  # suggestions by similar spelling
ONLY = "here it can only be "  # accepted values are those without an effect
FLAGS = {  # reasons for flags that the command rejects without one
    "allow_credentials": "API keys are sent in a header; there are no cookies",
    "default_chat_template_kwargs": (
        "use the request's `chat_template_kwargs`, or `--chat-template`"
    ),
    "disable_access_log_for_endpoints": "`--log-level warning` omits the access log",
    "disable_fastapi_docs": "only `/openapi.json` is served",
    "enable_log_deltas": "answers are not logged",
    "enable_log_outputs": "answers are not logged",
    "enable_offline_docs": "only `/openapi.json` is served",
    "enable_ssl_refresh": "the server speaks HTTP; use a reverse proxy for TLS",
    "exclude_tools_when_tool_choice_none": (
        "tools are never in the prompt if `tool_choice` is none"
    ),
    "fingerprint_mode": "the fingerprint is the version",
    "fingerprint_value": "the fingerprint is the version",
    "grpc": "the server speaks HTTP",
    "h11_max_header_count": "headers are bounded: docs/hardening.md",
    "h11_max_incomplete_event_size": "headers are bounded: docs/hardening.md",
    "headless": "processes with `--process-id` above 0 are headless",
    "log_config_file": "`--log-level` and `--log-json`",
    "log_error_stack": "server errors are always logged with tracebacks",
    "middleware": "code that is not Quire's own is not run",
    "return_tokens_as_token_ids": "it is a field of the request",
    "root_path": "let the proxy strip the prefix",
    "skip_tokenizer_init": "the server needs a tokenizer",
    "ssl_cert_reqs": "the server speaks HTTP; use a reverse proxy for TLS",
    "ssl_ciphers": "the server speaks HTTP; use a reverse proxy for TLS",
    "tool_parser_plugin": "code that is not Quire's own is not run",
    "tool_server": "tools are called by the client",
    "trust_request_chat_template": "a request's template is always bounded in time and memory",
}
HEAD = """# For users of vLLM

Replace `from vllm import LLM, SamplingParams` by `from quire import LLM, SamplingParams`, and
`vllm serve` by `quire serve`. Each public argument of vLLM is one of:

- **applied**: it has the same meaning, or the closest equivalent;
- **no effect**: it is accepted with one warning, because it cannot change an answer;
- **refused**: the error names the argument and its replacement. Values that request nothing
  (`None`, `False` and those in square brackets) are accepted.

`python tests/support/vllm_table.py > docs/vllm.md` writes the tables, and a test compares them with
the code.
"""

TESTS = """## vLLM's own server tests

`python -m tools.peers.vllm_tests SOURCE` runs vLLM 0.33's unmodified server tests of text models
against `quire serve` with the bundled model's tokenizer and random weights. Of 184 tests
(27 November 2026), 66 pass, 65 are skipped (nearly all call vLLM's internals), and 53 fail:

| failed | reason |
|---|---|
| 36 | random weights: the test needs a trained model that ends its reasoning, calls a tool or stops |
| 10 | the bundled model's vocabulary of 1,280 tokens: missing or special ids, more tokens per text |
| 2 | `kv_transfer_params` with the tokens of a prompt is refused |
| 1 | an empty `prompt_embeds` gets a different error message: prompt embeddings are not supported |
| 1 | `continuous_usage_stats` without `include_usage` is applied; vLLM ignores it |
| 1 | Anthropic's `input_tokens` exclude cached tokens, and a repeated short prompt is cached |
| 1 | the test renders the chat template of the model's folder, but another template is served |
| 1 | the version is compared with vLLM's |
"""


def published() -> dict[str, list[str]]:
    """Names by section of vllm_names.txt."""
    names_by_section: dict[str, list[str]] = {}
    section = ""
    for line in NAMES.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif not line.startswith("#"):
            names_by_section.setdefault(section, []).extend(line.split())
    return names_by_section


def argument_rows(
    names: list[str], applied: set[str], table: Mapping[str, str | UnsupportedArgument]
) -> Iterator[tuple[str, str, str]]:
    """(name, verdict, reason) of Python arguments."""
    for name in names:
        entry = None if name in applied else table[name]
        if entry is None:
            yield name, "applied", ""
        elif isinstance(entry, str):
            yield name, "no effect", entry
        else:
            harmless = (
                f" [{', '.join(f'`{value!r}`' for value in entry.harmless)}]"
                if entry.harmless
                else ""
            )
            yield name, "refused", entry.reason + harmless


def flag_rows(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """(flag, verdict, reason) by the messages of `quire serve`."""
    command = typer.main.get_command(app).get_command(None, "serve")
    known_flags = {
        name for param in command.params for name in (*param.opts, *param.secondary_opts)
    }
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        if flag in known_flags:
            yield flag, "applied", ""
            continue
        stderr = io.StringIO()
        try:
            with contextlib.redirect_stderr(stderr):
                command.make_context("serve", [flag])
            yield flag, "no effect", stderr.getvalue().partition("(")[2].strip().rstrip(")")
        except typer.TyperException as error:
            message = (
                error.format_message()
                .partition(flag)[2]
                .strip(". ")
                .removeprefix("(")
                .removesuffix(")")
            )
            entry = ENGINE.get(name, FLAGS.get(name, ""))
            if ONLY in message:  # the flag needs a value
                values, _, reason = message.partition(ONLY)[2].partition(": ")
                yield (
                    flag,
                    "no effect",
                    f"{reason} [{', '.join(f'`{value}`' for value in values.split(', '))}]",
                )
                continue
            reason_given = "" if any(guess in message for guess in GUESSES) else message
            yield (
                flag,
                "refused",
                reason_given or (entry if isinstance(entry, str) else entry.reason),
            )


def table(title: str, first: str, rows: Iterator[tuple[str, str, str]]) -> str:
    lines = [
        f"| `{name}` | {verdict} | {reason} |".replace("|  |", "| |")
        for name, verdict, reason in rows
    ]
    return "\n".join([f"## {title}", "", f"| {first} | | |", "|---|---|---|", *lines, ""])


def page() -> str:
    names = published()
    flags = sorted({*names["serve"], *names["EngineArgs"]} - {"model"})
    options, params = (
        {field.name for field in fields(kind)} for kind in (EngineOptions, SamplingParams)
    )
    return (
        "\n".join(
            [
                HEAD,
                table(
                    "`LLM`, `AsyncLLM`",
                    "argument",
                    argument_rows(names["EngineArgs"], options, ENGINE),
                ),
                table(
                    "`SamplingParams`",
                    "field",
                    argument_rows(names["SamplingParams"], params, SAMPLING),
                ),
                table("`quire serve`", "flag", flag_rows(flags)),
                TESTS,
            ]
        ).rstrip()
        + "\n"
    )


if __name__ == "__main__":
    print(page(), end="")
