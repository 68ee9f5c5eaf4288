"""The comparison with other engines: workloads, figures, reports and isolated failures."""

import ast
import io
import json
import re
import sys
import textwrap
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import typer
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.model.checkpoint.loader import read_config
from quire.scripts import collect_env
from quire.scripts.bench import bandwidth
from quire.tests.support.violations import require_none
from tools.peers import checkpoint, compare, envs, quality, report, run_openvino, turns
from tools.peers.loop import LoadSettings, TimedPrompt, TimedTokens, drive
from tools.peers.work import FILE_WORKS, WORKS, Workload

TINY = checkpoint.ModelShape(layers=2, width=64, heads=4, kv_heads=2, ffn=96, head=16)
MIXTURE = replace(TINY, experts=4, chosen=2)
HYBRID = replace(TINY, layers=3, convolved=3)

# A fake engine, run as a worker: a token is the prompt's first token + its index and, in the engine
# "picky", + the batch size for two requests. Five requests at once kill "picky", six are an error.
FAKE_ENGINE = """
    import os, sys, time, types
    from tools.peers import worker
    from tools.peers.loop import drive

    def prepare(settings):
        if settings.weights == "int4" and sys.argv[1] == "picky":
            raise NotImplementedError("no int4 here")

    def dequantise(settings):
        os.makedirs(settings.model)
        open(os.path.join(settings.model, "dequantised"), "w").write(settings.file)

    def score(settings, tokens):
        import numpy as np
        if sys.argv[1] == "picky":
            raise ValueError("no scores")
        probabilities = np.array([[0.5, 0.5], [0.25, 0.75]][settings.weights == "int4-32"])
        padding = [1e-30] * (sys.argv[1] == "quire")
        return np.log(np.tile([*probabilities, *padding], (len(tokens), 1)))

    def load(settings):
        print("noise on stdout")
        os.system("echo noise from a child")
        def serve(requests):
            counts = {}
            def step():
                if len(requests) == 5 and sys.argv[1] == "picky":
                    print("about to die", file=sys.stderr, flush=True)
                    os._exit(3)
                if len(requests) == 6 and sys.argv[1] == "picky":
                    raise ValueError("six are too many" + chr(10) + "and a second line")
                time.sleep(0.001)
                for index in [index for index in counts if counts[index] < requests[index].count]:
                    counts[index] += 1
                    drift = len(requests) if sys.argv[1] == "picky" and index in (1, 2) else 0
                    yield index, [requests[index].prompt[0] + counts[index] + drift]
            return drive(requests, lambda index, request: counts.update({index: 0}), step)
        return serve

    module = types.ModuleType("tools.peers.run_fake")
    module.prepare, module.load = prepare, load
    module.dequantise, module.score = dequantise, score
    sys.modules[module.__name__] = module
    worker.RUNNERS[sys.argv[1]] = ".run_fake"
    worker.main()
"""


@pytest.fixture
def bench(tmp_path, monkeypatch) -> turns.Bench:
    """A benchmark whose engines are all fakes."""
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE_ENGINE))
    monkeypatch.setattr(
        turns, "command", lambda place, engine: [sys.executable, str(script), engine]
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # the folder of `tools`
    model = tmp_path / "checkpoints" / "tiny" / "hf"
    return turns.Bench(tmp_path, LoadSettings(str(model), "", "", 64, 8, 1), limit=60)


def make_workload(count: int, **options) -> Workload:
    return Workload(f"{count} requests", count, (3, 6), options.pop("output", (4, 4)), **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("tiny") / "hf", TINY, vocab=512, max_len=128)


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory) -> Path:
    return checkpoint.write(
        tmp_path_factory.mktemp("moe_model") / "hf", MIXTURE, vocab=512, max_len=128
    )


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory) -> Path:
    return checkpoint.write(
        tmp_path_factory.mktemp("hybrid_model") / "hf", HYBRID, vocab=512, max_len=128
    )


@pytest.mark.parametrize("model", ["tiny", "moe_model", "hybrid_model"])
@pytest.mark.slow
def test_quire_serves_the_generated_checkpoint(model, request):
    folder = request.getfixturevalue(model)
    llm = LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=16, kv_cache_memory_bytes=1 << 22)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    prompts = [
        {"prompt_token_ids": list(range(300, 320))},
        {"prompt_token_ids": [9, 400]},
        "some words of a prompt",
    ]
    tokens = [
        output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)
    ]
    assert [len(token_ids) for token_ids in tokens] == [48, 48, 48]
    assert len({tuple(token_ids) for token_ids in tokens}) == 3
    assert sum(len(set(token_ids)) for token_ids in tokens) > 20, (
        "a model that repeats itself is no useful comparison"
    )


