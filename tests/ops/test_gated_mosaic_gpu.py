"""The Hopper attention kernel is used only after it passes its self-test (on a pretended GPU)."""

import dataclasses
import json
import logging
import math
import os
import stat
import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from quire.ops import attention
from quire.ops.attention import accuracy, cpu, xla
from quire.ops.attention import hopper as gate
from quire.ops.attention.accuracy import AttentionCase, Trial, arrays, attend, measure_attention
from quire.ops.attention.hopper_kernel import task
from quire.ops.attention.hopper_kernel.paged import make_kernel_shape, plan
from quire.ops.gpu import device, self_test
from quire.ops.gpu.self_test import CaseResult, InLayers, measure
from quire.tests.support.attention_plan import tasks_of

CASE = Trial("", 2, 30, heads=4, kv_heads=2, width=64)
PASSING = {"decoding": CaseResult(1e-3, 2e-3, 0, 6e-3), "a chunk": CaseResult(2e-3, 3e-3, 0, 6e-3)}
FAILING = CaseResult(0.5, 0.5, 0, 6e-3)


@pytest.fixture
def verdict_folder(monkeypatch, tmp_path):
    """Pretend a Hopper GPU whose kernel returns ones, which shows that it was used.

    Yields the folder of the self-tests' recorded verdicts.
    """

    def ones(q_TNH, k_TKH, v_TKH, pages, *_):
        return jnp.ones_like(q_TNH), pages

    monkeypatch.setattr(device, "is_hopper", lambda: True)
    monkeypatch.setattr(gate, "BACKEND", dataclasses.replace(gate.BACKEND, attend=ones))
    monkeypatch.setattr(
        cpu, "BACKEND", dataclasses.replace(cpu.BACKEND, limits=lambda *_: "there is another")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("QUIRE_MOSAIC", raising=False)
    forget_verdicts()
    yield tmp_path / "quire" / "proven"
    forget_verdicts()


def forget_verdicts() -> None:
    self_test.verdict.cache_clear()
    self_test.warn_once.cache_clear()
    jax.clear_caches()


class FakeSelfTest:
    """Stands in for the self-test: returns or raises `results` and records the tested kinds."""

    def __init__(self, monkeypatch, results):
        self.kinds = []
        self.results = results
        monkeypatch.setattr(self_test, "run_self_test", self)

    def __call__(self, module: str, kind: str):
        assert module == "quire.ops.attention.hopper"
        self.kinds.append(json.loads(kind))
        if isinstance(self.results, Exception):
            raise self.results
        return self.results


def serving_backend(case: Trial = CASE) -> str:
    inputs = arrays(case, 1)
    out = np.asarray(jax.jit(partial(attend, case, attention.paged_attention))(*inputs), np.float32)
    if (out == 1).all():
        return "the kernel"
    np.testing.assert_allclose(out, accuracy.reference(case, *inputs), rtol=2e-2, atol=1e-2)
    return "XLA"


@pytest.mark.slow
def test_self_test_runs_once_per_kind(verdict_folder, monkeypatch):
    fake_self_test = FakeSelfTest(monkeypatch, PASSING)
    assert [serving_backend(), serving_backend()] == ["the kernel", "the kernel"]
    assert fake_self_test.kinds == [
        {
            "heads": 4,
            "kv_heads": 2,
            "width": 64,
            "window": None,
            "soft_cap": None,
            "sinks": False,
            "page": 16,
            "codes": None,
            "values": None,
            "dtype": "bfloat16",
        }
    ]
    forget_verdicts()
    assert (
        serving_backend() == "the kernel" and len(fake_self_test.kinds) == 1
    )  # the verdict is remembered
    other_cases = [
        Trial("", 2, 30, heads=4, kv_heads=2, width=64, window=10, sinks=True, soft_cap=5.0),
        Trial("", 2, 30, heads=4, kv_heads=2, width=64, page=32, codes="int8"),
        Trial("", 2, 30, heads=8, kv_heads=1, width=320, values=256),
        Trial("", 2, 30, heads=4, kv_heads=2, width=64, dtype="float16"),
    ]
    for case in other_cases[:2]:
        assert serving_backend(case) == "the kernel"
    for case in other_cases[2:]:
        inputs = arrays(case, 1)
        assert jax.eval_shape(partial(attend, case, attention.paged_attention), *inputs) is not None
    records = [json.loads(path.read_text()) for path in verdict_folder.iterdir()]
    assert len(records) == 5 and all(
        {name: CaseResult(**result) for name, result in record["found"].items()} == PASSING
        for record in records
    )
    assert [
        kind for kind in fake_self_test.kinds if kind not in [record["kind"] for record in records]
    ] == []
    assert (
        fake_self_test.kinds[1]["window"] == 10
        and fake_self_test.kinds[1]["sinks"]
        and fake_self_test.kinds[1]["soft_cap"] == 5.0
    )
    assert (fake_self_test.kinds[2]["codes"], fake_self_test.kinds[2]["page"]) == ("int8", 32)
    assert (
        fake_self_test.kinds[3]["values"] == 256 and fake_self_test.kinds[4]["dtype"] == "float16"
    )


@pytest.mark.parametrize("changed", ["card", "driver", "sources"])
@pytest.mark.slow
def test_changed_gpu_driver_or_sources_run_the_self_test_again(
    verdict_folder, monkeypatch, tmp_path, changed
):
    """A verdict holds for one GPU, driver and version of the kernel's sources."""
    fake_self_test = FakeSelfTest(monkeypatch, PASSING)
    serving_backend()
    gpu_properties = self_test.describe_gpu()
    source = tmp_path / "tile.py"
    source.write_text("# another")
    if changed == "card":
        monkeypatch.setattr(
            self_test, "describe_gpu", lambda: gpu_properties | {"device": "NVIDIA H300"}
        )
    elif changed == "driver":
        monkeypatch.setattr(self_test, "driver", lambda: "999.0")
    else:
        kernel = dataclasses.replace(gate.KERNEL, sources=(*gate.SOURCES, source))
        limits = accuracy.self_tested(kernel, gate.kernel_limits, device.no_hopper_reason)
        monkeypatch.setattr(gate, "BACKEND", dataclasses.replace(gate.BACKEND, limits=limits))
    forget_verdicts()
    assert serving_backend() == "the kernel" and len(fake_self_test.kinds) == 2


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (
            PASSING | {"a chunk": FAILING},
            "it is wrong on this GPU: a chunk by 5.0e-01, where 6e-03 is allowed",
        ),
        ({"a": dataclasses.replace(FAILING, error=math.nan)}, "it is wrong on this GPU: a by nan"),
        (
            {"a": CaseResult(1e-3, 0.1, 0, 6e-3), "b": CaseResult(1e-3, 2e-3, 7, 6e-3)},
            "it is wrong on this GPU: a in one row by 1.0e-01, where 1e-02 is allowed; "
            "b in having other bits in 7 of 50 runs",
        ),
        (
            self_test.SelfTestFailed("it took longer than 240 s"),
            "its trial on this GPU failed: it took longer than 240 s",
        ),
        (OSError("no room"), "it could not be tried: no room"),
    ],
)
@pytest.mark.slow
def test_kernel_that_fails_its_self_test_is_replaced_by_xla(
    verdict_folder, monkeypatch, caplog, results, message
):
    fake_self_test = FakeSelfTest(monkeypatch, results)
    with caplog.at_level(logging.WARNING, "quire"):
        assert [
            serving_backend(),
            serving_backend(Trial("", 3, 20, heads=4, kv_heads=2, width=64)),
        ] == ["XLA", "XLA"]
    assert [message in record.getMessage() for record in caplog.records] == [True]  # once
    assert len(fake_self_test.kinds) == 1 and not verdict_folder.exists()
    forget_verdicts()
    fake_self_test.results = PASSING  # the failure may be temporary: the next process tests again
    assert serving_backend() == "the kernel" and len(fake_self_test.kinds) == 2


