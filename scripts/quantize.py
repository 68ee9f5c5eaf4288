"""`quire quantize`: a checkpoint with rounded weights, in a format that vLLM reads too."""

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as o


@o.takes_engine(only=o.SOURCE)
def main(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or Hugging Face id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must be new.")],
    quantization: Annotated[
        str,
        typer.Option(help=o.ENGINE_FLAGS["quantization"].__metadata__[0].help, show_default=False),
    ],
    *,
    engine: dict[str, Any],
) -> None:
    """Round a model's weights and write them in the compressed-tensors format, which vLLM reads too."""
    from rich.progress import Progress  # not at the top: `--help` must not wait for JAX

    from ..model.checkpoint import hub, loader, quantized

    folder = hub.resolve(model, revision=engine.get("revision"), download_dir=engine.get("download_dir"))
    overrides = engine.get("hf_overrides")
    config = loader.read_config(folder, quantization=quantization, hf_overrides=overrides)
    before = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    with Progress(transient=True) as bars:
        bar = bars.add_task("rounding", total=before)
        count = quantized.save(folder, out, config, lambda read: bars.advance(bar, read), overrides)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    experts = "; experts stay as they are" if quantized.keeps_experts(out) else ""
    print(
        f"wrote {out}: {size / 2**20:.1f} MiB of weights from {before / 2**20:.1f} MiB, {count} matrices in "
        f"{quantization}{experts}"
    )
