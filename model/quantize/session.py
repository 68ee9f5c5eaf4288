"""Quantise a checkpoint layer by layer; finished layers are saved, so that a run can be resumed."""

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
from ..checkpoint.safetensors import Tensor, publish_tensors, read_header
from ..config import ModelConfig, ModelError
from ..stored_format import StoredFormat
from . import fine_tune, gguf_file, mixed, sensitivity, whole
from .folds import find_folds
from .layer import Method, round_layer
from .source import CheckpointSource

RUN = "run.json"
IN_BLOCKS = ("gptq", "awq")  # methods whose codes fit GGUF's blocks


def save(
    folder: Path,
    out: Path,
    config: ModelConfig,
    method: str,
    samples: Sequence[Sequence[int]],
    progress: Callable[[int], None] = lambda num_layers: None,
    hf_overrides: Mapping[str, Any] | None = None,
    act_order: bool = True,
    layout: str = quantized.LAYOUT,
    bits: float | None = None,
    fine_tune_epochs: int = 0,
) -> int:
    """Like `quantized.save`, by a calibration method; `progress` gets the number of layers done.

    A layer is calibrated on the output of the quantised layers before it. `bits` chooses a format
    for each matrix with `mixed.choose`. Epochs of `fine_tune` count as further layers.
    """
    whole.check(config)
    plan = quantized.plan_writing(folder, out, config, hf_overrides, layout)
    if fine_tune_epochs:
        fine_tune.check(plan.stored)
    if bits is not None:
        return save_mixed(
            folder, out, config, method, samples, progress, hf_overrides, act_order, bits
        )
    method_spec = Method(method, plan.stored, act_order)
    quantised = quantise_layers(
        folder, out, config, method_spec, samples, progress, hf_overrides, fine_tune_epochs
    )
    count = quantized.save(
        folder, out, config, hf_overrides=hf_overrides, precomputed=quantised, layout=layout
    )
    shutil.rmtree(layers_folder(out))
    return count


def quantise_layers(
    folder: Path,
    out: Path,
    config: ModelConfig,
    method: Method,
    samples: Sequence[Sequence[int]],
    progress: Callable[[int], None],
    hf_overrides: Mapping[str, Any] | None,
    epochs: int = 0,
) -> dict[str, Tensor]:
    """Run `round_layers` and then `fine_tune`, with files beside the output."""
    source = CheckpointSource.open(folder, config, method.stored)
    run_folder = layers_folder(out)
    if method.uses_folds and not any(
        find_folds(config, index, source.leaves(index)) for index in range(len(config.layers))
    ):
        raise ModelError(
            f"method is {method.name!r}, and in no layer of this model of the family "
            f"{config.family} is there a norm, or a matrix, that scales could be folded into; it "
            "can be gptq"
        )
    try:
        run = run_description(
            folder, config, method.name, method.stored, method.act_order, samples, hf_overrides
        )
        make_run_folder(run_folder, run | {"fine_tune_epochs": epochs})
        quantised = round_layers(source, method, samples, run_folder, progress)
        layers = len(config.layers)
        if not epochs:
            return quantised
        return fine_tune.tune(
            source, quantised, samples, epochs, run_folder, lambda epoch: progress(layers + epoch)
        )
    except OSError as error:
        raise ModelError(f"{run_folder} cannot be written: {error.strerror}") from None


def layers_folder(out: Path) -> Path:
    """The folder for finished layers."""
    return out.with_name(f".{out.name}.layers")


