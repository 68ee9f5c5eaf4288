"""`quire bench`: metrics against numpy and scipy, the HTTP client against a misbehaving server, and
offline runs of the engine.
"""

import asyncio
import itertools
import json
import math
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import typer
from hypothesis import given
from hypothesis import strategies as st

from quire import LLM
from quire.__main__ import main
from quire.model.checkpoint import hub, loader
from quire.model.planning import cost
from quire.ops.native import build
from quire.scripts.bench import client, command, engine, load, metrics, plot, serve, startup, step
from quire.scripts.bench.drafts import Drafts, drafts_table
from quire.scripts.bench.load import Sample
from quire.scripts.bench.metrics import RequestTimes
from quire.scripts.options import UsageError
from quire.tests.support.served import model_of, scripted, served


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `quire bench ARGUMENTS`; returns (exit code, stdout, stderr)."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def call(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["quire", "bench", *arguments])
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        return (code, *capsys.readouterr())

    return call


# ---- arithmetic


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_match_numpy(values, percent):
    actual = metrics.percentile(sorted(values), percent)
    assert actual == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50))
def test_summaries_match_numpy(values):
    summary = metrics.summarise(values)
    expected = (np.mean(values), np.std(values), *np.percentile(values, (50, 90, 99)))
    assert tuple(vars(summary).values()) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert metrics.summarise([]) is None


def random_request_times(rng: random.Random) -> list[RequestTimes]:
    answers = []
    for _ in range(rng.randint(1, 30)):
        sent = rng.uniform(0, 100)
        count = rng.randint(1, 20)
        moments = itertools.accumulate([sent, *(rng.uniform(0.001, 2) for _ in range(count))])
        answers.append(
            RequestTimes(
                sent,
                list(moments)[1:],
                rng.randint(1, 99),
                count,
                rng.choice([None, None, "broke"]),
            )
        )
    return answers


@pytest.mark.parametrize("seed", range(10))
def test_request_metrics_match_their_definitions(seed):
    answers = random_request_times(random.Random(seed))
    good = [answer for answer in answers if answer.error is None]
    times_ms = metrics.milliseconds(answers)
    assert times_ms["ttft"] == pytest.approx([1000 * (a.times[0] - a.sent) for a in good])
    assert times_ms["e2el"] == pytest.approx([1000 * (a.times[-1] - a.sent) for a in good])
    assert times_ms["itl"] == pytest.approx(
        np.concatenate([1000 * np.diff(a.times) for a in good] or [[]])
    )
    # end-to-end latency = time to first token + mean time of each later token
    tpot = iter(times_ms["tpot"])
    for a, ttft, e2el in zip(good, times_ms["ttft"], times_ms["e2el"], strict=True):
        after_first = (a.output_tokens - 1) * next(tpot) if a.output_tokens > 1 else 0
        assert ttft + after_first == pytest.approx(e2el)
    totals = metrics.totals(answers, 4.0)
    assert (totals["completed"], totals["failed"]) == (len(good), len(answers) - len(good))
    assert totals["output_throughput"] == sum(a.output_tokens for a in good) / 4
    assert (
        totals["total_token_throughput"] == sum(a.output_tokens + a.prompt_tokens for a in good) / 4
    )
    limits = {"ttft": 1000.0, "tpot": 1100.0, "e2el": 12000.0}
    num_within_limits = sum(
        a.times[0] - a.sent <= 1
        and (a.output_tokens == 1 or np.mean(np.diff(a.times)) <= 1.1)
        and a.times[-1] - a.sent <= 12
        for a in good
    )
    assert metrics.goodput(answers, 4.0, limits) == num_within_limits / 4


def test_totals_of_failed_requests_do_not_divide_by_zero():
    answers = [RequestTimes(0.0, error="broke")]
    assert metrics.totals(answers, 0.0)["output_throughput"] == 0
    assert metrics.flat(metrics.milliseconds(answers)) == {}
    assert metrics.goodput(answers, 0.0, {"ttft": 1.0}) == 0


# ---- datasets and arrival times


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_arrival_times_are_a_gamma_process_of_the_request_rate(burstiness):
    arrival_times = load.arrivals(4000, 20.0, burstiness, seed=1)
    assert arrival_times[-1] == pytest.approx(4000 / 20) and arrival_times == sorted(arrival_times)
    gaps = np.diff([0.0, *arrival_times])
    assert (
        scipy.stats.kstest(
            gaps, scipy.stats.gamma(burstiness, scale=1 / (20 * burstiness)).cdf
        ).pvalue
        > 0.01
    )
    assert (
        load.arrivals(4000, 20.0, burstiness, seed=1)
        == arrival_times
        != load.arrivals(4000, 20.0, burstiness, 2)
    )


def test_arrival_times_at_infinite_rate_and_infinite_burstiness():
    assert load.arrivals(3, math.inf, 1.0, 0) == [0, 0, 0]
    assert load.arrivals(4, 2.0, math.inf, 0) == pytest.approx([0.5, 1, 1.5, 2])


class WordTokenizer:
    """A tokenizer of words; ids 0 to 2 are special."""

    vocab_size = 50
    special_ids = frozenset({0, 1, 2})

    def encode(self, text):
        return [3 + len(word) for word in text.split()]

    def decode(self, ids):
        return " ".join("x" * (i - 3) for i in ids)


def make_dataset(name, path=None, **options) -> load.Dataset:
    return load.dataset(name, path, **options)


def test_random_dataset_has_the_requested_lengths():
    data = make_dataset("random", random_input_len=20, random_output_len=10, random_range_ratio=0.5)
    samples = data.samples(500, WordTokenizer(), seed=3)
    for lengths, low, high in (
        ([len(s.prompt) for s in samples], 10, 30), ([s.output_len for s in samples], 5, 15),
    ):  # fmt: skip
        assert (min(lengths), max(lengths)) == (low, high)
    sampled_tokens = {token for s in samples for token in s.prompt}
    assert sampled_tokens == set(range(3, 50))
    assert {
        token for s in data.samples(99, WordTokenizer(), 3, vocab=40) for token in s.prompt
    } == set(range(3, 40))
    assert (
        data.samples(500, WordTokenizer(), seed=3)
        == samples
        != data.samples(500, WordTokenizer(), seed=4)
    )
    assert all(
        len(s.prompt) == 7
        for s in make_dataset("random", random_input_len=7).samples(9, WordTokenizer(), 0)
    )


def test_prefix_repetition_dataset_uses_each_prefix_equally_often():
    data = make_dataset(
        "prefix_repetition", prefix_repetition_prefix_len=30, prefix_repetition_suffix_len=5,
        prefix_repetition_num_prefixes=4, prefix_repetition_output_len=2,
    )  # fmt: skip
    samples = data.samples(40, WordTokenizer(), 0)
    heads = [tuple(s.prompt[:30]) for s in samples]
    assert sorted(heads.count(head) for head in set(heads)) == [10] * 4
    assert heads != sorted(heads) and len({tuple(s.prompt[30:]) for s in samples}) == 40
    assert {(len(s.prompt), s.output_len) for s in samples} == {(35, 2)}


def conversation(*texts) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


