"""FlashInfer attention without a GPU: plan, arguments, unsupported cases and fallbacks.

A numpy function (`flashinfer_kernel.py`) replaces the kernel; jax-tvm-ffi calls it as it calls
FlashInfer.
"""

import dataclasses
import json
import time
import tomllib
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from quire import LLM
from quire.model.config import ModelError
from quire.ops import attention
from quire.ops.attention import KVPages, QueryRows, accuracy, cpu, flashinfer, triton
from quire.ops.attention.accuracy import AttentionCase, Trial, arrays, attend
from quire.ops.attention.backend import AttentionParams, AttentionShape
from quire.ops.attention.flashinfer_kernel import library
from quire.ops.attention.flashinfer_kernel.plan import PlanShape, make_plan
from quire.ops.gpu import device, self_test
from quire.ops.gpu.self_test import CaseResult, measure
from quire.ops.implementations import NoImplementation, variance
from quire.serving.api.params import SamplingParams
from quire.tests.support import flashinfer_kernel
from quire.tests.support.attention_cases import LONGEST, Sequence, Shape, build, check, ragged, run
from quire.tests.support.cases import cases, thinned

PROCESSORS = 108


@pytest.fixture(autouse=True)
def a100(monkeypatch, tmp_path):
    """Pretend an A100."""
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(device, "is_hopper", lambda: False)
    monkeypatch.setattr(device, "capability", lambda: "8.0")
    monkeypatch.setattr(device, "num_processors", lambda: PROCESSORS)
    monkeypatch.setattr(library, "built", lambda kernel: ("", None))
    monkeypatch.setattr(library, "missing", lambda: None)
    # XLA keeps an FFI target per name for the process's lifetime: all names get this function.
    monkeypatch.setattr(library, "PLATFORM", "cpu")
    monkeypatch.setattr(
        library, "load", lambda path: lambda *arguments: flashinfer_kernel.paged_run(*arguments)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("QUIRE_MOSAIC", "trusted")
    forget_verdicts()
    yield
    forget_verdicts()


def forget_verdicts() -> None:
    self_test.verdict.cache_clear()
    self_test.warn_once.cache_clear()
    jax.clear_caches()


@pytest.fixture
def kernel(monkeypatch):
    """Run the numpy function on the CPU, also for float32 and small heads."""
    pytest.importorskip(
        "jax_tvm_ffi", reason="jax-tvm-ffi is not installed: pip install -e '.[test]'"
    )
    monkeypatch.setattr(flashinfer, "DTYPES", ("float32", "bfloat16", "float16"))
    monkeypatch.setattr(flashinfer, "WIDTHS", (16, 32, 64, 128, 256))


SHAPES = {
    "gqa": Shape(),
    "mha": Shape(K=4, G=1),
    "mqa": Shape(K=1, G=4, H=32),
    "wide group": Shape(K=1, G=60, T=32),
    "seven heads": Shape(K=2, G=7),
    "page 1": Shape(S=1),
    "page 96": Shape(S=96),
    "window": Shape(window=40),
    "window 1": Shape(window=1, S=8),
    "soft cap": Shape(soft_cap=2.0, window=70),
    "sinks": Shape(sinks=True, window=24),
    "sinks alone": Shape(sinks=True),
    "few rows": Shape(T=5, B=4),
    "one sequence": Shape(T=64, B=1),
    "decoding": Shape(T=16, B=16),
    "decoding, window": Shape(T=16, B=16, window=33, S=8),
}


ALWAYS_TESTED = [
    "gqa",
    "mqa",
    "seven heads",
    "page 1",
    "window 1",
    "soft cap",
    "sinks",
    "decoding, window",
]


@pytest.mark.random
@pytest.mark.parametrize("name", thinned(SHAPES, ALWAYS_TESTED))
@pytest.mark.slow
def test_random_steps_match_float64(kernel, name):
    """Unused memory holds NaN, and unused table entries hold stale page ids."""
    shape = SHAPES[name]
    rng = np.random.default_rng(3)
    for _ in range(cases(20, least=4)):
        check(
            shape,
            ragged(shape, rng),
            rng,
            partial(attention.paged_attention, implementation="flashinfer"),
        )


@pytest.mark.parametrize("processors", [1, 8, 500])
@pytest.mark.slow
def test_split_contexts_match_float64_for_any_number_of_processors(kernel, monkeypatch, processors):
    monkeypatch.setattr(device, "num_processors", lambda: processors)
    rng = np.random.default_rng(processors)
    for shape in (Shape(S=8, T=3, B=3), Shape(S=8, T=40, B=3, window=150)):
        sequences = [Sequence(1, LONGEST - 1, 1), Sequence(2, 3, 1), Sequence(3, 130, 1)]
        check(
            shape, sequences, rng, partial(attention.paged_attention, implementation="flashinfer")
        )


def test_a_step_without_rows(kernel):
    shape = Shape(T=4, B=2)
    case = build(shape, [Sequence(1, 20, 0)], np.random.default_rng(0))
    out, _ = run(shape, case, partial(attention.paged_attention, implementation="flashinfer"))
    assert not out.any()


def expected_spans(shape: PlanShape, rows: QueryRows) -> set[tuple[int, int, int, int]]:
    """All (row, query head of the group, first key, end) of a step, without split contexts."""
    spans = set()
    starts = np.asarray(rows.starts_B1)
    positions = np.asarray(rows.positions_T)
    for b in range(shape.sequences):
        for row in range(starts[b], starts[b + 1]):
            for head in range(shape.group):
                end = positions[row] + 1
                first = 0 if shape.window is None else max(0, end - shape.window)
                spans.add((row, head, first, end))
    return spans


@pytest.mark.random
@pytest.mark.slow
def test_plan_covers_each_key_of_each_row_once():
    """In production sizes: parts are contiguous, and each partial result has its own place."""
    rng = np.random.default_rng(5)
    num_split = 0
    for _ in range(cases(60, least=12)):
        shape = PlanShape(
            rows=int(rng.choice([8, 64, 300])),
            sequences=int(rng.choice([1, 8, 40])),
            heads=32,
            kv_heads=int(rng.choice([1, 2, 8, 32])),
            width=128,
            page=int(rng.choice([1, 16, 64, 256])),
            table=4096,
            window=None if rng.random() < 0.5 else int(rng.choice([1, 500, 4096])),
            processors=int(rng.choice([1, 46, 108, 148])),
        )
        rows = random_rows(shape, rng)
        plan = jax.tree.map(np.asarray, jax.jit(partial(make_plan, shape))(rows))
        num_split += check_plan(shape, rows, plan)
    assert num_split > 5, "few contexts were cut"


def random_rows(shape: PlanShape, rng: np.random.Generator) -> QueryRows:
    """Sequences that decode or prefill a chunk, some without rows, and padding."""
    B = shape.sequences
    T = shape.rows
    remaining = shape.rows
    counts = np.zeros(B, int)
    positions = rng.integers(0, 9, T)
    for b in rng.permutation(B):
        counts[b] = min(remaining, int(rng.choice([0, 1, 1, 1, rng.integers(1, T + 1)])))
        remaining -= counts[b]
    starts = np.concatenate([[0], np.cumsum(counts)])
    for b in range(B):
        max_first = shape.table * shape.page - counts[b]
        first = (
            int(rng.integers(0, max_first + 1))
            if rng.random() < 0.5
            else int(rng.integers(0, min(max_first, 900) + 1))
        )
        positions[starts[b] : starts[b + 1]] = first + np.arange(counts[b])
    tables = rng.integers(0, 1 << 20, (B, shape.table))
    return QueryRows(*(jnp.asarray(x, jnp.int32) for x in (positions, starts, tables, np.zeros(T))))


def check_plan(shape: PlanShape, rows: QueryRows, plan) -> bool:
    """Check a plan's work items; return whether it splits a context."""
    offsets = shape.offsets
    words = plan.words
    G = shape.group
    assert len(words) == offsets["end"]

    def listed(name: str, count: int) -> np.ndarray:
        return words[offsets[name] : offsets[name] + count]

    counts = (
        words[offsets["block_valid_mask"] : offsets["end"]]
        .view(np.uint8)[: shape.items]
        .astype(bool)
    )
    (keys,) = listed("kv_chunk_size", 1)
    (total,) = listed("total_num_rows", 1)
    starts = np.asarray(rows.starts_B1)
    positions = np.asarray(rows.positions_T)
    assert (
        total == starts[-1]
        and keys >= 1
        and keys % shape.page == 0
        and not counts[counts.sum() :].any()
    )
    first = listed("o_indptr", shape.sequences + 1)
    first_place = listed("merge_indptr", shape.rows + 1)
    assert (
        first_place[total] <= shape.partial_results
        and first_place[0] == 0
        and (first_place[total:] == first_place[total]).all()
    )
    spans = {}
    places = set()
    for b, tile, part_id in np.stack(
        [
            listed(name, shape.items)[counts]
            for name in ("request_indices", "qo_tile_indices", "kv_tile_indices")
        ],
        axis=1,
    ):
        count = starts[b + 1] - starts[b]
        length = positions[starts[b + 1] - 1] + 1
        lookback = length if shape.window is None else shape.window - 1
        start = max(length + tile * shape.tile // G - count - lookback, 0)
        low = min(part_id * keys + start, length)
        high = min((part_id + 1) * keys + start, length)
        num_parts = -(-min(length, lookback + shape.tile) // keys)
        for pair in range(tile * shape.tile, min((tile + 1) * shape.tile, count * G)):
            row = pair // G
            head = pair % G
            place = first[b] + row * num_parts + part_id
            assert first_place[starts[b] + row] <= place < first_place[starts[b] + row + 1]
            assert (place, head) not in places
            places.add((place, head))
            spans.setdefault((starts[b] + row, head), []).append((low, high))
    assert len(places) == first_place[total] * G, "the reduction reads a place that is not written"
    for row, head, low, end in expected_spans(shape, rows):
        pieces = sorted(spans.pop((row, head)))
        assert pieces[0][0] <= low and pieces[-1][1] >= end
        assert all(
            current[1] == following[0]
            for current, following in zip(pieces, pieces[1:], strict=False)
        )
    assert not spans
    for b in range(shape.sequences):
        pages = plan.pages[plan.first_page_B1[b] : plan.first_page_B1[b + 1]]
        length = positions[starts[b + 1] - 1] + 1 if starts[b + 1] > starts[b] else 0
        np.testing.assert_array_equal(
            pages, np.asarray(rows.tables_BM)[b, : -(-length // shape.page)]
        )
        assert not length or (len(pages) - 1) * shape.page + plan.last_page_B[b] == length
    return len(places) > total * G


@pytest.mark.parametrize("processors", thinned([2, 108], [2]))
@pytest.mark.slow
def test_self_test_accepts_the_kernel_and_finds_a_missing_key(kernel, monkeypatch, processors):
    """The self-test's cases at small sizes in float16, then with a kernel that omits keys."""
    kind = {
        "heads": 4,
        "kv_heads": 2,
        "width": 64,
        "window": 100,
        "soft_cap": None,
        "sinks": True,
        "page": 16,
    }
    kind |= {"dtype": "float16"}
    bounds = {"sequences": 6, "length": 400, "layers": 2}
    small = [
        dataclasses.replace(
            trial, **{name: min(getattr(trial, name), bound) for name, bound in bounds.items()}
        )
        for trial in flashinfer.trials(kind)
    ]
    monkeypatch.setattr(device, "num_processors", lambda: processors)
    for trial in small:
        result = measure(AttentionCase(trial, flashinfer.attend), 0, repeats=2)
        assert result.wrong is None, (trial, result)

    original = flashinfer_kernel.paged_run

    def forget_keys(*arguments):
        original(*arguments[:14], arguments[14] - 8, *arguments[15:])

    monkeypatch.setattr(flashinfer_kernel, "paged_run", forget_keys)
    assert measure(AttentionCase(small[0], flashinfer.attend), 0, repeats=1).wrong


def lowered_text(trial: Trial) -> str:
    q, pages, rows, sinks = arrays(trial, 1)
    step = partial(attend, trial, partial(attention.paged_attention, implementation="flashinfer"))
    return jax.jit(step).trace(q, pages, rows, sinks).lower(lowering_platforms=("cuda",)).as_text()


def test_operands_and_attributes_of_the_ffi_call():
    """Of a program lowered for CUDA, which has no host callback."""
    pytest.importorskip(
        "jax_tvm_ffi", reason="jax-tvm-ffi is not installed: pip install -e '.[test]'"
    )
    text = lowered_text(Trial("", 16, 300, heads=32, kv_heads=8, window=128, sinks=True))
    (call,) = [line for line in text.splitlines() if "custom_call @quire.flashinfer" in line]
    assert "@quire.flashinfer.quire_bfloat16_128_window_sinks.8.0(" in call
    shape = PlanShape(16, 16, 32, 8, 128, 16, 19, 128, PROCESSORS)
    info = ", ".join(map(str, shape.info))
    assert f"info = dense<[{info}]> : tensor<15xi64>" in call
    assert "window_left = 127 : i64" in call and "soft_cap = 0.000000e+00 : f64" in call
    assert "scale = 0.0883883476" in call
    end = shape.offsets["end"]
    pages = 16 * 19
    operands = [
        "16x32x128xbf16",
        "305x16x8x128xbf16",
        "305x16x8x128xbf16",
        f"{end}xi32",
        "17xi32",
        "17xi32",
        f"{pages}xi32",
        "16xi32",
        "32xf32",
    ]
    results = "16x32x128xbf16", f"{shape.scratch}xf32"
    types = ", ".join(f"tensor<{array_type}>" for array_type in operands)
    assert f"({types}) -> ({', '.join(f'tensor<{array_type}>' for array_type in results)})" in call
    assert "callback" not in text and text.count("custom_call @quire") == 1


UNSUPPORTED = {
    "queries and pages must both be": Trial("", 2, 30, dtype="float32"),
    "not codes with a scale": Trial("", 2, 30, page=32, codes="int8"),
    "none within the other (MLA)": Trial("", 2, 30, heads=8, kv_heads=1, width=576, values=512),
    "of one width of (64, 128, 256), not 96": Trial("", 2, 30, width=96),
    "both sinks and a soft cap": Trial("", 2, 30, sinks=True, soft_cap=5.0),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
@pytest.mark.slow
def test_unsupported_cases_raise_the_reason(reason, caplog):
    trial = UNSUPPORTED[reason]
    with pytest.raises(NoImplementation) as failure:
        lowered_text(trial)
    assert reason in str(failure.value) and "attention by FlashInfer" in caplog.text


def test_interleaved_pages_are_unsupported():
    q, pages, rows, _ = arrays(Trial("", 2, 30), 1)
    interleaved_PSKYH = jnp.stack([pages.k_PSKH, pages.v_PSKH], axis=3)
    paired = KVPages(kv_PSYH=interleaved_PSKYH.reshape(*interleaved_PSKYH.shape[:2], -1, 128))
    params = AttentionParams(1.0)
    shape = AttentionShape.of(q, paired, rows, params)
    assert "arrays of their own" in str(flashinfer.kernel_limits(params, shape))


@pytest.mark.parametrize(("capability", "is_supported"), [
    ("7.5", False), ("8.0", True), ("8.9", True), ("10.0", True), ("12.0", True), ("gfx942", False),
])  # fmt: skip
def test_supported_gpu_generations(monkeypatch, capability, is_supported):
    monkeypatch.setattr(device, "capability", lambda: capability)
    assert (device.no_ampere_reason() is None) == is_supported
    assert is_supported or capability in device.no_ampere_reason()


def test_error_without_flashinfer_names_the_extra(monkeypatch, caplog):
    monkeypatch.setattr(library, "missing", MISSING)
    monkeypatch.setattr(library, "version", lambda package: raise_not_found(package))
    with pytest.raises(NoImplementation, match=r"pip install 'quire\[flashinfer\]'"):
        lowered_text(Trial("", 2, 30))
    assert "flashinfer-python is not installed: pip install 'quire[flashinfer]'" in caplog.text
    monkeypatch.setattr(library, "version", lambda package: "0.5.0")
    forget_verdicts()
    with pytest.raises(
        NoImplementation, match=r"of version 0.5.0, and the arguments of 0.7.2.post1 are known"
    ):
        lowered_text(Trial("", 2, 30))


MISSING = library.missing  # the original, before the fixture replaces it


def test_extra_pins_the_supported_version():
    project = tomllib.loads((Path(attention.__file__).parents[2] / "pyproject.toml").read_text())
    assert (
        f"flashinfer-python=={library.KNOWN}"
        in project["project"]["optional-dependencies"]["flashinfer"]
    )


def raise_not_found(package: str) -> str:
    raise library.PackageNotFoundError(package)


def test_failed_build_falls_back_to_xla(monkeypatch, caplog):
    monkeypatch.setattr(library, "built", lambda kernel: ("", f"nvcc: no {kernel.capability}"))
    trial = Trial("", 2, 30, heads=4, kv_heads=2, width=64)
    inputs = arrays(trial, 1)
    for module in (cpu, triton):
        backend = dataclasses.replace(module.BACKEND, limits=lambda *_: "there is another")
        monkeypatch.setattr(module, "BACKEND", backend)
    out = jax.jit(partial(attend, trial, attention.paged_attention))(*inputs)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), accuracy.reference(trial, *inputs), rtol=2e-2, atol=1e-2
    )
    assert "attention by FlashInfer: its kernel is not in use on this GPU" in caplog.text
    assert "nvcc: no 8.0" in caplog.text


def test_failed_build_reports_the_reason(monkeypatch):
    """The build process fails without FlashInfer or nvcc."""
    monkeypatch.undo()
    library.built.cache_clear()
    path, reason = library.built(library.Kernel("nothing", 64, False, False, False, "8.0"))
    library.built.cache_clear()
    assert not path and reason is not None and "could not be built" in reason and "rror" in reason


@pytest.mark.slow  # waits for the timeout
def test_build_timeout_kills_child_processes(monkeypatch, tmp_path):
    monkeypatch.undo()
    library.built.cache_clear()
    started = tmp_path / "started"
    code = (
        "import pathlib, subprocess; child = subprocess.Popen(['sleep', '600']); "
        f"pathlib.Path({str(started)!r})"
    )
    (tmp_path / "slow.py").write_text(f"{code}.write_text(str(child.pid)); child.wait()")
    monkeypatch.setattr(library, "BUILDER", "slow")
    monkeypatch.setattr(library, "SECONDS", 20)
    monkeypatch.syspath_prepend(str(tmp_path))
    path, reason = library.built(library.Kernel("bfloat16", 64, False, False, False, "8.0"))
    library.built.cache_clear()
    assert not path and reason == "nvcc did not build FlashInfer's kernel within 20 s"
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(started.read_text()))
        while child.status() != psutil.STATUS_ZOMBIE:  # the process may take a moment to end
            time.sleep(0.05)


def test_failed_self_test_disables_the_kernel(monkeypatch):
    tested = []

    def test(module: str, kind: str):
        tested.append((module, json.loads(kind)))
        return {"decoding": CaseResult(0.5, 0.5, 0, 6e-3)}

    monkeypatch.setattr(self_test, "run_self_test", test)
    monkeypatch.delenv("QUIRE_MOSAIC")
    with pytest.raises(NoImplementation, match="it is wrong on this GPU: decoding by 5.0e-01"):
        lowered_text(Trial("", 2, 30, window=20))
    assert tested == [
        (
            "quire.ops.attention.flashinfer",
            {
                "heads": 32,
                "kv_heads": 8,
                "width": 128,
                "window": 20,
                "soft_cap": None,
                "sinks": False,
                "page": 16,
                "codes": None,
                "values": None,
                "dtype": "bfloat16",
            },
        ),
    ]
    monkeypatch.setenv("QUIRE_MOSAIC", "off")
    forget_verdicts()
    with pytest.raises(NoImplementation, match="QUIRE_MOSAIC is off"):
        lowered_text(Trial("", 2, 30, window=20))
    assert len(tested) == 1


def test_kernel_declares_that_its_results_vary(kernel):
    trial = Trial("", 2, 30, heads=4, kv_heads=2, width=64, dtype="float16")
    step = partial(attend, trial, partial(attention.paged_attention, implementation="flashinfer"))
    traced = jax.jit(step).trace(*arrays(trial, 1))
    assert variance(traced.jaxpr.jaxpr) == {flashinfer.varies()}


@pytest.mark.slow
def test_engine_generates_the_same_tokens_with_flashinfer(kernel, monkeypatch):
    """With chunked prefill, shared prefixes and batching; `require_invariance` is rejected."""
    options = {
        "dtype": "float32",
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
    }
    prompts = [
        "Once upon a time",
        "Long ago there was",
        "Sort: 52 31 90",
        "Once upon a time there was a fox. " * 3,
    ]
    params = [
        SamplingParams(temperature=0.7 * (n % 2), seed=n, max_tokens=20)
        for n in range(len(prompts))
    ]

    def generate() -> list[list[int]]:
        forget_verdicts()
        with LLM(**options) as llm:
            return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]

    expected = generate()
    calls = []
    original = flashinfer_kernel.paged_run

    def counted(*arguments):
        calls.append(len(arguments))
        original(*arguments)

    monkeypatch.setattr(flashinfer_kernel, "paged_run", counted)
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", {"flashinfer": ".flashinfer"})
    assert generate() == expected and len(calls) > 20
    forget_verdicts()
    with pytest.raises(
        ModelError, match="require_invariance is set, and here .*: attention by FlashInfer cuts"
    ):
        LLM(**options, require_invariance=True)