def test_unsupported_case_runs_no_self_test(verdict_folder, monkeypatch, caplog):
    fake_self_test = FakeSelfTest(monkeypatch, PASSING)
    with caplog.at_level(logging.WARNING, "quire"):
        assert serving_backend(Trial("", 2, 30, heads=4, kv_heads=2, width=48)) == "XLA"
    assert not fake_self_test.kinds and "keys must be of a width of" in caplog.text


def test_quire_mosaic_variable_overrides_the_self_test(verdict_folder, monkeypatch, caplog):
    fake_self_test = FakeSelfTest(monkeypatch, self_test.SelfTestFailed("no"))
    monkeypatch.setenv("QUIRE_MOSAIC", "trusted")
    assert serving_backend() == "the kernel"
    for value, message in (
        ("off", "QUIRE_MOSAIC is off"),
        ("of", "QUIRE_MOSAIC is 'of', and can be off or trusted"),
    ):
        monkeypatch.setenv("QUIRE_MOSAIC", value)
        forget_verdicts()
        assert serving_backend() == "XLA" and message in caplog.text
    assert not fake_self_test.kinds


def test_unwritable_cache_folder_runs_the_self_test_in_each_process(verdict_folder, monkeypatch):
    verdict_folder.parent.mkdir()
    verdict_folder.write_text("a file")
    fake_self_test = FakeSelfTest(monkeypatch, PASSING)
    assert serving_backend() == "the kernel"
    forget_verdicts()
    assert serving_backend() == "the kernel" and len(fake_self_test.kinds) == 2