@pytest.mark.parametrize(
    ("model", "shape"), [("tiny", TINY), ("moe_model", MIXTURE), ("hybrid_model", HYBRID)]
)
def test_checkpoint_weights_match_the_roofline_bytes(model, shape, request):
    """1,000 tokens choose every expert."""
    tensors = load_file(request.getfixturevalue(model) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    body = sum(t.size for name, t in tensors.items() if t.ndim == 2 and "embed" not in name)
    assert body + checkpoint.VOCAB * shape.width == shape.read(
        1000
    )  # convolution weights have three axes and are negligible
    assert [round(shape.read(1), -8) for shape in checkpoint.SIZES.values()] == [
        1e8,
        1e8,
        4e8,
        1e9,
        1e8,
        1e8,
    ]
    one_expert = 3 * shape.width * shape.ffn * shape.layers
    expected = {0: 0, 4: (4 - 2) * one_expert}[shape.experts]
    assert shape.read(1000) - shape.read(1) == pytest.approx(expected)


def test_existing_checkpoint_is_not_rewritten(tiny):
    modified = (tiny / "model.safetensors").stat().st_mtime_ns
    checkpoint.write(tiny, TINY, vocab=512, max_len=128)
    assert (tiny / "model.safetensors").stat().st_mtime_ns == modified


def test_tokenizer_round_trips_any_text(tiny):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    for text in ("plain words", "ünï\tcode \N{SNOWMAN}\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    "work", [*WORKS.values(), *FILE_WORKS.values()], ids=lambda work: work.title
)
def test_requests_of_rounds_differ_only_in_their_tokens(work):
    requests, same_seed, other_seed = (work.requests(seed) for seed in (0, 0, 1))
    assert requests == same_seed
    assert [(len(a.prompt), a.count, a.arrival) for a in requests] == [
        (len(b.prompt), b.count, b.arrival) for b in other_seed
    ]
    assert all(a.prompt != b.prompt for a, b in zip(requests, other_seed, strict=True)), (
        "a prefix cache would serve equal prompts"
    )
    for request in requests:
        assert work.weights == "gguf" or len(request.prompt) + request.count <= checkpoint.MAX_LEN
        assert all(len(checkpoint.SPECIALS) <= token < checkpoint.VOCAB for token in request.prompt)
    assert all(a.arrival < b.arrival for a, b in pairwise(requests)) is (
        work.spread or len(requests) == 1
    )


def test_minimum_bytes_of_a_workload_by_hand():
    """Two requests of 3 prompt tokens and 4 output tokens: four steps read the weights, and all
    steps but the first read the KV cache.
    """
    workload = Workload("two", 2, (3, 3), (4, 4))
    cache_bytes = sum(3 + i for i in (1, 2, 3)) * TINY.layers * 2 * TINY.kv_heads * TINY.head * 2
    assert workload.must_move(TINY) == 4 * 2 * TINY.read(1) + 2 * cache_bytes
    assert (
        replace(workload, weights="int4").must_move(TINY) == 4 * TINY.read(1) / 2 + 2 * cache_bytes
    )
    assert replace(workload, spread=True).must_move(TINY) is None
    assert replace(workload, by="first").must_move(TINY) is None


def test_phrases_workload_repeats_one_phrase():
    (request,) = WORKS["phrases"].requests(0)
    assert request.prompt == request.prompt[:16] * 8 and len(set(request.prompt)) == 16
    assert WORKS["phrases-drafts"].requests(0) != WORKS["phrases"].requests(0)


def test_drive_adds_requests_at_their_arrival_times():
    requests = [TimedPrompt([1], 2, 0.06), TimedPrompt([2], 3), TimedPrompt([3], 1, 0.03)]
    added = []
    counts = {}

    def add(index, request):
        added.append(index)
        counts[index] = 0

    def step():
        for index in [index for index in counts if counts[index] < requests[index].count]:
            counts[index] += 1
            yield index, [10 * requests[index].prompt[0] + counts[index]]
        # updates without a token, as some engines send at the end
        yield from [(index, []) for index in counts]

    answers = drive(requests, add, step)
    assert added == [1, 2, 0]
    assert [answer.tokens for answer in answers] == [[11, 12], [21, 22, 23], [31]]
    for request, answer in zip(requests, answers, strict=True):
        assert request.arrival <= answer.first <= answer.last
    assert answers[2].first == answers[2].last


def test_figures_of_a_round_by_hand():
    requests = [TimedPrompt([1], 3), TimedPrompt([2], 1, 0.5), TimedPrompt([3], 5, 1.0)]
    answers = [
        TimedTokens(0.5, 1.5, [7, 7, 7]),
        TimedTokens(1.5, 1.5, [8]),
        TimedTokens(2.0, 4.0, [9] * 5),
    ]
    figures = turns.figures(requests, [vars(answer) for answer in answers])
    assert figures == {
        "seconds": 4.0,
        "rate": 9 / 4,
        "first": 1.0,
        "decode": 2.0,
        "tokens": [7, 8, 9],
    }
    answers[2].tokens.pop()
    with pytest.raises(turns.EngineFailure, match="4 tokens where 5 were asked for"):
        turns.figures(requests, [vars(answer) for answer in answers])


def test_engines_alternate_and_failures_do_not_stop_others(bench):
    works = {
        "three": make_workload(3),
        "five": make_workload(5),
        "six": make_workload(6),
        "same": make_workload(4, kind="invariance"),
        "start": make_workload(1, kind="start", output=(1, 1), by="first"),
        "three-int4": make_workload(3, weights="int4"),
    }
    notes = []
    rounds = []
    results, failures = turns.play(
        works, ["plain", "picky"], bench, 2, notes.append, lambda: rounds.append(len(notes))
    )
    assert failures.keys() == {(name, "picky") for name in ("five", "six", "three-int4")}
    log = bench.place / "logs" / "picky.log"
    message = f"run: its process ended with exit code 3; the last line in {log}: about to die"
    assert failures["five", "picky"] == message
    assert failures["six", "picky"] == "run: ValueError: six are too many"
    assert failures["three-int4", "picky"] == "prepare: NotImplementedError: no int4 here"
    assert (
        results.keys()
        == {(name, engine) for name in works for engine in ("plain", "picky")} - failures.keys()
    )
    assert [len(results[name, "picky"]) for name in ("three", "same", "start")] == [2, 1, 2]
    assert results["same", "plain"] == [{"identical": 4, "of": 4}]
    assert results["same", "picky"] == [{"identical": 2, "of": 4}]
    assert results["start", "plain"][0]["first"] > 0
    assert results["three", "plain"][0]["tokens"] == [
        r.prompt[0] + 1 for r in works["three"].requests(0)
    ]
    order = [
        match.groups() for note in notes if (match := re.match(r"round (\d), three: (\w+)", note))
    ]
    assert order == [("1", "plain"), ("1", "picky"), ("2", "picky"), ("2", "plain")]
    assert len(rounds) == 4  # two groups of two rounds


@pytest.fixture
def file_bench(bench, tmp_path) -> turns.Bench:
    return replace(bench, settings=replace(bench.settings, file=str(tmp_path / "model.gguf")))


def test_engines_load_a_gguf_file_or_its_dequantised_weights(file_bench):
    work = FILE_WORKS["one"]
    weights = {
        engine: turns.load_settings(engine, work, file_bench).weights for engine in compare.ENGINES
    }
    assert weights == {
        "quire": "gguf", "llama.cpp": "gguf", "vllm": "int4-32", "openvino": "int4-32",
        "transformers": "bf16",
    }  # fmt: skip
    turns.dequantise(file_bench)
    written = Path(file_bench.settings.model) / "dequantised"
    assert written.read_text() == file_bench.settings.file


def test_divergences_from_float32(file_bench, monkeypatch):
    """Padding of a vocabulary counts for nothing, and an engine without scores has none."""
    monkeypatch.setattr(quality, "text_tokens", lambda file: [5, 6, 7])
    notes = []
    engines = ["quire", "vllm", "picky", "transformers"]
    divergences = quality.measure(engines, FILE_WORKS["one"], file_bench, notes.append)
    by_hand = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert divergences == {
        "quire": pytest.approx(0, abs=1e-6), "vllm": pytest.approx(by_hand, rel=1e-6),
        "picky": None,
    }  # fmt: skip
    assert "scores: picky failed: score: ValueError: no scores" in notes


def test_openvino_model_with_uncompressed_weights_is_an_error(tiny, tmp_path):
    count = sum(t.size for t in load_file(tiny / "model.safetensors").values())
    weights = tmp_path / "openvino_model.bin"
    for bytes_per_weight, size in ((1, count), (2, 2 * count)):
        weights.write_bytes(bytes(size))
        run_openvino.require_compressed(tmp_path, tiny, bytes_per_weight)
    with pytest.raises(RuntimeError, match="the exporter did not compress them"):
        run_openvino.require_compressed(tmp_path, tiny, 1)


def test_cold_start_has_an_empty_cache_folder(bench, monkeypatch):
    folders = []
    process = turns.EngineProcess

    def recorded(engine, bench, cache=None):
        folders.append(None if cache is None else [*cache.iterdir()])
        return process(engine, bench, cache)

    worker = turns.start("plain", make_workload(1), bench)
    monkeypatch.setattr(turns, "EngineProcess", recorded)
    start = make_workload(1, kind="start", output=(1, 1), by="first")
    try:
        for work in (start, replace(start, cold=True)):
            assert turns.measure(worker, work, 0, bench)["first"] > 0
    finally:
        worker.close()
    assert folders == [None, []]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads a process's state in /proc")
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit(143)])
def test_an_interrupted_comparison_keeps_its_measurements(bench, stop):
    def note(line: str) -> None:
        if "round 2, first: peer" in line:
            raise stop

    works = {"first": make_workload(1), "second": make_workload(2)}
    results, failures = turns.play(works, ["quire", "peer"], bench, 3, note)
    assert {key: len(rounds) for key, rounds in results.items()} == {
        ("first", "quire"): 1, ("first", "peer"): 2, ("second", "quire"): 1, ("second", "peer"): 1,
    }  # fmt: skip
    assert not failures


