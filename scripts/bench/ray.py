"""Benchmark replicas on Ray Serve on this machine: `python -m quire.scripts.bench.ray`. Needs the
extra `ray`.

Kills a replica under load, compares prefix-aware with round-robin routing, and compares
disaggregated prefill with replicas that do both prefill and decode.
"""

import http.client
import json
import os
import random
import signal
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

WORDS = (
    "a the fox bear lake hat moon tree bird king road song fish and then went saw had big red old "
    "went to in"
).split()
CLIENTS = 8


@dataclass(frozen=True)
class StreamedAnswer:
    """One streamed answer."""

    text: str
    first: float  # seconds to the first event
    gaps: list[float]  # seconds between events


def story(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def ask(port: int, body: dict[str, Any]) -> StreamedAnswer:
    """Stream an answer; raises RuntimeError if it is incomplete."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    began = time.perf_counter()
    kind = {"Content-Type": "application/json"}
    connection.request(
        "POST", "/v1/completions", json.dumps(body | {"stream": True, "ignore_eos": True}), kind
    )
    response = connection.getresponse()
    choices = []
    times = []
    finished = False
    for line in response:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            choices.append(json.loads(line[6:])["choices"][0]["text"])
        finished = finished or line == b"data: [DONE]\n"
    connection.close()
    if response.status != 200 or not finished:
        raise RuntimeError(f"no whole answer: {response.status}")
    return StreamedAnswer(
        "".join(choices), times[0] - began, [b - a for a, b in zip(times, times[1:], strict=False)]
    )


def counters(port: int) -> dict[str, float]:
    """Metrics summed over the decode replicas."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    counts: dict[str, float] = {}
    for line in connection.getresponse().read().decode().splitlines():
        if not line.startswith("#") and 'model_name="reader"' not in line:
            name, _, value = line.rpartition(" ")
            counts[name.split("{")[0]] = counts.get(name.split("{")[0], 0.0) + float(value)
    connection.close()
    return counts


def cpu_ticks() -> dict[int, int]:
    """The CPU time in clock ticks of each decode replica, by process ID."""
    folders = [
        path.parent
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b":quire:engine" in path.read_bytes()
    ]
    return {
        int(folder.name): int((folder / "stat").read_text().rpartition(")")[2].split()[11])
        for folder in folders
    }


def ask_all(
    port: int, bodies: Sequence[dict[str, Any]], during: Callable[[], None] | None = None
) -> list[StreamedAnswer]:
    """Send all requests from `CLIENTS` threads; `during` is called a second after the start."""
    with ThreadPoolExecutor(CLIENTS) as threads:
        answers = [threads.submit(ask, port, body) for body in bodies]
        if during is not None:
            time.sleep(1.0)
            during()
        return [answer.result() for answer in answers]


def measure_kill(port: int, expected: Callable[[dict[str, Any]], str]) -> None:
    """Kill the busiest replica a second into the load, and count resumed and identical answers."""
    rng = random.Random(0)
    bodies = [
        {
            "prompt": story(rng, rng.randrange(5, 60)),
            "max_tokens": 300,
            "temperature": n % 2,
            "seed": n,
        }
        for n in range(60)
    ]
    counts_before = counters(port)

    def kill() -> None:
        first = cpu_ticks()
        time.sleep(0.1)
        last = cpu_ticks()
        os.kill(
            max(last, key=lambda process: last[process] - first.get(process, 0)), signal.SIGKILL
        )

    answers = ask_all(port, bodies, kill)
    counts_after = counters(port)
    unchanged = sum(
        answer.text == expected(body) for answer, body in zip(answers, bodies, strict=True)
    )
    names = ("quire:front_retries_total", "quire:front_resumed_total")
    counts = [int(counts_after[name] - counts_before[name]) for name in names]
    print(
        f"killed: {len(answers)} of {len(bodies)} answered, {unchanged} as by one engine; sent "
        f"again {counts[0]}, ",
        end="",
    )
    print(f"of these half told {counts[1]}")


def measure_routing(port: int, name: str) -> None:
    """Measure prefix cache hits and TTFT of six-turn conversations with four shared prefixes."""
    rng = random.Random(name)
    prefixes = [story(rng, 250) for _ in range(4)]
    conversations = [prefixes[n % 4] + " " + story(rng, 20) for n in range(24)]
    counts_before = counters(port)
    first = []
    for _ in range(6):
        rng.shuffle(conversations)
        answers = ask_all(
            port,
            [{"prompt": prompt, "max_tokens": 24, "temperature": 0} for prompt in conversations],
        )
        first += [answer.first for answer in answers]
        conversations = [
            f"{prompt}{answer.text} {story(rng, 12)}"
            for prompt, answer in zip(conversations, answers, strict=True)
        ]
    counts_after = counters(port)
    names = [f"vllm:prefix_cache_{counter}_total" for counter in ("hits", "queries")]
    hits, num_tokens = (counts_after[name] - counts_before[name] for name in names)
    print(
        f"routing {name}: {hits / num_tokens:.1%} of {num_tokens:.0f} prompt tokens found; ", end=""
    )
    print(f"first event after {statistics.median(first) * 1e3:.0f} ms (median)")


def measure_prefill_split(port: int, name: str) -> list[str]:
    """Measure ITL of four streams that decode while long prompts arrive. Returns all answers."""
    rng = random.Random(1)
    writing = [
        {"prompt": story(rng, 10), "max_tokens": 400, "temperature": 1, "seed": n}
        for n in range(12)
    ]
    reading = [{"prompt": story(rng, 420), "max_tokens": 4, "temperature": 0} for _ in range(30)]
    with ThreadPoolExecutor(4) as writers, ThreadPoolExecutor(1) as readers:
        written = [writers.submit(ask, port, body) for body in writing]
        read = [readers.submit(ask, port, body) for body in reading]
        written = [answer.result() for answer in written]
        read = [answer.result() for answer in read]
    gaps = sorted(gap for answer in written for gap in answer.gaps)
    print(f"{name}: between events {gaps[len(gaps) // 2] * 1e3:.1f} ms (median), ", end="")
    print(
        f"{gaps[int(len(gaps) * 0.99)] * 1e3:.0f} ms (99 %); first event of a long prompt after ",
        end="",
    )
    print(f"{statistics.median(answer.first for answer in read) * 1e3:.0f} ms (median)")
    return [answer.text for answer in (*written, *read)]


def main(
    model: Annotated[
        str | None,
        typer.Argument(help="Model folder or Hugging Face model ID.", show_default="quill"),
    ] = None,
) -> None:
    """Benchmark replicas on Ray Serve on this machine."""
    from ... import LLM, SamplingParams
    from ...serving.http.settings import ServerSettings
    from ...serving.ray import deploy
    from ...serving.ray.scale import DeploymentPlan, ReplicaOptions

    options: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "kv_cache_memory_bytes": 64 << 20,
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scale = ReplicaOptions(replicas=3, replica_resources={"CPU": 0.1})
    plan = DeploymentPlan(
        ((model, ("m",)),), ServerSettings(port=port), options, scale, log_level="warning"
    )

    def expected(body: dict[str, Any]) -> str:
        sampling = {key: value for key, value in body.items() if key != "prompt"}
        params = SamplingParams(**sampling, ignore_eos=True)
        return alone.generate(body["prompt"], params, use_tqdm=False)[0].outputs[0].text

    deploy.connect(None, plan)
    alone = LLM(model, **options)
    try:
        deploy.run(plan)
        measure_kill(port, expected)
        for routing in ("prefix", "round-robin"):
            deploy.run(replace(plan, scale=replace(scale, routing=routing)))
            measure_routing(port, routing)
        texts = []
        for name, chosen in {
            "together": replace(scale, replicas=2),
            "apart": replace(scale, replicas=1, prefill_replicas=1),
        }.items():
            deploy.run(replace(plan, scale=chosen))
            texts.append(measure_prefill_split(port, name))
        print(
            f"apart as together: {sum(map(str.__eq__, *texts))} of {len(texts[0])} answers "
            "identical"
        )
    finally:
        deploy.stop()


if __name__ == "__main__":
    typer.run(main)
