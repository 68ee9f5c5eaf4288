"""Whole steps compiled for an H200, without one: their launches, graphs, memory and copies stay
within bounds.

Needs what `make gpu-compiler` installs. A change that makes a program better lowers its row of
BOUNDS.
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

ROOT = Path(__file__).parents[2]  # where `tools` is
LACKING = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        LACKING is not None and "QUIRE_NEEDS_GPU_COMPILER" not in os.environ,
        reason=f"no step is compiled for a GPU: {LACKING} (or make gpu-compiler)",
    ),
]


@dataclass(frozen=True)
class Bound:
    """The most that a step's program may have; one graph holds all of it, and no pages or experts
    are copied.
    """

    case: str
    launches: int  # a layer
    temporaries: int  # megabytes
    moved: float  # times the bytes that a step must read
    others: int  # launches outside of layers
    copied: int = 0  # megabytes of weights a layer: a router's, which is cut into summands
    sorts: int = 0  # of all layers and the sampler; XLA may take one for them that is in no graph
    # bytes a thread, of all kernels; 48 are two addresses of barriers in attention of chunks
    spilled: int = 0
    alike: bool = True  # a row's bits are the same in any company


BOUNDS = (
    Bound("llama-3-8b, bf16, batch 1", 8, 10, 1.03, others=41),
    Bound("llama-3-8b, bf16, batch 64", 8, 35, 1.04, others=44),
    Bound("llama-3-8b, bf16, batch 256", 8, 140, 1.06, others=50),
    Bound("llama-3-8b, int8, batch 64", 10, 35, 1.07, others=45),
    Bound("llama-3-8b, int8-weights, batch 64", 8, 35, 1.06, others=45),
    Bound("llama-3-8b, int4, batch 64", 8, 35, 1.07, others=45),
    Bound("llama-3-8b, fp8, batch 64", 10, 35, 1.07, others=45),
    Bound("llama-3-8b, fp8-weights, batch 64", 8, 35, 1.06, others=45),
    Bound("llama-3-8b, bf16, batch 64, KV fp8", 8, 35, 1.05, others=44),
    Bound("llama-3-8b, bf16, batch 64, top-k, top-p", 8, 225, 1.12, others=129),
    Bound("llama-3-8b, bf16, batch 64, 2048 rows", 9, 225, 1.88, others=131, spilled=48),
    Bound("llama-3-8b, bf16, batch 64, tensor 8", 10, 13, 1.15, others=51, alike=False),
    Bound("llama-3-8b, bf16, batch 64, 4 drafts of ngram", 9, 202, 1.36, others=49, spilled=48),
    Bound(
        "llama-3-8b, bf16, batch 64, 4 drafts of ngram, top-k, top-p",
        9,
        1340,
        2.13,
        others=147,
        spilled=48,
    ),
    Bound("llama-3-8b, bf16, batch 64, 4 drafts of eagle3", 9, 215, 1.29, others=140, spilled=48),
    Bound(
        "llama-3-8b, bf16, batch 64, 4 drafts of draft_model", 9, 202, 1.32, others=158, spilled=48
    ),
    Bound("gemma-3-12b, bf16, batch 64", 8, 71, 1.04, others=55),
    Bound("qwen3-30b-a3b, bf16, batch 64", 14, 41, 1.06, others=43),
    Bound("qwen3-30b-a3b, int8, batch 64", 17, 41, 1.14, others=44),
    Bound("qwen3-30b-a3b, int4, batch 64", 14, 41, 1.16, others=44),
    Bound("qwen3-30b-a3b, int4-128-zero, batch 64", 14, 41, 1.17, others=44),
    Bound("qwen3-30b-a3b, fp8, batch 64", 17, 41, 1.14, others=44),
    Bound("gpt-oss-20b, mxfp4, batch 64", 21, 54, 1.09, others=49),
    Bound("deepseek-v3, bf16, batch 64", 33, 146, 1.03, others=44, copied=12),
    Bound("qwen3-next-80b-a3b, bf16, batch 64", 28, 115, 1.13, others=47),
    Bound("granite-4.0-h-small, bf16, batch 64", 25, 165, 1.22, others=47, copied=2),
)


FEW = ("qwen3-30b-a3b, fp8, batch 64",)
# Half a minute each of two cores: `make test-all` has every one.
TRIED = [bound for bound in BOUNDS if bound.case in FEW or FACTOR >= 1]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the command says of every step that is tried, where nothing is installed but
    `quire[cuda12]`.
    """
    assert LACKING is None, LACKING
    python = extras_alone.make(tmp_path_factory.mktemp("alone") / "venv", "cuda12")
    return compiled("h200", *(bound.case for bound in TRIED), python=str(python))