def test_workers_are_stopped_between_runs(bench):
    worker = turns.start("plain", make_workload(1), bench)
    state = Path(f"/proc/{worker.process.pid}/stat")

    def stops() -> bool:
        """Wait until the kernel has delivered the signal."""
        end = time.monotonic() + 120
        while state.read_text().rsplit(")")[1].split()[0] != "T" and time.monotonic() < end:
            time.sleep(0.01)
        return time.monotonic() < end

    try:
        assert stops()
        assert worker.run([TimedPrompt([5], 2)])[0]["tokens"] == [6, 7]
        assert stops()
    finally:
        worker.close()
    assert worker.process.poll() is not None


def test_a_hanging_engine_is_abandoned(bench):
    worker = turns.start("plain", make_workload(1), replace(bench, limit=30))
    worker.limit = 0.2
    try:
        with pytest.raises(turns.EngineFailure, match=r"run: no answer in 0\.2 s"):
            worker.run([TimedPrompt([5], 2, arrival=60.0)])
    finally:
        worker.close()


def test_a_runner_starts_by_path_without_quire_installed(tmp_path, monkeypatch):
    """A peer's interpreter has no Quire; in this one the peer itself is missing too."""
    monkeypatch.setattr(turns, "python_of", lambda place, engine: Path(sys.executable))
    bench = turns.Bench(tmp_path, LoadSettings("nowhere", "", "", 64, 8, 1), limit=60)
    command = turns.command(tmp_path, "no-such-engine")
    assert command[1] == "-P", "its own folder must not come before the peer's packages"
    with pytest.raises(turns.EngineFailure, match="prepare: KeyError: 'no-such-engine'"):
        turns.start("no-such-engine", make_workload(1), bench)
    assert set(envs.RECIPES) | {"quire"} == set(compare.ENGINES)


