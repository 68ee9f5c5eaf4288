"""`quire convert`: convert a Hugging Face checkpoint to Orbax format, which loads sharded."""

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as o


@o.takes_engine(only=("dtype", *o.SOURCE))
def main(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder or Hugging Face model ID.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Output folder; it must be new or empty.")
    ],
    *,
    engine: dict[str, Any],
) -> None:
    """Convert a model to an Orbax checkpoint, which loads sharded. All commands accept the output
    folder as MODEL.
    """
    from rich.progress import Progress  # not at the top: `--help` must not wait for JAX

    from ..model.checkpoint import hub, loader, orbax
    from ..model.weights import abstract
    from ..sharding.spec import nbytes

    folder = hub.resolve(
        model, revision=engine.pop("revision", None), download_dir=engine.pop("download_dir", None)
    )
    config = loader.read_config(folder, **engine)
    orbax.import_orbax("quire convert")  # before reading: a missing library is reported at once
    orbax.make_empty_folder(out)
    with Progress(transient=True) as bars:
        bar = bars.add_task("reading", total=nbytes(abstract(config)))
        weights = loader.load(
            folder, config, progress=lambda count: bars.advance(bar, count), skip_packing=True
        )
        bars.update(bar, description="writing", total=None)
        orbax.save(folder, out, weights, config.dtype, engine.get("hf_overrides"))
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"wrote {out}: {size / 2**20:.1f} MiB")
