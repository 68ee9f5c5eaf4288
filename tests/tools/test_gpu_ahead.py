"""Ahead-of-time analysis of programs compiled for GPUs, as far as it works without the compiler."""

import importlib.metadata
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from quire.model.config import Moe
from quire.model.planning.cost import DEVICES
from quire.scripts.gpu.step_time import GOALS, attention_seconds, known_device, step_seconds
from tools.gpu import ahead, target
from tools.gpu.ahead import CASES, Case, Shares, config_of, depths, expert_blocks, kind_of
from tools.gpu.hlo import Module
from tools.gpu.program import SPILLS, read_thunks

PROGRAM = """
HloModule jit_step, is_scheduled=true

%append (p.0: bf16[4096,8], p.1: bf16[2,8]) -> bf16[4096,8] {
  %p.0 = bf16[4096,8]{1,0} parameter(0)
  %p.1 = bf16[2,8]{1,0} parameter(1)
  %where = s32[2,1]{1,0} constant({{1}, {2}})
  ROOT %written = bf16[4096,8]{1,0} scatter(%p.0, %where, %p.1), to_apply=%add
}

%look_up (q.0: bf16[4096,8]) -> bf16[2,8] {
  %q.0 = bf16[4096,8]{1,0} parameter(0)
  %at = s32[2]{0} constant({3, 4})
  ROOT %rows = bf16[2,8]{1,0} gather(%q.0, %at), slice_sizes={1,8}
}

%take (r.0: bf16[4,1024,512], r.1: s32[]) -> bf16[1,1024,512] {
  %r.0 = bf16[4,1024,512]{2,1,0} parameter(0)
  %r.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,1024,512]{2,1,0} dynamic-slice(%r.0, %r.1, %zero, %zero), dynamic_slice_sizes={1,1024,512}
}

%multiply (s.0: bf16[2,1024], s.1: bf16[1,1024,512]) -> f32[2,512] {
  %s.0 = bf16[2,1024]{1,0} parameter(0)
  %s.1 = bf16[1,1024,512]{2,1,0} parameter(1)
  %flat = bf16[1024,512]{1,0} bitcast(%s.1)
  ROOT %dot = f32[2,512]{1,0} dot(%s.0, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%condition (t.0: (s32[], bf16[2,1024], bf16[4,1024,512])) -> pred[] {
  %t.0 = (s32[], bf16[2,1024]{1,0}, bf16[4,1024,512]{2,1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%turn (u.0: (s32[], bf16[2,1024], bf16[4,1024,512])) -> (s32[], bf16[2,1024], bf16[4,1024,512]) {
  %u.0 = (s32[], bf16[2,1024]{1,0}, bf16[4,1024,512]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%u.0), index=0
  %x = bf16[2,1024]{1,0} get-tuple-element(%u.0), index=1
  %stack = bf16[4,1024,512]{2,1,0} get-tuple-element(%u.0), index=2
  %expert = bf16[1,1024,512]{2,1,0} fusion(%stack, %n), kind=kLoop, calls=%take
  %out = f32[2,512]{1,0} fusion(%x, %expert), kind=kCustom, calls=%multiply
  ROOT %next = (s32[], bf16[2,1024]{1,0}, bf16[4,1024,512]{2,1,0}) tuple(%n, %x, %stack)
}

ENTRY %main (a: bf16[4096,8], b: bf16[2,8], c: (s32[], bf16[2,1024], bf16[4,1024,512])) -> bf16[4096,8] {
  %a.1 = bf16[4096,8]{1,0} parameter(0), metadata={op_name="state.pages[0].k_PSKH"}
  %b.1 = bf16[2,8]{1,0} parameter(1), metadata={op_name="rows"}
  %n.1 = s32[] parameter(2)
  %x.1 = bf16[2,1024]{1,0} parameter(3)
  %w.1 = bf16[4,1024,512]{2,1,0} parameter(4), metadata={op_name="weights.layers[0].moe.up_EDGF"}
  %filled = bf16[4096,8]{1,0} fusion(%a.1, %b.1), kind=kInput, calls=%append
  %read = bf16[2,8]{1,0} fusion(%filled), kind=kLoop, calls=%look_up
  %both = (bf16[2,8]{1,0}, bf16[4096,8]{1,0}) custom-call(%read, %filled), output_to_operand_aliasing={{1}: (1, {})}
  %more = bf16[4096,8]{1,0} get-tuple-element(%both), index=1
  %kernel = bf16[2,8]{1,0} custom-call(%read, %more), custom_call_target="mosaic_gpu_v2"
  %all = (s32[], bf16[2,1024]{1,0}, /*index=2*/bf16[4,1024,512]{2,1,0}) tuple(%n.1, %x.1, %w.1)
  %loop = (s32[], bf16[2,1024]{1,0}, bf16[4,1024,512]{2,1,0}) while(%all), condition=%condition, body=%turn
  ROOT %copy = bf16[4096,8]{1,0} copy(%more)
}
"""