def test_sharegpt_dataset_skips_unusable_conversations(tmp_path):
    def words(count: int) -> str:
        return "a " * count

    good = [
        conversation(words(4), words(5)),
        conversation(words(1024), words(1024), "more"),
        conversation(words(100), words(6)),
    ]
    bad = [
        conversation(words(4)),
        conversation(words(3), words(9)),
        conversation(words(9), words(3)),
        conversation(words(1025), words(4)),
    ]
    bad += [
        conversation(words(1024), words(1025)),
        conversation("", words(9)),
        conversation(None, words(9)),
        {},
        7,
        {"conversations": 3},
    ]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(bad + good))
    samples = make_dataset("sharegpt", path).samples(3, WordTokenizer(), 0)
    assert sorted((len(s.prompt) // 2, s.output_len) for s in samples) == [
        (4, 5),
        (100, 6),
        (1024, 1024),
    ]
    # the file is cycled when more samples are wanted
    repeated = make_dataset("sharegpt", path, sharegpt_output_len=2).samples(11, WordTokenizer(), 0)
    assert (
        repeated[:5] == repeated[5:10]
        and repeated[10] == repeated[0]
        and {s.output_len for s in repeated} == {2}
    )
    # with a fixed output length the recorded answers do not matter
    assert sorted(len(s.prompt) // 2 for s in repeated[:5]) == [4, 9, 100, 1024, 1024]


def test_custom_dataset_reads_prompts_and_output_lengths(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(
        '{"prompt": "one\u2028two", "name": 1}\n\n{"prompt": [3, 4], "output_tokens": 9}\nwrong, but not needed'
    )
    samples = make_dataset("custom", path, custom_output_len=5).samples(2, None, 0)
    assert samples == [Sample("one\u2028two", 5), Sample([3, 4], 9)]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("custom", "{", "line 1 is not JSON"),
        ("custom", '{"prompt": "a"}\n{"promt": "a"}', 'line 2 must be an object with "prompt"'),
        ("custom", "[1]", "line 1"),
        ("custom", '{"prompt": [1, true]}', "line 1"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "output_tokens is 0"),
        ("custom", "\n", "no request"),
        ("sharegpt", "{", "not JSON"),
        ("sharegpt", "{}", "list of conversations"),
        ("sharegpt", "[]", "no request"),
    ],
)
def test_dataset_errors_name_the_line(tmp_path, name, content, message):
    path = tmp_path / "data"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        make_dataset(name, path).samples(5, WordTokenizer(), 0)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("sonnet", {}, "can be random, sharegpt"),
        ("sharegpt", {}, "needs --dataset-path"),
        ("random", {"path": "x"}, "leave out --dataset-path"),
        (
            "random",
            {"custom_output_len": 3},
            "--custom-output-len is not for --dataset-name random",
        ),
        ("prefix_repetition", {"random_input_len": 3}, "--random-input-len is not for"),
        ("random", {"random_input_len": 0}, "--random-input-len is 0"),
        ("random", {"random_range_ratio": 1.0}, "--random-range-ratio is 1"),
        ("random", {"random_range_ratio": math.nan}, "--random-range-ratio is nan"),
    ],
)
def test_dataset_errors_name_the_option(name, options, message):
    with pytest.raises(UsageError, match=message):
        make_dataset(name, **options)


def test_several_values_of_an_option_become_repeated_options():
    line = "m --concurrency 1 2 4K 8x --goodput ttft:5 tpot:6 -- --concurrency 3 m 4 --seed 1 2"
    spread = command.repeat_options(line.split())
    assert (
        spread
        == (
            "m --concurrency 1 --concurrency 2 --concurrency 4K 8x --goodput ttft:5 --goodput "
            "tpot:6 -- --concurrency 3 m 4 --seed 1 2"
        ).split()
    )


# ---- the client


@given(st.data(), st.sampled_from(["\n", "\r\n"]))
def test_server_sent_events_survive_any_chunking(data, end):
    texts = data.draw(
        st.lists(
            st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=5
        )
    )
    wire = "".join(
        f": ping{end}{end}event: x{end}data: {text}{end}data: more{end}{end}" for text in texts
    ).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=20)))

    async def chunks():
        for start, stop in itertools.pairwise([0, *cuts, len(wire)]):
            yield wire[start:stop]

    async def collect():
        return [event async for event in client.events(chunks())]

    assert asyncio.run(collect()) == [f"{text}\nmore" for text in texts]


def read_body(wire: bytes, headers: dict[str, str]) -> bytes:
    async def collect():
        reader = asyncio.StreamReader()
        reader.feed_data(wire)
        reader.feed_eof()
        return b"".join([chunk async for chunk in client.read_body(reader, headers)])

    return asyncio.run(collect())


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 20))
def test_response_bodies_end_by_chunk_or_content_length(chunks, num_missing):
    body = b"".join(chunks)
    chunked = (
        b"".join(b"%X;note=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    )
    assert read_body(chunked, {"transfer-encoding": "chunked"}) == body
    assert read_body(body + b"next", {"content-length": str(len(body))}) == body
    assert read_body(body, {}) == body
    with pytest.raises(asyncio.IncompleteReadError):
        read_body(body, {"content-length": str(len(body) + num_missing)})
    with pytest.raises(asyncio.IncompleteReadError):
        read_body(chunked[: -min(num_missing + 4, len(chunked))], {"transfer-encoding": "chunked"})


@pytest.mark.parametrize("size", [b"", b"-1", b"0x2", b"g", b"1" * 17])
def test_invalid_chunk_lengths_are_rejected(size):
    with pytest.raises(client.Failure, match="length"):
        read_body(size + b"\r\nxx\r\n", {"transfer-encoding": "chunked"})


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, False, "")),
        ("http://localhost/", ("localhost", 80, False, "")),
        ("https://localhost/api/v1/", ("localhost", 443, True, "/api")),
        ("http://[::1]:5/v1", ("::1", 5, False, "")),
    ],
)
def test_base_urls_are_parsed(url, expected):
    server = client.ServerAddress.parse(url)
    assert (server.host, server.port, server.tls is not None, server.path) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://localhost",
        "http://",
        "http://localhost:99999",
        "http://localhost/?x=1",
    ],
)
def test_invalid_base_urls_are_rejected(url, run):
    code, out, err = run("serve", "--base-url", url)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: --base-url: ")


def event(text: str | None = None, **fields: Any) -> bytes:
    data = (
        fields if text is None else {"choices": [{"index": 0, "text": text, "finish_reason": None}]}
    )
    return f"data: {json.dumps(data)}\n\n".encode()


def delta(finish_reason=None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])


DONE = b"data: [DONE]\n\n"
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10})
TWO = [event("a"), event("b")]
STREAM = {"content-type": "text/event-stream"}


