"""`quire pull`: download models into the Hugging Face cache."""

from typing import Annotated, Any

import typer

from . import options as o


@o.takes_engine(only=("revision", "download_dir"))
def main(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Hugging Face model ID (owner/name); for a GGUF file, owner/name:Q4_K_M or "
            "owner/name/path.gguf.",
        ),
    ],
    *,
    engine: dict[str, Any],
) -> None:
    """Download models into the Hugging Face cache, unless they are cached already. Other commands
    download a missing model by themselves.
    """
    from ..model.checkpoint import hub  # not at the top: `--help` must not wait for it

    for name in names:
        print(f"{name}: {hub.resolve(name, **engine)}")