def test_bytes_launches_and_copies_of_a_program_by_hand():
    pages = 4096 * 8 * 2
    rows = 2 * 8 * 2
    expert = 1024 * 512 * 2

    def work_of(in_place_share: float):
        def traffic_share(name, in_place):
            return in_place_share if in_place else 0.25 if kind_of(name) == "pages" else 1.0

        return Module(PROGRAM).work(traffic_share, lambda names, inner: 3)

    work = work_of(0)
    append = 2 * rows
    look_up = 2 * rows
    in_place = 2 * rows
    kernel = rows + pages / 4 + rows
    copy = 2 * pages
    slice_bytes = expert + 4 + expert  # read with the expert's index, and written
    product = 2 * 1024 * 2 + expert + 2 * 512 * 4
    assert work.bytes == append + look_up + in_place + kernel + copy + 3 * (slice_bytes + product)
    assert work_of(2).bytes == work.bytes + 2 * pages, (
        "a kernel reads and writes these pages in place"
    )
    assert work.launches == 5 + 3 * 2
    # copies of so few pages are not reported
    assert work.copied == {"weights.layers[0].moe.up_EDGF": 3 * expert}


def test_known_trip_count_of_a_loop_is_used():
    counted = PROGRAM.replace(
        "body=%turn", 'body=%turn, backend_config={"known_trip_count":{"n":"7"}}'
    )
    work = Module(counted).work(
        lambda name, in_place: 1.0 - in_place, lambda names, inner: pytest.fail("it is counted")
    )
    assert work.launches == 5 + 7 * 2


def test_copies_of_kv_pages_are_reported():
    longer = PROGRAM.replace("4096,8]", "40960,8]")
    work = Module(longer).work(lambda name, in_place: 1.0 - in_place, lambda names, inner: 0)
    assert work.copied["state.pages[0].k_PSKH"] == 40960 * 8 * 2


def test_bytes_of_a_compiled_cpu_program():
    """A matrix product of XLA's CPU compiler reads at least its inputs and writes its result."""
    a = np.ones((64, 256), np.float32)
    b = np.ones((256, 512), np.float32)
    text = jax.jit(lambda a, b: a @ b).lower(a, b).compile().as_text() or ""
    work = Module(text).work(lambda name, in_place: 1.0 - in_place, lambda names, inner: 1)
    min_bytes = a.nbytes + b.nbytes + 64 * 512 * 4
    assert min_bytes <= work.bytes <= 3 * min_bytes and work.launches >= 1 and not work.copied


def test_thunks_count_launches_graphs_and_ungraphed_kernels():
    text = """\
000: kCustomKernel [source | next=001 (1)] fusion_1 grid: [1, 1, 1]
001: kCommandBuffer [prev=000 (1) | next=008 (1)]
    002: kCustomKernel [source | next=003 (1)] gemm grid: [1, 1, 1]
    003: kWhile [prev=002 (1) | sink]
condition:
        004: kCustomKernel [source | sink] compare grid: [1, 1, 1]
      body:
        005: kCopy         [source | sink] kCopy
008: kWhile [prev=001 (1) | next=011 (1)]
condition:
    009: kCustomKernel [source | sink] sort_1_1 grid: [1, 1, 1]
  body:
    010: kCustomCall [source | sink] kCustomCall
011: kCommandBuffer [prev=008 (1) | sink]
    012: kAllReduce [source | sink] all-reduce
"""
    outside = {"kCustomKernel": 1, "kWhile": 1, "sort": 1, "kCustomCall": 1}
    assert read_thunks(text) == (2, 7, outside, 1)