class FakeServer:
    """An HTTP server in a thread.

    `behave(server, body, writer)` answers each request. Request bodies and headers are recorded
    in order.
    """

    def __init__(self, behave: Callable[..., Any], names: tuple[str, ...] = ("quill",)):
        self.behave = behave
        self.names = names
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.open = self.max_open = 0
        self.metrics: Callable[[], str] | None = None  # the body of /metrics
        self.request_received = threading.Event()
        self.client_closed = threading.Event()

    def __enter__(self) -> "FakeServer":
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = self.call(asyncio.start_server(self.connection, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_):
        # in the loop's thread: a connection may be closing there
        self.loop.call_soon_threadsafe(self.server.close)
        self.call(self.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def stop(self):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    async def connection(self, reader, writer):
        self.open += 1
        self.max_open = max(self.max_open, self.open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /v1/models "):
                body = json.dumps({"data": [{"id": name} for name in self.names]}).encode()
                writer.write(
                    f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                )
                return
            if head.startswith("GET /metrics ") and self.metrics is not None:
                body = self.metrics().encode()
                writer.write(
                    f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                )
                return
            length = next(
                line.split(":")[1]
                for line in head.split("\r\n")
                if line.startswith("Content-Length")
            )
            self.headers.append(head)
            self.bodies.append(json.loads(await reader.readexactly(int(length))))
            self.request_received.set()
            watch = asyncio.ensure_future(reader.read())
            watch.add_done_callback(lambda _: self.client_closed.set())
            await self.behave(self, self.bodies[-1], writer)
            watch.cancel()
        except asyncio.CancelledError:
            pass
        finally:
            self.open -= 1
            writer.close()


async def reply(writer, chunks: list[bytes], chunked: bool = True, end: bool = True):
    """Write a stream of events, each flushed alone; `end=False` leaves out the final chunk."""
    coding = "Transfer-Encoding: chunked\r\n" if chunked else ""
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{coding}\r\n".encode())
    for chunk in chunks:
        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk) if chunked else chunk)
        await writer.drain()
        await asyncio.sleep(0)
    if chunked and end:
        writer.write(b"0\r\n\r\n")


def streams_events(*chunks: bytes, **options):
    async def behave(server, body, writer):
        await reply(writer, list(chunks), **options)

    return behave


def replies_with(status: str, body: bytes):
    async def behave(server, body_sent, writer):
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    return behave


async def silence(server, body, writer):
    await asyncio.sleep(60)


async def two_events_then_silence(server, body, writer):
    await reply(writer, TWO, end=False)
    await asyncio.sleep(60)


def writes_bytes(data: bytes):
    async def behave(server, body, writer):
        writer.write(data)

    return behave


def ask_once(server: FakeServer) -> RequestTimes:
    """Send one request, timed by a clock that counts its own readings (one at the start, then one
    per event).
    """
    address = client.ServerAddress.parse(server.url)
    clock = itertools.count().__next__
    return asyncio.run(client.ask(address, "/v1/completions", {"prompt": "x"}, 30.0, clock))


@pytest.mark.parametrize(
    "behave, times, tokens",
    [
        (streams_events(*TWO, DONE), [1, 2], (0, 2)),  # no usage: events are counted
        (streams_events(*TWO, event("c"), USAGE, DONE), [1, 2, 3], (7, 3)),
        (streams_events(*TWO, DONE, chunked=False), [1, 2], (0, 2)),
        (streams_events(event("ab"), USAGE, DONE), [1], (7, 3)),  # several tokens in an event
        (streams_events(event(""), event("a"), DONE), [1, 2], (0, 2)),  # a token without text
        (
            streams_events(
                delta(role="assistant", content=""), delta(content="a"), delta(reasoning_content="b"),
                delta(finish_reason="stop"), USAGE, DONE,
            ),
            [2, 3], (7, 3),
        ),
        (streams_events(delta(role="assistant", content="a"), delta("length", content="b"), DONE), [1, 2], (0, 2)),
        (streams_events(b"".join([*TWO, DONE])), [1, 2], (0, 2)),
        (streams_events(*TWO, DONE + b"data: ignored\n\n"), [1, 2], (0, 2)),
        (
            writes_bytes(b"HTTP/1.1 102 Wait\r\nX: y\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + b"".join(TWO) + DONE),
            [1, 2], (0, 2),
        ),
    ],
)  # fmt: skip
def test_streamed_events_are_timed_one_by_one(behave, times, tokens):
    with FakeServer(behave) as server:
        answer = ask_once(server)
    assert answer == RequestTimes(0, times, *tokens)


@pytest.mark.parametrize(
    "behave, ended",
    [
        (
            streams_events(
                event(choices=[{"text": "", "finish_reason": "stop"}]),
                event(choices=[], usage={"completion_tokens": 1}),
                DONE,
            ),
            1,
        ),
        (streams_events(delta(role="assistant", content=""), delta(finish_reason="stop"), DONE), 2),
    ],
)
def test_an_answer_without_tokens_completes(run, behave, ended):
    with FakeServer(behave) as server:
        answer = ask_once(server)
        address = (
            "--host",
            "127.0.0.1",
            "--port",
            server.url.rpartition(":")[2],
            "--backend",
            "openai",
        )
        options = (
            "--tokenizer",
            "quill",
            "--random-input-len",
            "3",
            "--goodput",
            "ttft:5",
            "--json",
            "-",
        )
        code, out, _ = run("serve", *address, *options, "--num-prompts", "3", "--trust-remote-code")
    assert (answer.error, answer.times, answer.ended, answer.ttft, answer.tpot) == (
        None,
        [],
        ended,
        None,
        None,
    )
    result = json.loads(out)
    assert (code, result["completed"], result["failed"], result["errors"]) == (0, 3, 0, {})
    assert "mean_ttft_ms" not in result and result["mean_e2el_ms"] > 0


@pytest.mark.parametrize(
    "behave, error",
    [
        (
            replies_with("503 Busy", b'{"error": {"message": "too many\\nrequests"}}'),
            "HTTP 503: too many",
        ),
        (replies_with("404 No", b'{"detail": "x"}'), "HTTP 404: {'detail': 'x'}"),
        (replies_with("500 Oh", b"<html>\nno"), "HTTP 500: <html>"),
        (replies_with("500 Oh", b""), "HTTP 500"),
        (
            replies_with("200 OK", b'{"choices": [{"text": "not streamed"}]}'),
            "the stream ended without [DONE]",
        ),
        (streams_events(*TWO, event(error={"message": "gone"})), "gone"),
        (streams_events(*TWO), "the stream ended without [DONE]"),
        (streams_events(*TWO, end=False), "disconnected in the middle of the answer"),
        (streams_events(end=False), "disconnected"),
        (streams_events(DONE), "the stream held no token"),
        (streams_events(b"data: {\n\n"), "an event is not JSON"),
        (streams_events(b"data: []\n\n"), "an event is not a JSON object"),
        (
            streams_events(b"data: \xff\n\n"),
            "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        (streams_events(b"data: " + b"x" * (1 << 21)), "a line is longer than 1048576 bytes"),
        (writes_bytes(b""), "disconnected"),
        (writes_bytes(b"SSH-2.0\r\n\r\n"), "the answer is not HTTP/1.1"),
        (
            writes_bytes(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
            "the answer's length cannot be read",
        ),
        (writes_bytes(b"HTTP/1.1 200 OK\r\n" + b"x" * (1 << 21)), None),
    ],
)
def test_failed_requests_report_an_error_and_do_not_raise(behave, error):
    with FakeServer(behave) as server:
        message = ask_once(server).error
    assert message is not None and "\n" not in message
    assert error is None or message == error


@pytest.mark.filterwarnings(
    "error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("behave", [silence, two_events_then_silence])
def test_a_request_that_times_out_closes_its_connection(behave):
    async def request_with_timeout(server):
        address = client.ServerAddress.parse(server.url)
        answer = await client.ask(address, "/v1/completions", {}, 0.2, itertools.count().__next__)
        assert answer.error == "no end within 0.2 s"
        assert await asyncio.to_thread(server.client_closed.wait, 10)

    with FakeServer(behave) as server:
        asyncio.run(request_with_timeout(server))


def test_connection_refused_is_reported():
    with FakeServer(silence) as server:
        pass
    assert "Connect call failed" in (ask_once(server).error or "")


def test_requests_are_sent_in_order_within_the_concurrency_limit():
    sent = []
    num_in_flight = 0
    max_in_flight = 0

    async def send(index: int) -> RequestTimes:
        nonlocal num_in_flight, max_in_flight
        sent.append(index)
        num_in_flight += 1
        max_in_flight = max(max_in_flight, num_in_flight)
        for _ in range(random.Random(index).randint(1, 5)):
            await asyncio.sleep(0)
        num_in_flight -= 1
        return RequestTimes(index)

    for limit, expected in ((None, 40), (1, 1), (7, 7)):
        sent = []
        max_in_flight = 0
        answers, _ = asyncio.run(serve.send_requests(send, [0.0] * 40, limit))
        assert [answer.sent for answer in answers] == sent == list(range(40))
        assert max_in_flight == expected


# ---- bench serve


def test_bench_serve_reports_successes_and_failures(run, tmp_path, monkeypatch):
    """Every third request fails; the table, the JSON and the plot report the others."""

    async def behave(server, body, writer):
        if len(server.bodies) % 3 == 0:
            await replies_with("503 Busy", b'{"error": {"message": "busy"}}')(server, body, writer)
        else:
            count = body["max_tokens"]
            usage = event(
                choices=[], usage={"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            )
            await reply(writer, [*[event("x")] * count, usage, DONE])

    file = tmp_path / "result.json"
    picture = tmp_path / "picture.png"
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with FakeServer(behave) as server:
        code, out, err = run(
            "serve",
            "--base-url",
            server.url,
            "--num-prompts",
            "12",
            "--random-input-len",
            "8",
            "--random-output-len",
            "4",
            "--max-concurrency",
            "2",
            "--ignore-eos",
            "--request-rate",
            "1000",
            "--burstiness",
            "0.5",
            "--goodput",
            "ttft:60000",
            "tpot:60000",
            "--save-result",
            "--result-filename",
            str(file),
            "--plot",
            str(picture),
        )
    assert (code, err) == (0, "")
    assert server.max_open <= 2
    assert all("Authorization: Bearer secret\r\n" in head for head in server.headers)
    assert len(server.bodies) == 12
    first = server.bodies[0]
    assert first | {"prompt": None} == {
        "model": "quill",
        "prompt": None,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert all(len(body["prompt"]) == 8 for body in server.bodies)
    for text in (
        "8 of 12",
        "TTFT",
        "TPOT",
        "ITL",
        "E2E",
        "median",
        "P90",
        "P99",
        "4 failed:\n  4 x HTTP 503: busy",
    ):
        assert text in out
    assert "8 of 12, kept TTFT 60000 ms, TPOT 60000 ms" in out
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"], result["errors"]) == (
        8,
        4,
        {"HTTP 503: busy": 4},
    )
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (64, 32)
    assert result["request_throughput"] == pytest.approx(8 / result["duration"])
    assert result["request_goodput"] == result["request_throughput"]
    good = [request for request in result["requests"] if request["error"] is None]
    assert result["mean_ttft_ms"] == pytest.approx(
        np.mean([request["times_ms"][0] for request in good])
    )
    gaps = np.concatenate([np.diff(request["times_ms"]) for request in good])
    assert result["p99_itl_ms"] == pytest.approx(np.percentile(gaps, 99))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_serve_sends_chat_prompts_as_text(run, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "Grüße"}\n{"prompt": "two", "output_tokens": 3}')
    with FakeServer(streams_events(*TWO, DONE), names=("other", "more")) as server:
        options = (
            "serve",
            "--base-url",
            server.url + "/v1",
            "--endpoint",
            "/v1/chat/completions",
            "--num-prompts",
            "2",
        )
        code, out, _ = run(
            *options, "--dataset-name", "custom", "--dataset-path", str(lines), "--json", "-"
        )
        assert (code, json.loads(out)["completed"]) == (0, 2)
        assert (
            run(*options, "--tokenizer", "quill", "--random-input-len", "5", "--model", "mine")[0]
            == 0
        )
    bodies = sorted(server.bodies[:2], key=lambda body: body["max_tokens"])
    assert [body["messages"] for body in bodies] == [
        [{"role": "user", "content": "two"}], [{"role": "user", "content": "Grüße"}],
    ]  # fmt: skip
    assert [(body["model"], body["max_tokens"]) for body in bodies] == [
        ("other", 3),
        ("other", 128),
    ]
    assert "prompt" not in bodies[0] and "ignore_eos" not in bodies[0]
    assert (
        isinstance(server.bodies[2]["messages"][0]["content"], str)
        and server.bodies[2]["model"] == "mine"
    )


def test_bench_serve_fails_if_all_requests_fail(run):
    with FakeServer(replies_with("500 Oh", b"")) as server:
        code, out, err = run(
            "serve", "--base-url", server.url, "--num-prompts", "3", "--goodput", "ttft:5"
        )
    assert (code, err) == (1, "")
    assert "0 of 3" in out and "3 x HTTP 500" in out and "0.00 requests/s" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--endpoint", "/v1/embeddings"], "/v1/chat/completions"),
        (["--port", "8001"], "leave out --host and --port"),
        (["--backend", "tgi"], "openai, vllm, openai-chat"),
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], "leave one out"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--num-prompts", "1.5"], "32K"),
        (["--request-rate", "-1"], "--request-rate is -1"),
        (["--request-rate", "nan"], "--request-rate is nan"),
        (["--burstiness", "2"], "--request-rate"),
        (["--max-concurrency", "-1"], "--max-concurrency is -1"),
        (["--goodput", "itl:5"], "ttft:500"),
        (["--goodput", "ttft:soon"], "ttft:500"),
        (["--goodput", "ttft:0"], "ttft:500"),
        (["--goodput", "ttft:1", "tpot1"], "tpot1"),
        (["--plot", "x.gif"], ".png"),
        (["--plot", "no/such/folder.png"], "no folder"),
        (["--json", "."], "it is a folder"),
        (["--json", "a", "--save-result"], "leave one out"),
        (["--result-filename", "a"], "--result-filename needs --save-result"),
        (["--dataset-name", "custom"], "--dataset-path"),
        (
            ["--dataset-name", "custom", "--dataset-path", "no/such/file", "--model", "x"],
            "no server answers",
        ),
        ([], "no server answers"),
    ],
)
def test_bench_serve_usage_errors_are_one_line(run, arguments, message):
    code, out, err = run("serve", "--base-url", "http://127.0.0.1:1", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err


def test_bench_serve_needs_a_model_name_and_a_tokenizer(run):
    with FakeServer(replies_with("404 Not Found", b""), names=()) as server:
        assert "lists no model" in run("serve", "--base-url", server.url)[2]
        code, _, err = run("serve", "--base-url", server.url, "--model", "no-such-model")
        assert (code, err.count("\n")) == (2, 2) and "--tokenizer" in err
        assert "note: the server's tokenizer cannot be asked: HTTP 404" in err


def test_bench_serve_samples_prompts_with_the_servers_tokenizer(run, served_quill):
    """The served model has an alias and no local files, so that the server tokenizes prompts."""
    options = (
        "serve",
        "--base-url",
        served_quill,
        "--model",
        "an-alias",
        "--num-prompts",
        "3",
        "--random-output-len",
        "2",
    )
    for endpoint in ("/v1/completions", "/v1/chat/completions"):
        code, out, err = run(
            *options, "--random-input-len", "9", "--endpoint", endpoint, "--json", "-"
        )
        assert code == 0 and "tokens of the server's tokenizer" in err
        result = json.loads(out)
        assert result["completed"] == 3
        if endpoint == "/v1/completions":
            assert [request["prompt_tokens"] for request in result["requests"]] == [9] * 3


@pytest.fixture
def served_quill():
    engine, _ = scripted(lambda prompt: "word " * 40)
    with served(model_of(engine, "an-alias")) as state:
        yield state.url


def test_ctrl_c_stops_bench_serve_quietly():
    with FakeServer(silence) as server:
        command = [
            sys.executable,
            "-m",
            "quire",
            "bench",
            "serve",
            "--base-url",
            server.url,
            "--num-prompts",
            "5",
        ]
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Processes that a shell starts in the background ignore SIGINT, and their children
            # inherit that: these tests may run so.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            assert server.request_received.wait(300)
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=300)
        finally:
            child.kill()
    assert (child.returncode, out, err) == (130, "", "")


# ---- the engine


@pytest.fixture(scope="module")
def llm():
    from quire import LLM

    return LLM("quill-draft", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128)


def test_engine_runs_at_the_requested_concurrency(llm, monkeypatch):
    monkeypatch.setattr(
        llm.engine, "max_fused_steps", lambda plan: 1
    )  # no fused steps: one event per token
    rng = random.Random(0)
    samples = [
        Sample(rng.choices(range(3, 1000), k=rng.randint(1, 60)), rng.randint(1, 12))
        for _ in range(9)
    ]
    for concurrency in (1, 3):
        advances: list[tuple[int, int]] = []
        note = advances.append
        run = engine.serve(
            llm,
            samples,
            concurrency,
            0.0,
            itertools.count().__next__,
            lambda *n, note=note: note(n),
        )
        for sample, answer in zip(samples, run.answers, strict=True):
            assert (answer.prompt_tokens, answer.output_tokens) == (
                len(sample.prompt),
                sample.output_len,
            )
            assert len(answer.times) == sample.output_len and list(answer.times) == sorted(
                set(answer.times)
            )
        assert sorted(advances) == sorted((1, sample.output_len) for sample in samples)
        # Every token of every request was computed once. One more step per request may have been
        # launched before its end was known.
        rows = sum(step.plan.num_tokens for step in run.steps)
        needed = sum(len(sample.prompt) + sample.output_len - 1 for sample in samples)
        assert needed <= rows <= needed + len(samples)
        assert max(len(step.plan.items) for step in run.steps) == concurrency
        assert not llm.engine.busy and not llm.engine.requests
        # The clock counts its readings: one at the start, one per request, one per call of step(),
        # one at the end.
        assert sum(step.seconds for step in run.steps) <= run.seconds
    assert llm.engine.runner.compiles.recompiles == 0


def test_an_interrupted_run_aborts_its_requests(llm, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    requests = []
    add = llm.add
    monkeypatch.setattr(
        llm, "add", lambda *args, **kwargs: requests.append(add(*args, **kwargs)) or requests[-1]
    )
    with pytest.raises(KeyboardInterrupt):
        engine.serve(llm, [Sample([5], 1), *[Sample([5] * 40, 50)] * 5], 3, 0.0, advance=interrupt)
    assert [request.sequences[0].finish_reason for request in requests] == [
        "length",
        "abort",
        "abort",
    ]
    assert not llm.engine.busy and not llm.engine.requests
    llm.engine.scheduler.check()
    assert len(engine.serve(llm, [Sample([5], 2)], 1, 1.0).answers) == 1


def test_requests_longer_than_the_model_length_are_rejected(llm):
    with pytest.raises(UsageError, match="100 prompt and 29 output tokens do not fit into the 128"):
        engine.serve(llm, [Sample([5] * 100, 28), Sample([5] * 100, 29)], 1, 0.0)
    assert not llm.engine.busy


def test_a_failed_step_aborts_the_benchmark(llm, monkeypatch):
    def fail(plan):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llm.engine.runner, "launch", fail)
    with pytest.raises(UsageError, match="a step failed"):
        engine.serve(llm, [Sample([5], 2)], 1, 0.0)


def test_roofline_of_decode_steps_by_hand():
    """Steps that prefill do not count; a sequence reads the KV cache up to its own position."""

    def step(seconds, *items):
        items = tuple(SimpleNamespace(start=start, num_tokens=count) for start, count in items)
        plan = SimpleNamespace(items=items, decodes=all(i.num_tokens == 1 for i in items), steps=1)
        return engine.TimedStep(seconds, plan, 2 * len(items))

    steps = [step(9.0, (0, 16), (4, 1)), step(2.0, (16, 1), (5, 1)), step(4.0, (17, 1))]
    roof = engine.roof(steps, 1000, lambda length: 10 * min(length, 10), 500.0)
    assert roof is not None
    # KV reads: 100 + 60 and 100 bytes, so 1130 bytes a step with the weights; at 500 bytes a second
    # 2.26 s, and the steps took 3 s on average.
    assert (roof.steps, roof.sequences, roof.weight_bytes, roof.cache_bytes) == (
        2,
        1.5,
        1000,
        130.0,
    )
    assert roof.tokens == 3
    assert roof.seconds == pytest.approx(2.26) and roof.share == pytest.approx(2.26 / 3)
    assert engine.roof(steps[:1], 1000, lambda length: 0, 500.0) is None


def test_roofline_counts_all_weight_and_cache_bytes(llm):
    import jax

    config = llm.engine.runner.config
    weights = llm.engine.runner.weights
    run = engine.serve(llm, [Sample([5] * 20, 2)], 1, 0.0)
    roof = engine.engine_roof(llm, run, 1e9)
    assert (
        roof is not None and config.tied
    )  # so that the embedding table is read, as the output matrix
    assert roof.weight_bytes == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)
    )
    # 21 positions; all sliding windows are wider than that
    attention_layers = [layer.attention for layer in config.layers]
    assert roof.cache_bytes == sum(21 * 2 * a.kv_heads * a.head_dim * 2 for a in attention_layers)


def test_device_bandwidth_is_measured():
    assert engine.device_bandwidth(1 << 16, passes=2) > 0


SMALL = ("quill-draft", "--max-num-batched-tokens", "32", "--max-model-len", "128")


def test_throughput_sweeps_concurrency(run, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "read_bandwidth", lambda: 2e9)
    monkeypatch.setattr("quire.scripts.bench.throughput.read_bandwidth", lambda: 2e9)
    file = tmp_path / "r.json"
    picture = tmp_path / "p.svg"
    code, out, err = run(
        "throughput",
        *SMALL,
        "--num-prompts",
        "6",
        "--concurrency",
        "4",
        "1",
        "--random-input-len",
        "10",
        "--random-output-len",
        "5",
        "--json",
        str(file),
        "--plot",
        str(picture),
    )
    assert (code, err) == (0, "")
    result = json.loads(file.read_text())
    assert [point["concurrency"] for point in result["points"]] == [1, 4]
    for point in result["points"]:
        assert (point["total_input_tokens"], point["total_output_tokens"]) == (60, 30)
        decode = point["decode"]
        assert decode["roof_ms"] == pytest.approx(
            (decode["weight_bytes"] + decode["cache_bytes"]) / 2e6
        )
        assert decode["roof_share"] == pytest.approx(
            decode["roof_ms"] / np.mean(decode["steps_ms"]), rel=1e-3
        )
    # at concurrency 1 every token but the first takes a decode step of its own
    assert result["points"][0]["decode"]["steps"] == 6 * 4
    assert (result["options"]["concurrency"], result["command"]) == ([4, 1], "bench throughput")
    assert "2.0 GB/s" in out and "reached" in out
    assert b"<svg" in picture.read_bytes()


def test_throughput_without_decode_steps_has_no_roofline(run, monkeypatch):
    monkeypatch.setattr("quire.scripts.bench.throughput.read_bandwidth", lambda: 2e9)
    options = (
        "throughput",
        *SMALL,
        "--max-num-seqs",
        "4",
        "--num-prompts",
        "2",
        "--random-input-len",
        "10",
    )
    code, out, _ = run(*options, "--random-output-len", "1")
    assert code == 0 and "No step only decoded" in out
    code, out, err = run(*options, "--random-output-len", "1", "--random-input-len", "200")
    assert (code, out, err.count("\n")) == (2, "", 1) and "length is 128 (max_model_len)" in err


def test_latency_reports_every_batch(run, tmp_path):
    file = tmp_path / "r.json"
    picture = tmp_path / "p.pdf"
    code, out, err = run(
        "latency",
        *SMALL,
        "--batch-size",
        "4",
        "--input-len",
        "6",
        "--output-len",
        "5",
        "--num-iters",
        "3",
        "--num-iters-warmup",
        "1",
        "--json",
        str(file),
        "--plot",
        str(picture),
    )
    assert (code, err) == (0, "")
    result = json.loads(file.read_text())
    assert len(result["batches_ms"]) == 3
    assert result["mean_batch_ms"] == pytest.approx(np.mean(result["batches_ms"]))
    assert all(
        text in out
        for text in ("whole batch", "first token", "each token after", "3 batches of 4 requests")
    )
    assert picture.read_bytes().startswith(b"%PDF")


STEP = "jit(fused_steps)/while/body/jit(step)"
PRODUCT = "quire.ops.linear.cpu/ffi_call"
PROGRAM = f"""
%body (p: s32[]) -> s32[] {{
  %call.1 = bf16[4,8]{{1,0}} custom-call(%x, %w), metadata={{op_name="{STEP}/layer0/mlp/{PRODUCT}"}}
  %call.2 = bf16[4,8]{{1,0}} custom-call(%x, %w), metadata={{op_name="{STEP}/layer1/mlp/{PRODUCT}"}}
  %call.3 = f32[4,9]{{1,0}} custom-call(%x, %w), metadata={{op_name="{STEP}/logits/{PRODUCT}"}}
  %fusion.4 = s32[4]{{0}} fusion(%x), kind=kLoop, metadata={{op_name="{STEP}/add"}}
}}
ENTRY %main (p: s32[]) -> s32[] {{
  ROOT %while.5 = s32[] while(%p), condition=%c, body=%body, metadata={{op_name="jit(fused_steps)/while"}}
}}
"""


def make_trace(*events: tuple[str, float, float, str]) -> SimpleNamespace:
    """A trace of events on two threads, from (name, start ms, length ms, module)."""
    trace_events = [
        SimpleNamespace(
            name=name, start_ns=start * 1e6, duration_ns=length * 1e6,
            stats=[("hlo_op", name), ("hlo_module", module), ("program_id", 7)] if module else [],
        )
        for name, start, length, module in events
    ]  # fmt: skip
    return SimpleNamespace(
        planes=[
            SimpleNamespace(
                lines=[
                    SimpleNamespace(events=trace_events[::2]),
                    SimpleNamespace(events=trace_events[1::2]),
                ]
            )
        ]
    )


def test_step_trace_is_attributed_to_scopes():
    """Two steps in one loop of a program, a copy outside of the steps, and idle time."""
    lengths = (("call.1", 0, 2.0), ("fusion.4", 2, 0.5), ("call.2", 3, 1), ("call.3", 4, 3))
    first_step, second_step = (
        [(name, at + start, length, "s") for name, start, length in lengths] for at in (10.0, 18.0)
    )
    traced_steps = step.read(
        make_trace(
            *first_step,
            *second_step,
            ("while.5", 10, 15, "s"),
            ("copy.1", 2, 1, "copies"),
            ("Python", 0, 90, ""),
            ("ThunkExecutor::Execute", 9, 8, ""),
            ("ThunkExecutor::Execute", 17, 9, ""),
            ("ThunkExecutor::Execute (wait for completion)", 12, 13, ""),
            ("ThunkExecutor::Execute", 2, 1, ""),
        ),
        ["%copy.1 = s32[] copy(%x)", PROGRAM],
    )
    assert traced_steps.steps == 2 and traced_steps.program == pytest.approx(0.009)
    assert [(scope_time.scope, scope_time.kind, scope_time.launches) for scope_time in traced_steps.groups] == [
        ("mlp", "products", 2), ("step", "XLA's operations", 1), ("logits", "products", 1)
    ]  # fmt: skip
    assert [scope_time.seconds for scope_time in traced_steps.groups] == pytest.approx(
        [0.003, 0.0005, 0.003]
    )
    assert step.idle_seconds(0.010, traced_steps) == pytest.approx(
        {"between operations": 0.0025, "between programs: launch, host": 0.001}
    )
    with pytest.raises(UsageError, match="does not name them"):
        step.read(make_trace(("dot.1", 0, 1, "s")), [PROGRAM])


def test_step_breakdown_counts_launches_of_every_layer(run, tmp_path, monkeypatch):
    """Every layer's matrix products are counted; scopes and idle time add up to the step."""
    try:
        build.compiler()
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    monkeypatch.setattr(step, "read_bandwidth", lambda: 2e9)
    file = tmp_path / "r.json"
    code, out, err = run(
        "step",
        *SMALL,
        "--batch-size",
        "2",
        "--input-len",
        "20",
        "--num-steps",
        "40",
        "--json",
        str(file),
    )
    assert (code, err) == (0, "")
    result = json.loads(file.read_text())
    launches_by_scope = {
        (scope_time["scope"], scope_time["kind"]): scope_time["launches"]
        for scope_time in result["traced"]["parts"]
    }
    layers = len(loader.read_config(hub.resolve("quill-draft")).layers)
    assert launches_by_scope["logits", "products"] == 1 and result["traced"]["steps"] > 30
    # qkv and out, gate-up and down
    assert (
        launches_by_scope["attention", "products"]
        == launches_by_scope["mlp", "products"]
        == 2 * layers
    )
    assert launches_by_scope["attention", "attention"] == layers
    total_ms = sum(scope_time["ms"] for scope_time in result["traced"]["parts"]) + sum(
        result["traced"]["rest_ms"].values()
    )
    assert total_ms >= result["traced"]["step_ms"] * 0.8
    assert (
        "mlp: products" in out
        and "between programs" in out
        and "2 sequences after 20 tokens" in out
    )
    code, out, err = run("step", *SMALL, "--input-len", "20", "--num-steps", "90")
    assert (code, out) == (2, "") and "do not fit into the 128 of --max-model-len" in err


def test_draft_acceptance_figures_by_hand():
    """Two loads with 4 and 1 proposals of 3 draft tokens each."""
    first_load = Drafts(4, 12, (4, 2, 1))
    both_loads = Drafts(5, 15, (4, 2, 1))
    assert (
        both_loads.since(first_load) == Drafts(1, 3, (0, 0, 0))
        and first_load.joined(both_loads.since(first_load)) == both_loads
    )
    assert first_load.result() == {
        "spec_decode_acceptance_rate": pytest.approx(100 * 7 / 12),
        "spec_decode_acceptance_length": 1 + 7 / 4,
        "spec_decode_num_drafts": 4,
        "spec_decode_draft_tokens": 12,
        "spec_decode_accepted_tokens": 7,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.5, 0.25],
    }
    head, row, _ = drafts_table("at once", [(1, first_load), (2, both_loads)]).splitlines()
    assert (
        row.split() == ["1", "12", "58.3%", "2.75", "100%", "50%", "25%"]
        and "tokens a step" in head
    )
    nothing = Drafts(0, 0, (0, 0, 0))
    assert (nothing.share, nothing.length, nothing.by_position) == (0, 1, [0, 0, 0])


DRAFTED = (
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 3, "adapts": false}',
)