def test_peer_runners_import_only_loop():
    """Peer environments have no Quire: a runner imports its engine, the standard library and
    loop.py.
    """
    from tools.peers import worker

    folder = Path(worker.__file__).parent
    loaded = [
        *sorted({*folder.glob("run_*.py")} - {folder / "run_quire.py"}),
        folder / "worker.py",
        folder / "loop.py",
    ]
    require_none(
        (
            f"{path.name}:{node.lineno}: {ast.unparse(node)}"
            for path in loaded
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            and (
                (node.module or "").startswith("quire")
                or (node.level and (node.level, node.module) != (1, "loop"))
            )
        ),
        "A runner that is started by its path imports nothing of Quire but loop.py:",
    )


def test_every_engine_has_a_runner():
    from tools.peers import worker

    folder = Path(worker.__file__).parent
    assert worker.RUNNERS.keys() == set(compare.ENGINES)
    files = {f".{path.stem}" for path in folder.glob("run_*.py")}
    assert set(worker.RUNNERS.values()) == files
    for name in files:
        text = (folder / f"{name[1:]}.py").read_text()
        assert "\ndef prepare(" in text
        assert "\ndef load(" in text


def figures_of_round(rate: float, first: float, tokens=(1, 2)) -> dict:
    return {
        "seconds": 8 / rate,
        "rate": rate,
        "first": first,
        "decode": rate,
        "tokens": list(tokens),
    }


