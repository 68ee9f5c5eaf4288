"""`quire quantize`: quantise a checkpoint, in a layout that other engines also read."""

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
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder or Hugging Face model ID.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Output folder or .gguf file; it must not exist.")
    ],
    quantization: Annotated[
        str | None,
        o.option(
            o.ENGINE_FLAGS["quantization"].__metadata__[0].help,
            "Options",
            default_text="required without --bits",
        ),
    ] = None,
    bits: Annotated[
        float | None,
        o.option(
            "Instead of --quantization: mixed precision with at most N bits per weight on average, "
            "scales included. The format of each matrix is chosen by its error on the calibration "
            "text: int3-32 to int8-weights, or unquantised.",
            CALIBRATION,
            "N",
            default_text="the same format for all matrices",
            min=1,
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="Checkpoint layout: compressed-tensors; gptq (as GPTQModel; for int4 and "
            "int8-weights-128); awq (as AutoAWQ; for int4 with zero points); bitsandbytes (nf4); "
            "fp8 (as DeepSeek; for fp8-weights-128); or gguf, one file for llama.cpp in Q8_0, "
            "Q5_0, Q5_1, Q4_0, Q4_1, MXFP4, F16, BF16 or F32 (with --method gptq or awq: Q8_0 or "
            "Q4_0).",
            metavar="LAYOUT",
        ),
    ] = COMPRESSED,
    method: Annotated[
        str,
        typer.Option(
            help="Quantisation method: rtn (round to nearest), or a method that uses calibration "
            "text: gptq or awq (int2 to int4, int8), smoothquant (int8, fp8), squeezellm "
            "(codebook), quip (e8p).",
            metavar="METHOD",
        ),
    ] = NEAREST,
    calibration: Annotated[
        Path | None,
        o.option(
            "Calibration text, similar to what the model will process: a .txt file, or a .jsonl "
            "file whose objects have text, prompt or messages.",
            CALIBRATION,
            "FILE",
            default_text="the bundled general text of 11,000 tokens",
        ),
    ] = None,
    calibration_samples: Annotated[
        int, o.option("Maximum number of calibration samples.", CALIBRATION, "N", min=1)
    ] = 128,
    calibration_tokens: Annotated[
        int, o.option("Maximum length of a calibration sample in tokens.", CALIBRATION, "N", min=1)
    ] = 2048,
    act_order: Annotated[
        bool,
        o.option(
            "For gptq: quantise the columns with the largest activations first.",
            CALIBRATION,
            name="--act-order/--no-act-order",
        ),
    ] = True,
    fine_tune_epochs: Annotated[
        int,
        o.option(
            "Epochs of fine-tuning after quantisation: trains the output scales and norm weights "
            "on the calibration text to match the unquantised model's token probabilities. Needs "
            "memory for all layers at once.",
            CALIBRATION,
            "N",
            min=0,
        ),
    ] = 0,
    *,
    engine: dict[str, Any],
) -> None:
    """Quantise a model's weights and write a checkpoint in a layout that other engines also read.

    The formats codebook and e8p have a layout that only Quire reads.

    Calibration holds the weights of one layer at a time in memory, except with --fine-tune-epochs.
    To continue a run that was interrupted, start the same command again.
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
    quant_format = None if layout == GGUF else quantization or mixed.ANY
    dtype = engine.get("dtype", "auto")
    config = loader.read_config(folder, dtype, quantization=quant_format, hf_overrides=overrides)
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
