"""Runs engines in turns; the processes of all other engines are stopped meanwhile (SIGSTOP)."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

from . import checkpoint
from .envs import python_of
from .loop import LoadSettings, TimedPrompt
from .work import Workload

SHORT = 8  # maximum output tokens of a warm-up request
# The formats in which engines that do not read GGUF files get the file's dequantised weights.
NEAREST = {"vllm": "int4-32", "openvino": "int4-32", "transformers": "bf16"}


class EngineFailure(RuntimeError):
    """An engine failed; the message is one line."""


@dataclass(frozen=True)
class Bench:
    """Settings of the comparison."""

    place: Path  # folder of environments, checkpoints and logs
    settings: LoadSettings  # `prepared` and `weights` are replaced for each engine and workload
    limit: float  # timeout of a worker's job in seconds


class EngineProcess:
    """The worker process of one engine.

    It is stopped (SIGSTOP) between jobs, so that its idle threads take no CPU time from others.
    """

    def __init__(self, engine: str, bench: Bench, cache: Path | None = None):
        """Start the process; with `cache`, that folder takes the place of ~/.cache."""
        self.engine = engine
        self.limit = bench.limit
        self.log = bench.place / "logs" / f"{engine}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        threads = str(bench.settings.threads)
        peer = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{bench.settings.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        path = (
            os.path.dirname(python_of(bench.place, engine))
            + os.pathsep
            + os.environ.get("PATH", "")
        )
        # PATH has the command-line tools of the peer's environment.
        env = os.environ if engine == "quire" else os.environ | peer | {"PATH": path}
        if cache is not None:
            env = env | {"XDG_CACHE_HOME": str(cache)}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command(bench.place, engine),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.jobs = self.process.stdin
        self.answers = self.process.stdout

    def ask(self, **job) -> dict:
        """Run a job and return the worker's answer; the process runs only during the job."""
        self.signal(signal.SIGCONT)
        try:
            self.jobs.write(json.dumps(job).encode() + b"\n")
            self.jobs.flush()
            ready, _, _ = select.select([self.answers], [], [], self.limit)
            line = self.answers.readline() if ready else None
        except BrokenPipeError:
            line = b""
        if not line:
            raise EngineFailure(
                f"{job['op']}: "
                f"{f'no answer in {self.limit:g} s' if line is None else self.last_words()}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailure(f"{job['op']}: {answer['error']}")
        self.signal(signal.SIGSTOP)
        return answer

    def last_words(self) -> str:
        """How the worker process ended, with the last line of its log."""
        lines = [
            line.strip()
            for line in self.log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        code = self.process.wait()
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return (
            f"its process ended with {ended}; the last line in {self.log}: "
            f"{lines[-1][:200] if lines else '(none)'}"
        )

    def run(self, requests: list[TimedPrompt]) -> list[dict]:
        return self.ask(op="run", requests=[asdict(request) for request in requests])["answers"]

    def signal(self, number: int) -> None:
        """Send a signal to the process group: engines may have child processes that outlive the
        worker.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def peak_memory(self) -> int:
        """The sum of the peak resident bytes of the process and its children."""
        peak = 0
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):  # a process may end meanwhile
                if os.getpgid(int(process.name)) == self.process.pid:
                    status = (process / "status").read_text()
                    peak += int(status.split("VmHWM:")[1].split()[0]) << 10
        return peak

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.jobs.close()
        self.answers.close()


def command(place: Path, engine: str) -> list[str]:
    """The command line of a worker. It is run by its path, because the environments of peers
    contain neither Quire nor these tools.
    """
    return [str(python_of(place, engine)), "-P", str(Path(__file__).with_name("worker.py")), engine]


def start(engine: str, work: Workload, bench: Bench) -> EngineProcess:
    """Prepare and load an engine; returns its worker process."""
    prepare(engine, work, bench)
    worker = EngineProcess(engine, bench)
    try:
        worker.ask(op="load", settings=asdict(load_settings(engine, work, bench)))
    except BaseException:  # also on Ctrl-C: the caller does not have the process yet
        worker.close()
        raise
    return worker


def prepare(engine: str, work: Workload, bench: Bench) -> None:
    """Convert the model in a separate process, whose memory would otherwise burden serving."""
    worker = EngineProcess(engine, bench)
    try:
        worker.ask(op="prepare", settings=asdict(load_settings(engine, work, bench)))
    finally:
        worker.close()


def load_settings(engine: str, work: Workload, bench: Bench) -> LoadSettings:
    prepared = Path(bench.settings.model).parent / engine
    weights = NEAREST.get(engine, "gguf") if work.weights == "gguf" else work.weights
    adapters = tuple(
        str(checkpoint.adapter_folder(bench.settings.model, n)) for n in range(work.adapters)
    )
    work_settings = {"weights": weights, "drafts": work.drafts, "adapters": adapters}
    return replace(bench.settings, prepared=str(prepared), **work_settings)


def score(engine: str, work: Workload, tokens: list[int], out: Path, bench: Bench) -> None:
    """Write the log-probabilities [T, V] of the next token after each token of a text, as a NumPy
    file.
    """
    prepare(engine, work, bench)
    worker = EngineProcess(engine, bench)
    try:
        settings = asdict(load_settings(engine, work, bench))
        worker.ask(op="score", settings=settings, tokens=tokens, out=str(out))
    finally:
        worker.close()


def dequantise(bench: Bench) -> None:
    """Write the GGUF file's dequantised weights, by transformers, for engines that read no GGUF."""
    worker = EngineProcess("transformers", bench)
    try:
        worker.ask(op="dequantise", settings=asdict(bench.settings))
    finally:
        worker.close()


def measure(worker: EngineProcess, work: Workload, turn: int, bench: Bench) -> dict:
    """Run a workload once on an engine; returns the measurement."""
    requests = work.requests(turn)
    if work.kind == "start":
        settings = asdict(load_settings(worker.engine, work, bench))
        with tempfile.TemporaryDirectory() as cache:
            started = time.perf_counter()
            fresh = EngineProcess(worker.engine, bench, Path(cache) if work.cold else None)
            try:
                fresh.ask(op="load", settings=settings)
                fresh.run(requests)
                return {"first": time.perf_counter() - started}
            finally:
                fresh.close()
    if not turn:  # warm up: engines compile or pack weights at first use
        warm = [
            replace(request, count=min(request.count, SHORT), arrival=0.0)
            for request in work.requests(-1)
        ]
        worker.run(warm)
    if work.kind == "invariance":
        alone = [worker.run([request])[0]["tokens"] for request in requests]
        together = [answer["tokens"] for answer in worker.run(requests)]
        return {
            "identical": sum(a == b for a, b in zip(alone, together, strict=True)),
            "of": len(requests),
        }
    with busy_processes(work.busy):
        return figures(requests, worker.run(requests)) | {"memory": worker.peak_memory()}


@contextlib.contextmanager
def busy_processes(count: int):
    """Context in which `count` other processes keep CPU cores busy."""
    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def figures(requests: list[TimedPrompt], answers: list[dict]) -> dict:
    """The figures of one run: total seconds and `rate`; `first` (TTFT) and `decode` (tokens per
    second after the first) are medians over the requests.
    """
    for request, answer in zip(requests, answers, strict=True):
        if len(answer["tokens"]) != request.count:
            raise EngineFailure(
                f"run: {len(answer['tokens'])} tokens where {request.count} were asked for"
            )
    seconds = max(answer["last"] for answer in answers)
    spans = [
        (a["last"] - a["first"], r.count - 1)
        for r, a in zip(requests, answers, strict=True)
        if r.count > 1
    ]
    return {
        "seconds": seconds,
        "rate": sum(request.count for request in requests) / seconds,
        "first": median(a["first"] - r.arrival for r, a in zip(requests, answers, strict=True)),
        "decode": median(count / span for span, count in spans) if spans else None,
        # First tokens, to check that all engines run the same model.
        "tokens": [answer["tokens"][0] for answer in answers],
    }


def measurement_text(measurement: dict) -> str:
    if "identical" in measurement:
        return f"{measurement['identical']} of {measurement['of']} identical"
    rate = f"{measurement['rate']:.1f} tokens/s, " if "rate" in measurement else ""
    return f"{rate}first token after {measurement['first']:.3f} s"


def load_group(work: Workload) -> tuple[str, ...]:
    """What an engine must load for a workload: weights, drafts and adapters."""
    drafts = f"{work.drafts} drafts"
    adapters = f"{work.adapters} adapters"
    return work.weights, *[drafts] * bool(work.drafts), *[adapters] * bool(work.adapters)


def play(
    works: dict[str, Workload],
    engines: list[str],
    bench: Bench,
    rounds: int,
    note: Callable[[str], None],
    before_round: Callable[[], None] = lambda: None,
) -> tuple[dict[tuple[str, str], list[dict]], dict[tuple[str, str], str]]:
    """Run all workloads on all engines for several rounds.

    An engine that fails at a workload skips it in later rounds, and its process is restarted. If
    interrupted, returns the measurements so far.

    Args:
        works: The workloads by name.
        engines: Names of the engines.
        bench: Settings of the comparison.
        rounds: Number of rounds.
        note: Called with progress messages.
        before_round: Called before each round.

    Returns:
        ({(work, engine): a measurement per round}, {(work, engine): reason of the failure}).
    """
    results: dict[tuple[str, str], list[dict]] = {}
    failures: dict[tuple[str, str], str] = {}
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        for loaded in dict.fromkeys(map(load_group, works.values())):
            group = {name: work for name, work in works.items() if load_group(work) == loaded}
            workers: dict[str, EngineProcess] = {}
            try:
                for turn in range(rounds):
                    before_round()
                    first = turn % len(engines)  # no engine is always the first
                    for name, engine in product(group, engines[first:] + engines[:first]):
                        if (name, engine) in failures or (
                            turn and group[name].kind == "invariance"
                        ):
                            continue  # invariance is a count, not a time: once will do
                        try:
                            if engine not in workers:
                                note(f"{engine} loads ({', '.join(loaded)})")
                                workers[engine] = start(engine, group[name], bench)
                            measurement = measure(workers[engine], group[name], turn, bench)
                        except EngineFailure as error:
                            failed_works = (
                                [name] if engine in workers else list(group)
                            )  # what cannot load cannot do any of these
                            failures |= {
                                (work_name, engine): str(error)
                                for work_name in failed_works
                                if (work_name, engine) not in failures
                            }
                            note(f"{name}: {engine} failed: {error}")
                            if engine in workers:
                                workers.pop(engine).close()
                        else:
                            results.setdefault((name, engine), []).append(measurement)
                            note(
                                f"round {turn + 1}, {name}: {engine} "
                                f"{measurement_text(measurement)}"
                            )
            finally:
                for worker in workers.values():
                    worker.close()
    return results, failures