def test_throughput_counts_accepted_draft_tokens(run, tmp_path, monkeypatch):
    """A step that verifies drafts is a decode step with more tokens than sequences."""
    monkeypatch.setattr("quire.scripts.bench.throughput.read_bandwidth", lambda: 2e9)
    file = tmp_path / "r.json"
    code, out, err = run(
        "throughput",
        *SMALL,
        "--num-prompts",
        "4",
        "--concurrency",
        "2",
        "--random-input-len",
        "10",
        "--random-output-len",
        "60",
        *DRAFTED,
        "--json",
        str(file),
    )
    assert (code, err) == (0, "")
    (point,) = json.loads(file.read_text())["points"]
    assert point["total_output_tokens"] == 240 and point["spec_decode_accepted_tokens"] > 20
    assert point["spec_decode_acceptance_length"] == pytest.approx(
        1 + point["spec_decode_accepted_tokens"] / point["spec_decode_num_drafts"]
    )
    rates = point["spec_decode_per_position_acceptance_rates"]
    assert len(rates) == 3 and rates == sorted(rates, reverse=True)
    assert point["decode"]["tokens"] > point["decode"]["sequences"]
    # All tokens but the first of each answer come from decode steps; steps that also prefill do not
    # count.
    assert point["decode"]["steps"] * point["decode"]["tokens"] <= 240 - 4 + 1e-6
    assert point["mean_tpot_ms"] < point["mean_itl_ms"], "a step sends its tokens in one event"
    assert "accepted by position" in out and "reached" in out


