"""The command line: `quire COMMAND`, or `python -m quire COMMAND`."""

import sys
from importlib import import_module
from typing import Annotated

import typer
from typer.core import TyperGroup

from . import __version__
from .scripts.command import SETTINGS, Command, UsageError, write_help
from .serving.api.other_engines import COMMANDS as THEIRS

# Command -> module with its `main`. Only the command that runs is imported.
COMMANDS = {
    "generate": ".scripts.generate",
    "search": ".scripts.search",
    "chat": ".scripts.chat",
    "run": ".scripts.run",
    "pull": ".scripts.pull",
    "list": ".scripts.list",
    "rm": ".scripts.rm",
    "serve": ".scripts.serve.command",
    "run-batch": ".scripts.run_batch",
    "bench": ".scripts.bench.command",
    "plan": ".scripts.plan.command",
    "convert": ".scripts.convert",
    "quantize": ".scripts.quantize",
    "train-heads": ".scripts.train_heads.command",
    "build-kernels": ".scripts.build_kernels",
    "collect-env": ".scripts.collect_env",
}


class Commands(TyperGroup):
    """The commands in `COMMANDS`; each module is imported when its command runs."""

    def __init__(self, **attributes):
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # the names, for the list and for "did you mean"

    def get_command(self, ctx, cmd_name):
        if cmd_name not in COMMANDS:
            return None
        module = import_module(COMMANDS[cmd_name], __package__)
        if (app := getattr(module, "app", None)) is None:  # a command group defines its own app
            app = typer.Typer(add_completion=False)
            app.command(cmd_name, cls=Command)(module.main)
        return typer.main.get_command(app)

    def resolve_command(self, ctx, args):
        if (equivalent := THEIRS.get(args[0])) is not None:
            meant = f"here it is '{equivalent}'" if equivalent in COMMANDS else equivalent
            raise UsageError(f"No such command '{args[0]}': {meant}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx, formatter) -> None:
        write_help(self, ctx, formatter)


app = typer.Typer(
    cls=Commands, add_completion=False, invoke_without_command=True, context_settings=SETTINGS
)


def show_version(is_requested: bool) -> None:
    if is_requested:
        print(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def quire(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=show_version
        ),
    ] = False,
) -> None:
    """LLM inference in JAX. `quire COMMAND --help` describes a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command in `sys.argv`.

    A usage error prints one line to stderr and exits with code 2.
    """
    try:
        sys.exit(typer.main.get_command(app)(prog_name="quire", standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(130)
    except typer.TyperException as error:
        message, code = error.format_message(), error.exit_code
    except ImportError as error:
        from .ops.errors import MissingLibrary

        if not isinstance(error, MissingLibrary):
            raise
        message, code = str(error), 2
    except ValueError as error:
        from .model.config import ModelError
        from .serving.api.errors import RequestError

        if not isinstance(error, (ModelError, RequestError)):
            raise
        message, code = str(error), 2
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
