"""`quire train-heads`: heads that draft for a model, trained on what it writes itself."""

from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options as o
from .settings import Settings


def flag(field: Field) -> Any:
    """The flag of a setting. Not given it is None, which leaves the default to `Settings`."""
    about = field.metadata
    kind = field.type
    name = f"--{field.name.replace('_', '-')}"
    parser = o.size if kind is int else None
    named = name if kind is bool else ""
    return Annotated[
        kind | None,
        o.option(
            about["help"], about["panel"], about["metavar"], about["shown"], named, parser=parser
        ),
    ]


@o.takes("settings", {field.name: flag(field) for field in fields(Settings)}, make=Settings)
def main(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or Hugging Face id.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder for answers, checkpoints and heads.")
    ],
    *,
    settings: Settings,
) -> None:
    """Train heads that draft for a model, on what it writes itself. They are in OUT/heads in the
    end.

    Stopped by Ctrl-C it saves, and the same command goes on.
    """
    from ...model.extras import import_extra  # not at the top: `--help` must not wait for JAX

    for library in ("optax", "orbax.checkpoint"):
        import_extra(library, "train", "quire train-heads")
    from .session import Session

    Session(model, out, settings).run()