def test_throughput_assigns_adapters_in_turn(run, tmp_path, monkeypatch):
    """Adapter weights are not counted in the roofline."""
    monkeypatch.setattr("quire.scripts.bench.throughput.read_bandwidth", lambda: 2e9)
    adapter_names = []
    add = LLM.add

    def recording_add(self, *args, adapter=None, **kwargs):
        adapter_names.append(adapter and adapter.lora_name)
        return add(self, *args, adapter=adapter, **kwargs)

    monkeypatch.setattr(LLM, "add", recording_add)
    file = tmp_path / "r.json"
    code, out, err = run(
        "throughput",
        *SMALL,
        "--num-prompts",
        "4",
        "--concurrency",
        "2",
        "--random-input-len",
        "10",
        "--random-output-len",
        "5",
        "--adapters",
        "3",
        "--adapter-rank",
        "8",
        "--dtype",
        "float32",
        "--json",
        str(file),
    )
    assert (code, err) == (0, "")
    result = json.loads(file.read_text())
    (point,) = result["points"]
    assert (result["options"]["adapters"], point["total_output_tokens"]) == (3, 20)
    assert adapter_names == [
        None,
        "adapter-1",
        "adapter-2",
        "adapter-3",
        "adapter-1",
    ]  # the first is the warm-up
    config = loader.read_config(hub.resolve("quill-draft"), "float32")
    assert point["decode"]["weight_bytes"] == cost.read_weight_bytes(config)


