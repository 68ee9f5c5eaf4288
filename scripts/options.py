"""The options that commands share. Those of the engine are made from the fields of `EngineOptions`."""

import functools
import inspect
from collections.abc import Collection
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..serving.api.options import MEMORY as MEMORY
from ..serving.api.options import MODEL as MODEL
from ..serving.api.options import OUTPUT as OUTPUT
from ..serving.api.options import EngineOptions
from .sizes import size

SAMPLING = "Sampling"


class UsageError(typer.TyperException):
    """A command line that cannot be carried out."""

    exit_code = 2


def given(**values) -> dict:
    """The options that were given; the others keep the engine's own defaults."""
    return {name: value for name, value in values.items() if value is not None}


Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A folder or Hugging Face id.", show_default="the bundled model, quill"),
]


def sized(name: str, help: str, metavar: str, panel: str, default: str | bool = True):
    """A whole number that may be written as 32K."""
    return typer.Option(name, help=help, parser=size, metavar=metavar, rich_help_panel=panel, show_default=default)


def sampled(name: str, help: str):
    return typer.Option(name, help=help, rich_help_panel=SAMPLING)


MaxTokens = Annotated[int | None, sized("--max-tokens", "Most tokens of an answer.", "TOKENS", SAMPLING)]
Temperature = Annotated[float | None, sampled("--temperature", "0 always takes the likeliest token.")]
TopP = Annotated[
    float | None, sampled("--top-p", "Sample from the likeliest tokens that together have this probability.")
]
TopK = Annotated[int | None, sampled("--top-k", "Sample from this many of the likeliest tokens.")]
MinP = Annotated[float | None, sampled("--min-p", "Drop tokens less likely than this fraction of the likeliest.")]
Seed = Annotated[int | None, sampled("--seed", "The same seed gives the same tokens.")]
Stop = Annotated[list[str] | None, sampled("--stop", "Stop before this text; may be given several times.")]
RepetitionPenalty = Annotated[
    float | None, sampled("--repetition-penalty", "Above 1: tokens already seen become less likely.")
]
PresencePenalty = Annotated[
    float | None, sampled("--presence-penalty", "Subtracted from the logit of every token already generated.")
]
FrequencyPenalty = Annotated[
    float | None, sampled("--frequency-penalty", "Subtracted from it for every time that the token was generated.")
]


def engine_flag(option: Field) -> Any:
    """The flag of a field of `EngineOptions`. Not given it is None, which leaves the default to the engine."""
    about, name = option.metadata, f"--{option.name.replace('_', '-')}"
    sized = about["metavar"] if option.type in (int, int | None) else None
    return Annotated[
        option.type | None,
        typer.Option(
            name if option.default is not True else f"{name}/--no-{name[2:]}",
            help=about["help"],
            metavar=about["metavar"],
            parser=size if sized else None,
            rich_help_panel=about["panel"],
            show_default=about["default"],
        ),
    ]


ENGINE_FLAGS = {option.name: engine_flag(option) for option in fields(EngineOptions) if option.metadata}


def takes_engine(only: Collection[str] = ENGINE_FLAGS, without: Collection[str] = ()):
    """A command with flags of the engine in place of its parameter `engine`, a dict of those that were given."""
    return takes("engine", {name: flag for name, flag in ENGINE_FLAGS.items() if name in only and name not in without})


def takes(place: str, added: dict):
    """The same for any options, in place of any parameter."""

    def decorate(main):
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(main, eval_str=True).parameters.values():
            if parameter.name == place:
                kind = parameter.kind
                parameters += [inspect.Parameter(n, kind, default=None, annotation=a) for n, a in added.items()]
            else:
                parameters.append(parameter)

        @functools.wraps(main)
        def command(**values):
            chosen = given(**{name: values.pop(name) for name in added})
            return main(**values, **{place: chosen})

        command.__signature__ = inspect.Signature(parameters)  # where Typer looks
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def read_text(path: Path) -> str:
    """A UTF-8 file, or stdin where the path is `-`."""
    source = "stdin" if str(path) == "-" else str(path)
    try:
        return (typer.get_binary_stream("stdin").read() if source == "stdin" else path.read_bytes()).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text: byte {error.start} cannot be decoded") from None
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from None
