"""Everything at once: clients that die, a queue that is full, steps that raise, and an end under
load.

Forty seconds of it (ten at each change), and more until all has happened that can. Afterwards every
page is free or kept, and every request that the engine took is counted at its end.
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
MOST = 300
CLIENTS = 48

pytestmark = pytest.mark.slow


def engine():
    """The bundled model with few pages and a short queue: sequences give way, and requests are
    turned away.
    """
    return make_engine(
        make_options(None, max_num_seqs=16, kv_cache_memory_bytes=3 << 20, max_queued_requests=24)
    )


@pytest.fixture(scope="module")
def server():
    with served(Model(("quill",), engine)) as state:
        state.engine = state.service.models.models[0].llm.engine
        yield state


class Client:
    """Sends requests one after the other, and treats their answers as it likes."""

    def __init__(self, server, seed: int, outcomes: Counter):
        self.address = server.url.removeprefix("http://").split(":")
        self.rng = random.Random(seed)
        self.outcomes = outcomes

    def body(self) -> dict:
        rng = self.rng
        prompt = [rng.randrange(3, 500) for _ in range(rng.choice((1, 5, 40, 300)))]
        own = {
            "prompt": prompt,
            "max_tokens": rng.choice((1, 10, 60, 200)),
            "temperature": rng.choice((0, 1)),
        }
        own |= {
            "stream": rng.random() < 0.7,
            "ignore_eos": rng.random() < 0.5,
            "priority": rng.choice((-1, 0, 0, 1)),
        }
        if rng.random() < 0.2:
            own |= {"n": rng.choice((2, 4))}
        if rng.random() < 0.1:
            own |= {"timeout": rng.choice((0.001, 0.05, 0.5))}
        if rng.random() < 0.1:
            own |= {"logprobs": 3, "stop": ["e", "zz"]}
        if rng.random() < 0.1:
            own |= {"temperature": -1}
        return own

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
            sent = f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
            fate = rng.random()
            if fate < 0.05:  # half of it
                writer.write(sent[: rng.randrange(len(sent))])
                self.outcomes["half sent"] += 1
                return
            writer.write(sent)
            if fate < 0.4:  # dies, before or in the middle of the answer
                if rng.random() < 0.7:
                    await reader.read(rng.choice((1, 100, 2000)))
                await asyncio.sleep(rng.choice((0, 0.01, 0.1)))
                self.outcomes["killed"] += 1
                return
            if fate < 0.5:
                await asyncio.sleep(rng.random())  # slow
            answer = await reader.read()
            self.check(body, answer)
        finally:
            writer.transport.abort()

    def check(self, body: dict, answer: bytes) -> None:
        """What was read to its end has an end."""
        head, _, rest = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        assert status in (200, 400, 429, 500, 503), head
        self.outcomes[str(status)] += 1
        if status == 200 and body["stream"]:
            assert b"data: [DONE]" in rest
            ends = rest.count(b'"finish_reason":"')
            failed = b'"error":{' in rest
            assert failed or ends == body.get("n", 1), rest[-500:]
            self.outcomes["stream failed" if failed else "stream whole"] += 1

    async def run(self, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            try:
                await self.request()
            except ConnectionError:
                self.outcomes["connection"] += 1


async def storm(server, outcomes: Counter, enough: Callable[[], bool]) -> None:
    began = time.monotonic()

    def goes_on() -> bool:
        return (passed := time.monotonic() - began) < SECONDS or (passed < MOST and not enough())

    async with asyncio.TaskGroup() as group:
        for seed in range(CLIENTS):
            group.create_task(Client(server, seed, outcomes).run(goes_on))


def break_steps(server, rng: random.Random):
    """Now and then a launch, or a collection, raises."""
    runner = server.engine.runner
    broken = Counter()
    launch = runner.launch
    collect = runner.collect

    def fails(name, work, *given):
        if rng.random() < 0.002:
            broken[name] += 1
            raise RuntimeError(f"{name} is not well")
        return work(*given)

    runner.launch = lambda plan, moves: fails("launch", launch, plan, moves)
    runner.collect = lambda launched: fails("collect", collect, launched)

    def mend():
        runner.launch = launch
        runner.collect = collect

    return broken, mend


def accounted(server) -> None:
    """Nothing is held, and every request that was taken has ended in one way."""
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


def test_chaos(server, caplog):
    rng = random.Random(0)
    outcomes = Counter()
    metrics = server.service.models.models[0].llm.metrics
    broken, mend = break_steps(server, rng)
    wanted = {
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

    def missing() -> set[str]:
        preempted = ["preempted"] * bool(metrics.values()["vllm:num_preemptions_total"])
        return wanted - {*outcomes, *broken, *preempted}

    asyncio.run(storm(server, outcomes, lambda: not missing()))
    mend()
    accounted(server)
    assert sum(metrics.ends.values()) > SECONDS  # work was done
    assert not missing(), outcomes
    print(dict(outcomes), dict(metrics.ends))


def test_an_end_under_load(server):
    """No new work, running streams come to their ends, and the server is gone."""

    async def run() -> list[bytes]:
        address = server.url.removeprefix("http://").split(":")
        body = json.dumps(
            {"prompt": "Once", "max_tokens": 150, "ignore_eos": True, "stream": True}
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: "
            "application/json\r\n"
        )
        sent = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

        async def one() -> bytes:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            return answer

        streams = [asyncio.create_task(one()) for _ in range(24)]
        while not server.engine.scheduler.running:
            await asyncio.sleep(0.005)
        server.loop.call_soon_threadsafe(server.service.stop)
        await asyncio.sleep(0.02)
        late = await one()
        assert late.startswith(b"HTTP/1.1 503") and b"shutting down" in late
        return await asyncio.gather(*streams)

    for answer in asyncio.run(run()):
        # those that came after the signal
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503"))
        assert answer.startswith(b"HTTP/1.1 503") or (
            b"[DONE]" in answer and b'"finish_reason":"length"' in answer
        )
    server.thread.join(120)
    assert not server.thread.is_alive()
    assert not server.engine.requests and server.engine.lifecycle.is_closed
