"""The check for machines with a GPU, as far as it goes without one: its parts at a tiny size, and
its bookkeeping.
"""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.model.checkpoint.loader import family_for
from quire.model.families import llama
from quire.model.planning.cost import kv_read_bytes
from quire.model.weights import abstract
from quire.ops import attention
from quire.ops.attention import triton, xla
from quire.ops.attention.accuracy import LARGEST_ERROR, arrays, attend, reference
from quire.ops.gpu import device
from quire.ops.gpu.self_test import CaseResult
from quire.scripts.gpu import attention as gpu_attention
from quire.scripts.gpu import check as gpu_check
from quire.scripts.gpu import pieces as gpu_pieces
from quire.scripts.gpu import serving as gpu_serving
from quire.scripts.gpu import step as gpu_step
from quire.scripts.gpu.attention import RIGHT, TimedTrial
from quire.scripts.gpu.check import PARTS, CheckPart, check
from quire.scripts.gpu.common import FULL, PAGE, TINY, PartReport, attention_by
from quire.scripts.gpu.step_time import GOALS, least
from quire.serving.device.pipeline import Pipeline
from quire.serving.device.step import step
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.batch_builder import BatchBuilder
from quire.sharding.spec import ArraySpec, nbytes, random_arrays
from quire.tests.support.cases import thinned

SHORT = [work for work in RIGHT if work.length < 600]
FEW = [
    work
    for work in SHORT
    if work.name in ("decode, cap", "chunk, int8", "chunk, latent", "chunk, window")
]


@pytest.mark.parametrize("work", thinned(SHORT, FEW), ids=lambda work: work.name)
@pytest.mark.slow
def test_its_reference_is_what_xla_says(work):
    inputs = arrays(work, 3)
    wanted = reference(work, *inputs)
    out = np.asarray(jax.jit(partial(attend, work, xla.attend))(*inputs), np.float64)
    assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 4e-3


def test_what_it_counts():
    """Bytes and operations of small cases, counted by hand."""
    assert TimedTrial("", 2, 10, heads=2, kv_heads=1, width=4).operations == 4 * 2 * 10 * 2 * 4
    assert TimedTrial("", 1, 3, rows=3, heads=1, kv_heads=1, width=1).operations == 4 * (1 + 2 + 3)
    assert TimedTrial("", 1, 100, heads=1, kv_heads=1, width=1, window=10).operations == 4 * 10
    assert (
        TimedTrial("", 1, 100, heads=1, kv_heads=1, width=1, window=10).bytes == 2 * 2 * 10 + 2 * 2
    )
    assert (
        TimedTrial("", 2, 100, heads=4, kv_heads=2, width=8).bytes
        == 2 * (100 * 2 * 8 * 4) + 2 * 2 * 2 * 4 * 8
    )
    config = llama.config(FULL.hf, 1056)
    weights = abstract(config)
    assert 16.0e9 < nbytes(weights) < 16.1e9
    a_token = 32 * 2 * 8 * 128 * 2
    assert kv_read_bytes(config, 1) == a_token
    words = 128256 * 4096 * 2
    read, _ = least(config, 64, 64, 1000)
    assert read == pytest.approx(nbytes(weights) - words + 64 * 1000 * a_token)
    mixture = family_for(FULL.experts).config(FULL.experts, 1056)
    layers = FULL.experts["num_hidden_layers"]
    few, _ = least(mixture, 1, 1, 1)
    many, _ = least(mixture, 10_000, 1, 1)
    assert many - few == pytest.approx(layers * 120 * 3 * 2048 * 768 * 2), (
        "8 of 128 experts in each layer"
    )


