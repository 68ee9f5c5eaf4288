"""Worker process of one engine: reads jobs from stdin and writes answers to stdout, a JSON object
per line.

The engine's own interpreter runs it by its path: `python -P .../worker.py vllm`. The engine's
output goes to stderr.
"""

import json
import os
import sys
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import numpy as np

if not __package__:  # run by its path: the peer's packages precede these tools on sys.path
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    __package__ = "peers"

from .loop import LoadSettings, TimedPrompt

RUNNERS = {
    "quire": ".run_quire",
    "vllm": ".run_vllm",
    "openvino": ".run_openvino",
    "transformers": ".run_transformers",
    "llama.cpp": ".run_llama_cpp",
}


def reply(runner, state: dict, job: dict) -> dict:
    """Run one job: all but `run`, which takes requests, take LoadSettings."""
    if job["op"] == "prepare":
        runner.prepare(LoadSettings(**job["settings"]))
        return {}
    if job["op"] == "load":
        state["serve"] = runner.load(LoadSettings(**job["settings"]))
        return {}
    if job["op"] == "dequantise":
        runner.dequantise(LoadSettings(**job["settings"]))
        return {}
    if job["op"] == "score":
        scores_TV = runner.score(LoadSettings(**job["settings"]), job["tokens"])
        np.save(job["out"], log_softmax(np.asarray(scores_TV, np.float64)).astype(np.float32))
        return {}
    requests = [TimedPrompt(**request) for request in job["requests"]]
    return {"answers": [asdict(answer) for answer in state["serve"](requests)]}


def log_softmax(scores_TV: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits; those of log-probabilities are the same."""
    shifted_TV = scores_TV - scores_TV.max(-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirects output of libraries, in Python or C, away from the answers
    state: dict = {}
    runner = None
    for line in sys.stdin:
        try:
            runner = runner or import_module(RUNNERS[sys.argv[1]], __package__)
            answer = reply(runner, state, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0]}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
