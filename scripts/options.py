"""Options that commands share.

Flags come from the fields of `EngineOptions` and `SamplingParams`.
"""

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..serving.api.flags import ADAPTERS
from ..serving.api.flags import MEMORY as MEMORY
from ..serving.api.flags import MODEL as MODEL
from ..serving.api.flags import OUTPUT as OUTPUT
from ..serving.api.flags import SAMPLING as SAMPLING
from ..serving.api.options import EngineOptions
from ..serving.api.params import MODEL_DEFAULTS, SamplingParams
from .command import UsageError as UsageError
from .sizes import size

SOURCE = ("revision", "download_dir", "hf_overrides")  # engine flags that select the model


def drop_none(**values) -> dict:
    """The options set on the command line; omitted ones are None and keep the engine's default."""
    return {name: value for name, value in values.items() if value is not None}


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Model folder or Hugging Face model ID.",
        show_default="the bundled model, quill",
    ),
]


def option(
    help: str,
    panel: str,
    metavar: str | None = None,
    default_text: str | bool = True,
    name: str = "",
    **typer_options,
) -> Any:
    """Declare an option that `--help` lists under the heading `panel`.

    Args:
        default_text: The default shown in `--help`, if the value itself is not clear.
        name: Space-separated flag names, if they differ from the parameter's name or the flag has
            no `--no-` form.
    """
    return typer.Option(
        *name.split(),
        help=help,
        rich_help_panel=panel,
        metavar=metavar,
        show_default=default_text,
        **typer_options,
    )


Images = Annotated[
    list[Path] | None,
    option("Image file for the prompt; may be given several times.", OUTPUT, "FILE"),
]


def size_option(help: str, panel: str, metavar: str, default_text: str | bool = True) -> Any:
    """Declare an integer option that accepts suffixes, as in 32K."""
    return option(help, panel, metavar, default_text, parser=size)


def field_flag(field: Field, default_text: str | bool) -> Any:
    """The optional flag for a dataclass field declared by `serving.api.flags.flag`."""
    metadata = field.metadata
    name = f"--{field.name.replace('_', '-')}"
    # Typer supports no sequence type other than list.
    kind: Any = list[str] if field.type == Sequence[str] else field.type
    parser = size if metadata["metavar"] and kind in (int, int | None) else None
    if metadata["metavar"] == "JSON":
        kind = Any
        parser = json_object
    name = f"{name}/--no-{name[2:]}" if field.default is True else name
    name = f"{name} -{metadata['short']}" if metadata.get("short") else name
    return Annotated[
        kind | None,
        option(
            metadata["help"],
            metadata["panel"],
            metadata["metavar"],
            default_text,
            name,
            parser=parser,
        ),
    ]


def json_object(text: str | dict[str, Any]) -> dict[str, Any]:
    """Parse a JSON object; values from a `--config` file are parsed already."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(f"{text!r:.80} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r:.80} must be a JSON object, as in '{{\"name\": 1}}'")
    return value


def engine_flag(field: Field) -> Any:
    """The flag for a field of `EngineOptions`; None if omitted: the engine sets the default."""
    default = f"{field.default}"
    return field_flag(
        field,
        field.metadata["default_text"]
        or {"None": "none", "True": "on", "False": "off"}.get(default, default),
    )


ENGINE_FLAGS = {
    field.name: engine_flag(field) for field in fields(EngineOptions) if "panel" in field.metadata
}
ADAPTER_FLAGS = [
    field.name for field in fields(EngineOptions) if field.metadata.get("panel") == ADAPTERS
]
SAMPLING_FIELDS = {
    field.name: field for field in fields(SamplingParams) if "panel" in field.metadata
}


def takes_engine(
    only: Collection[str] = ENGINE_FLAGS, excluded: Collection[str] = (), adapters: bool = False
):
    """Replace a command's parameter `engine` by engine flags.

    Its value is a dict of the flags that are set.

    Args:
        only: Names of the engine options to add.
        excluded: Names of engine options to leave out.
        adapters: Add the LoRA flags, for commands whose requests can select an adapter.
    """
    left_out = excluded if adapters else (*excluded, *ADAPTER_FLAGS)
    return takes(
        "engine",
        {
            name: flag
            for name, flag in ENGINE_FLAGS.items()
            if name in only and name not in left_out
        },
    )


def takes_sampling(max_tokens: int, excluded: Collection[str] = ()):
    """Replace the parameter `sampling` by sampling flags.

    Args:
        max_tokens: Default of `--max-tokens` shown in `--help` for models that define none.
        excluded: Names of sampling parameters to leave out.
    """

    def default_text(field: Field) -> str | bool:
        neutral = max_tokens if field.name == "max_tokens" else field.default
        return f"the model's own, or {neutral:g}" if field.name in MODEL_DEFAULTS else True

    chosen = [field for name, field in SAMPLING_FIELDS.items() if name not in excluded]
    return takes(
        "sampling", {field.name: field_flag(field, default_text(field)) for field in chosen}
    )


def takes(
    parameter_name: str,
    added: Mapping[str, Any],
    defaults: Mapping[str, Any] = {},
    make: Callable[..., Any] = dict,
):
    """Replace a command's parameter by options.

    Args:
        parameter_name: The parameter to replace.
        added: Annotations of the options by name.
        defaults: Default values of options; others default to None.
        make: Builds the parameter's value from the options that are set.
    """

    def decorate(main):
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(main, eval_str=True).parameters.values():
            if parameter.name == parameter_name:
                kind = parameter.kind
                parameters += [
                    inspect.Parameter(name, kind, default=defaults.get(name), annotation=annotation)
                    for name, annotation in added.items()
                ]
            else:
                parameters.append(parameter)

        @functools.wraps(main)
        def command(**values):
            value = make(**drop_none(**{name: values.pop(name) for name in added}))
            return main(**values, **{parameter_name: value})

        # Typer reads the signature.
        signature = inspect.Signature(parameters)
        command.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def read_bytes(path: Path) -> bytes:
    """Read a file, or stdin if the path is `-`."""
    try:
        return typer.get_binary_stream("stdin").read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {source_name(path)}: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Read a UTF-8 file, or stdin if the path is `-`."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source_name(path)} is not UTF-8 text: byte {error.start} cannot be decoded"
        ) from None


def source_name(path: Path) -> str:
    return "stdin" if str(path) == "-" else str(path)