@pytest.mark.slow
def test_self_test_process_without_gpu_timing_out_or_crashing(
    verdict_folder, monkeypatch, tmp_path, caplog
):
    """A real process, which finds no GPU, exceeds the time limit, or crashes."""
    assert serving_backend() == "XLA"
    assert (
        "its trial on this GPU failed: it ended with status 1: NotImplementedError: there is no"
    ) in caplog.text
    monkeypatch.setattr(self_test, "SECONDS", 0.3)
    forget_verdicts()
    assert serving_backend() == "XLA" and "it took longer than 0.3 s" in caplog.text
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -SEGV $$\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(self_test, "SECONDS", 20)
    forget_verdicts()
    assert serving_backend() == "XLA" and "it ended with status -11: it said nothing" in caplog.text


def test_self_test_process_gets_memory_and_module_settings(verdict_folder, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho noise\n"
        'found="{\\"error\\": 1, \\"worst_row\\": 2, \\"other_bits\\": 3, \\"allowed\\": 4}"\n'
        'echo "{\\"$XLA_PYTHON_CLIENT_PREALLOCATE\\": $found, \\"$PYTHONPATH $4 $5\\": $found}"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "path", ["", "/one", "/two"])
    path = f"{os.getcwd()}{os.pathsep}/one{os.pathsep}/two"
    assert self_test.run_self_test("a.module", "{}") == dict.fromkeys(
        ("false", f"{path} a.module {{}}"), CaseResult(1, 2, 3, 4)
    )
    python.write_text("#!/bin/sh\necho goodbye\n")
    with pytest.raises(self_test.SelfTestFailed, match="it said 'goodbye"):
        self_test.run_self_test("a.module", "{}")


@pytest.mark.nightly
@pytest.mark.parametrize("spoilt", [False, True])
def test_self_test_process_rejects_inaccurate_kernel(interpreted_once, monkeypatch, capsys, spoilt):
    """At small sizes in the interpreter, the self-test accepts only an accurate kernel."""
    monkeypatch.setattr(task, "SPAN", 64)
    real = partial(gate.attend, interpret=InterpretGPUParams())
    kind = {"heads": 4, "kv_heads": 1, "width": 64, "sinks": True}

    def kernel(q, k, v, pages, rows, params, sinks_N):
        params = dataclasses.replace(params, scale=params.scale * (1.02 if spoilt else 1))
        return real(q, k, v, pages, rows, params, sinks_N)

    def sizes(parameters):
        assert parameters == kind
        return [
            Trial("decoding over spans", 2, 200, 1, 1, **kind),
            Trial("a chunk", 1, 90, 30, 3, **kind),
        ]

    assert {t.rows == 1 for t in gate.trials(kind)} == {True, False}
    assert (
        max(t.length for t in gate.trials(kind)) > 2 * 4096
        and max(t.layers for t in gate.trials(kind)) > 4
    )
    monkeypatch.setattr(gate, "trials", sizes)
    monkeypatch.setattr(self_test, "REPEATS", 1)
    monkeypatch.setattr(gate, "attend", kernel)
    monkeypatch.setattr(sys, "argv", ["tries", gate.__name__, json.dumps(kind)])
    jax.clear_caches()
    self_test.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(results) == {"decoding over spans", "a chunk"}
    assert [CaseResult(**result).wrong is None for result in results.values()] == [
        not spoilt
    ] * 2, results


@dataclasses.dataclass(frozen=True)
class DoublingCase:
    """Self-test case whose kernel doubles rows of ones and adds `spoil(state)`."""

    spoil: Callable = lambda state: 0.0
    name: str = "doubled"
    allowed: float = 1e-3

    def build(self, seed):
        return jnp.int32(seed), jnp.ones((100, 8)), np.full((100, 8), 2.0)

    def run(self, state, x):
        return x * 2 + self.spoil(state), state + 1


def test_measure_reports_errors_and_differing_bits():
    assert (
        measure(DoublingCase(), 0) == CaseResult(0.0, 0.0, 0, 1e-3)
        and measure(DoublingCase(), 0).wrong is None
    )
    # the error of all rows together is within the limit
    one_row = measure(DoublingCase(lambda _: jnp.zeros((100, 8)).at[7].set(0.008)), 0)
    assert one_row.error == pytest.approx(4e-4, rel=1e-3) and one_row.worst_row == pytest.approx(
        4e-3, rel=1e-3
    )
    assert one_row.wrong == "in one row by 4.0e-03, where 2e-03 is allowed"
    races = measure(
        DoublingCase(lambda state: jnp.where(state == 31, 1e-6, 0)), 0
    )  # one run of fifty
    assert races.wrong == "in having other bits in 1 of 50 runs"
    assert measure(DoublingCase(lambda _: jnp.nan), 0).wrong == "by nan, where 1e-03 is allowed"
    assert (
        measure(DoublingCase(lambda _: jnp.zeros((100, 8)).at[7, 1].set(jnp.nan)), 0).wrong
        is not None
    )


def test_case_in_layers_fails_if_one_layer_is_wrong():
    """Every layer has its own inputs."""
    result = measure(InLayers(DoublingCase()), 0)
    assert (
        result == CaseResult(0.0, 0.0, 0, 1e-3)
        and InLayers(DoublingCase()).name == "doubled, in a step of 3 layers"
    )
    for layer in range(3):
        spoiled_case = InLayers(
            DoublingCase(lambda state, layer=layer: jnp.where(state == layer, 0.1, 0))
        )
        assert measure(spoiled_case, 0, repeats=1).wrong is not None


def test_self_test_digest_depends_on_graph_capture(monkeypatch):
    digest = self_test.digest(gate.KERNEL, "{}")
    assert self_test.digest(gate.KERNEL, "{}") == digest
    monkeypatch.setattr(self_test.graphs, "compiler_options", lambda: {self_test.graphs.OPTION: ""})
    assert self_test.digest(gate.KERNEL, "{}") != digest


@pytest.mark.slow
def test_layers_append_to_donated_pages_in_place():
    """Each layer of a step writes its donated pages and reads them back, also when quantised."""
    for codes in (None, "int8"):
        case = AttentionCase(
            Trial("", 2, 40, 3, 2, heads=4, kv_heads=2, width=64, page=32, codes=codes, layers=2),
            attend_in_xla,
        )
        pages, inputs, expected = case.build(0)
        old_pages = jax.tree.map(np.asarray, pages)
        assert expected.shape == (2, 8, 4, 64) and not expected[:, 6:].any()
        assert all(k is not None and v is not None for _, k, v, *_ in inputs)
        assert measure(case, 0, 2).wrong is None
        _, new_pages = case.run(pages, inputs)
        changed = [
            a.tobytes() != np.asarray(b).tobytes()
            for a, b in zip(jax.tree.leaves(old_pages), jax.tree.leaves(new_pages), strict=True)
        ]
        # in quantised pages only the scales must change
        assert all(changed) if codes is None else sum(changed) >= 4


def attend_in_xla(*arguments):
    return xla.attend(*arguments)


class FakeCoordinator:
    """Key-value store of three JAX processes, of which this one has index 1."""

    def __init__(self, monkeypatch, **values):
        self.values = values
        monkeypatch.setattr(jax, "process_count", lambda: 3)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(distributed.global_state, "client", self)

    def key_value_set(self, key, value, allow_overwrite):
        self.values[key.rpartition("/")[2]] = value

    def blocking_key_value_get(self, key, wait):
        if key.rpartition("/")[2] not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key.rpartition("/")[2]]