def test_latency_counts_accepted_draft_tokens(run, tmp_path):
    file = tmp_path / "r.json"
    code, out, err = run(
        "latency",
        *SMALL,
        "--batch-size",
        "2",
        "--input-len",
        "6",
        "--output-len",
        "40",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "0",
        *DRAFTED,
        "--json",
        str(file),
        "--plot",
        str(tmp_path / "p.png"),
    )
    assert (code, err) == (0, "")
    result = json.loads(file.read_text())
    assert 0 < result["spec_decode_accepted_tokens"] < result["spec_decode_draft_tokens"]
    assert result["mean_tpot_ms"] < result["mean_itl_ms"]
    assert all(
        text in out for text in ("each step after", "a token of an answer", "accepted by position")
    )


def test_serve_reads_drafts_from_the_servers_metrics(run, tmp_path):
    """vLLM's counters of the benchmarked model, as differences over the load."""
    file = tmp_path / "r.json"
    scrapes = []

    def metrics() -> str:
        scrapes.append(1)
        k = len(scrapes)
        lines = []
        for model, times in (("quill", 1), ("other", 50)):
            label = f'{{model_name="{model}"}}'
            counts = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15}
            for name, count in counts.items():
                lines += [f"# TYPE vllm:spec_decode_num_{name} counter"] * (times == 1)
                lines.append(f"vllm:spec_decode_num_{name}_total{label} {count * k * times}")
            for place, count in enumerate((10, 5, 0)):
                label = f'{{model_name="{model}",position="{place}"}}'
                lines.append(
                    f"vllm:spec_decode_num_accepted_tokens_per_pos_total{label} {count * k * times}"
                )
        return "\n".join(lines) + "\n"

    async def behave(server, body, writer):
        usage = event(
            choices=[], usage={"prompt_tokens": len(body["prompt"]), "completion_tokens": 2}
        )
        await reply(writer, [event("x"), event("x"), usage, DONE])

    with FakeServer(behave) as server:
        server.metrics = metrics
        address = ("--base-url", server.url, "--num-prompts", "2", "--random-input-len", "4")
        code, out, _ = run("serve", *address, "--json", str(file))
    result = json.loads(file.read_text())
    assert code == 0 and "server" not in result
    assert result["spec_decode_num_drafts"] == 10 and result["spec_decode_acceptance_rate"] == 50
    assert result["spec_decode_acceptance_length"] == 2.5
    assert result["spec_decode_per_position_acceptance_rates"] == [1, 0.5, 0]
    assert "accepted by position" in out and "100%  50%  0%" in out