@pytest.fixture
def engine_report() -> dict:
    """A report of three engines, one of which failed."""
    works = {"one": WORKS["one"], "prompt": WORKS["prompt"], "invariance": WORKS["invariance"]}
    results = {
        ("one", "quire"): [figures_of_round(rate, 0.1) for rate in (90, 120, 100)],
        ("one", "vllm"): [figures_of_round(rate, 0.1, (1, 3)) for rate in (50, 10, 40)],
        ("prompt", "quire"): [figures_of_round(1, 0.5)],
        ("prompt", "vllm"): [figures_of_round(1, 2.0)],
        ("prompt", "openvino"): [figures_of_round(1, 1.0)],
        ("invariance", "quire"): [{"identical": 24, "of": 24}],
        ("invariance", "vllm"): [{"identical": 6, "of": 24}],
    }
    failures = {("one", "openvino"): "load: no room", ("invariance", "openvino"): "load: no room"}
    engines = ["quire", "vllm", "openvino"]
    summary = report.summary(works, engines, results, failures, TINY, 30e9)
    versions = {"quire": {"jax": "1.2"}, "vllm": {"vllm": "3.4"}, "openvino": {}}
    return {
        "size": "tiny",
        "shape": vars(TINY),
        "rounds": 3,
        "bandwidth": 30e9,
        "versions": versions,
        "works": summary,
    }


def test_summary_ranks_engines(engine_report):
    one_request, prompt, invariance = engine_report["works"].values()
    assert one_request["engines"]["quire"]["rate"] == 100
    assert (one_request["best_peer"], one_request["ratio"]) == ("vllm", 2.5)
    assert one_request["engines"]["quire"]["roof_share"] == pytest.approx(
        one_request["must_move"] / 30e9 / 0.08
    )
    assert one_request["engines"]["vllm"]["first_tokens_as_quire"] == [1, 2]
    assert one_request["engines"]["openvino"] == {"failed": "load: no room"}
    # by time, lower is better
    assert (prompt["best_peer"], prompt["ratio"]) == ("openvino", 2.0)
    assert "ratio" not in invariance
    json.dumps(engine_report)


def test_report_on_a_file_has_memory_and_quality():
    """Their rows have as many columns as the others."""
    works = {"one": FILE_WORKS["one"]}
    results = {
        ("one", "quire"): [figures_of_round(100, 0.1) | {"memory": 3 << 29}],
        ("one", "vllm"): [figures_of_round(50, 0.1) | {"memory": 0}],
    }
    engines = ["quire", "vllm", "openvino"]
    failures = {("one", "openvino"): "load: no room"}
    lines = report.markdown(
        {
            "size": "model",
            "shape": None,
            "rounds": 1,
            "bandwidth": 30e9,
            "versions": dict.fromkeys(engines, {}),
            "divergences": {"quire": 1.23e-4, "vllm": None},
            "works": report.summary(works, engines, results, failures, None, 30e9),
        }
    ).splitlines()
    assert [line.count("|") for line in lines[:5]] == [7] * 5
    assert lines[3].split("|")[2:5] == [" 1.50 ", "  ", "  "]
    assert lines[4].split("|")[2:5] == [" 0.00012 ", " failed ", "  "]
    assert "- quire: reads the file, without options." in lines