def test_processes_choose_the_same_kernel(verdict_folder, monkeypatch, caplog):
    """All processes of a program use the kernel, or none does."""
    fake_self_test = FakeSelfTest(monkeypatch, PASSING)
    coordinator = FakeCoordinator(monkeypatch, **{"0": "", "2": ""})
    assert serving_backend() == "the kernel" and coordinator.values["1"] == ""
    forget_verdicts()
    coordinator.values["2"] = "it is wrong on this GPU"
    assert serving_backend() == "XLA" and "process 2: it is wrong on this GPU" in caplog.text
    forget_verdicts()
    coordinator.values["2"] = ""
    fake_self_test.results = PASSING | {"a chunk": FAILING}
    (file,) = verdict_folder.iterdir()
    file.unlink()
    assert serving_backend() == "XLA" and coordinator.values["1"].startswith(
        "it is wrong on this GPU: a chunk"
    )
    forget_verdicts()
    fake_self_test.results = PASSING
    del coordinator.values["0"]
    assert serving_backend() == "XLA" and "process 0: it did not say whether it may" in caplog.text


@pytest.mark.parametrize(
    ("capability", "served"), [("9.0", True), ("8.9", False), ("10.0", False), ("gfx942", False)]
)
def test_kernel_requires_hopper(monkeypatch, tmp_path, caplog, capability, served):
    for cached in (device.is_hopper, device.is_gpu):
        cached.cache_clear()
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(device, "capability", lambda: capability)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake_self_test = FakeSelfTest(monkeypatch, PASSING)
    forget_verdicts()
    q, pages, rows, _ = jax.eval_shape(lambda: arrays(CASE, 0))
    if served:
        assert device.no_hopper_reason() is None
    else:
        with pytest.raises(
            NotImplementedError, match=f"9.x \\(Hopper\\), and this GPU's is {capability}"
        ):
            gate.BACKEND(q, None, None, pages, rows, CASE.params)
        assert f"this GPU's is {capability}" in caplog.text and not fake_self_test.kinds
    device.is_hopper.cache_clear()
    forget_verdicts()


