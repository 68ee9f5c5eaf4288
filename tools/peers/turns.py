"""Engines in turns: all processes but that of the engine at work are stopped."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
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

SHORT = 8  # tokens of a warm-up


class EngineFailure(RuntimeError):
    """Why an engine cannot go on, in a line."""


@dataclass(frozen=True)
class Bench:
    """What all turns share."""

    place: Path  # environments, checkpoints and logs
    settings: LoadSettings  # `prepared` and `weights` are set for each engine and group
    limit: float  # seconds that a worker may take over a job


class EngineProcess:
    """The process of one engine.

    Between jobs it is stopped, so that its idle threads cost the others nothing.
    """

    def __init__(self, engine: str, bench: Bench):
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
        # tools beside the interpreter
        env = os.environ if engine == "quire" else os.environ | peer | {"PATH": path}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command(bench.place, engine),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    def ask(self, **job) -> dict:
        """Do a job; the process runs for that long only."""
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], self.limit)
            line = self.process.stdout.readline() if ready else None
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
        """How a process ended that closed its end of the pipe."""
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
        """To the whole group: an engine may have processes of its own, which can outlive the
        worker.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def command(place: Path, engine: str) -> list[str]:
    """How a worker is started: by its path, since the environments of peers have neither Quire nor
    these tools.
    """
    return [str(python_of(place, engine)), "-P", str(Path(__file__).with_name("worker.py")), engine]


def start(engine: str, work: Workload, bench: Bench) -> EngineProcess:
    """A process that has loaded, after another one has prepared what it loads."""
    prepare(engine, work, bench)
    worker = EngineProcess(engine, bench)
    try:
        worker.ask(op="load", settings=asdict(settings_of(engine, work, bench)))
    except BaseException:  # Ctrl-C too: nobody else knows of this process yet
        worker.close()
        raise
    return worker


def prepare(engine: str, work: Workload, bench: Bench) -> None:
    """In a process of its own: converting leaves memory behind that serving should not pay for."""
    worker = EngineProcess(engine, bench)
    try:
        worker.ask(op="prepare", settings=asdict(settings_of(engine, work, bench)))
    finally:
        worker.close()


def settings_of(engine: str, work: Workload, bench: Bench) -> LoadSettings:
    prepared = Path(bench.settings.model).parent / engine
    adapters = tuple(
        str(checkpoint.adapter_folder(bench.settings.model, n)) for n in range(work.adapters)
    )
    own = {"weights": work.weights, "drafts": work.drafts, "adapters": adapters}
    return replace(bench.settings, prepared=str(prepared), **own)


def measure(worker: EngineProcess, work: Workload, turn: int, bench: Bench) -> dict:
    """One engine's turn at a work."""
    requests = work.requests(turn)
    if work.kind == "start":
        settings = asdict(settings_of(worker.engine, work, bench))
        started = time.perf_counter()
        fresh = EngineProcess(worker.engine, bench)
        try:
            fresh.ask(op="load", settings=settings)
            fresh.run(requests)
            return {"first": time.perf_counter() - started}
        finally:
            fresh.close()
    if not turn:  # compiles and packs whatever is compiled or packed at first use
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
    with neighbours(work.busy):
        return figures(requests, worker.run(requests))


@contextlib.contextmanager
def neighbours(count: int):
    """So many processes that compute all the time, until the end."""
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
    """What one run comes to.

    `first` and `decode` are the medians over its requests, `rate` is of all together.
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
        # to see that all engines run the same model
        "tokens": [answer["tokens"][0] for answer in answers],
    }


def brief(done: dict) -> str:
    if "identical" in done:
        return f"{done['identical']} of {done['of']} identical"
    rate = f"{done['rate']:.1f} tokens/s, " if "rate" in done else ""
    return f"{rate}first token after {done['first']:.3f} s"


def loads(work: Workload) -> tuple[str, ...]:
    """What an engine must have loaded for a work."""
    drafts = f"{work.drafts} drafts"
    adapters = f"{work.adapters} adapters"
    return work.weights, *[drafts] * bool(work.drafts), *[adapters] * bool(work.adapters)


def play(
    works: dict[str, Workload],
    engines: list[str],
    bench: Bench,
    rounds: int,
    note: Callable[[str], None],
    between: Callable[[], None] = lambda: None,
) -> tuple[dict[tuple[str, str], list[dict]], dict[tuple[str, str], str]]:
    """({(work, engine): a measurement a round}, {(work, engine): why it failed}); `between` is
    called every round.

    An engine that fails at a work is left out of that work from then on, and its process is started
    anew. When stopped, this returns what was measured until then.
    """
    results: dict[tuple[str, str], list[dict]] = {}
    failures: dict[tuple[str, str], str] = {}
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        for loaded in dict.fromkeys(map(loads, works.values())):
            group = {name: work for name, work in works.items() if loads(work) == loaded}
            workers: dict[str, EngineProcess] = {}
            try:
                for turn in range(rounds):
                    between()
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
                            done = measure(workers[engine], group[name], turn, bench)
                        except EngineFailure as error:
                            hit = (
                                [name] if engine in workers else list(group)
                            )  # what cannot load cannot do any of these
                            failures |= {
                                (each, engine): str(error)
                                for each in hit
                                if (each, engine) not in failures
                            }
                            note(f"{name}: {engine} failed: {error}")
                            if engine in workers:
                                workers.pop(engine).close()
                        else:
                            results.setdefault((name, engine), []).append(done)
                            note(f"round {turn + 1}, {name}: {engine} {brief(done)}")
            finally:
                for worker in workers.values():
                    worker.close()
    return results, failures