@pytest.mark.slow
def test_startup_measures_cold_and_warm_compile_caches(run, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "not-used"))
    cache_sizes = []
    start = startup.start

    def recording_start(options, caches):
        def cache_size():
            return sum(path.name.endswith("-cache") for path in caches.rglob("*"))

        size_before = cache_size()
        stage_ends = start(options, caches)
        cache_sizes.append((size_before, cache_size()))
        return stage_ends

    monkeypatch.setattr(startup, "start", recording_start)
    picture = tmp_path / "p.png"
    code, out, err = run(
        "startup",
        *SMALL,
        "--max-num-seqs",
        "1",
        "--num-iters",
        "1",
        "--json",
        "-",
        "--plot",
        str(picture),
    )
    assert (code, err) == (0, "")
    (empty, filled), warm_sizes = cache_sizes
    assert empty == 0 < filled and warm_sizes == (
        filled,
        filled,
    )  # the second start compiled nothing
    result = json.loads(out)
    for state in ("cold", "warm"):
        (stages,) = result["starts_s"][state]
        assert 0 < stages["python"] < stages["imports"] < stages["ready"] < stages["token"]
        assert result[state]["mean_token_ms"] == pytest.approx(stages["token"] * 1000)
    assert not (tmp_path / "not-used").exists() and picture.exists()
    code, out, err = run("startup", "quill-draft", "--max-model-len", "1G", "--num-iters", "1")
    assert (code, out, err.count("\n")) == (2, "", 1) and "max_model_len is 1073741824" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["throughput", "--concurrency", "0"], "--concurrency is 0"),
        (["throughput", "--concurrency", "8", "--max-num-seqs", "4"], "--max-num-seqs"),
        (["throughput", "--dataset-name", "sharegpt"], "--dataset-path"),
        (["throughput", "no-such-model"], "there is no model 'no-such-model'"),
        (["latency", "--batch-size", "0"], "--batch-size is 0"),
        (["latency", "--num-iters-warmup", "-1"], "--num-iters-warmup is -1"),
        (["latency", *SMALL, "--batch-size", "4", "--input-len", "1K"], "max_model_len"),
        (["startup", "--num-iters", "0"], "--num-iters is 0"),
        (["startup", "no-such-model"], "there is no model 'no-such-model'"),
        (["thruput"], "throughput"),
    ],
)
def test_usage_errors_are_one_line(run, arguments, message, monkeypatch):
    monkeypatch.setattr("quire.scripts.bench.throughput.read_bandwidth", lambda: 2e9)
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err


