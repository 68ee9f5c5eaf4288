"""`quire quantize`: writes a quantised checkpoint in a layout that other engines read too."""

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as o

CALIBRATION = "Calibration"
NEAREST = "rtn"
COMPRESSED = "compressed-tensors"
GGUF = "gguf"


@o.takes_engine(only=("dtype", *o.SOURCE))
def main(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or Hugging Face id.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write, or .gguf file; it must be new.")
    ],
    quantization: Annotated[
        str | None,
        o.option(
            o.ENGINE_FLAGS["quantization"].__metadata__[0].help,
            "Options",
            default_text="needed without --bits",
        ),
    ] = None,
    bits: Annotated[
        float | None,
        o.option(
            "In place of --quantization: so many bits a weight in all, scales included, and for "
            "each matrix the format that calibration text finds for it, from int3-32 to "
            "int8-weights, or none.",
            CALIBRATION,
            "N",
            default_text="one format for all",
            min=1,
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="How the weights lie in files: compressed-tensors; gptq (int4, int8-weights-128) "
            "as GPTQModel writes them, awq (int4 with zero points) as AutoAWQ, bitsandbytes "
            "(nf4), fp8 (fp8-weights-128) as DeepSeek; or gguf: one file for llama.cpp, in "
            "Q8_0, Q5_0, Q5_1, Q4_0, Q4_1, MXFP4, F16, BF16 or F32 (gptq and awq: Q8_0 and "
            "Q4_0).",
            metavar="LAYOUT",
        ),
    ] = COMPRESSED,
    method: Annotated[
        str,
        typer.Option(
            help="How codes are chosen: rtn (the nearest), or by what the model computes over "
            "calibration text: gptq and awq (int2 to int4, int8), smoothquant (int8, fp8), "
            "squeezellm (codebook), quip (e8p).",
            metavar="METHOD",
        ),
    ] = NEAREST,
    calibration: Annotated[
        Path | None,
        o.option(
            "Text such as the model will read and write: a .txt file, or a .jsonl file whose "
            "lines have text, prompt or messages.",
            CALIBRATION,
            "FILE",
            default_text="a general text of 11,000 tokens that comes with Quire",
        ),
    ] = None,
    calibration_samples: Annotated[
        int, o.option("Pieces of that text.", CALIBRATION, "N", min=1)
    ] = 128,
    calibration_tokens: Annotated[
        int, o.option("Tokens of the longest piece.", CALIBRATION, "N", min=1)
    ] = 2048,
    act_order: Annotated[
        bool,
        o.option(
            "Of gptq: the largest inputs are rounded first.",
            CALIBRATION,
            name="--act-order/--no-act-order",
        ),
    ] = True,
    fine_tune_epochs: Annotated[
        int,
        o.option(
            "Times that the calibration text is gone through when all layers are rounded, to tune "
            "scales of outputs and of norms such that probabilities are nearer to those of the "
            "dense model. All layers are in memory then.",
            CALIBRATION,
            "N",
            min=0,
        ),
    ] = 0,
    *,
    engine: dict[str, Any],
) -> None:
    """Round a model's weights and write them in a layout that other engines read too.

    codebook and e8p are in a form of Quire's own.

    With calibration text one layer's weights at a time are in memory, but for --fine-tune-epochs. A
    run that was stopped goes on when it is started again.
    """
    if (quantization is None) == (bits is None):
        raise o.UsageError("give --quantization FORMAT, or --bits N for a format for each matrix")
    if bits is not None and layout != COMPRESSED:
        raise o.UsageError(f"--bits {bits:g} needs --layout {COMPRESSED}")
    is_calibrated = bits is not None or method != NEAREST
    if calibration is not None and not is_calibrated:
        raise o.UsageError(
            f"--method {method} looks at no calibration text; give another --method, or --bits"
        )
    if fine_tune_epochs and (not is_calibrated or bits is not None or layout == GGUF):
        raise o.UsageError(
            f"--fine-tune-epochs {fine_tune_epochs} needs a --method other than {NEAREST}, and "
            f"neither --bits nor --layout {GGUF}"
        )
    if layout == GGUF and "dtype" in engine:
        raise o.UsageError(
            f"--dtype {engine['dtype']} is for folders; --quantization says it for --layout {GGUF}"
        )
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from ..model.checkpoint import hub, loader, quantized
    from ..model.quantize import mixed

    folder = hub.resolve(
        model, revision=engine.get("revision"), download_dir=engine.get("download_dir")
    )
    overrides = engine.get("hf_overrides")
    rounds = None if layout == GGUF else quantization or mixed.ANY
    dtype = engine.get("dtype", "auto")
    config = loader.read_config(folder, dtype, quantization=rounds, hf_overrides=overrides)
    original_size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if layout == GGUF and not is_calibrated:
        from ..model.quantize import gguf_file

        with Progress(transient=True) as bars:
            bar = bars.add_task("writing", total=original_size)
            count = gguf_file.save(
                folder,
                out,
                config,
                str(quantization).upper(),
                lambda read: bars.advance(bar, read),
                overrides,
            )
    elif not is_calibrated:
        with Progress(transient=True) as bars:
            bar = bars.add_task("rounding", total=original_size)
            count = quantized.save(
                folder, out, config, lambda read: bars.advance(bar, read), overrides, layout=layout
            )
    else:
        from ..model.quantize import samples, session
        from ..model.text.tokenizer import Tokenizer

        length = min(calibration_tokens, config.max_len)
        text = calibration or samples.BUNDLED
        pieces = samples.read_samples(text, Tokenizer(folder), calibration_samples, length)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, transient=True) as bars:
            bar = bars.add_task("layers and epochs", total=len(config.layers) + fine_tune_epochs)

            def show(completed: int) -> None:
                bars.update(bar, completed=completed)

            if layout == GGUF:
                kind = str(quantization).upper()
                count = session.save_gguf(
                    folder, out, config, kind, method, pieces, show, overrides, act_order
                )
            else:
                count = session.save(
                    folder,
                    out,
                    config,
                    method,
                    pieces,
                    show,
                    overrides,
                    act_order,
                    layout,
                    bits,
                    fine_tune_epochs,
                )
        name = "the bundled calibration text" if calibration is None else calibration
        print(f"{method} over {sum(map(len, pieces)):,} tokens of {name}, {len(pieces)} pieces")
    size = sum(
        file.stat().st_size for file in ([out] if layout == GGUF else out.glob("*.safetensors"))
    )
    experts = (
        "; experts stay as they are"
        if layout != GGUF and quantized.has_unquantised_experts(out)
        else ""
    )
    print(
        f"wrote {out}: {size / 2**20:.1f} MiB of weights from {original_size / 2**20:.1f} MiB, "
        f"{count} matrices in "
        f"{quantization or f'formats of their own, {bits:g} bits a weight at most'}, laid out as "
        f"{layout}{experts}"
    )
