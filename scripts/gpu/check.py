"""Check and time Quire on this machine's NVIDIA GPU: `python -m quire.scripts.gpu.check [--out
FOLDER]`.

Every part runs in a process of its own, with the whole GPU memory. A crash or a hang does not
affect other parts, and results reported before it are kept. The most important parts run first;
parts that do not fit into the time limit are skipped.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

GRAPHS = "--xla_gpu_enable_command_buffer="


@dataclass(frozen=True)
class CheckPart:
    """A part of the check, skipped when the remaining time is below `estimated_seconds`."""

    name: str
    title: str
    module: str
    function: str
    estimated_seconds: float  # on an H100
    options: dict[str, Any] = field(default_factory=dict)
    flags: str = ""  # XLA flags in addition to those in the environment

    def attention(self, results: dict[str, Any]) -> dict[str, str]:
        """The attention to use: the part's own option, else the kernel unless its checks failed."""
        if self.function not in ("run", "experts"):
            return {}
        works = all(passed(results[name]) for name in ("right", "step_kernel") if name in results)
        return {"attention": self.options.get("attention") or ("kernel" if works else "xla")}


PARTS = (
    CheckPart("right", "the attention kernel against float64", ".attention", "right", 45),
    CheckPart("fast", "the attention kernel's time", ".attention", "fast", 45),
    CheckPart(
        "step_kernel",
        "the decode step with the kernel",
        ".step",
        "run",
        75,
        {"attention": "kernel"},
    ),
    CheckPart("serving", "streams, and the host between steps", ".serving", "run", 75),
    CheckPart("step_experts", "the decode step of a mixture of experts", ".step", "experts", 100),
    CheckPart("chosen", "what an engine chooses by itself", ".attention", "chosen", 100),
    CheckPart("pieces", "what else a step is made of", ".pieces", "measure", 75),
    CheckPart(
        "step_xla", "the decode step with XLA's attention", ".step", "run", 75, {"attention": "xla"}
    ),
    CheckPart(
        "no_graphs",
        "a decode step without command buffers",
        ".step",
        "run",
        45,
        {"batches": (1,)},
        GRAPHS,
    ),
    CheckPart(
        "graphs_default",
        "a decode step with XLA's own choice of command buffers",
        ".step",
        "run",
        45,
        {"batches": (1,)},
        f"{GRAPHS}+FUSION",
    ),
)
MACHINE = CheckPart("machine", "the machine", ".check", "machine", 0)
Launch = Callable[[CheckPart, dict[str, str], float], dict[str, Any]]


def passed(findings: dict[str, Any]) -> bool:
    return not {"failed", "wrong", "skipped"} & set(findings)


