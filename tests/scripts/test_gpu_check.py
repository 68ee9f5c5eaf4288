"""`gpu_check` without a GPU: its parts at a tiny size, and the scheduling of its parts."""

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

SHORT_CASES = [work for work in RIGHT if work.length < 600]
QUICK_CASES = [
    work
    for work in SHORT_CASES
    if work.name in ("decode, cap", "chunk, int8", "chunk, latent", "chunk, window")
]


@pytest.mark.parametrize("work", thinned(SHORT_CASES, QUICK_CASES), ids=lambda work: work.name)
@pytest.mark.slow
def test_float64_reference_agrees_with_xla_attention(work):
    inputs = arrays(work, 3)
    expected = reference(work, *inputs)
    out = np.asarray(jax.jit(partial(attend, work, xla.attend))(*inputs), np.float64)
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 4e-3


def test_bytes_and_operations_are_counted_by_hand():
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
    token_kv_bytes = 32 * 2 * 8 * 128 * 2
    assert kv_read_bytes(config, 1) == token_kv_bytes
    embedding_bytes = 128256 * 4096 * 2
    read, _ = least(config, 64, 64, 1000)
    assert read == pytest.approx(nbytes(weights) - embedding_bytes + 64 * 1000 * token_kv_bytes)
    mixture = family_for(FULL.experts).config(FULL.experts, 1056)
    layers = FULL.experts["num_hidden_layers"]
    read_one_token, _ = least(mixture, 1, 1, 1)
    read_many_tokens, _ = least(mixture, 10_000, 1, 1)
    assert read_many_tokens - read_one_token == pytest.approx(layers * 120 * 3 * 2048 * 768 * 2), (
        "8 of 128 experts in each layer"
    )


