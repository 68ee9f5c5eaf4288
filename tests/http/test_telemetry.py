"""Spans as a collector gets them, and the log as people and machines read it."""

import io
import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire.model.config import ModelError
from quire.serving.http import logs, telemetry

FACTS = {
    "request_id": "cmpl-1",
    "model": "quill",
    "max_tokens": 16,
    "temperature": 0.5,
    "top_p": 1.0,
    "n": 2,
    "prompt_tokens": 12,
    "completion_tokens": 32,
    "time_to_first_token": 0.25,
    "time_in_queue": 0.125,
    "e2e": 1.5,
    "finish_reasons": ["stop", "length"],
}
SENT = {
    "gen_ai.request.id": "cmpl-1",
    "gen_ai.request.model": "quill",
    "gen_ai.request.max_tokens": 16,
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.top_p": 1.0,
    "gen_ai.request.n": 2,
    "gen_ai.usage.prompt_tokens": 12,
    "gen_ai.usage.completion_tokens": 32,
    "gen_ai.latency.time_to_first_token": 0.25,
    "gen_ai.latency.time_in_queue": 0.125,
    "gen_ai.latency.e2e": 1.5,
    "gen_ai.response.finish_reasons": ["stop", "length"],
}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {
    "traceparent": f"00-{TRACE}-{PARENT}-01",
    "tracestate": "vendor=1",
    "authorization": "Bearer secret",
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in (
        telemetry.ENDPOINT_VARIABLE,
        telemetry.PROTOCOL_VARIABLE,
        "OTEL_SERVICE_NAME",
        "OTEL_SDK_DISABLED",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def memory():
    """A tracer whose spans stay here."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return telemetry.Tracer(provider), exporter


@pytest.fixture
def collector():
    """A server that takes what comes: [(path, content type, message)]."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append(
                (
                    self.path,
                    self.headers["content-type"],
                    ExportTraceServiceRequest.FromString(body),
                )
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", got
    server.shutdown()
    thread.join()
    server.server_close()


def plain(value):
    kind = value.WhichOneof("value")
    return (
        [plain(one) for one in value.array_value.values]
        if kind == "array_value"
        else getattr(value, kind)
    )


def test_a_span_says_what_is_known(memory):
    tracer, exporter = memory
    span = tracer.request("llm_request", HEADERS)
    assert exporter.get_finished_spans() == ()
    span.finish(FACTS)
    span.finish({"model": "other"})
    (found,) = exporter.get_finished_spans()
    assert (found.name, found.kind) == ("llm_request", SpanKind.SERVER)
    assert {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in found.attributes.items()
    } == SENT
    assert f"{found.context.trace_id:032x}" == TRACE and f"{found.parent.span_id:016x}" == PARENT
    assert found.context.trace_state.get("vendor") == "1"
    assert found.status.status_code == StatusCode.UNSET
    assert "secret" not in found.to_json()


def test_what_is_not_known_is_left_out(memory):
    tracer, exporter = memory
    tracer.request("llm_request", {}).finish(
        {"model": "quill", "max_tokens": None, "error": "timeout"}
    )
    (found,) = exporter.get_finished_spans()
    assert dict(found.attributes) == {"gen_ai.request.model": "quill", "error.type": "timeout"}
    assert found.status.status_code == StatusCode.ERROR
    assert found.parent is None
    with pytest.raises(KeyError, match="prompt"):
        tracer.request("llm_request", {}).finish({"prompt": "words"})


@pytest.mark.parametrize(
    "header", ["", "00", "x" * 10_000, f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "ü"]
)
def test_a_bad_parent_is_none(memory, header):
    tracer, exporter = memory
    tracer.request("llm_request", {"traceparent": header, "tracestate": "=,=,="}).finish({})
    assert exporter.get_finished_spans()[0].parent is None


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_collector_gets_the_spans(collector, monkeypatch, by_environment):
    """As protobuf, after the request or at the end."""
    url, got = collector
    if by_environment:
        monkeypatch.setenv(telemetry.ENDPOINT_VARIABLE, url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracer = telemetry.make_tracer(None if by_environment else url)
    for index in range(1200):
        tracer.request("llm_request", HEADERS).finish(FACTS | {"request_id": str(index)})
    tracer.close()
    assert {(path, kind) for path, kind, _ in got} == {("/v1/traces", "application/x-protobuf")}
    resources = [resource for *_, message in got for resource in message.resource_spans]
    names = [
        {one.key: plain(one.value) for one in resource.resource.attributes}
        for resource in resources
    ]
    assert {name["service.name"] for name in names} == {"mine" if by_environment else "quire"}
    spans = [
        span for resource in resources for scope in resource.scope_spans for span in scope.spans
    ]
    attributes = [{one.key: plain(one.value) for one in span.attributes} for span in spans]
    assert sorted(int(found["gen_ai.request.id"]) for found in attributes) == list(range(1200))
    assert all(found | {"gen_ai.request.id": "cmpl-1"} == SENT for found in attributes)
    assert {(span.trace_id.hex(), span.parent_span_id.hex(), span.name) for span in spans} == {
        (TRACE, PARENT, "llm_request")
    }
    assert len({span.span_id for span in spans}) == 1200
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)


def test_a_collector_that_is_away_hurts_nobody(caplog):
    """Spans cost what they cost, the rest is dropped, and the end comes soon."""
    caplog.set_level(logging.CRITICAL)
    tracer = telemetry.make_tracer("http://127.0.0.1:9/v1/traces")  # nobody listens
    slowest = 0.0
    for _ in range(5000):
        begun = time.perf_counter()
        tracer.request("llm_request", HEADERS).finish(FACTS)
        slowest = max(slowest, time.perf_counter() - begun)
    assert slowest < 2
    begun = time.perf_counter()
    tracer.close(0.5)
    assert time.perf_counter() - begun < 5


def test_without_an_endpoint_there_is_none(monkeypatch):
    assert telemetry.make_tracer(None) is None
    assert telemetry.make_tracer("") is None
    monkeypatch.setenv(telemetry.ENDPOINT_VARIABLE, "")
    assert telemetry.make_tracer(None) is None


@pytest.mark.parametrize(
    "url",
    ["localhost:4317", "grpc://localhost:4317", "http://", "http://:1/", "http://[localhost", "x"],
)
def test_an_endpoint_that_is_none(url):
    with pytest.raises(ModelError, match="otlp_traces_endpoint is .* must be a URL"):
        telemetry.make_tracer(url)


def test_another_protocol(monkeypatch):
    monkeypatch.setenv(telemetry.PROTOCOL_VARIABLE, "grpc")
    with pytest.raises(ModelError, match="'grpc'; only http/protobuf"):
        telemetry.make_tracer("http://localhost:4317")


def test_the_libraries_are_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        ModelError, match=r"otlp_traces_endpoint needs OpenTelemetry: pip install 'quire\[otel\]'"
    ):
        telemetry.make_tracer("http://localhost:4318/v1/traces")


# --- the log


@pytest.fixture
def written(monkeypatch):
    """The log's text so far, with everything as it was afterwards."""
    # an exporter may still complain
    monkeypatch.setattr(logging.getLogger("opentelemetry"), "propagate", False)
    loggers = [
        logging.getLogger(name)
        for name in (None, "quire", "uvicorn", "uvicorn.error", "uvicorn.access")
    ]
    before = [
        (logger, logger.handlers[:], logger.level, logger.propagate, logger.disabled)
        for logger in loggers
    ]
    yield io.StringIO()
    for logger, handlers, level, propagate, disabled in before:
        logger.handlers[:], logger.propagate, logger.disabled = handlers, propagate, disabled
        logger.setLevel(level)


def objects(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_for_people(written):
    logs.setup_logging(False, "info", written)
    logging.getLogger("quire").info("ready at %s", "http://localhost")
    logging.getLogger("quire").debug("not this")
    logging.getLogger("uvicorn.error").warning("late")
    logging.getLogger("elsewhere").info("not this")
    logs.access("GET", "/v1/models", 200, 0.25, "req-1", tokens=7, model="quill", left=None)
    lines = written.getvalue().splitlines()
    for line, rest in zip(
        lines, ["INFO     ready at http://localhost", "WARNING  late"], strict=False
    ):
        datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S")
        assert line[20:] == rest
    assert lines[2][20:] == "INFO     GET /v1/models 200 0.250 s req-1 tokens=7 model=quill"
    assert len(lines) == 3


def test_an_object_a_line(written):
    logs.setup_logging(True, "DEBUG", written)
    before = datetime.now(UTC).timestamp()
    logging.getLogger("quire").warning(
        "two\nlines", extra={"count": 3, "share": 0.1234567, "odd": {1}, "level": "x", "_mark": 1}
    )
    logs.access(
        "POST",
        "/v1/score",
        200,
        1.5,
        "req-2",
        tokens=7,
        first=0.125,
        ended=None,
        message="no",
        name="no",
    )
    first, second = objects(written)
    when = datetime.fromisoformat(first.pop("time"))
    assert when.tzinfo is not None and before - 1 < when.timestamp() < before + 60
    assert first == {
        "level": "warning",
        "logger": "quire",
        "message": "two\\nlines",
        "count": 3,
        "share": 0.123457,
        "odd": "{1}",
    }
    assert second.pop("time").endswith("Z")
    assert second == {
        "level": "info",
        "logger": "quire.access",
        "message": ("POST /v1/score 200 1.500 s req-2 tokens=7 first=0.125"),
        "method": "POST",
        "path": "/v1/score",
        "status": 200,
        "seconds": 1.5,
        "request_id": "req-2",
        "tokens": 7,
        "first": 0.125,
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_an_exception(written, as_json):
    """One field of an object; for people lines that no record looks like, whatever it says."""
    logs.setup_logging(as_json, "info", written)
    try:
        raise ValueError("bad\x1b[2J\n2026-01-01 00:00:00 INFO     forged")
    except ValueError:
        logging.getLogger("quire").exception("a step failed")
    if as_json:
        (found,) = objects(written)
        assert (
            found["exception"].startswith("Traceback") and "ValueError: bad" in found["exception"]
        )
    else:
        first, *rest = written.getvalue().splitlines()
        assert first.endswith("ERROR    a step failed")
        assert len(rest) > 3 and all(line.startswith("    ") for line in rest)
    assert "\x1b" not in written.getvalue()


@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())))
def test_a_record_is_one_line_whatever_it_says(path, name):
    for formatter in (logs.PlainFormatter(), logs.JsonFormatter()):
        record = logging.makeLogRecord(
            {"msg": "%s %s", "args": (path, name), "levelname": "INFO", "request_id": name}
        )
        line = formatter.format(record)
        assert len(line.splitlines()) == 1
        assert line.isprintable() or not set(map(ord, line)) & {*range(32), *range(127, 160)}
        line.encode()
        assert len(line) < 5 * logs.MAX_TEXT
    assert json.loads(line)["request_id"] == logs.escape(name, logs.MAX_FIELD)