def test_expected_expert_blocks_match_random_routing():
    rng = np.random.default_rng(5)
    moe = Moe(experts=16, top_k=3, dim=8)
    samples = [rng.permuted(np.tile(np.arange(16), (40, 1)), axis=1)[:, :3] for _ in range(400)]
    blocks = np.mean(
        [np.sum(-(-np.bincount(chosen.reshape(-1), minlength=16) // 16)) for chosen in samples]
    )
    assert expert_blocks(moe, 40) == pytest.approx(blocks, rel=0.02)


def test_share_of_each_argument_that_a_step_reads():
    case = Case("qwen3-30b-a3b", batch=64)
    shares = Shares(config_of(case, 2), case, 65536)
    assert shares.of("state.pages[1].v_PSKH", False) == 1.0  # 64 sequences of 1,024
    assert shares.of("weights.layers[0].moe.up_EDGF.codes", False) == pytest.approx(
        1 - (1 - 8 / 128) ** 64
    )
    assert shares.of("weights.layers[0].moe.router_DE", False) == shares.of("buffer", False) == 1.0
    assert shares.of("state.pages[1].v_PSKH", True) == 0, (
        "of pages only the tokens of a step are written"
    )
    assert shares.of("state.recurrent[0]['memory']", True) == 2, (
        "recurrent memory is read and written"
    )
    assert 125 < shares.turns({"weights.layers[0].moe.up_EDGF", "buffer"}, False) < 128
    assert shares.turns({"state.pages[0].k_PSKH"}, False) == 16
    windowed = Case("gpt-oss-20b", batch=1)
    shares = Shares(config_of(windowed, 2), windowed, 4096)
    assert [shares.of(f"state.pages[{layer}].k_PSKH", False) for layer in (0, 1)] == [
        128 / 4096,
        1024 / 4096,
    ]


def test_step_seconds_is_the_roofline_plus_launches():
    device = DEVICES["h200"]
    bytes_only = step_seconds(device, 16e9, 0, 0)
    assert 16e9 / device.bandwidth < bytes_only < 2 * 16e9 / device.bandwidth
    assert step_seconds(device, 16e9, 1e9, 0) == bytes_only < step_seconds(device, 16e9, 1e13, 0)
    assert step_seconds(device, 16e9, 0, 1000) > step_seconds(device, 16e9, 0, 500) > bytes_only


def test_predicted_attention_times_are_documented():
    """By hand: decode over 8,192 tokens with 8 KV heads of 128, and causal prefill of 8,192 tokens."""
    row = 32 * 128 * 2 * 2  # bytes of queries and outputs
    bytes_of_64, bytes_of_16 = (
        (size * 8192 * 8 * 2 * 128 * 2 + n * row) for size, n in ((64, 64), (16, 1))
    )
    causal_operations = 2 * 2 * 32 * 128 * 8192 * 8193 / 2
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    h200 = DEVICES["h200"]
    for num_bytes, operations in ((bytes_of_64, 0), (bytes_of_16, 0), (0, causal_operations)):
        assert f"| {attention_seconds(h200, num_bytes, operations) * 1e3:.3f} ms, " in page
    assert (
        known_device("NVIDIA H100 80GB HBM3") == DEVICES["h100"]
        and known_device("another card") is None
    )


@pytest.mark.parametrize("name", GOALS)
def test_goals_and_predictions_are_documented(name):
    """Every goal has a prediction that a first measurement can falsify."""
    goal = GOALS[name]
    docs = Path(__file__).parents[2] / "docs"
    (row,) = [
        line
        for line in (docs / "kernels.md").read_text().splitlines()
        if line.startswith(f"| {name} |")
    ]
    assert f"| {goal.seconds * 1e3:.2f} ms | {goal.predicted:.0%} |" in row
    reached = (
        f"| {goal.share * 100:.0f} % of the roof | {goal.seconds * 1e3:.2f} ms, "
        f"{goal.predicted * 100:.0f} % of "
    )
    assert reached in (docs / "performance.md").read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_can_be_reduced_to_few_layers(case):
    for layers in depths(case.model):
        config = config_of(case, layers)
        assert len(config.layers) == layers
    few_layers, more_layers = depths(case.model)
    patterns = [
        [layer.attention.window for layer in config_of(case, layers).layers]
        for layers in (few_layers, more_layers)
    ]
    assert patterns[1][:few_layers] == patterns[0]


def test_gpu_target_description_for_the_compiler():
    card = target.CARDS["h200"].text(1.5e11, 4.8e12)
    assert (
        "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }"
        in card
    )
    assert (
        "shared_memory_per_block_optin: 232448\n" in card
        and "memory_bandwidth: 4800000000000\n" in card
    )
    assert 'driver_version: "12.9.0"' in card, "without it XLA leaves calls out of its graphs"
    assert "ACCELERATED" not in target.CARDS["a100"].text(1, 1) and set(target.CARDS) <= set(
        DEVICES
    )


def test_cases_are_selected_by_name_or_substring():
    assert [case.name for case in ahead.wanted(["llama-3-8b, bf16, batch 64"])] == [
        "llama-3-8b, bf16, batch 64"
    ]
    models = {case.model for case in ahead.wanted(["gemma", "qwen3"])}
    assert models == {"gemma-3-12b", "qwen3-30b-a3b", "qwen3-next-80b-a3b"}
    assert ahead.wanted([]) == [*CASES] and not ahead.wanted(["nothing"])
    assert len({case.name for case in CASES}) == len(CASES)


def test_compile_failures_are_a_row_of_the_table(monkeypatch):
    def measure(case, card, spills):
        raise jax.errors.JaxRuntimeError("INTERNAL: no\nmore")

    monkeypatch.setattr(ahead, "measure", measure)
    result = ahead.attempt(CASES[0], "h200", False)
    assert [*ahead.lines(iter([result]), False)][
        -1
    ] == f"| {CASES[0].name} | does not compile: INTERNAL: no |"


def test_spills_of_each_case_are_measured_in_a_new_process(monkeypatch):
    """A process compiles a kernel only once, so that a second case would report no spills."""
    commands = []
    failure = {"name": "a step", "failed": "INTERNAL: no"}

    def run(command, **options):
        commands.append(command[1:])
        return SimpleNamespace(stdout=json.dumps(failure))

    monkeypatch.setattr(subprocess, "run", run)
    assert ahead.alone(CASES[0], "h200") == ahead.Failure(**failure)
    (command,) = commands
    assert command[:3] == ["-m", "tools.gpu.ahead", CASES[0].name] and "--spills" in command
    assert ahead.wanted(command[2:3]) == [CASES[0]]


def test_spills_are_counted_once():
    text = """ptxas info    : Function properties for kernel
    0 bytes stack frame, 348 bytes spill stores, 340 bytes spill loads
ptxas warning : Registers are spilled in function 'kernel', 348 bytes spill stores, 340 bytes spill loads
"""
    assert SPILLS.findall(text) == [("348", "340")]


def test_missing_compiler_plugin_names_the_pip_command(monkeypatch, capsys):
    distributions: list[Any] = []
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **kwargs: distributions)
    monkeypatch.setattr("sys.argv", ["ahead"])
    # main() sets this variable; monkeypatch restores it
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    with pytest.raises(SystemExit) as ended:
        ahead.main()
    message = capsys.readouterr().err
    assert ended.value.code == 2 and message.count("\n") == 1
    assert f"pip install --no-deps jax-cuda12-plugin=={jax.__version__}" in message
    distributions.append(SimpleNamespace(version="0.1"))
    assert "of version 0.1" in str(target.missing())
