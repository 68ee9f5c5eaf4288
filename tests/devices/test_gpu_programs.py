"""Whole steps compiled ahead of time for an H200: launches, graphs, memory and copies stay within
bounds.

Needs what `make gpu-compiler` installs. A change that improves a program lowers its row of BOUNDS.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.scripts.gpu.step_time import GOALS
from quire.tests.support import extras_alone
from quire.tests.support.cases import FACTOR, thinned
from tools.gpu.ahead import CASES
from tools.gpu.target import missing

ROOT = Path(__file__).parents[2]  # the folder of `tools`
MISSING_COMPILER = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        MISSING_COMPILER is not None and "QUIRE_NEEDS_GPU_COMPILER" not in os.environ,
        reason=f"no step is compiled for a GPU: {MISSING_COMPILER} (or make gpu-compiler)",
    ),
]


@dataclass(frozen=True)
class Bound:
    """Upper bounds of a step's program, which must be a single graph without copies of pages or
    experts.
    """

    case: str
    launches: int  # per layer
    temporaries: int  # megabytes
    moved: float  # relative to the bytes that a step must read
    outside: int  # launches outside of the layers
    copied: int = 0  # megabytes of weights per layer, as of a router that is split into summands
    sorts: int = 0  # in all layers and the sampler; XLA may choose a sort that cannot be in a graph
    # bytes per thread over all kernels; 48 are two barrier addresses in chunked attention
    spilled: int = 0
    is_batch_invariant: bool = True


BOUNDS = (
    Bound("llama-3-8b, bf16, batch 1", 8, 10, 1.03, outside=41),
    Bound("llama-3-8b, bf16, batch 64", 8, 35, 1.04, outside=44),
    Bound("llama-3-8b, bf16, batch 256", 8, 140, 1.06, outside=50),
    Bound("llama-3-8b, int8, batch 64", 10, 35, 1.07, outside=45),
    Bound("llama-3-8b, int8-weights, batch 64", 8, 35, 1.06, outside=45),
    Bound("llama-3-8b, int4, batch 64", 8, 35, 1.07, outside=45),
    Bound("llama-3-8b, fp8, batch 64", 10, 35, 1.07, outside=45),
    Bound("llama-3-8b, fp8-weights, batch 64", 8, 35, 1.06, outside=45),
    Bound("llama-3-8b, bf16, batch 64, KV fp8", 8, 35, 1.05, outside=44),
    Bound("llama-3-8b, bf16, batch 64, top-k, top-p", 8, 225, 1.12, outside=129),
    Bound("llama-3-8b, bf16, batch 64, 2048 rows", 9, 225, 1.88, outside=131, spilled=48),
    Bound(
        "llama-3-8b, bf16, batch 64, tensor 8", 10, 13, 1.15, outside=51, is_batch_invariant=False
    ),
    Bound("llama-3-8b, bf16, batch 64, 4 drafts of ngram", 9, 202, 1.36, outside=49, spilled=48),
    Bound(
        "llama-3-8b, bf16, batch 64, 4 drafts of ngram, top-k, top-p",
        9,
        1340,
        2.13,
        outside=147,
        spilled=48,
    ),
    Bound("llama-3-8b, bf16, batch 64, 4 drafts of eagle3", 9, 215, 1.29, outside=140, spilled=48),
    Bound(
        "llama-3-8b, bf16, batch 64, 4 drafts of draft_model", 9, 202, 1.32, outside=158, spilled=48
    ),
    Bound("gemma-3-12b, bf16, batch 64", 8, 71, 1.04, outside=55),
    Bound("qwen3-30b-a3b, bf16, batch 64", 14, 41, 1.06, outside=43),
    Bound("qwen3-30b-a3b, int8, batch 64", 17, 41, 1.14, outside=44),
    Bound("qwen3-30b-a3b, int4, batch 64", 14, 41, 1.16, outside=44),
    Bound("qwen3-30b-a3b, int4-128-zero, batch 64", 14, 41, 1.17, outside=44),
    Bound("qwen3-30b-a3b, fp8, batch 64", 17, 41, 1.14, outside=44),
    Bound("gpt-oss-20b, mxfp4, batch 64", 21, 54, 1.09, outside=49),
    Bound("deepseek-v3, bf16, batch 64", 33, 146, 1.03, outside=44, copied=12),
    Bound("qwen3-next-80b-a3b, bf16, batch 64", 28, 115, 1.13, outside=47),
    Bound("granite-4.0-h-small, bf16, batch 64", 25, 165, 1.22, outside=47, copied=2),
)


QUICK_CASES = ("qwen3-30b-a3b, fp8, batch 64",)
# Each takes half a minute of two cores; `make test-all` runs all of them.
TESTED_BOUNDS = [bound for bound in BOUNDS if bound.case in QUICK_CASES or FACTOR >= 1]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Reports on every tested step, compiled in an environment with only `quire[cuda12]`."""
    assert MISSING_COMPILER is None, MISSING_COMPILER
    python = extras_alone.make(tmp_path_factory.mktemp("alone") / "venv", "cuda12")
    return compile_steps("h200", *(bound.case for bound in TESTED_BOUNDS), python=str(python))