def test_random_arrays_made_in_place():
    kinds = ["ones", "zeros", "bytes", "signed", "scale/127", "exponents"]
    types = [jnp.float32, jnp.float32, jnp.uint8, jnp.int8, jnp.float32, jnp.uint8]
    specs = [
        ArraySpec((500, 70), dtype, (None, None), kind, 9)
        for kind, dtype in zip(kinds, types, strict=True)
    ]
    specs += [ArraySpec((500, 70), jnp.bfloat16, (None, None), fan_in=100)] * 2
    there = random_arrays(specs, 5, on_device=True)
    here = random_arrays(specs, 5)
    for a, b in zip(there, here, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a = np.asarray(a, np.float64)
        b = np.asarray(b, np.float64)
        assert abs(a.mean() - b.mean()) < 0.05 * (b.std() + 1e-9)
        assert a.std() == pytest.approx(b.std(), rel=0.05)
    assert (there[-1] != there[-2]).any()


def test_only_the_attention_named_is_compiled(monkeypatch):
    listed = dict(attention.IMPLEMENTATIONS)
    work = RIGHT[1]
    inputs = arrays(work, 1)

    @jax.jit
    def run(*inputs):
        return attend(work, attention.paged_attention, *inputs)

    run(*inputs)
    with (
        attention_by("mosaic_gpu"),
        pytest.raises(NotImplementedError, match="mosaic_gpu: there is no NVIDIA GPU"),
    ):
        run(*inputs)  # not as it was traced before
    assert listed == attention.IMPLEMENTATIONS
    run(*inputs)


@pytest.mark.nightly
def test_the_step_with_the_kernel_lowers_for_cuda(monkeypatch):
    """At the sizes that the card is measured with, but for the number of layers."""
    monkeypatch.setattr(device, "is_hopper", lambda: True)
    monkeypatch.setattr(device, "num_processors", lambda: 132)
    monkeypatch.setenv("QUIRE_NATIVE", "off")
    length = FULL.context + FULL.steps
    config = llama.config(FULL.hf | {"num_hidden_layers": 2}, length)
    weights = jax.tree.map(lambda spec: spec.struct, abstract(config))
    layouts = BatchBuilder(StepShape.largest(64, FULL.rows, 64).with_cache(1, PAGE, length)).layouts
    state = Pipeline(config, None).abstract_state((100,), PAGE, 64)
    pages = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), state.pages)
    for size in (min(layouts), max(layouts)):
        buffer = layouts[size].padding
        decodes = size.rows == size.seqs
        with attention_by("mosaic_gpu"):
            traced = step.trace(
                weights,
                state.replace(pages=pages),
                buffer,
                shape=layouts[size].shape,
                config=config,
                is_plain=decodes,
            )
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        # In each layer: attention over spans of keys, and beside prompts their merge.
        assert text.count("@mosaic_gpu_v2") == 2 * (1 if decodes else 2)
        # nothing waits for the host: no branch, and one loop, a search of so many steps as are
        # known
        if decodes:
            assert "stablehlo.case" not in text and "stablehlo.if" not in text
            assert text.count("stablehlo.while") <= 1


@pytest.mark.slow
def test_the_step_part(tmp_path):
    found = {}
    for role in ("kernel", "xla"):
        report = PartReport(tmp_path / f"{role}.json")
        gpu_step.run(report, TINY, 3, role)
        found[role] = json.loads(report.file.read_text())
        assert not {"wrong", "failed"} & set(found[role]) and found[role]["copy"] > 0
        for batch in TINY.batches:
            assert found[role][f"batch {batch}"]["share"] > 0
    assert "llama-3-8b, bf16, batch 1, compared" not in found["kernel"]
    assert found["xla"]["llama-3-8b, bf16, batch 6, compared"] == {
        "hidden": 0,
        "first_tokens": 1,
        "tokens": 1,
    }
    report = PartReport(tmp_path / "other.json")
    with np.load(tmp_path / "llama-3-8b, bf16, batch 6.npz") as kept:
        gpu_step.compare(report, "llama-3-8b, bf16, batch 6", kept["drawn"], kept["hidden"][::-1])
    assert "llama-3-8b, bf16, batch 6: hidden states differ by" in report.found["wrong"][0]


