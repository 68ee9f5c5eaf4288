"""Run the GPU check's serving load on transformers, on the same GPU: `python -m
tools.peers.gpu_streams FOLDER`.

FOLDER is the `--out` of `python -m quire.scripts.gpu.check`. Needs Quire, torch and transformers in
one environment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.scripts.gpu.common import FULL, CheckSizes
from quire.scripts.gpu.serving import requests


def main(
    folder: Annotated[Path, typer.Argument(help="Folder with the check's gpu_check.json.")],
) -> None:
    """Serve the same requests with transformers' continuous batching, and add the results to
    the file.
    """
    from . import continuous  # imports torch and transformers

    if not continuous.has_card():
        raise SystemExit("torch finds no GPU")
    file = folder / "gpu_check.json"
    checked = json.loads(file.read_text())
    checked["parts"]["transformers"] = compare(checked, FULL, continuous)
    file.write_text(json.dumps(checked, indent=1))


def compare(checked: dict[str, Any], scale: CheckSizes, peer: Any) -> dict[str, Any]:
    """The peer's results by its settings, and `times`: Quire's throughput over the peer's best."""
    quire_throughput = (
        checked["parts"].get("serving", {}).get("throughput", {}).get("output_throughput")
    )
    if quire_throughput is None:
        raise SystemExit(
            "gpu_check.json has no throughput of Quire: run the check with its part `serving`"
        )
    prompts = [sample.prompt for sample in requests(scale, checked["machine"]["seed"])]
    results = {}
    for result in peer.run(scale.hf, prompts, scale.answer, scale.streams):
        results[result["what"]] = result
        print(f"{result['what']}: {result['output_throughput']:.0f} output tokens/s", flush=True)
    times = quire_throughput / max(result["output_throughput"] for result in results.values())
    print(
        f"Quire: {quire_throughput:.0f} output tokens/s, {times:.2f} times the best of these; to "
        "reach: 3 times"
    )
    return results | {"times": times}


if __name__ == "__main__":
    typer.run(main)
