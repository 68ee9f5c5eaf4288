"""The process that compiles grammars first: one JSON request a line in, one JSON answer a line out.

A grammar is a program from a stranger. Its compiler bounds most of its work, but not all of it (a number that is to
be a multiple of a large one takes seconds), and what overflows its stack ends the process. GBNF and JSON schemas are
rewritten in Python before, which would hold up all of the server. So both are done here, where the operating system
bounds memory and time and where a crash hurts nobody.
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
from .grammar_body import body_of
from .grammar_text import whole

MEMORY = 1 << 30  # bytes of address space
SECONDS = 0.4  # of processor time a grammar; a waiting worker uses none


def compiled(
    structure: Mapping[str, Any],
    is_servers: bool,
    limits: Mapping[str, Any],
    tokenizer: llguidance.LLTokenizer,
) -> dict[str, str]:
    """{"body": the grammar in JSON}, or {"param", "fault"}: why it cannot be served. Some fail only in a first step."""
    try:
        body = json.dumps(body_of(structure, is_servers), ensure_ascii=False)
    except RequestError as error:
        return {"param": error.param, "fault": error.message}
    except RecursionError:
        return {"param": FIELD, "fault": "is nested too deep; ask for something simpler"}
    matcher = llguidance.LLMatcher(tokenizer, whole(body, ""), log_level=0, limits=llguidance.LLParserLimits(**limits))
    if not matcher.is_error():
        matcher.compute_bitmask()
    fault = matcher.get_error()
    return {"param": FIELD, "fault": fault} if fault else {"body": body}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit; processor time still ends what grows
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tokenizer = llguidance.LLTokenizer("byte")  # a token a byte: that it is small is all that matters
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        answer = compiled(*json.loads(line), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
