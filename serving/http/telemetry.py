"""OpenTelemetry tracing: one span of numbers and names per request."""

import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ...model.config import ModelError
from ..api.params import SamplingParams

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SUPPORTED_PROTOCOL = "http/protobuf"
ATTRIBUTES = {  # all attributes of a span, by our names
    "request_id": "gen_ai.request.id",
    "model": "gen_ai.request.model",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "n": "gen_ai.request.n",
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "completion_tokens": "gen_ai.usage.completion_tokens",
    "time_to_first_token": "gen_ai.latency.time_to_first_token",
    "time_in_queue": "gen_ai.latency.time_in_queue",
    "e2e": "gen_ai.latency.e2e",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "error": "error.type",
}


def span_facts(facts: Mapping[str, Any], params: SamplingParams) -> dict[str, Any]:
    """A request's log facts and sampling parameters, by the names in ATTRIBUTES."""
    names = {"model": "model", "prompt_tokens": "prompt_tokens", "completion_tokens": "tokens",
             "time_in_queue": "queued", "time_to_first_token": "first_token"}  # fmt: skip
    logged = {name: facts.get(log_name) for name, log_name in names.items()}
    reasons = [reason for reason in facts.get("finish_reason", "").split(",") if reason]
    requested = {
        name: getattr(params, name) for name in ("max_tokens", "temperature", "top_p", "n")
    }
    return logged | requested | {"finish_reasons": reasons or None}


class Span:
    """The tracing span of one request."""

    def __init__(self, span: Any):
        self.span = span

    def finish(self, facts: Mapping[str, Any]) -> None:
        """End the span with `facts`, by the names in ATTRIBUTES; None is left out.

        Later calls have no effect.
        """
        if unknown := facts.keys() - ATTRIBUTES.keys():
            raise KeyError(
                f"{sorted(unknown)} are no facts of a span; it has {', '.join(ATTRIBUTES)}"
            )
        if not self.span.is_recording():
            return
        self.span.set_attributes(
            {ATTRIBUTES[name]: value for name, value in facts.items() if value is not None}
        )
        if facts.get("error") is not None:
            from opentelemetry.trace import StatusCode

            self.span.set_status(StatusCode.ERROR)
        self.span.end()


class Tracer:
    """Sends spans from a thread with a bounded queue.

    Spans that the collector does not take in time are dropped.
    """

    def __init__(self, provider: Any):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self.tracer = provider.get_tracer("quire")
        self.propagator = TraceContextTextMapPropagator()

    def request(self, name: str, headers: Mapping[str, str]) -> Span:
        """Start a span whose parent is the one in the headers, if any."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        context = self.propagator.extract(carrier, Context())
        return Span(self.tracer.start_span(name, context, SpanKind.SERVER))

    def close(self, seconds: float = 2.0) -> None:
        """Send the remaining spans, waiting at most `seconds` for the collector."""
        ending = threading.Thread(target=self.provider.shutdown, daemon=True)
        ending.start()
        ending.join(seconds)


def make_tracer(endpoint: str | None) -> Tracer | None:
    """A tracer for the OTLP endpoint of the option or the environment; None without one."""
    url = endpoint or os.environ.get(ENDPOINT_VARIABLE)
    if not url:
        return None
    name = "otlp_traces_endpoint" if endpoint else ENDPOINT_VARIABLE
    if not is_valid_url(url):
        raise ModelError(f"{name} is {url!r}; it must be a URL as http://localhost:4318/v1/traces")
    if (protocol := os.environ.get(PROTOCOL_VARIABLE, SUPPORTED_PROTOCOL)) != SUPPORTED_PROTOCOL:
        raise ModelError(
            f"{PROTOCOL_VARIABLE} is {protocol!r}; only {SUPPORTED_PROTOCOL} is spoken here"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ModelError(
            f"{name} needs OpenTelemetry: pip install 'quire[otel]' ({error})"
        ) from None
    resource = {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "quire")}
    provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracer(provider)


def is_valid_url(url: str) -> bool:
    try:
        split_url = urlsplit(url)
        return (
            split_url.scheme in ("http", "https")
            and bool(split_url.hostname)
            and split_url.port != 0
        )
    except ValueError:  # a malformed port or address
        return False
