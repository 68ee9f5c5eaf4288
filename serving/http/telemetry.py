"""OpenTelemetry: one span a request, in numbers and names, for a collector that may be away."""

import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ...model.config import ModelError
from ..api.params import SamplingParams

VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL, SPOKEN = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"
ATTRIBUTES = {  # all that a span says of a request
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


def span_facts(facts: Mapping[str, Any], asked: SamplingParams) -> dict[str, Any]:
    """What the log knows of a request and what was asked for, by the names of ATTRIBUTES."""
    names = {"model": "model", "prompt_tokens": "prompt_tokens", "completion_tokens": "tokens",
             "time_in_queue": "queued", "time_to_first_token": "first_token"}  # fmt: skip
    found = {name: facts.get(own) for name, own in names.items()}
    reasons = [reason for reason in facts.get("finish_reason", "").split(",") if reason]
    wanted = {name: getattr(asked, name) for name in ("max_tokens", "temperature", "top_p", "n")}
    return found | wanted | {"finish_reasons": reasons or None}


class Span:
    """A request on its way."""

    def __init__(self, span: Any):
        self.span = span

    def finish(self, facts: Mapping[str, Any]) -> None:
        """The request is over; `facts` are by the names of ATTRIBUTES, and None says nothing. Only the first counts."""
        if unknown := facts.keys() - ATTRIBUTES.keys():
            raise KeyError(f"{sorted(unknown)} are no facts of a span; it has {', '.join(ATTRIBUTES)}")
        if not self.span.is_recording():
            return
        self.span.set_attributes({ATTRIBUTES[name]: value for name, value in facts.items() if value is not None})
        if facts.get("error") is not None:
            from opentelemetry.trace import StatusCode

            self.span.set_status(StatusCode.ERROR)
        self.span.end()


class Tracer:
    """Sends spans from a thread with a bounded queue: what a collector does not take in time is dropped."""

    def __init__(self, provider: Any):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider, self.tracer = provider, provider.get_tracer("quire")
        self.propagator = TraceContextTextMapPropagator()

    def request(self, name: str, headers: Mapping[str, str]) -> Span:
        """A span that begins now, below the one that the headers speak of."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        context = self.propagator.extract(carrier, Context())
        return Span(self.tracer.start_span(name, context, SpanKind.SERVER))

    def close(self, seconds: float = 2.0) -> None:
        """Send what is left, and wait no longer than this for a collector that does not answer."""
        ending = threading.Thread(target=self.provider.shutdown, daemon=True)
        ending.start()
        ending.join(seconds)


def make_tracer(endpoint: str | None) -> Tracer | None:
    """For a collector's OTLP endpoint over HTTP, given here or in the environment; None where there is none."""
    found = endpoint or os.environ.get(VARIABLE)
    if not found:
        return None
    name = "otlp_traces_endpoint" if endpoint else VARIABLE
    if not valid(found):
        raise ModelError(f"{name} is {found!r}; it must be a URL as http://localhost:4318/v1/traces")
    if (protocol := os.environ.get(PROTOCOL, SPOKEN)) != SPOKEN:
        raise ModelError(f"{PROTOCOL} is {protocol!r}; only {SPOKEN} is spoken here")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ModelError(f"{name} needs OpenTelemetry: pip install 'quire[otel]' ({error})") from None
    own = {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "quire")}
    provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=found)))
    return Tracer(provider)


def valid(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an address that is none
        return False
