"""`quire bench`: benchmark commands."""

import re

import typer

from ..command import SETTINGS, Command, CommandGroup
from . import host, latency, serve, simulate, startup, step, throughput

MULTI_VALUE_OPTIONS = {  # options that accept several values -> regular expression of a value
    "--concurrency": r"[0-9.]+[kKmM]?",
    "--goodput": r"[a-z0-9]+:\S*",
}


class MultiValueCommand(Command):
    """Accepts `--concurrency 1 2 4` for `--concurrency 1 --concurrency 2 --concurrency 4`."""

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, repeat_options(args))


def repeat_options(arguments: list[str]) -> list[str]:
    """Repeat an option's flag before each of its values, as the parser expects."""
    expanded: list[str] = []
    option = None
    values = 0
    for argument in arguments:
        if option is not None and values and re.fullmatch(MULTI_VALUE_OPTIONS[option], argument):
            expanded.append(option)
        elif values:
            option = None
            values = 0
        if argument in MULTI_VALUE_OPTIONS:
            option = argument
            values = 0
        elif option is not None:
            values += 1
        expanded.append(argument)
    return expanded


app = typer.Typer(
    name="bench",
    cls=CommandGroup,
    add_completion=False,
    invoke_without_command=True,
    context_settings=SETTINGS,
)


@app.callback()
def main(context: typer.Context) -> None:
    """Benchmark throughput, latency, startup, a running server, the scheduler, parts of a step, or
    host overhead.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for name, module in (
    ("throughput", throughput),
    ("latency", latency),
    ("startup", startup),
    ("serve", serve),
    ("simulate", simulate),
    ("step", step),
    ("host", host),
):
    app.command(name, cls=MultiValueCommand)(module.main)