def test_random_arrays_on_the_device_match_the_hosts_distribution():
    kinds = ["ones", "zeros", "bytes", "signed", "scale/127", "exponents"]
    types = [jnp.float32, jnp.float32, jnp.uint8, jnp.int8, jnp.float32, jnp.uint8]
    specs = [
        ArraySpec((500, 70), dtype, (None, None), kind, 9)
        for kind, dtype in zip(kinds, types, strict=True)
    ]
    specs += [ArraySpec((500, 70), jnp.bfloat16, (None, None), fan_in=100)] * 2
    device_arrays = random_arrays(specs, 5, on_device=True)
    host_arrays = random_arrays(specs, 5)
    for a, b in zip(device_arrays, host_arrays, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a = np.asarray(a, np.float64)
        b = np.asarray(b, np.float64)
        assert abs(a.mean() - b.mean()) < 0.05 * (b.std() + 1e-9)
        assert a.std() == pytest.approx(b.std(), rel=0.05)
    assert (device_arrays[-1] != device_arrays[-2]).any()


def test_attention_by_selects_one_backend_and_retraces(monkeypatch):
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
        run(*inputs)  # traced anew
    assert listed == attention.IMPLEMENTATIONS
    run(*inputs)


@pytest.mark.nightly
def test_the_step_with_the_kernel_lowers_for_cuda(monkeypatch):
    """At the measured sizes, but with 2 layers."""
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
        # In each layer: attention over spans of keys, and with prompts the merge of the spans.
        assert text.count("@mosaic_gpu_v2") == 2 * (1 if decodes else 2)
        # no branch, and at most one loop, a binary search whose number of iterations is known
        if decodes:
            assert "stablehlo.case" not in text and "stablehlo.if" not in text
            assert text.count("stablehlo.while") <= 1


@pytest.mark.slow
def test_step_part_compares_the_kernel_with_xla(tmp_path):
    reports = {}
    for role in ("kernel", "xla"):
        report = PartReport(tmp_path / f"{role}.json")
        gpu_step.run(report, TINY, 3, role)
        reports[role] = json.loads(report.file.read_text())
        assert not {"wrong", "failed"} & set(reports[role]) and reports[role]["copy"] > 0
        for batch in TINY.batches:
            assert reports[role][f"batch {batch}"]["share"] > 0
    assert "llama-3-8b, bf16, batch 1, compared" not in reports["kernel"]
    assert reports["xla"]["llama-3-8b, bf16, batch 6, compared"] == {
        "hidden": 0,
        "first_tokens": 1,
        "tokens": 1,
    }
    report = PartReport(tmp_path / "other.json")
    with np.load(tmp_path / "llama-3-8b, bf16, batch 6.npz") as saved_outputs:
        gpu_step.compare(
            report,
            "llama-3-8b, bf16, batch 6",
            saved_outputs["drawn"],
            saved_outputs["hidden"][::-1],
        )
    assert "llama-3-8b, bf16, batch 6: hidden states differ by" in report.found["wrong"][0]


@pytest.mark.slow
def test_step_part_of_a_mixture_of_experts(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(
        GOALS, "qwen3-30b-a3b, bf16, batch 6", GOALS["qwen3-30b-a3b, bf16, batch 64"]
    )
    gpu_step.experts(report := PartReport(tmp_path / "experts.json"), TINY, 3, "xla")
    assert report.found["batch 6"]["share"] > 0 and "batch 1" not in report.found
    assert (
        "to reach 75% of the roof (an H200 by the model: 17.86 ms, 87%)" in capsys.readouterr().out
    )


@pytest.mark.nightly
def test_pieces_part_times_every_piece(tmp_path, capsys):
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


def test_pieces_count_bytes_and_operations_of_chosen_experts():
    """An MLP and experts, by hand; experts without tokens are not read."""
    config = llama.config(TINY.hf | {"num_hidden_layers": 1}, 20)
    one_row, five_rows = gpu_pieces.dense(config, (1, 5), 3)
    weights = 3 * 32 * 48
    assert (one_row.bytes, one_row.operations, five_rows.operations) == (
        2 * weights,
        2 * weights,
        5 * 2 * weights,
    )
    hf, _ = TINY.mixtures
    expert_weights = 3 * 32 * 32
    mixture = family_for(hf).config(hf, 20)
    one_row, many_rows = gpu_pieces.mixtures("", mixture, (1, 200), 3)
    assert (one_row.bytes, many_rows.bytes) == (2 * 2 * expert_weights, 6 * 2 * expert_weights)
    assert many_rows.operations == 200 * 2 * 2 * expert_weights


@pytest.mark.slow
def test_serving_part_reports_throughput_latency_and_host_time(tmp_path, capsys):
    report = PartReport(tmp_path / "serving.json")
    gpu_serving.run(report, TINY, 3, "kernel")
    results = json.loads(report.file.read_text())
    assert results["throughput"]["total_output_tokens"] == TINY.requests * TINY.answer
    assert results["latency"]["p99_itl_ms"] > 0
    host = results["host"]
    assert host["sequences"] == TINY.streams and host["steps"] > 2
    assert host["share"] == pytest.approx(1 - host["device"] / host["engine"])
    assert "to reach: under 3 %" in capsys.readouterr().out


def test_longest_run_of_true_values():
    assert gpu_serving.longest([]) == range(0)
    assert gpu_serving.longest([True]) == range(1)
    assert gpu_serving.longest([True, False, True, True, False]) == range(2, 4)
    assert gpu_serving.longest([False, True, True, True]) == range(1, 4)


@pytest.mark.slow
def test_attention_part_uses_triton_on_other_gpus(tmp_path, monkeypatch, capsys):
    """Unsupported cases are reported; they are neither wrong nor timed."""
    monkeypatch.setattr(triton, "attend", partial(triton.attend, interpret=True))
    cases = [work for work in RIGHT if work.name in ("decode, MHA", "chunk, latent")]
    monkeypatch.setattr(gpu_attention, "RIGHT", cases)
    monkeypatch.setattr(
        gpu_attention, "FAST", [TimedTrial("latent", 2, 64, kv_heads=1, width=96, values=64)]
    )
    triton_scale = replace(TINY, kernel="triton")
    gpu_attention.right(report := PartReport(tmp_path / "right.json"), triton_scale, 3)
    assert set(report.found) == {"decode, MHA"} and report.found["decode, MHA"] < LARGEST_ERROR
    gpu_attention.fast(report, triton_scale, 3)
    assert (
        capsys.readouterr().out.count("none within the other") == 2 and "latent" not in report.found
    )


@pytest.mark.parametrize(
    ("hopper", "tiny", "kernel"),
    [(True, False, "mosaic_gpu"), (False, False, "triton"), (False, True, "xla")],
)
def test_attention_backend_by_gpu(hopper, tiny, kernel, tmp_path, monkeypatch):
    scales = []
    monkeypatch.setattr(device, "is_hopper", lambda: hopper)
    monkeypatch.setattr(gpu_attention, "right", lambda report, scale, seed: scales.append(scale))
    gpu_check.run_part("right", tmp_path / "right.json", 3, None, tiny)
    assert [scale.kernel for scale in scales] == [kernel]


@pytest.mark.slow
def test_attention_part_reports_wrong_results(tmp_path, monkeypatch):
    report = PartReport(tmp_path / "right.json")
    gpu_attention.right(report, TINY, 3)
    assert report.found["decode, MHA"] < LARGEST_ERROR and "wrong" not in report.found
    broken = CaseResult(error=float("nan"), worst_row=0.0, other_bits=0, allowed=LARGEST_ERROR)
    monkeypatch.setattr(gpu_attention, "measure_attention", lambda *args: broken)
    gpu_attention.right(report, TINY, 3)
    names = [work.name for work in RIGHT if work.length <= TINY.longest]
    assert report.found["wrong"] == [f"{name}: wrong {broken.wrong}" for name in names]


@pytest.mark.slow
def test_attention_part_times_flashinfer_where_supported(tmp_path, monkeypatch, capsys):
    trials = [
        TimedTrial("decode, 2 of 64", 2, 64),
        TimedTrial("latent", 2, 64, kv_heads=1, width=96, values=64),
    ]
    monkeypatch.setattr(gpu_attention, "FAST", trials)
    gpu_attention.fast(report := PartReport(tmp_path / "fast.json"), TINY, 3)
    assert [report.found[work.name]["flashinfer"] for work in trials] == [None, None]
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


def test_check_runs_the_parts_that_fit_into_the_time_left(capsys):
    """Parts run in order, a failed part stops no other, and results are saved after each part."""
    clock = Clock()
    launches = []
    saved = []
    seconds_by_part = {"right": 30, "fast": 60, "step_kernel": 100, "serving": 40, "pieces": 80}

    def launch(check_part, chosen, limit):
        launches.append((check_part.name, chosen.get("attention"), limit))
        clock.now += min(seconds_by_part.get(check_part.name, 10), limit)
        return (
            {"failed": "it ended with status 1\nValueError: no"}
            if check_part.name == "step_kernel"
            else {"error": 1e-4}
        )

    def save(results):
        saved.append(json.loads(json.dumps(results)))

    results = check(PARTS, 370, launch, save, clock)
    launched_names = ["right", "fast", "step_kernel", "serving", "step_experts", "chosen", "pieces"]
    assert [name for name, *_ in launches] == launched_names
    assert launches[0] == ("right", None, 2.5 * 45)
    assert launches[2] == ("step_kernel", "kernel", 2.5 * 75)
    assert launches[3] == ("serving", "xla", 370 - 190)  # as the kernel has just failed
    assert launches[4] == ("step_experts", "xla", 370 - 230)
    assert launches[5] == ("chosen", None, 370 - 240)
    assert launches[6] == ("pieces", None, 370 - 250)
    assert list(results) == [check_part.name for check_part in PARTS]
    assert results["step_xla"] == {"skipped": "40 s are left and it takes about 75"}
    assert results["right"] == {"error": 1e-4, "took": 30}
    assert [len(snapshot) for snapshot in saved] == list(range(1, len(PARTS) + 1))
    out = capsys.readouterr().out
    assert (
        "FAILED: it ended with status 1\nValueError: no" in out and "skipped: 40 s are left" in out
    )


@pytest.mark.parametrize(("right_result", "serving"), [({}, "kernel"), ({"wrong": ["a"]}, "xla")])
def test_check_serves_with_xla_if_the_kernel_is_wrong(right_result, serving):
    chosen = {}

    def launch(check_part, attention, limit):
        chosen[check_part.name] = attention.get("attention")
        return dict(right_result) if check_part.name == "right" else {}

    check(PARTS, 1e6, launch, lambda right_result: None)
    assert chosen["serving"] == serving == chosen["no_graphs"]
    assert chosen["step_xla"] == "xla" and chosen["step_kernel"] == "kernel"


@pytest.mark.slow
def test_part_process_that_fails_or_hangs_is_reported(tmp_path):
    nonsense = CheckPart("nonsense", "nothing", ".step", "run", 1)
    assert (
        "it took longer than 0 s" in gpu_check.start(nonsense, {}, 0.2, tmp_path, 0, True)["failed"]
    )
    (tmp_path / "nonsense.json").write_text('{"found": 1}')
    results = gpu_check.start(nonsense, {}, 60, tmp_path, 0, True)
    assert results["found"] == 1 and results["failed"].startswith("it ended with status 1\n")
    assert results["failed"].endswith("StopIteration")


def test_gpu_check_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == 1 and "no NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_gpu_check_command_writes_its_results(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(
        "sys.argv", ["gpu_check", "--tiny", "--only", "right", "--out", str(tmp_path / "out")]
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    gpu_check.main()
    results = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert set(results) == {"machine", "parts"} and set(results["parts"]) == {"right"}
    machine = results["machine"]
    assert (
        machine["jax"] == jax.__version__
        and machine["xla_flags"] == "--xla_gpu_enable_command_buffer="
    )
    assert {"device", "driver", "platform", "seed"} <= set(machine)
    assert results["parts"]["right"]["decode, MHA"] < LARGEST_ERROR
    assert "right  decode, MHA" in capfd.readouterr().out
