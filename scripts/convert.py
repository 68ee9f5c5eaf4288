"""`quire convert`: a Hugging Face checkpoint as an orbax checkpoint, which restores sharded."""

from pathlib import Path
from typing import Annotated

import typer


def main(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or Hugging Face id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must be empty or new.")],
) -> None:
    """Write a model as an orbax checkpoint. Use the folder wherever a MODEL is asked for."""
    from ..model.checkpoint import save_orbax  # not at the top: `--help` must not wait for JAX

    save_orbax(model, out)
    print(f"wrote {out}: {sum(file.stat().st_size for file in out.rglob('*') if file.is_file()) / 2**20:.1f} MiB")
