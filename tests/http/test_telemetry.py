"""Trace spans as a collector receives them, and logs in plain text and JSON."""

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
SPAN_ATTRIBUTES = {
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
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_SPAN_ID = "b7ad6b7169203331"
HEADERS = {
    "traceparent": f"00-{TRACE_ID}-{PARENT_SPAN_ID}-01",
    "tracestate": "vendor=1",
    "authorization": "Bearer secret",
}


@pytest.fixture(autouse=True)
def clear_otel_environment(monkeypatch):
    for name in (
        telemetry.ENDPOINT_VARIABLE,
        telemetry.PROTOCOL_VARIABLE,
        "OTEL_SERVICE_NAME",
        "OTEL_SDK_DISABLED",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def memory_tracer():
    """A tracer that exports to memory, and its exporter."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return telemetry.Tracer(provider), exporter


@pytest.fixture
def collector():
    """A collector's URL and what it received: [(path, content type, message)]."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(
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
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", received
    server.shutdown()
    thread.join()
    server.server_close()


def attribute_value(value):
    kind = value.WhichOneof("value")
    return (
        [attribute_value(item) for item in value.array_value.values]
        if kind == "array_value"
        else getattr(value, kind)
    )


def test_span_attributes(memory_tracer):
    tracer, exporter = memory_tracer
    span = tracer.request("llm_request", HEADERS)
    assert exporter.get_finished_spans() == ()
    span.finish(FACTS)
    span.finish({"model": "other"})
    (finished_span,) = exporter.get_finished_spans()
    assert (finished_span.name, finished_span.kind) == ("llm_request", SpanKind.SERVER)
    assert {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in finished_span.attributes.items()
    } == SPAN_ATTRIBUTES
    assert (
        f"{finished_span.context.trace_id:032x}" == TRACE_ID
        and f"{finished_span.parent.span_id:016x}" == PARENT_SPAN_ID
    )
    assert finished_span.context.trace_state.get("vendor") == "1"
    assert finished_span.status.status_code == StatusCode.UNSET
    assert "secret" not in finished_span.to_json()


def test_unknown_span_attributes_are_omitted(memory_tracer):
    tracer, exporter = memory_tracer
    tracer.request("llm_request", {}).finish(
        {"model": "quill", "max_tokens": None, "error": "timeout"}
    )
    (finished_span,) = exporter.get_finished_spans()
    assert dict(finished_span.attributes) == {
        "gen_ai.request.model": "quill",
        "error.type": "timeout",
    }
    assert finished_span.status.status_code == StatusCode.ERROR
    assert finished_span.parent is None
    with pytest.raises(KeyError, match="prompt"):
        tracer.request("llm_request", {}).finish({"prompt": "words"})


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        "x" * 10_000,
        f"00-{'0' * 32}-{PARENT_SPAN_ID}-01",
        f"ff-{TRACE_ID}-{PARENT_SPAN_ID}-01",
        "ü",
    ],
)
def test_invalid_traceparent_is_ignored(memory_tracer, header):
    tracer, exporter = memory_tracer
    tracer.request("llm_request", {"traceparent": header, "tracestate": "=,=,="}).finish({})
    assert exporter.get_finished_spans()[0].parent is None


@pytest.mark.parametrize("by_environment", [False, True])
def test_spans_are_exported_to_the_collector(collector, monkeypatch, by_environment):
    """As protobuf, in batches or when the tracer closes."""
    url, received = collector
    if by_environment:
        monkeypatch.setenv(telemetry.ENDPOINT_VARIABLE, url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracer = telemetry.make_tracer(None if by_environment else url)
    for index in range(1200):
        tracer.request("llm_request", HEADERS).finish(FACTS | {"request_id": str(index)})
    tracer.close()
    assert {(path, kind) for path, kind, _ in received} == {
        ("/v1/traces", "application/x-protobuf")
    }
    resources = [resource for *_, message in received for resource in message.resource_spans]
    names = [
        {
            attribute.key: attribute_value(attribute.value)
            for attribute in resource.resource.attributes
        }
        for resource in resources
    ]
    assert {name["service.name"] for name in names} == {"mine" if by_environment else "quire"}
    spans = [
        span for resource in resources for scope in resource.scope_spans for span in scope.spans
    ]
    attributes = [
        {attribute.key: attribute_value(attribute.value) for attribute in span.attributes}
        for span in spans
    ]
    assert sorted(
        int(span_attributes["gen_ai.request.id"]) for span_attributes in attributes
    ) == list(range(1200))
    assert all(
        span_attributes | {"gen_ai.request.id": "cmpl-1"} == SPAN_ATTRIBUTES
        for span_attributes in attributes
    )
    assert {(span.trace_id.hex(), span.parent_span_id.hex(), span.name) for span in spans} == {
        (TRACE_ID, PARENT_SPAN_ID, "llm_request")
    }
    assert len({span.span_id for span in spans}) == 1200
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)


def test_unreachable_collector_delays_no_request(caplog):
    """Finishing a span stays fast, spans that do not fit are dropped, and closing ends soon."""
    caplog.set_level(logging.CRITICAL)
    tracer = telemetry.make_tracer("http://127.0.0.1:9/v1/traces")  # no server listens there
    slowest = 0.0
    for _ in range(5000):
        start = time.perf_counter()
        tracer.request("llm_request", HEADERS).finish(FACTS)
        slowest = max(slowest, time.perf_counter() - start)
    assert slowest < 2
    start = time.perf_counter()
    tracer.close(0.5)
    assert time.perf_counter() - start < 5