def test_fields_are_bounded(written):
    logs.setup_logging(True, "info", written)
    logs.access(
        "X" * 10_000,
        "/" + "\n" * 10_000,
        404,
        0.0,
        "r" * 10_000,
        tokens=10**5000,
        share=float("nan"),
        on=True,
    )
    (found,) = objects(written)
    assert len(written.getvalue()) < 3000
    assert (
        found["path"].startswith("/\\n\\n")
        and found["path"].endswith("...")
        and len(found["path"]) == 200
    )
    assert found["share"] == "nan" and found["on"] is True and isinstance(found["tokens"], str)


def test_uvicorns_own_lines_are_not_doubled(written):
    """Its warnings are told, the rest where everything is wanted, and of requests access()
    tells more.
    """
    for level in ("debug", "info", "error"):
        logs.setup_logging(False, level, written)
        logging.getLogger("uvicorn.access").info("GET / 200")
        logging.getLogger("uvicorn.error").info("started, %s", level)
        logging.getLogger("uvicorn.error").warning("late, %s", level)
        logging.getLogger("elsewhere").warning("odd, %s", level)
    lines = [line[29:] for line in written.getvalue().splitlines()]
    assert lines == ["started, debug", "late, debug", "odd, debug", "late, info", "odd, info"]


def test_a_level_that_is_none():
    with pytest.raises(ModelError, match="log_level is 'loud'; it can be debug, info"):
        logs.setup_logging(False, "loud")
