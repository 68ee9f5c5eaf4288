"""`quire pull`: download a model into the Hub's cache."""

from typing import Annotated, Any

import typer

from . import options as o


@o.takes_engine(only=("revision", "download_dir"))
def main(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="owner/name on the Hub; of a GGUF file owner/name:Q4_K_M or its path.",
        ),
    ],
    *,
    engine: dict[str, Any],
) -> None:
    """Download models into the Hub's cache, or see that they are there. Other commands do so when
    they need one.
    """
    from ..model.checkpoint import hub  # not at the top: `--help` must not wait for it

    for name in names:
        print(f"{name}: {hub.resolve(name, **engine)}")