def test_no_tracer_without_endpoint(monkeypatch):
    assert telemetry.make_tracer(None) is None
    assert telemetry.make_tracer("") is None
    monkeypatch.setenv(telemetry.ENDPOINT_VARIABLE, "")
    assert telemetry.make_tracer(None) is None


@pytest.mark.parametrize(
    "url",
    ["localhost:4317", "grpc://localhost:4317", "http://", "http://:1/", "http://[localhost", "x"],
)
def test_invalid_endpoint_is_rejected(url):
    with pytest.raises(ModelError, match="otlp_traces_endpoint is .* must be a URL"):
        telemetry.make_tracer(url)


def test_grpc_protocol_is_rejected(monkeypatch):
    monkeypatch.setenv(telemetry.PROTOCOL_VARIABLE, "grpc")
    with pytest.raises(ModelError, match="'grpc'; only http/protobuf"):
        telemetry.make_tracer("http://localhost:4317")


def test_missing_opentelemetry_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        ModelError, match=r"otlp_traces_endpoint needs OpenTelemetry: pip install 'quire\[otel\]'"
    ):
        telemetry.make_tracer("http://localhost:4318/v1/traces")


# --- the log


@pytest.fixture
def log_stream(monkeypatch):
    """A stream for the log; the configuration of loggers is restored afterwards."""
    # an exporter may still log errors
    monkeypatch.setattr(logging.getLogger("opentelemetry"), "propagate", False)
    loggers = [
        logging.getLogger(name)
        for name in (None, "quire", "uvicorn", "uvicorn.error", "uvicorn.access")
    ]
    saved_loggers = [
        (logger, logger.handlers[:], logger.level, logger.propagate, logger.disabled)
        for logger in loggers
    ]
    yield io.StringIO()
    for logger, handlers, level, propagate, disabled in saved_loggers:
        logger.handlers[:] = handlers
        logger.propagate = propagate
        logger.disabled = disabled
        logger.setLevel(level)


def json_records(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_plain_log_lines(log_stream):
    logs.setup_logging(False, "info", log_stream)
    logging.getLogger("quire").info("ready at %s", "http://localhost")
    logging.getLogger("quire").debug("not this")
    logging.getLogger("uvicorn.error").warning("late")
    logging.getLogger("elsewhere").info("not this")
    logs.access("GET", "/v1/models", 200, 0.25, "req-1", tokens=7, model="quill", left=None)
    lines = log_stream.getvalue().splitlines()
    for line, expected in zip(
        lines, ["INFO     ready at http://localhost", "WARNING  late"], strict=False
    ):
        datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S")
        assert line[20:] == expected
    assert lines[2][20:] == "INFO     GET /v1/models 200 0.250 s req-1 tokens=7 model=quill"
    assert len(lines) == 3


def test_json_log_lines(log_stream):
    logs.setup_logging(True, "DEBUG", log_stream)
    time_before = datetime.now(UTC).timestamp()
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
    first_record, second_record = json_records(log_stream)
    timestamp = datetime.fromisoformat(first_record.pop("time"))
    assert (
        timestamp.tzinfo is not None and time_before - 1 < timestamp.timestamp() < time_before + 60
    )
    assert first_record == {
        "level": "warning",
        "logger": "quire",
        "message": "two\\nlines",
        "count": 3,
        "share": 0.123457,
        "odd": "{1}",
    }
    assert second_record.pop("time").endswith("Z")
    assert second_record == {
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
def test_logged_exception(log_stream, as_json):
    """A field of the JSON record; in plain text, indented lines that cannot be mistaken for
    records.
    """
    logs.setup_logging(as_json, "info", log_stream)
    try:
        raise ValueError("bad\x1b[2J\n2026-01-01 00:00:00 INFO     forged")
    except ValueError:
        logging.getLogger("quire").exception("a step failed")
    if as_json:
        (record,) = json_records(log_stream)
        assert (
            record["exception"].startswith("Traceback") and "ValueError: bad" in record["exception"]
        )
    else:
        message_line, *traceback_lines = log_stream.getvalue().splitlines()
        assert message_line.endswith("ERROR    a step failed")
        assert len(traceback_lines) > 3 and all(line.startswith("    ") for line in traceback_lines)
    assert "\x1b" not in log_stream.getvalue()


@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())))
def test_every_record_is_one_printable_line(path, name):
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


def test_log_fields_are_bounded(log_stream):
    logs.setup_logging(True, "info", log_stream)
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
    (record,) = json_records(log_stream)
    assert len(log_stream.getvalue()) < 3000
    assert (
        record["path"].startswith("/\\n\\n")
        and record["path"].endswith("...")
        and len(record["path"]) == 200
    )
    assert record["share"] == "nan" and record["on"] is True and isinstance(record["tokens"], str)


def test_uvicorn_lines_are_not_duplicated(log_stream):
    """Uvicorn's warnings are logged, its info lines only at debug level, and its access log never,
    since access() logs requests in more detail.
    """
    for level in ("debug", "info", "error"):
        logs.setup_logging(False, level, log_stream)
        logging.getLogger("uvicorn.access").info("GET / 200")
        logging.getLogger("uvicorn.error").info("started, %s", level)
        logging.getLogger("uvicorn.error").warning("late, %s", level)
        logging.getLogger("elsewhere").warning("odd, %s", level)
    lines = [line[29:] for line in log_stream.getvalue().splitlines()]
    assert lines == ["started, debug", "late, debug", "odd, debug", "late, info", "odd, info"]


def test_invalid_log_level_is_rejected():
    with pytest.raises(ModelError, match="log_level is 'loud'; it can be debug, info"):
        logs.setup_logging(False, "loud")