def check(
    check_parts: Sequence[CheckPart],
    budget: float,
    launch: Launch,
    save: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run the parts that fit into `budget` seconds. Returns the findings by part."""
    began = clock()
    results = {}
    for check_part in check_parts:
        remaining = budget - (clock() - began)
        print(f"\n{check_part.name}: {check_part.title}", flush=True)
        if remaining < check_part.estimated_seconds:
            reason = (
                f"{remaining:.0f} s are left and it takes about {check_part.estimated_seconds:.0f}"
            )
            results[check_part.name] = {"skipped": reason}
            print(f"skipped: {reason}", flush=True)
        else:
            started = clock()
            # A part that hangs must leave time for the others.
            limit = min(remaining, 2.5 * check_part.estimated_seconds)
            findings = launch(check_part, check_part.attention(results), limit)
            results[check_part.name] = findings
            findings["took"] = clock() - started
            if failed := findings.get("failed"):
                print(f"FAILED: {failed}", flush=True)
        save(results)
    return results


def start(
    check_part: CheckPart, chosen: dict[str, str], limit: float, folder: Path, seed: int, tiny: bool
) -> dict[str, Any]:
    """Run a part in a subprocess. Returns its findings; `failed` holds the reason if it failed."""
    file = folder / f"{check_part.name}.json"
    errors = folder / f"{check_part.name}.err"
    command = [
        sys.executable,
        "-m",
        __spec__.name if __spec__ else __name__,
        "--part",
        check_part.name,
        "--file",
        str(file),
    ]
    command += [
        "--seed",
        str(seed),
        *(["--attention", chosen["attention"]] if chosen else []),
        *["--tiny"] * tiny,
    ]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {check_part.flags}".strip()
    with errors.open("w") as stderr:
        child = subprocess.Popen(
            command, stderr=stderr, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **({"XLA_FLAGS": flags} if flags else {})},
        )  # fmt: skip
        try:
            status = child.wait(limit)
            failed = f"it ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            failed = f"it took longer than {limit:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # its children too
                child.wait()
    findings = json.loads(file.read_text()) if file.exists() else {}
    if failed:
        lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        findings["failed"] = "\n".join([failed, *lines[-12:]])
    return findings


def run_part(name: str, file: Path, seed: int, attention: str | None, tiny: bool) -> None:
    """Run a part in this process."""
    from ...ops.gpu.device import is_hopper
    from ...serving.build import use_compile_cache
    from .common import FULL, TINY, PartReport

    use_compile_cache()
    scale = TINY if tiny else FULL if is_hopper() else replace(FULL, kernel="triton")
    check_part = next(check_part for check_part in (*PARTS, MACHINE) if check_part.name == name)
    options = {name: value for name, value in check_part.options.items() if name != "attention"}
    options |= {} if attention is None else {"attention": attention}
    run = getattr(importlib.import_module(check_part.module, __package__), check_part.function)
    run(PartReport(file), scale, seed, **options)


def machine(report, scale, seed: int) -> None:
    """Report the GPU, whether it is supported, and the XLA flags."""
    from ...ops.gpu import device
    from ...ops.gpu.self_test import describe_gpu

    findings = {
        "serves": device.is_gpu() and device.no_ampere_reason() is None,
        **describe_gpu(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "seed": seed,
    }
    report(**findings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Check and time Quire on this machine's NVIDIA GPU."
    )
    parser.add_argument("--out", type=Path, help="folder for the results, gpu_check.json")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit in minutes (10)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[check_part.name for check_part in PARTS],
        help="parts to run (all)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed for random inputs (from the clock)",
    )
    for name in ("--part", "--attention"):  # set by the subprocess call in `start`
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    # Runs tiny sizes on any machine, for tests of this script.
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        return run_part(chosen.part, chosen.file, chosen.seed, chosen.attention, chosen.tiny)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:

        def launch(
            check_part: CheckPart, attention: dict[str, str], limit: float
        ) -> dict[str, Any]:
            return start(check_part, attention, limit, Path(folder), chosen.seed, chosen.tiny)

        machine_findings = launch(MACHINE, {}, 120)
        if "failed" in machine_findings:
            parser.exit(1, f"JAX does not start: {machine_findings['failed']}\n")
        if not machine_findings["serves"] and not chosen.tiny:
            parser.exit(
                1,
                "there is no NVIDIA GPU from Ampere on (compute capability 8.0) here: "
                f"{machine_findings['device']}\n",
            )
        for name, value in machine_findings.items():
            print(f"{name}: {value}")

        def save(results: dict[str, Any]) -> None:
            if chosen.out is not None:
                chosen.out.mkdir(parents=True, exist_ok=True)
                (chosen.out / "gpu_check.json").write_text(
                    json.dumps({"machine": machine_findings, "parts": results}, indent=1)
                )

        selected_parts = [
            check_part for check_part in PARTS if not chosen.only or check_part.name in chosen.only
        ]
        budget = chosen.minutes * 60 - (time.monotonic() - began)
        results = check(selected_parts, budget, launch, save)
    bad = [name for name, findings in results.items() if {"failed", "wrong"} & set(findings)]
    if bad:
        raise SystemExit(f"failed or wrong: {', '.join(bad)}")
    return None


if __name__ == "__main__":
    main()