@pytest.mark.nightly
@pytest.mark.parametrize("window", [None, 128])
def test_self_test_cases_cover_every_path_of_the_kernel(window):
    """XLA passes every case, and the cases together cover every path of the kernel."""
    kind = {"heads": 16, "kv_heads": 4, "width": 64, "window": window}
    covered = set()
    for case in gate.trials(kind):
        assert measure_attention(case, xla.attend, 0).wrong is None
        q, pages, rows, _ = arrays(case, 0)
        shape = make_kernel_shape(
            q,
            pages,
            rows,
            window=window,
            scale=1.0,
            soft_cap=None,
            values=None,
            sinks=False,
            processors=132,
        )
        is_decode = len(rows.positions_T) == len(rows.tables_BM)
        covered |= {
            ("can be cut", shape.cut),
            ("padding", bool(case.empty)),
            ("decodes", is_decode),
        }
        for items in tasks_of(shape, plan(shape, rows)):
            covered |= {("in turns", len(items) > 1)}
            for item in items:
                spans_several = item.first // item.span != item.last // item.span
                has_longer_spans = item.span > shape.span
                is_split = (is_decode, item.place >= 0) if shape.cut else None
                covered |= {
                    ("cut", is_split),
                    ("several spans", item.place >= 0, spans_several),
                    ("longer spans", has_longer_spans),
                }
    is_split = {
        ("cut", (is_decode, is_split)) for is_decode in (True, False) for is_split in (True, False)
    }
    expected = {
        ("can be cut", True),
        *is_split,
        ("several spans", True, False),
        ("longer spans", True),
    }
    expected |= {("several spans", True, True)} if window is None else set()
    if window is not None:  # the window is shorter than a span: no work is split
        expected = {("can be cut", False), ("cut", None)}
    expected |= {
        ("several spans", False, True),
        ("several spans", False, False),
        ("longer spans", False),
    }
    expected |= {
        (name, value) for name in ("padding", "decodes", "in turns") for value in (True, False)
    }
    assert expected <= covered, sorted(expected - covered, key=str)
