"""The engine of a command, with its progress shown while it loads."""

import sys


def load(model: str | None, **options):
    """An `LLM`. A terminal shows each stage on stderr: the first compilation takes a while."""
    from .. import LLM  # not at the top: `--help` must not wait for JAX

    if not sys.stderr.isatty():
        return LLM(model, **options)
    from rich.console import Console

    with Console(stderr=True).status("loading") as status:
        return LLM(model, progress=status.update, **options)
