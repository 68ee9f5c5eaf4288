"""The process that compiles grammars first: run by path, one JSON request a line in, one JSON answer a line out.

A grammar is a program from a stranger. Its compiler bounds most of its work, but not all of it (a number that is to
be a multiple of a large one takes seconds), and what overflows its stack ends the process; so it is tried here, where
the operating system bounds memory and time and where a crash hurts nobody. It imports nothing of Quire.
"""

import contextlib
import json
import resource
import signal
import sys

import llguidance

MEMORY = 1 << 30  # bytes of address space
SECONDS = 0.4  # of processor time a grammar; a waiting worker uses none


def fault(grammar: str, limits: dict, tokenizer: llguidance.LLTokenizer) -> str:
    """Why a grammar cannot be served, or nothing. Its first step is taken too: some fail only there."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**limits))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit; processor time still ends what grows
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tokenizer = llguidance.LLTokenizer("byte")  # a token a byte: that it is small is all that matters
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        answer = fault(*json.loads(line), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
