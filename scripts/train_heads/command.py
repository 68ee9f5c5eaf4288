"""`quire train-heads`: train draft heads for speculative decoding on a model's own outputs."""

from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options as o
from .settings import Settings


def flag(field: Field) -> Any:
    """The flag for a field of `Settings`; None if omitted: `Settings` sets the default."""
    metadata = field.metadata
    kind = field.type
    parser = o.size if kind is int else None
    return Annotated[
        kind | None,
        o.option(
            metadata["help"],
            metadata["panel"],
            metadata["metavar"],
            metadata["default_text"],
            name=f"--{field.name.replace('_', '-')}" if kind is bool else "",
            parser=parser,
        ),
    ]


@o.takes("settings", {field.name: flag(field) for field in fields(Settings)}, make=Settings)
def main(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder or Hugging Face model ID.")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Output folder for generated answers, checkpoints and the heads."
        ),
    ],
    *,
    settings: Settings,
) -> None:
    """Train draft heads for speculative decoding (Medusa, EAGLE or EAGLE-3) on answers that the
    model generates. Writes them to OUT/heads.

    Ctrl-C saves a checkpoint and stops; the same command continues the training.
    """
    from ...model.extras import import_extra  # not at the top: `--help` must not wait for JAX

    for library in ("optax", "orbax.checkpoint"):
        import_extra(library, "train", "quire train-heads")
    from .session import Session

    Session(model, out, settings).run()