def compile_steps(target: str, *names: str, python: str = sys.executable) -> dict[str, dict]:
    """Reports on the steps of these names, from `tools.gpu.ahead`."""
    assert MISSING_COMPILER is None, MISSING_COMPILER
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "QUIRE_GRAPHS")
    }
    command = [python, "-m", "tools.gpu.ahead", "--json", "--spills", "--target", target, *names]
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000
    )
    assert not process.returncode, process.stderr[-3000:]
    return {report["name"]: report for report in map(json.loads, process.stdout.splitlines())}


@pytest.mark.parametrize("bound", TESTED_BOUNDS, ids=lambda bound: bound.case)
def test_compiled_step_is_within_its_bounds(results, bound):
    report = results[bound.case]
    assert "failed" not in report, report
    assert report["graphs"] == 1 and report["outside"] == {}, (
        "the host synchronizes, or launches more than once"
    )
    assert report["sorts"] <= bound.sorts
    assert not (bound.is_batch_invariant and report["varies"]), report["varies"]
    assert report["spilled"] <= bound.spilled
    assert report["launches_a_layer"] <= bound.launches
    assert report["launches"] <= bound.outside
    assert report["temporaries"] <= bound.temporaries * 1e6
    assert report["moved"] <= bound.moved * report["needed"]
    if goal := GOALS.get(bound.case):
        assert report["seconds"] == pytest.approx(goal.seconds, rel=0.02)
    weights = report["copied"].pop("weights")
    assert not any(report["copied"].values()) and weights <= bound.copied * 1e6, (
        weights,
        report["copied"],
    )


@pytest.mark.parametrize("target", thinned(["a100", "b200"], []))
def test_flashinfer_attention_on_other_gpus(target):
    """Attention is one call in the step's single graph, planned once; XLA's attention takes
    thousands of launches.
    """
    pytest.importorskip(
        "jax_tvm_ffi", reason="jax-tvm-ffi is not installed: pip install -e '.[test]'"
    )
    name = "llama-3-8b, bf16, batch 64"
    report = compile_steps(f"{target}+flashinfer", name)[name]
    assert report["graphs"] == 1 and report["outside"] == {} and not any(report["copied"].values())
    assert (
        report["launches_a_layer"] <= 14 and report["launches"] <= 45 and report["executed"] <= 500
    )
    assert report["temporaries"] <= 35e6 and report["moved"] <= 1.13 * report["needed"]


# (GPU, step): launches per layer, sorts per layer, bytes moved relative to those that must be read
TRITON_BOUNDS = {
    ("a100", "gpt-oss-20b, mxfp4, batch 64"): (37, 1, 1.15),
    ("a100", "qwen3-30b-a3b, bf16, batch 64"): (39, 1, 1.07),
    ("a100", "llama-3-8b, int4, batch 64"): (12, 0, 1.11),
    ("a100", "llama-3-8b, bf16, batch 64"): (15, 0, 1.14),
    ("b200", "qwen3-30b-a3b, int4, batch 64"): (40, 1, 1.20),
    ("b200", "llama-3-8b, fp8-weights, batch 64"): (13, 0, 1.08),
    ("b200", "llama-3-8b, bf16, batch 64"): (15, 0, 1.15),
}
QUICK_TRITON_CASES = [*TRITON_BOUNDS][:1]


@pytest.mark.parametrize("step", thinned(TRITON_BOUNDS, QUICK_TRITON_CASES), ids=", ".join)
def test_triton_kernels_on_other_gpus(step):
    target, name = step
    launches, sorts, moved = TRITON_BOUNDS[step]
    report = compile_steps(target, name)[name]
    assert report["graphs"] == 1 and report["outside"] == {} and not any(report["copied"].values())
    assert report["launches_a_layer"] <= launches and report["moved"] <= moved * report["needed"]
    assert (
        report["sorts"]
        <= sorts * {"gpt-oss-20b": 24, "qwen3-30b-a3b": 48, "llama-3-8b": 32}[name.split(",")[0]]
    )


def test_every_bound_has_a_case():
    assert {bound.case for bound in BOUNDS} <= {case.name for case in CASES}
