"""The options that commands share. Flags are made from the fields of `EngineOptions` and `SamplingParams`."""

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..serving.api.options import ADAPTERS, EngineOptions
from ..serving.api.options import MEMORY as MEMORY
from ..serving.api.options import MODEL as MODEL
from ..serving.api.options import OUTPUT as OUTPUT
from ..serving.api.options import SAMPLING as SAMPLING
from ..serving.api.params import MODEL_DEFAULTS, SamplingParams
from .command import UsageError as UsageError
from .sizes import size

SOURCE = ("revision", "download_dir", "hf_overrides")  # flags of the engine that say what model is read


def given(**values) -> dict:
    """The options that were given; the others keep the engine's own defaults."""
    return {name: value for name, value in values.items() if value is not None}


Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A folder or Hugging Face id.", show_default="the bundled model, quill"),
]


def option(help: str, panel: str, metavar: str | None = None, shown: str | bool = True, name: str = "", **more) -> Any:
    """An option on a panel of `--help`. `shown` says what happens without it, where the default itself does not.

    `name` is needed where the parameter is called otherwise, and for a flag without its `--no-` form; a space divides
    several.
    """
    return typer.Option(*name.split(), help=help, rich_help_panel=panel, metavar=metavar, show_default=shown, **more)


def sized(help: str, panel: str, metavar: str, shown: str | bool = True) -> Any:
    """A whole number that may be written as 32K."""
    return option(help, panel, metavar, shown, parser=size)


def field_flag(field: Field, shown: str | bool) -> Any:
    """The flag of a field that `flag` declares; it may be left out."""
    about, name = field.metadata, f"--{field.name.replace('_', '-')}"
    kind: Any = list[str] if field.type == Sequence[str] else field.type  # Typer knows no other sequence
    parser = size if about["metavar"] and kind in (int, int | None) else None
    if about["metavar"] == "JSON":
        kind, parser = Any, json_object
    name = f"{name}/--no-{name[2:]}" if field.default is True else name
    name = f"{name} -{about['short']}" if about.get("short") else name
    return Annotated[kind | None, option(about["help"], about["panel"], about["metavar"], shown, name, parser=parser)]


def json_object(text: str | dict[str, Any]) -> dict[str, Any]:
    """An object as JSON, or as a file of options has it."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(f"{text!r:.80} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text!r:.80} must be a JSON object, as in '{{\"name\": 1}}'")
    return found


def engine_flag(field: Field) -> Any:
    """The flag of a field of `EngineOptions`. Not given it is None, which leaves the default to the engine."""
    default = f"{field.default}"
    return field_flag(
        field, field.metadata["default_text"] or {"None": "none", "True": "on", "False": "off"}.get(default, default)
    )


ENGINE_FLAGS = {field.name: engine_flag(field) for field in fields(EngineOptions) if "panel" in field.metadata}
ADAPTER_FLAGS = [field.name for field in fields(EngineOptions) if field.metadata.get("panel") == ADAPTERS]
SAMPLING_FIELDS = {field.name: field for field in fields(SamplingParams) if "panel" in field.metadata}


def takes_engine(only: Collection[str] = ENGINE_FLAGS, without: Collection[str] = (), adapters: bool = False):
    """A command with flags of the engine in place of its parameter `engine`, a dict of those that were given.

    Those of adapters are only for a command whose requests can name one.
    """
    left_out = without if adapters else (*without, *ADAPTER_FLAGS)
    return takes("engine", {name: flag for name, flag in ENGINE_FLAGS.items() if name in only and name not in left_out})


def takes_sampling(max_tokens: int, without: Collection[str] = ()):
    """The same for the sampling parameters, in place of `sampling`; where the model has none, `max_tokens` is this."""

    def shown(field: Field) -> str | bool:
        neutral = max_tokens if field.name == "max_tokens" else field.default
        return f"the model's own, or {neutral:g}" if field.name in MODEL_DEFAULTS else True

    chosen = [field for name, field in SAMPLING_FIELDS.items() if name not in without]
    return takes("sampling", {field.name: field_flag(field, shown(field)) for field in chosen})


def takes(place: str, added: Mapping[str, Any], defaults: Mapping[str, Any] = {}, make: Callable[..., Any] = dict):
    """The same for any options, in place of any parameter: it is what `make` makes of those that were given."""

    def decorate(main):
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(main, eval_str=True).parameters.values():
            if parameter.name == place:
                kind = parameter.kind
                parameters += [
                    inspect.Parameter(name, kind, default=defaults.get(name), annotation=annotation)
                    for name, annotation in added.items()
                ]
            else:
                parameters.append(parameter)

        @functools.wraps(main)
        def command(**values):
            chosen = make(**given(**{name: values.pop(name) for name in added}))
            return main(**values, **{place: chosen})

        command.__signature__ = inspect.Signature(parameters)  # where Typer looks
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def read_bytes(path: Path) -> bytes:
    """A file, or stdin where the path is `-`."""
    try:
        return typer.get_binary_stream("stdin").read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {source_name(path)}: {error.strerror}") from None


def read_text(path: Path) -> str:
    """The same as text in UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source_name(path)} is not UTF-8 text: byte {error.start} cannot be decoded") from None


def source_name(path: Path) -> str:
    return "stdin" if str(path) == "-" else str(path)
