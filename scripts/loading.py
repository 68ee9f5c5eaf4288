"""Making the engine for a command, with what it is doing shown while it does it."""

import sys


def load(model: str | None, **options):
    """An `LLM`. On a terminal stderr tells each stage: a first compilation takes a while."""
    from .. import LLM  # not at the top: `--help` must not wait for JAX

    if not sys.stderr.isatty():
        return LLM(model, **options)
    from rich.console import Console

    with Console(stderr=True).status("loading") as status:
        return LLM(model, progress=status.update, **options)
