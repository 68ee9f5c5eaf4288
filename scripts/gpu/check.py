"""Checks and times Quire on this machine's NVIDIA GPU: `python -m quire.scripts.gpu.check [--out
FOLDER]`.

Every part runs in a process of its own: it finds an empty card, a crash or a hang stops no other
part, and what it has found by then is kept. The most important parts run first, as long as there is
time.
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
    """A part of the check; it is skipped when fewer seconds are left than it needs on an H100, by
    estimate.
    """

    name: str
    title: str
    module: str
    function: str
    needs: float
    options: dict[str, Any] = field(default_factory=dict)
    flags: str = ""  # of XLA, besides those of the environment

    def attention(self, found: dict[str, Any]) -> dict[str, str]:
        """The attention that it uses: its own choice, or the kernel unless that has failed
        already.
        """
        if self.function not in ("run", "experts"):
            return {}
        works = all(sound(found[name]) for name in ("right", "step_kernel") if name in found)
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


def sound(found: dict[str, Any]) -> bool:
    return not {"failed", "wrong", "skipped"} & set(found)


def check(
    parts: Sequence[CheckPart],
    budget: float,
    launch: Launch,
    save: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """The findings of each part; a part that needs more seconds than are left is skipped."""
    began = clock()
    found = {}
    for part in parts:
        left = budget - (clock() - began)
        print(f"\n{part.name}: {part.title}", flush=True)
        if left < part.needs:
            found[part.name] = {
                "skipped": f"{left:.0f} s are left and it takes about {part.needs:.0f}"
            }
            print(f"skipped: {found[part.name]['skipped']}", flush=True)
        else:
            started = clock()
            # A part that hangs must leave time for the others.
            found[part.name] = launch(part, part.attention(found), min(left, 2.5 * part.needs))
            found[part.name]["took"] = clock() - started
            if failed := found[part.name].get("failed"):
                print(f"FAILED: {failed}", flush=True)
        save(found)
    return found


def start(
    part: CheckPart, chosen: dict[str, str], limit: float, folder: Path, seed: int, tiny: bool
) -> dict[str, Any]:
    """Run a part in a process of its own. Returns its findings, and how it failed if it did."""
    file = folder / f"{part.name}.json"
    errors = folder / f"{part.name}.err"
    command = [
        sys.executable,
        "-m",
        __spec__.name if __spec__ else __name__,
        "--part",
        part.name,
        "--file",
        str(file),
    ]
    command += [
        "--seed",
        str(seed),
        *(["--attention", chosen["attention"]] if chosen else []),
        *["--tiny"] * tiny,
    ]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {part.flags}".strip()
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
                os.killpg(child.pid, signal.SIGKILL)  # with its own children
                child.wait()
    found = json.loads(file.read_text()) if file.exists() else {}
    if failed:
        last = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()][
            -12:
        ]
        found["failed"] = "\n".join([failed, *last])
    return found


def run_part(name: str, file: Path, seed: int, attention: str | None, tiny: bool) -> None:
    """Run a part in this process."""
    from ...ops.gpu.device import is_hopper
    from ...serving.build import use_compile_cache
    from .common import FULL, TINY, PartReport

    use_compile_cache()
    scale = TINY if tiny else FULL if is_hopper() else replace(FULL, kernel="triton")
    part = next(part for part in (*PARTS, MACHINE) if part.name == name)
    options = {name: value for name, value in part.options.items() if name != "attention"}
    options |= {} if attention is None else {"attention": attention}
    run = getattr(importlib.import_module(part.module, __package__), part.function)
    run(PartReport(file), scale, seed, **options)


def machine(report, scale, seed: int) -> None:
    """The card, and XLA's flags."""
    from ...ops.gpu import device
    from ...ops.gpu.self_test import describe_gpu

    found = {
        "serves": device.is_gpu() and device.no_ampere_reason() is None,
        **describe_gpu(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "seed": seed,
    }
    report(**found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Check and time Quire on this machine's NVIDIA GPU."
    )
    parser.add_argument("--out", type=Path, help="a folder for gpu_check.json")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it may take (10)")
    parser.add_argument(
        "--only", nargs="+", choices=[part.name for part in PARTS], help="these parts"
    )
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 1_000_000, help="of the random inputs"
    )
    for name in ("--part", "--attention"):  # how it calls itself
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    # on any machine, to test the check
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        return run_part(chosen.part, chosen.file, chosen.seed, chosen.attention, chosen.tiny)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:

        def launch(part: CheckPart, attention: dict[str, str], limit: float) -> dict[str, Any]:
            return start(part, attention, limit, Path(place), chosen.seed, chosen.tiny)

        here = launch(MACHINE, {}, 120)
        if "failed" in here:
            parser.exit(1, f"JAX does not start: {here['failed']}\n")
        if not here["serves"] and not chosen.tiny:
            parser.exit(
                1,
                "there is no NVIDIA GPU from Ampere on (compute capability 8.0) here: "
                f"{here['device']}\n",
            )
        for name, value in here.items():
            print(f"{name}: {value}")

        def save(found: dict[str, Any]) -> None:
            if chosen.out is not None:
                chosen.out.mkdir(parents=True, exist_ok=True)
                (chosen.out / "gpu_check.json").write_text(
                    json.dumps({"machine": here, "parts": found}, indent=1)
                )

        parts = [part for part in PARTS if not chosen.only or part.name in chosen.only]
        found = check(parts, chosen.minutes * 60 - (time.monotonic() - began), launch, save)
    bad = [name for name, part in found.items() if {"failed", "wrong"} & set(part)]
    if bad:
        raise SystemExit(f"failed or wrong: {', '.join(bad)}")
    return None


if __name__ == "__main__":
    main()