@pytest.mark.parametrize("command", ["throughput", "latency", "startup", "serve"])
def test_help_of_every_bench(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "") and f"Usage: quire bench {command}" in out
    assert f" {command} " in run()[1] and run() == run("--help")


# ---- plots


def test_plots_mark_percentiles_and_limits():
    from matplotlib.figure import Figure

    rng = random.Random(0)
    figure = Figure()
    values = {
        "ttft": [rng.uniform(1, 9) for _ in range(50)],
        "tpot": [],
        "itl": [1.0] * 300 + [900.0],
        "e2el": [4.0],
    }
    plot.distributions(figure, values, metrics.METRICS, {"ttft": 5.0}, "a title")
    assert [axes.get_xlabel() for axes in figure.axes] == ["TTFT, ms", "ITL, ms", "E2E, ms"]
    for axes, sample_values in zip(
        figure.axes, (values["ttft"], values["itl"], values["e2el"]), strict=True
    ):
        marks = [float(np.asarray(line.get_xdata())[0]) for line in axes.lines[1:4]]
        assert marks == pytest.approx(np.percentile(sample_values, (50, 90, 99)))
    assert figure.axes[1].get_xlim()[1] < 10 and "900" in figure.axes[1].texts[0].get_text()
    assert any("limit 5" in text.get_text() for text in figure.axes[0].get_legend().get_texts())

    decode = dict.fromkeys(
        ("sequences", "roof_ms", "roof_share", "mean_ms", "p10_ms", "p90_ms"), 1.0
    )
    points = [
        {"concurrency": level, "output_throughput": 10.0 * level, "decode": sample_values}
        for level, sample_values in (
            (1, {**decode, "steps_ms": [1.0, 2.0]}),
            (2, None),
            (4, {**decode, "steps_ms": [1.0]}),
        )
    ]
    for plotted_points, labels in (
        (points, ["requests at once"] * 2),
        (points[:1], ["decode step, ms"]),
        (points[1:2], [""]),
    ):
        figure = Figure()
        plot.throughput(figure, plotted_points, "quill", 3e10)
        assert [axes.get_xlabel() for axes in figure.axes] == labels
        figure.canvas.draw()

    figure = Figure()
    plot.stages(figure, {"cold": [1.0, 3.0], "warm": [1.0, 1.5]}, ["one", "two"], "start")
    assert sorted(bar.get_width() for bar in figure.axes[0].patches) == pytest.approx(
        [0.5, 1, 1, 2]
    )


def test_a_result_is_printed_before_its_file_is_written(tmp_path, capsys):
    from quire.scripts.bench.report import ResultFiles

    report = ResultFiles("serve", {}, tmp_path / "gone" / "r.json", None)
    with pytest.raises(typer.TyperException, match="r.json"):
        report.write({}, "the table")
    assert capsys.readouterr().out == "the table\n"


def test_simulate_compares_batching_policies_and_prefix_caching(run, tmp_path):
    """Static batching takes longer; with prefix caching a shared prefix is computed once."""
    figures = {}
    for name, options in {
        "plain": [],
        "static": ["--policy", "static"],
        "shared": ["--shared-prefix", "200"],
        "apart": ["--shared-prefix", "200", "--no-enable-prefix-caching"],
    }.items():
        code, out, _ = run(
            "simulate",
            "--num-prompts",
            "60",
            "--longest",
            "300",
            "--max-num-seqs",
            "8",
            *options,
            "--json",
            "-",
        )
        assert code == 0
        figures[name] = json.loads(out)
        assert figures[name]["ended"] == {"length": 60} and figures[name]["pages_filled"] > 0.9
    assert figures["static"]["seconds"] > 1.5 * figures["plain"]["seconds"]
    assert figures["apart"]["cached_tokens"] == 0
    saved = figures["apart"]["rows"] - figures["shared"]["rows"]
    assert saved == figures["shared"]["cached_tokens"] > 50 * 190
    code, out, _ = run("simulate", "--num-prompts", "40", "--plot", str(tmp_path / "plot.png"))
    assert code == 0 and "40 chats" in out and (tmp_path / "plot.png").stat().st_size > 10_000
    code, _, err = run("simulate", "--num-pages", "10")
    assert code == 2 and "--num-pages" in err and "needs 251" in err