def compiled(target: str, *names: str, python: str = sys.executable) -> dict[str, dict]:
    """What the command says of the steps of these names."""
    assert LACKING is None, LACKING
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "QUIRE_GRAPHS")
    }
    command = [python, "-m", "tools.gpu.ahead", "--json", "--spills", "--target", target, *names]
    done = subprocess.run(
        command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=3000
    )
    assert not done.returncode, done.stderr[-3000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("bound", TRIED, ids=lambda bound: bound.case)
def test_a_step_within_its_bounds(results, bound):
    found = results[bound.case]
    assert "failed" not in found, found
    assert found["graphs"] == 1 and found["outside"] == {}, (
        "the host waits, or launches more than once"
    )
    assert found["sorts"] <= bound.sorts
    assert not (bound.alike and found["varies"]), found["varies"]
    assert found["spilled"] <= bound.spilled
    assert found["launches_a_layer"] <= bound.launches
    assert found["launches"] <= bound.others
    assert found["temporaries"] <= bound.temporaries * 1e6
    assert found["moved"] <= bound.moved * found["needed"]
    if goal := GOALS.get(bound.case):
        assert found["seconds"] == pytest.approx(goal.seconds, rel=0.02)
    weights = found["copied"].pop("weights")
    assert not any(found["copied"].values()) and weights <= bound.copied * 1e6, (
        weights,
        found["copied"],
    )


@pytest.mark.parametrize("target", thinned(["a100", "b200"], []))
def test_on_other_cards_attention_is_a_call_of_flashinfer(target):
    """In the step's one graph, with a plan that is made once: XLA's attention runs thousands of
    launches.
    """
    pytest.importorskip(
        "jax_tvm_ffi", reason="jax-tvm-ffi is not installed: pip install -e '.[test]'"
    )
    name = "llama-3-8b, bf16, batch 64"
    found = compiled(f"{target}+flashinfer", name)[name]
    assert found["graphs"] == 1 and found["outside"] == {} and not any(found["copied"].values())
    assert found["launches_a_layer"] <= 14 and found["launches"] <= 45 and found["executed"] <= 500
    assert found["temporaries"] <= 35e6 and found["moved"] <= 1.13 * found["needed"]


OTHERS = {  # (card, step): launches a layer, sorts a layer, times the bytes that a step must read
    ("a100", "gpt-oss-20b, mxfp4, batch 64"): (37, 1, 1.15),
    ("a100", "qwen3-30b-a3b, bf16, batch 64"): (39, 1, 1.07),
    ("a100", "llama-3-8b, int4, batch 64"): (12, 0, 1.11),
    ("a100", "llama-3-8b, bf16, batch 64"): (15, 0, 1.14),
    ("b200", "qwen3-30b-a3b, int4, batch 64"): (40, 1, 1.20),
    ("b200", "llama-3-8b, fp8-weights, batch 64"): (13, 0, 1.08),
    ("b200", "llama-3-8b, bf16, batch 64"): (15, 0, 1.15),
}
FIRST = [*OTHERS][:1]


@pytest.mark.parametrize("step", thinned(OTHERS, FIRST), ids=", ".join)
def test_on_other_cards_triton_has_attention_experts_and_codes(step):
    target, name = step
    launches, sorts, moved = OTHERS[step]
    found = compiled(target, name)[name]
    assert found["graphs"] == 1 and found["outside"] == {} and not any(found["copied"].values())
    assert found["launches_a_layer"] <= launches and found["moved"] <= moved * found["needed"]
    assert (
        found["sorts"]
        <= sorts * {"gpt-oss-20b": 24, "qwen3-30b-a3b": 48, "llama-3-8b": 32}[name.split(",")[0]]
    )


def test_bounds_are_of_cases():
    assert {bound.case for bound in BOUNDS} <= {case.name for case in CASES}
