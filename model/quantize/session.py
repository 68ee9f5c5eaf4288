"""A checkpoint rounded layer by layer; what is done lies in a folder beside it, and a run that was stopped goes on."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...ops.cache_folder import publish
from ..checkpoint import quantized
from ..checkpoint.folder import read_json
from ..checkpoint.published import gather
from ..checkpoint.safetensors import Tensor, read_header, write_whole
from ..config import ModelConfig, ModelError
from ..stored_format import StoredFormat
from . import fine_tune, gguf_file, mixed, sensitivity, whole
from .folds import folds
from .layer import Method, round_layer
from .source import Source

RUN = "run.json"
IN_BLOCKS = ("gptq", "awq")  # methods whose codes GGUF's blocks hold


def save(
    folder: Path,
    out: Path,
    config: ModelConfig,
    method: str,
    samples: Sequence[Sequence[int]],
    progress: Callable[[int], None] = lambda done: None,
    hf_overrides: Mapping[str, Any] | None = None,
    act_order: bool = True,
    layout: str = quantized.LAYOUT,
    bits: float | None = None,
    fine_tune_epochs: int = 0,
) -> int:
    """As `quantized.save`, by a method that looks at the samples; `progress` is told how many layers are done.

    The matrices of a layer see what comes out of rounded layers before it. With `bits` each matrix has the format that
    `mixed.choose` finds for it, so many bits a weight in all. Epochs of `fine_tune` count as further layers.
    """
    whole.check(config)
    plan = quantized.plan(folder, out, config, hf_overrides, layout)
    if fine_tune_epochs:
        fine_tune.check(plan.stored)
    if bits is not None:
        return save_mixed(folder, out, config, method, samples, progress, hf_overrides, act_order, bits)
    how = Method(method, plan.stored, act_order)
    made = rounded(folder, out, config, how, samples, progress, hf_overrides, fine_tune_epochs)
    count = quantized.save(folder, out, config, hf_overrides=hf_overrides, made=made, layout=layout)
    shutil.rmtree(beside(out))
    return count


def rounded(
    folder: Path,
    out: Path,
    config: ModelConfig,
    how: Method,
    samples: Sequence[Sequence[int]],
    progress: Callable[[int], None],
    hf_overrides: Mapping[str, Any] | None,
    epochs: int = 0,
) -> dict[str, Tensor]:
    """`round_layers` and then epochs of `fine_tune`, whose files lie beside what is to be written."""
    source, done = Source.of(folder, config, how.stored), beside(out)
    if how.folds and not any(folds(config, index, source.leaves(index)) for index in range(len(config.layers))):
        raise ModelError(
            f"method is {how.name!r}, and in no layer of this model of the family {config.family} is there a norm, or "
            "a matrix, that scales could be folded into; it can be gptq"
        )
    try:
        run = asked(folder, config, how.name, how.stored, how.act_order, samples, hf_overrides)
        begin(done, run | {"fine_tune_epochs": epochs})
        made = round_layers(source, how, samples, done, progress)
        layers = len(config.layers)
        if not epochs:
            return made
        return fine_tune.tuned(source, made, samples, epochs, done, lambda epoch: progress(layers + epoch))
    except OSError as error:
        raise ModelError(f"{done} cannot be written: {error.strerror}") from None


def beside(out: Path) -> Path:
    """The folder for the layers that are done."""
    return out.with_name(f".{out.name}.layers")


def save_gguf(
    folder: Path,
    out: Path,
    config: ModelConfig,
    kind: str,
    method: str,
    samples: Sequence[Sequence[int]],
    progress: Callable[[int], None] = lambda done: None,
    hf_overrides: Mapping[str, Any] | None = None,
    act_order: bool = True,
) -> int:
    """As `gguf_file.save`, with codes that a method chooses as it does those of the format with the same ones."""
    whole.check(config)
    if kind not in gguf_file.CHOSEN or method not in IN_BLOCKS:
        raise ModelError(
            f"method is {method!r} and quantization {kind!r}; layout gguf has {' and '.join(IN_BLOCKS)} for "
            f"{' and '.join(gguf_file.CHOSEN)}, and rtn for all its types"
        )
    gguf_file.plan(folder, out, config, kind, hf_overrides)  # what speaks against the file is said first
    coded = replace(config, quant=gguf_file.CHOSEN[kind][0])
    plan = quantized.plan(folder, out, coded, hf_overrides)
    made = rounded(folder, out, coded, Method(method, plan.stored, act_order), samples, progress, hf_overrides)
    own = gather(dict(made), plan.stored)
    count = gguf_file.save(folder, out, config, kind, hf_overrides=hf_overrides, made=own)
    shutil.rmtree(beside(out))
    return count


def save_mixed(
    folder: Path,
    out: Path,
    config: ModelConfig,
    method: str,
    samples: Sequence[Sequence[int]],
    progress: Callable[[int], None],
    hf_overrides: Mapping[str, Any] | None,
    act_order: bool,
    bits: float,
) -> int:
    """The same with a format for each matrix, rounded to nearest or by gptq."""
    if method not in ("rtn", "gptq"):
        raise ModelError(f"method is {method!r} with bits; it can be rtn or gptq")
    plan = quantized.plan(folder, out, config, hf_overrides)
    source = Source.of(folder, config, plan.stored)
    done, made = beside(out), {}
    try:
        begin(done, asked(folder, config, method, plan.stored, act_order, samples, hf_overrides) | {"bits": bits})
        chosen = mixed.choose(source, samples, done, bits, progress)
        plan = quantized.plan(folder, out, config, hf_overrides, chosen=chosen)
        if method == "gptq":
            how = Method(method, plan.stored, act_order)
            made = round_layers(Source.of(folder, config, plan.stored), how, samples, done, progress)
    except OSError as error:
        raise ModelError(f"{done} cannot be written: {error.strerror}") from None
    count = quantized.save(folder, out, config, hf_overrides=hf_overrides, made=made, chosen=chosen)
    shutil.rmtree(done)
    return count


def asked(
    folder: Path,
    config: ModelConfig,
    method: str,
    stored: StoredFormat,
    act_order: bool,
    samples: Sequence[Sequence[int]],
    hf_overrides: Any,
) -> dict[str, Any]:
    """What a run is made of: one that differs in any of it makes other codes."""
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(folder.glob("*.safetensors"))}
    return {
        "model": str(folder.resolve()),
        "files": files,
        "hf_overrides": dict(hf_overrides or {}),
        "dtype": config.dtype,
        "quantization": stored.quant,
        "layout": stored.method,
        "method": method,
        "act_order": act_order,
        "calibration": hashlib.sha256(json.dumps([list(map(int, ids)) for ids in samples]).encode()).hexdigest(),
    }


def begin(done: Path, run: dict[str, Any]) -> None:
    """The folder for layers that are done; one of another run is refused."""
    if (done / RUN).exists():
        before = read_json(done / RUN)
        if differs := [name for name, value in run.items() if before.get(name) != value]:
            raise ModelError(
                f"{done} holds layers of a run that was stopped, and {differs[0]} was another; give the same arguments "
                "to go on with it, or remove the folder"
            )
        return
    with publish(done / RUN) as part:
        part.write_text(json.dumps(run, indent=2))


def round_layers(
    source: Source, how: Method, samples: Sequence[Sequence[int]], done: Path, progress: Callable[[int], None]
) -> dict[str, Tensor]:
    """All tensors that are not as they were, layer by layer; only layers that are not done are rounded."""
    made: dict[str, Tensor] = {}
    count = len(source.config.layers)
    if how.by_gradients:
        sensitivity.write(source, samples, done)
    batches = [] if how.by_gradients else whole.embedded(source.embedding(), samples, source.dense)
    for index in range(count):
        file = done / f"layer-{index:05}.safetensors"
        if not file.exists():
            met = sensitivity.read(source, index, done) if how.by_gradients else source.inputs(index, batches)
            write_whole(file, round_layer(source, index, met, how))
        own = read_header(file)
        made |= own
        if batches and index + 1 < count:
            weights = source.layer(index, own)
            batches = [batch.through(index, weights, source.dense) for batch in batches]
        progress(index + 1)
    return made
