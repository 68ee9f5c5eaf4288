"""What a terminal shows of long work: the stages of loading, and a bar for batches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stages(progress: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Who hears each stage of loading: `progress`, or else the terminal if there is one."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda note: None)
        return
    from rich.console import Console

    with Console(stderr=True).status("loading") as status:
        yield status.update


@contextmanager
def bar(total: int, wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """`advance(requests, tokens)`; draws on a terminal when there is more than one request."""
    if not wanted or total < 2 or not sys.stderr.isatty():
        yield lambda requests, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"),
        TextColumn("{task.fields[rate]:.0f} tokens/s"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task, tokens = progress.add_task("", total=total, tokens=0, rate=0.0), 0

        def advance(requests: int, new_tokens: int) -> None:
            nonlocal tokens
            if requests:
                tokens += new_tokens
                elapsed = progress.tasks[task].elapsed or 1e-9
                progress.update(task, advance=requests, tokens=tokens, rate=tokens / elapsed)

        yield advance