def test_report_as_markdown_and_as_a_table(engine_report):
    text = report.markdown(engine_report)
    head, _, one_request_row, prompt_row, invariance_row, *notes = text.splitlines()
    assert head.split(" | ")[1:4] == ["quire 1.2", "vllm 3.4", "openvino"]
    assert one_request_row.split(" | ")[1:5] == ["100.0", "40.0", "failed", "2.50"]
    assert prompt_row.split(" | ")[1:5] == ["500 ms", "2.00 s", "1.00 s", "2.00"]
    assert invariance_row.split(" | ")[1:4] == ["24 of 24", "6 of 24", "failed"]
    assert {line.count("|") for line in (head, one_request_row, prompt_row, invariance_row)} == {7}
    assert "- openvino failed: load: no room" in notes
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.rich_table(engine_report))
    screen = console.export_text()
    assert "failed: load: no room" in screen
    assert "24 of 24" in screen


@pytest.mark.slow
def test_environment_is_rebuilt_when_its_recipe_changes(tmp_path, monkeypatch):
    monkeypatch.setitem(envs.RECIPES, "peer", envs.Recipe(steps=(), shown=("pip",)))
    assert not envs.ready(tmp_path, "peer")
    python = envs.make(tmp_path, "peer", lambda note: None)
    assert envs.ready(tmp_path, "peer")
    assert envs.versions(tmp_path, "peer").keys() == {"pip"}
    (tmp_path / "peer" / "mark").touch()
    assert envs.make(tmp_path, "peer", lambda note: pytest.fail("made again")) == python
    monkeypatch.setitem(
        envs.RECIPES, "peer", envs.Recipe(steps=(("./there-is-no-such-folder",),), shown=())
    )
    with pytest.raises(
        envs.EnvError, match=r"peer: `.*no-such-folder` failed; .*install\.log tells why"
    ):
        envs.make(tmp_path, "peer", lambda note: None)
    assert not (tmp_path / "peer" / "mark").exists()
    assert not envs.ready(tmp_path, "peer")


def test_int4_checkpoint_for_vllm_is_written_once(tmp_path):
    shape = replace(TINY, width=128, ffn=128, head=32)
    folder = checkpoint.write(tmp_path / "hf", shape, vocab=512, max_len=128)
    checkpoint.quantise(folder, tmp_path / "vllm" / "int4", "int4")
    assert read_config(tmp_path / "vllm" / "int4").quant == "int4-128"
    written = (tmp_path / "vllm" / "int4" / "config.json").stat()
    checkpoint.quantise(folder, tmp_path / "vllm" / "int4", "int4")
    assert (tmp_path / "vllm" / "int4" / "config.json").stat() == written


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(compare.main)
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--work", "nine"), "'nine' is not one of one, sixteen"),
        (("--engine", "tgi"), "'tgi' is not one of quire, vllm"),
        (("--size", "7b"), "'7b' is not one of 60m, 100m"),
    ],
)
def test_invalid_options_are_named(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


def test_compare_command_writes_the_results(run, bench, tmp_path, monkeypatch):
    """An engine without an environment is left out with its reason; the others are compared."""

    def make(place, engine, note):
        if engine == "vllm":
            raise envs.EnvError("vllm: pip failed")

    monkeypatch.setattr(envs, "make", make)
    monkeypatch.setattr(envs, "versions", lambda place, engine: {"it": "1"})
    monkeypatch.setattr(checkpoint, "write", lambda folder, shape: folder)
    monkeypatch.setattr(compare, "read_bandwidth", lambda: 2e9)
    monkeypatch.setitem(WORKS, "one", make_workload(3))
    result = run(
        "--work",
        "one",
        "--engine",
        "vllm",
        "--engine",
        "openvino",
        "--engine",
        "quire",
        "--rounds",
        "2",
        "--envs",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    )
    assert result.exit_code == 0, result.output
    result_file = json.loads((tmp_path / "out" / "100m.json").read_text())
    engines = result_file["works"]["one"]["engines"]
    assert engines["vllm"] == {"failed": "vllm: pip failed"}
    assert len(engines["quire"]["rounds"]) == len(engines["openvino"]["rounds"]) == 2
    assert engines["openvino"]["first_tokens_as_quire"] == [3, 3]
    assert result_file["bandwidths"] == [2e9, 2e9]
    assert "vllm failed: vllm: pip failed" in (tmp_path / "out" / "100m.md").read_text()


def test_read_bandwidth_is_plausible():
    assert 1e8 < bandwidth.read_bandwidth(16, passes=2) < 1e13
    assert collect_env.cores() >= 1