def save_gguf(
    folder: Path,
    out: Path,
    config: ModelConfig,
    kind: str,
    method: str,
    samples: Sequence[Sequence[int]],
    progress: Callable[[int], None] = lambda num_layers: None,
    hf_overrides: Mapping[str, Any] | None = None,
    act_order: bool = True,
) -> int:
    """Like `gguf_file.save`, with codes chosen by a method for the format with the same codes."""
    whole.check(config)
    if kind not in gguf_file.CALIBRATED_TYPES or method not in IN_BLOCKS:
        raise ModelError(
            f"method is {method!r} and quantization {kind!r}; layout gguf has "
            f"{' and '.join(IN_BLOCKS)} for {' and '.join(gguf_file.CALIBRATED_TYPES)}, and rtn "
            "for all its types"
        )
    gguf_file.plan_writing(folder, out, config, kind, hf_overrides)  # raises errors early
    coded = replace(config, quant=gguf_file.CALIBRATED_TYPES[kind][0])
    plan = quantized.plan_writing(folder, out, coded, hf_overrides)
    quantised = quantise_layers(
        folder, out, coded, Method(method, plan.stored, act_order), samples, progress, hf_overrides
    )
    matrices = gather(dict(quantised), plan.stored)
    count = gguf_file.save(
        folder, out, config, kind, hf_overrides=hf_overrides, precomputed=matrices
    )
    shutil.rmtree(layers_folder(out))
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
    """Like `save`, with a format for each matrix, by rtn or gptq."""
    if method not in ("rtn", "gptq"):
        raise ModelError(f"method is {method!r} with bits; it can be rtn or gptq")
    plan = quantized.plan_writing(folder, out, config, hf_overrides)
    source = CheckpointSource.open(folder, config, plan.stored)
    run_folder = layers_folder(out)
    quantised = {}
    try:
        make_run_folder(
            run_folder,
            run_description(folder, config, method, plan.stored, act_order, samples, hf_overrides)
            | {"bits": bits},
        )
        chosen = mixed.choose(source, samples, run_folder, bits, progress)
        plan = quantized.plan_writing(folder, out, config, hf_overrides, chosen=chosen)
        if method == "gptq":
            method_spec = Method(method, plan.stored, act_order)
            quantised = round_layers(
                CheckpointSource.open(folder, config, plan.stored),
                method_spec,
                samples,
                run_folder,
                progress,
            )
    except OSError as error:
        raise ModelError(f"{run_folder} cannot be written: {error.strerror}") from None
    count = quantized.save(
        folder, out, config, hf_overrides=hf_overrides, precomputed=quantised, chosen=chosen
    )
    shutil.rmtree(run_folder)
    return count


def run_description(
    folder: Path,
    config: ModelConfig,
    method: str,
    stored: StoredFormat,
    act_order: bool,
    samples: Sequence[Sequence[int]],
    hf_overrides: Any,
) -> dict[str, Any]:
    """Everything that determines a run's codes."""
    files = {
        path.name: [path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(folder.glob("*.safetensors"))
    }
    return {
        "model": str(folder.resolve()),
        "files": files,
        "hf_overrides": dict(hf_overrides or {}),
        "dtype": config.dtype,
        "quantization": stored.quant,
        "layout": stored.method,
        "method": method,
        "act_order": act_order,
        "calibration": hashlib.sha256(
            json.dumps([list(map(int, ids)) for ids in samples]).encode()
        ).hexdigest(),
    }


def make_run_folder(run_folder: Path, run: dict[str, Any]) -> None:
    """Make the folder for finished layers; reject one of a different run."""
    if (run_folder / RUN).exists():
        previous_run = read_json(run_folder / RUN)
        if differs := [name for name, value in run.items() if previous_run.get(name) != value]:
            raise ModelError(
                f"{run_folder} holds layers of a run that was stopped, and {differs[0]} was "
                "another; give the same arguments to go on with it, or remove the folder"
            )
        return
    with publish(run_folder / RUN) as temporary:
        temporary.write_text(json.dumps(run, indent=2))


def round_layers(
    source: CheckpointSource,
    method: Method,
    samples: Sequence[Sequence[int]],
    run_folder: Path,
    progress: Callable[[int], None],
) -> dict[str, Tensor]:
    """All tensors that change, layer by layer; finished layers are read from files."""
    quantised: dict[str, Tensor] = {}
    count = len(source.config.layers)
    if method.uses_gradients:
        sensitivity.write(source, samples, run_folder)
    batches = (
        []
        if method.uses_gradients
        else whole.embed_samples(source.embedding(), samples, source.dense)
    )
    for index in range(count):
        file = run_folder / f"layer-{index:05}.safetensors"
        if not file.exists():
            statistics = (
                sensitivity.read(source, index, run_folder)
                if method.uses_gradients
                else source.inputs(index, batches)
            )
            publish_tensors(file, round_layer(source, index, statistics, method))
        layer_tensors = read_header(file)
        quantised |= layer_tensors
        if batches and index + 1 < count:
            weights = source.layer(index, layer_tensors)
            batches = [batch.run_layer(index, weights, source.dense) for batch in batches]
        progress(index + 1)
    return quantised
