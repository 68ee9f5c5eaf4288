"""Everything at once: clients that disconnect, a full queue, failing steps, and a shutdown under
load.

It runs for forty seconds (ten in the checks of each change), and longer until every expected
outcome has occurred. Afterwards every page is free or cached, and every accepted request is counted
once.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.serving.http.models import Model
from quire.tests.support.cases import cases
from quire.tests.support.served import served

SECONDS = cases(40)
MAX_SECONDS = 300
NUM_CLIENTS = 48

pytestmark = pytest.mark.slow


def make_small_engine():
    """The bundled model with few pages and a short queue, so that sequences are preempted and
    requests rejected.
    """
    return make_engine(
        make_options(None, max_num_seqs=16, kv_cache_memory_bytes=3 << 20, max_queued_requests=24)
    )


@pytest.fixture(scope="module")
def server():
    with served(Model(("quill",), make_small_engine)) as state:
        state.engine = state.service.models.models[0].llm.engine
        yield state


class ChaosClient:
    """Sends requests one by one and reads, delays or abandons the answers at random."""

    def __init__(self, server, seed: int, outcomes: Counter):
        self.address = server.url.removeprefix("http://").split(":")
        self.rng = random.Random(seed)
        self.outcomes = outcomes

    def body(self) -> dict:
        rng = self.rng
        prompt = [rng.randrange(3, 500) for _ in range(rng.choice((1, 5, 40, 300)))]
        body = {
            "prompt": prompt,
            "max_tokens": rng.choice((1, 10, 60, 200)),
            "temperature": rng.choice((0, 1)),
        }
        body |= {
            "stream": rng.random() < 0.7,
            "ignore_eos": rng.random() < 0.5,
            "priority": rng.choice((-1, 0, 0, 1)),
        }
        if rng.random() < 0.2:
            body |= {"n": rng.choice((2, 4))}
        if rng.random() < 0.1:
            body |= {"timeout": rng.choice((0.001, 0.05, 0.5))}
        if rng.random() < 0.1:
            body |= {"logprobs": 3, "stop": ["e", "zz"]}
        if rng.random() < 0.1:
            body |= {"temperature": -1}
        return body

    async def request(self) -> None:
        rng = self.rng
        body = self.body()
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            data = json.dumps(body).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {self.address[0]}\r\nContent-Type: "
                "application/json\r\n"
            )
            request_data = (
                f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
            )
            action = rng.random()
            if action < 0.05:  # sends only a part
                writer.write(request_data[: rng.randrange(len(request_data))])
                self.outcomes["half sent"] += 1
                return
            writer.write(request_data)
            if action < 0.4:  # disconnects before or during the answer
                if rng.random() < 0.7:
                    await reader.read(rng.choice((1, 100, 2000)))
                await asyncio.sleep(rng.choice((0, 0.01, 0.1)))
                self.outcomes["killed"] += 1
                return
            if action < 0.5:
                await asyncio.sleep(rng.random())  # a slow reader
            answer = await reader.read()
            self.check(body, answer)
        finally:
            writer.transport.abort()

    def check(self, body: dict, answer: bytes) -> None:
        """An answer that was read completely has its finish reasons or an error."""
        head, _, content = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        assert status in (200, 400, 429, 500, 503), head
        self.outcomes[str(status)] += 1
        if status == 200 and body["stream"]:
            assert b"data: [DONE]" in content
            num_finish_reasons = content.count(b'"finish_reason":"')
            failed = b'"error":{' in content
            assert failed or num_finish_reasons == body.get("n", 1), content[-500:]
            self.outcomes["stream failed" if failed else "stream whole"] += 1

    async def run(self, should_continue: Callable[[], bool]) -> None:
        while should_continue():
            try:
                await self.request()
            except ConnectionError:
                self.outcomes["connection"] += 1


async def run_clients(server, outcomes: Counter, enough: Callable[[], bool]) -> None:
    start = time.monotonic()

    def should_continue() -> bool:
        return (passed := time.monotonic() - start) < SECONDS or (
            passed < MAX_SECONDS and not enough()
        )

    async with asyncio.TaskGroup() as group:
        for seed in range(NUM_CLIENTS):
            group.create_task(ChaosClient(server, seed, outcomes).run(should_continue))


def break_steps(server, rng: random.Random):
    """Let launches and collections fail at random."""
    runner = server.engine.runner
    failures = Counter()
    launch = runner.launch
    collect = runner.collect

    def call_or_fail(name, work, *arguments):
        if rng.random() < 0.002:
            failures[name] += 1
            raise RuntimeError(f"{name} is not well")
        return work(*arguments)

    runner.launch = lambda plan, moves: call_or_fail("launch", launch, plan, moves)
    runner.collect = lambda launched: call_or_fail("collect", collect, launched)

    def restore():
        runner.launch = launch
        runner.collect = collect

    return failures, restore


def check_accounting(server) -> None:
    """No resources are held, and every accepted request has exactly one end."""
    engine = server.engine
    thread = server.service.models.models[0].llm.thread
    until = time.monotonic() + 120
    while (engine.busy or server.service.open) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.2)
    assert not engine.busy and not engine.requests and not server.service.open
    assert not thread.outbox.listeners and not thread.outbox.news
    engine.scheduler.check()
    assert all(group.num_free == group.num_pages - 1 for group in engine.tables[0].pools)
    assert engine.runner.compiles.recompiles == 0


def test_disconnections_full_queue_and_failed_steps(server, caplog):
    rng = random.Random(0)
    outcomes = Counter()
    metrics = server.service.models.models[0].llm.metrics
    failures, restore = break_steps(server, rng)
    expected_outcomes = {
        "200",
        "400",
        "429",
        "500",
        "killed",
        "half sent",
        "stream whole",
        "stream failed",
        "launch",
        "collect",
        "preempted",
    }

    def missing_outcomes() -> set[str]:
        preempted = ["preempted"] * bool(metrics.values()["vllm:num_preemptions_total"])
        return expected_outcomes - {*outcomes, *failures, *preempted}

    asyncio.run(run_clients(server, outcomes, lambda: not missing_outcomes()))
    restore()
    check_accounting(server)
    assert sum(metrics.ends.values()) > SECONDS  # requests were finished
    assert not missing_outcomes(), outcomes
    print(dict(outcomes), dict(metrics.ends))


def test_shutdown_under_load(server):
    """New requests are rejected, running streams finish, and the server stops."""

    async def run() -> list[bytes]:
        address = server.url.removeprefix("http://").split(":")
        body = json.dumps(
            {"prompt": "Once", "max_tokens": 150, "ignore_eos": True, "stream": True}
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: "
            "application/json\r\n"
        )
        request_data = (
            f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )

        async def complete() -> bytes:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(request_data)
            answer = await reader.read()
            writer.close()
            return answer

        streams = [asyncio.create_task(complete()) for _ in range(24)]
        while not server.engine.scheduler.running:
            await asyncio.sleep(0.005)
        server.loop.call_soon_threadsafe(server.service.stop)
        await asyncio.sleep(0.02)
        late_answer = await complete()
        assert late_answer.startswith(b"HTTP/1.1 503") and b"shutting down" in late_answer
        return await asyncio.gather(*streams)

    for answer in asyncio.run(run()):
        # requests after the signal get 503
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503"))
        assert answer.startswith(b"HTTP/1.1 503") or (
            b"[DONE]" in answer and b'"finish_reason":"length"' in answer
        )
    server.thread.join(120)
    assert not server.thread.is_alive()
    assert not server.engine.requests and server.engine.lifecycle.is_closed
