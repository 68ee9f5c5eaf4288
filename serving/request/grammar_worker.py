"""Worker process that compiles grammars: a JSON request per input line, a JSON answer per output
line.

A grammar comes from an untrusted client. The compiler bounds most of its work, but not all (a
`multipleOf` of a large number takes seconds), and a stack overflow ends the process. GBNF and JSON
schemas are rewritten in Python, which would block the whole server. So both run in a process whose
memory and time the operating system bounds and whose crash does no harm.
"""

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

import llguidance

from ..api.errors import RequestError
from ..api.structured import FIELD
from .grammar_body import build_body
from .grammar_text import complete_grammar

MEMORY = 1 << 30  # bytes of address space
SECONDS = 0.4  # processor time per grammar; an idle worker uses none


def compile_grammar(
    structure: Mapping[str, Any],
    is_servers: bool,
    limits: Mapping[str, Any],
    tokenizer: llguidance.LLTokenizer,
) -> dict[str, str]:
    """Return {"body": the grammar in JSON}, or {"param", "fault"} if it cannot be served.

    Some grammars fail only when the first token mask is computed.
    """
    try:
        body = json.dumps(build_body(structure, is_servers), ensure_ascii=False)
    except RequestError as error:
        return {"param": error.param, "fault": error.message}
    except RecursionError:
        return {"param": FIELD, "fault": "is nested too deep; ask for something simpler"}
    matcher = llguidance.LLMatcher(
        tokenizer,
        complete_grammar(body, ""),
        log_level=0,
        limits=llguidance.LLParserLimits(**limits),
    )
    if not matcher.is_error():
        matcher.compute_bitmask()
    fault = matcher.get_error()
    return {"param": FIELD, "fault": fault} if fault else {"body": body}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # MacOS has no such limit; the time limit remains.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tokenizer = llguidance.LLTokenizer("byte")  # one token per byte: small and enough for checks
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # the signal ends the process
        structure, is_servers, limits = json.loads(line)
        answer = compile_grammar(structure, is_servers, limits, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
