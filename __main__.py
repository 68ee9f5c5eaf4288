"""The command line: `quire COMMAND`, or `python -m quire COMMAND`."""

import sys
from importlib import import_module
from typing import Annotated

import typer

from . import __version__
from .scripts.command import SETTINGS, Command, CommandGroup, UsageError
from .serving.api.other_engines import COMMANDS as THEIRS

# Command -> (module with its `main`, summary). Only the command that runs is imported.
COMMANDS = {
    "generate": (".scripts.generate", "Generate text from a prompt."),
    "search": (
        ".scripts.search",
        "Generate several candidates and print the best: by reward model score, or by "
        "majority vote.",
    ),
    "chat": (".scripts.chat", "Chat with a model."),
    "run": (".scripts.run", "Chat with a model like `quire chat`."),
    "pull": (
        ".scripts.pull",
        "Download models into the Hugging Face cache, unless they are cached already.",
    ),
    "list": (
        ".scripts.list",
        "List the downloaded models in the Hugging Face cache, and the bundled ones.",
    ),
    "rm": (".scripts.rm", "Delete models from the Hugging Face cache."),
    "serve": (
        ".scripts.serve.command",
        "Serve models over HTTP with APIs compatible with OpenAI, Anthropic and Ollama, "
        "Prometheus metrics and a chat page.",
    ),
    "run-batch": (".scripts.run_batch", "Process a file of requests in OpenAI's batch format."),
    "bench": (
        ".scripts.bench.command",
        "Benchmark throughput, latency, startup, a running server, the scheduler, parts of a "
        "step, or host overhead.",
    ),
    "plan": (
        ".scripts.plan.command",
        "Estimate the memory of a model's weights and KV cache, and how many sequences fit.",
    ),
    "convert": (".scripts.convert", "Convert a model to an Orbax checkpoint, which loads sharded."),
    "quantize": (
        ".scripts.quantize",
        "Quantise a model's weights and write a checkpoint in a layout that other engines "
        "also read.",
    ),
    "train-heads": (
        ".scripts.train_heads.command",
        "Train draft heads for speculative decoding (Medusa, EAGLE or EAGLE-3) on answers "
        "that the model generates.",
    ),
    "build-kernels": (
        ".scripts.build_kernels",
        "Compile the CPU kernels ahead of time and print the path of each library.",
    ),
    "collect-env": (
        ".scripts.collect_env",
        "Print versions, hardware, caches, kernels in use and batch invariance, for bug reports.",
    ),
}


class Commands(CommandGroup):
    """The commands in `COMMANDS`; each module is imported when its command runs."""

    def __init__(self, **attributes):
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # the names, for the list and for "did you mean"

    def get_command(self, ctx, cmd_name):
        if cmd_name not in COMMANDS:
            return None
        name, _ = COMMANDS[cmd_name]
        module = import_module(name, __package__)
        if (app := getattr(module, "app", None)) is None:  # a command group defines its own app
            app = typer.Typer(add_completion=False)
            app.command(cmd_name, cls=Command)(module.main)
        return typer.main.get_command(app)

    def resolve_command(self, ctx, args):
        if (equivalent := THEIRS.get(args[0])) is not None:
            meant = f"here it is '{equivalent}'" if equivalent in COMMANDS else equivalent
            raise UsageError(f"No such command '{args[0]}': {meant}")
        return super().resolve_command(ctx, args)

    def summary(self, ctx, name: str) -> str:  # without an import of the command's module
        _, summary = COMMANDS[name]
        return summary


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
