"""Benchmark Quire against vLLM, OpenVINO GenAI, transformers and llama.cpp on CPUs: `python -m
tools.peers.compare`.

All load the same model, with random weights or of a GGUF file, and take turns at the same
workloads, each in a virtual environment of its own, which this command creates (several gigabytes,
once). Run it on an idle machine.
"""

from __future__ import annotations

import json
import platform
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from quire.scripts import collect_env
from quire.scripts.bench.bandwidth import read_bandwidth

from . import checkpoint, envs, quality, report, turns
from .loop import LoadSettings
from .work import FILE_WORKS, WORKS, Workload

ENGINES = ("quire", *envs.RECIPES)
MAX_SEQS = 32


def main(
    size: Annotated[str, typer.Option(help=f"Model: {' or '.join(checkpoint.SIZES)}.")] = "100m",
    gguf: Annotated[
        Path | None,
        typer.Option(
            help="A GGUF file instead of random weights: Quire and llama.cpp load the file, "
            "OpenVINO and vLLM its dequantised weights in int4 with groups of 32, transformers in "
            "bfloat16. KL divergence from float32 is measured too."
        ),
    ] = None,
    work: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Workload to run: {', '.join(WORKS)}; of a GGUF file {', '.join(FILE_WORKS)}. "
            "Repeatable."
        ),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help=f"Engine to run: {', '.join(ENGINES)}. Repeatable.")
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Number of rounds, in which every engine runs every workload."),
    ] = 5,
    place: Annotated[
        Path | None, typer.Option("--envs", help="Folder for environments and checkpoints.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results, SIZE.json and SIZE.md.")
    ] = None,
    limit: Annotated[float, typer.Option(help="Timeout in seconds of an engine's job.")] = 900,
    install_only: Annotated[
        bool, typer.Option("--install-only", help="Create the environments and exit.")
    ] = False,
) -> None:
    """Run all workloads on all engines and print a table."""
    from rich.console import Console

    if size not in checkpoint.SIZES:
        raise typer.BadParameter(
            f"{size!r} is not one of {', '.join(checkpoint.SIZES)}", param_hint="--size"
        )
    if gguf is not None and not gguf.is_file():
        raise typer.BadParameter(f"{gguf} is not a file", param_hint="--gguf")
    choices = WORKS if gguf is None else FILE_WORKS
    works = {name: choices[name] for name in select_names(work, choices, "--work")}
    engines = select_names(engine, ENGINES, "--engine")
    place = (place or envs.default_place()).resolve()
    # Exits normally on SIGTERM, so that the stopped workers are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(stderr=True, highlight=False)
    failures: dict[tuple[str, str], str] = {}
    for name in engines if gguf is None else {**dict.fromkeys(engines), quality.REFERENCE: None}:
        try:
            envs.make(place, name, console.print)
        except envs.EnvError as error:
            failures |= {(work_name, name): str(error) for work_name in works}
            console.print(f"failed: {error}")
    if install_only:
        raise typer.Exit(1 if failures else 0)
    failed_engines = {engine for _, engine in failures}
    if gguf is not None and quality.REFERENCE in failed_engines:
        raise SystemExit(f"--gguf needs {quality.REFERENCE}, which dequantises the file")
    fit = [name for name in engines if name not in failed_engines]
    if gguf is None:
        shape = checkpoint.SIZES[size]
        bench = prepare_random_model(shape, size, place, limit, works, fit)
    else:
        shape = None
        size = gguf.stem
        try:
            bench = prepare_file(gguf.resolve(), place, limit, works, fit)
        except turns.EngineFailure as error:
            raise SystemExit(f"{gguf} cannot be dequantised: {error}") from None
    divergences = (
        {}
        if shape is not None
        else quality.measure(fit, next(iter(works.values())), bench, console.print)
    )
    runnable_works = works
    if shape is not None and (shape.experts or shape.convolved):
        runnable_works = {name: work for name, work in works.items() if not work.adapters}
        missing = product(works.keys() - runnable_works.keys(), engines)
        failures |= dict.fromkeys(missing, "adapters are compared for Llamas alone")
    bandwidths: list[float] = []
    results, failed = turns.play(
        runnable_works, fit, bench, rounds, console.print,
        before_round=lambda: bandwidths.append(read_bandwidth()),
    )  # fmt: skip
    failures |= failed
    if not bandwidths:
        raise typer.Exit(130)  # stopped before the first turn
    bandwidth = median(bandwidths)
    comparison = {
        "size": size,
        "shape": shape and asdict(shape),
        "rounds": rounds,
        "machine": machine(),
        "bandwidth": bandwidth,
        "bandwidths": bandwidths,
        "versions": {name: envs.versions(place, name) for name in engines},
        "divergences": divergences,
        "works": report.summary(works, engines, results, failures, shape, bandwidth),
    }
    Console(width=None if sys.stdout.isatty() else 160).print(report.rich_table(comparison))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{size}.json").write_text(json.dumps(comparison, indent=1))
        (out / f"{size}.md").write_text(report.markdown(comparison))


def prepare_random_model(
    shape: checkpoint.ModelShape,
    size: str,
    place: Path,
    limit: float,
    works: Mapping[str, Workload],
    engines: list[str],
) -> turns.Bench:
    """Write a model with random weights in the formats that the workloads need."""
    folder = checkpoint.write(place / "checkpoints" / size / "hf", shape)
    settings = LoadSettings(
        str(folder), "", "bf16", checkpoint.MAX_LEN, MAX_SEQS, collect_env.cores()
    )
    bench = turns.Bench(place, settings, limit)
    for weights in ("int8", "int4"):
        if "vllm" in engines and any(work.weights == weights for work in works.values()):
            checkpoint.quantise(folder, folder.parent / "vllm" / weights, weights)
    for number in range(max((work.adapters for work in works.values()), default=0)):
        checkpoint.write_adapter(checkpoint.adapter_folder(folder, number), shape, number)
    shared = [work for work in works.values() if work.weights == "q4_k_m"]
    if shared and "llama.cpp" in engines:
        turns.prepare("llama.cpp", shared[0], bench)  # Quire reads the same file
    return bench


def prepare_file(
    file: Path, place: Path, limit: float, works: Mapping[str, Workload], engines: list[str]
) -> turns.Bench:
    """Write the dequantised weights of a GGUF file, and for vLLM these in int4."""
    folder = place / "checkpoints" / file.stem / "hf"
    longest = max(work.prompt[1] + work.output[1] for work in works.values())
    settings = LoadSettings(
        str(folder), "", "gguf", -(-longest // 256) * 256, MAX_SEQS, collect_env.cores(),
        file=str(file),
    )  # fmt: skip
    bench = turns.Bench(place, settings, limit)
    turns.dequantise(bench)
    if "vllm" in engines:
        weights = turns.NEAREST["vllm"]
        checkpoint.quantise(folder, folder.parent / "vllm" / weights, weights)
    return bench


def select_names(selected: list[str] | None, options, option: str) -> list[str]:
    """The selected names, or all if none are selected, in the order of `options`."""
    if unknown := [name for name in selected or [] if name not in options]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is not one of {', '.join(options)}", param_hint=option
        )
    return [name for name in options if not selected or name in selected]


def machine() -> dict[str, str | int]:
    """The processor, the number of cores and the operating system."""
    return {
        "processor": dict(collect_env.machine())["cpu"],
        "cores": collect_env.cores(),
        "system": platform.platform(),
    }


if __name__ == "__main__":
    typer.run(main)
