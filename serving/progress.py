"""Progress display on a terminal: stages of loading, and a bar for batches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stages(progress: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Yield the receiver of loading stages: `progress`, or else the terminal if there is one."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda note: None)
        return
    from rich.console import Console

    with Console(stderr=True).status("loading") as status:
        yield status.update


@contextmanager
def bar(total: int, is_enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield `advance(requests, tokens)`; draws on a terminal if there are several requests."""
    if not is_enabled or total < 2 or not sys.stderr.isatty():
        yield lambda requests, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, tokens=0, rate=0.0)
        tokens = 0

        def advance(requests: int, new_tokens: int) -> None:
            nonlocal tokens
            if requests:
                tokens += new_tokens
                elapsed = progress.tasks[task].elapsed or 1e-9
                progress.update(task, advance=requests, tokens=tokens, rate=tokens / elapsed)

        yield advance