@pytest.mark.slow
def test_the_step_of_a_mixture(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(
        GOALS, "qwen3-30b-a3b, bf16, batch 6", GOALS["qwen3-30b-a3b, bf16, batch 64"]
    )
    gpu_step.experts(report := PartReport(tmp_path / "experts.json"), TINY, 3, "xla")
    assert report.found["batch 6"]["share"] > 0 and "batch 1" not in report.found
    assert (
        "to reach 75% of the roof (an H200 by the model: 17.86 ms, 87%)" in capsys.readouterr().out
    )


@pytest.mark.nightly
def test_the_pieces_part(tmp_path, capsys):
    report = PartReport(tmp_path / "pieces.json")
    gpu_pieces.measure(report, TINY, 3)
    times = {
        name: piece["seconds"] for name, piece in report.found.items() if isinstance(piece, dict)
    }
    assert len(times) == 1 + 3 * 2 + 3 * 4 + 1 + 1 + 2 + 4 and min(times.values()) > 0
    kinds = (
        "experts of qwen3_moe",
        "experts of gpt_oss",
        "dense block in int4-32",
        "append",
        "delta rule, 1 sequence of 32 rows",
        "logits",
        "tokens, greedy",
    )
    assert all(any(name.startswith(kind) for name in times) for kind in kinds)
    assert "dense block in bfloat16, 32 rows" in capsys.readouterr().out


def test_what_the_pieces_count():
    """An MLP and experts, by hand; experts that nobody chose are not read."""
    config = llama.config(TINY.hf | {"num_hidden_layers": 1}, 20)
    one, several = gpu_pieces.dense(config, (1, 5), 3)
    weights = 3 * 32 * 48
    assert (one.bytes, one.operations, several.operations) == (
        2 * weights,
        2 * weights,
        5 * 2 * weights,
    )
    hf, _ = TINY.mixtures
    each = 3 * 32 * 32
    mixture = family_for(hf).config(hf, 20)
    one, many = gpu_pieces.mixtures("", mixture, (1, 200), 3)
    assert (one.bytes, many.bytes) == (2 * 2 * each, 6 * 2 * each)
    assert many.operations == 200 * 2 * 2 * each


@pytest.mark.slow
def test_the_serving_part(tmp_path, capsys):
    report = PartReport(tmp_path / "serving.json")
    gpu_serving.run(report, TINY, 3, "kernel")
    found = json.loads(report.file.read_text())
    assert found["throughput"]["total_output_tokens"] == TINY.requests * TINY.answer
    assert found["latency"]["p99_itl_ms"] > 0
    host = found["host"]
    assert host["sequences"] == TINY.streams and host["steps"] > 2
    assert host["share"] == pytest.approx(1 - host["device"] / host["engine"])
    assert "to reach: under 3 %" in capsys.readouterr().out


def test_the_longest_stretch():
    assert gpu_serving.longest([]) == range(0)
    assert gpu_serving.longest([True]) == range(1)
    assert gpu_serving.longest([True, False, True, True, False]) == range(2, 4)
    assert gpu_serving.longest([False, True, True, True]) == range(1, 4)


@pytest.mark.slow
def test_on_other_cards_attention_is_tritons(tmp_path, monkeypatch, capsys):
    """What it does not serve is said, and is neither wrong nor timed."""
    monkeypatch.setattr(triton, "attend", partial(triton.attend, interpret=True))
    few = [work for work in RIGHT if work.name in ("decode, MHA", "chunk, latent")]
    monkeypatch.setattr(gpu_attention, "RIGHT", few)
    monkeypatch.setattr(
        gpu_attention, "FAST", [TimedTrial("latent", 2, 64, kv_heads=1, width=96, values=64)]
    )
    other = replace(TINY, kernel="triton")
    gpu_attention.right(report := PartReport(tmp_path / "right.json"), other, 3)
    assert set(report.found) == {"decode, MHA"} and report.found["decode, MHA"] < LARGEST_ERROR
    gpu_attention.fast(report, other, 3)
    assert (
        capsys.readouterr().out.count("none within the other") == 2 and "latent" not in report.found
    )


@pytest.mark.parametrize(
    ("hopper", "tiny", "kernel"),
    [(True, False, "mosaic_gpu"), (False, False, "triton"), (False, True, "xla")],
)
def test_each_card_has_its_attention(hopper, tiny, kernel, tmp_path, monkeypatch):
    scales = []
    monkeypatch.setattr(device, "is_hopper", lambda: hopper)
    monkeypatch.setattr(gpu_attention, "right", lambda report, scale, seed: scales.append(scale))
    gpu_check.run_part("right", tmp_path / "right.json", 3, None, tiny)
    assert [scale.kernel for scale in scales] == [kernel]


@pytest.mark.slow
def test_attention_by_itself(tmp_path, monkeypatch):
    report = PartReport(tmp_path / "right.json")
    gpu_attention.right(report, TINY, 3)
    assert report.found["decode, MHA"] < LARGEST_ERROR and "wrong" not in report.found
    broken = CaseResult(error=float("nan"), worst_row=0.0, other_bits=0, allowed=LARGEST_ERROR)
    monkeypatch.setattr(gpu_attention, "measure_attention", lambda *given: broken)
    gpu_attention.right(report, TINY, 3)
    short = [work.name for work in RIGHT if work.length <= TINY.longest]
    assert report.found["wrong"] == [f"{name}: wrong {broken.wrong}" for name in short]


@pytest.mark.slow
def test_the_time_of_attention(tmp_path, monkeypatch, capsys):
    """FlashInfer is timed beside it where it has a kernel, and left out elsewhere."""
    short = [
        TimedTrial("decode, 2 of 64", 2, 64),
        TimedTrial("latent", 2, 64, kv_heads=1, width=96, values=64),
    ]
    monkeypatch.setattr(gpu_attention, "FAST", short)
    gpu_attention.fast(report := PartReport(tmp_path / "fast.json"), TINY, 3)
    assert [report.found[work.name]["flashinfer"] for work in short] == [None, None]
    monkeypatch.setattr(gpu_attention.library, "missing", lambda: None)
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(gpu_attention.flashinfer, "attend", xla.attend)
    gpu_attention.fast(report := PartReport(tmp_path / "both.json"), TINY, 3)
    assert (
        report.found["decode, 2 of 64"]["flashinfer"] > 0
        and report.found["latent"]["flashinfer"] is None
    )
    assert (
        "FlashInfer: latent: keys and values must lie in arrays of their own"
        in capsys.readouterr().out
    )


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_parts_run_as_long_as_there_is_time(capsys):
    """In order; one that fails or hangs stops no other, and what is there is saved after each."""
    clock = Clock()
    asked = []
    saved = []
    takes = {"right": 30, "fast": 60, "step_kernel": 100, "serving": 40, "pieces": 80}

    def launch(part, chosen, limit):
        asked.append((part.name, chosen.get("attention"), limit))
        clock.now += min(takes.get(part.name, 10), limit)
        return (
            {"failed": "it ended with status 1\nValueError: no"}
            if part.name == "step_kernel"
            else {"error": 1e-4}
        )

    def save(found):
        saved.append(json.loads(json.dumps(found)))

    found = check(PARTS, 370, launch, save, clock)
    named = ["right", "fast", "step_kernel", "serving", "step_experts", "chosen", "pieces"]
    assert [name for name, *_ in asked] == named
    assert asked[0] == ("right", None, 2.5 * 45)
    assert asked[2] == ("step_kernel", "kernel", 2.5 * 75)
    assert asked[3] == ("serving", "xla", 370 - 190)  # as the kernel has just failed
    assert asked[4] == ("step_experts", "xla", 370 - 230)
    assert asked[5] == ("chosen", None, 370 - 240)
    assert asked[6] == ("pieces", None, 370 - 250)
    assert list(found) == [part.name for part in PARTS]
    assert found["step_xla"] == {"skipped": "40 s are left and it takes about 75"}
    assert found["right"] == {"error": 1e-4, "took": 30}
    assert [len(one) for one in saved] == list(range(1, len(PARTS) + 1))
    out = capsys.readouterr().out
    assert (
        "FAILED: it ended with status 1\nValueError: no" in out and "skipped: 40 s are left" in out
    )


@pytest.mark.parametrize(("found", "serving"), [({}, "kernel"), ({"wrong": ["a"]}, "xla")])
def test_the_kernel_serves_where_it_is_right(found, serving):
    chosen = {}

    def launch(part, attention, limit):
        chosen[part.name] = attention.get("attention")
        return dict(found) if part.name == "right" else {}

    check(PARTS, 1e6, launch, lambda found: None)
    assert chosen["serving"] == serving == chosen["no_graphs"]
    assert chosen["step_xla"] == "xla" and chosen["step_kernel"] == "kernel"


@pytest.mark.slow
def test_a_process_that_fails_or_hangs(tmp_path):
    nonsense = CheckPart("nonsense", "nothing", ".step", "run", 1)
    assert (
        "it took longer than 0 s" in gpu_check.start(nonsense, {}, 0.2, tmp_path, 0, True)["failed"]
    )
    (tmp_path / "nonsense.json").write_text('{"found": 1}')
    found = gpu_check.start(nonsense, {}, 60, tmp_path, 0, True)
    assert found["found"] == 1 and found["failed"].startswith("it ended with status 1\n")
    assert found["failed"].endswith("StopIteration")


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == 1 and "no NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(
        "sys.argv", ["gpu_check", "--tiny", "--only", "right", "--out", str(tmp_path / "out")]
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    gpu_check.main()
    kept = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert set(kept) == {"machine", "parts"} and set(kept["parts"]) == {"right"}
    machine = kept["machine"]
    assert (
        machine["jax"] == jax.__version__
        and machine["xla_flags"] == "--xla_gpu_enable_command_buffer="
    )
    assert {"device", "driver", "platform", "seed"} <= set(machine)
    assert kept["parts"]["right"]["decode, MHA"] < LARGEST_ERROR
    assert "right  decode, MHA" in capfd.readouterr().out
