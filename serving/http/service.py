"""The server's state, and the way of a request from its bytes to its answer."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request

from ...model.config import ModelError
from ..adapter_store import with_adapter
from ..api.errors import RequestError
from ..api.outputs import CompletionOutput, RequestOutput
from ..api.params import Terms
from ..api.validation import INT32_MAX
from ..async_llm import Ask, AsyncLLM
from ..defaults import with_defaults
from ..engine.beam_search import BeamSearchParams, Search
from ..engine.engine import Engine
from ..engine.runner import DeviceLost
from ..multihost.leader import EXIT
from ..observe.metrics import HttpMetrics
from ..protocol.answers.answer import Delivery, Head, Prompted, Usage
from ..protocol.answers.choices import Choices
from ..protocol.sent_fields import as_sent
from ..request.request import Request as Served
from ..resume import Journal, seed_of
from .answering import AS_EVENTS, Answering, ClientLeft, EventStream, Framing, until_gone, watched
from .batches import Batches
from .errors import HttpError, JsonResponse
from .files import StoredFiles
from .guard import digest, new_id, too_large
from .logs import access
from .models import Model, Models
from .prompting import Prepared, needs_tokenizer
from .settings import Formats, ServerSettings
from .storage import Storage
from .stored import StoredResponses
from .telemetry import make_tracer, span_facts

log = logging.getLogger("quire")

DRAINING = "draining"
SMALL_BODY = 4096  # bytes that are read in less time than handing them to another thread takes
FAREWELL = 2.0  # seconds for the last answers, when the device is lost
BEAT = 0.05  # seconds between two looks at the engines
MOST_IGNORED, MOST_NAMES = 16, 256  # in one header, and in the log
# Polled, or parts of the page: they are logged only when they fail.
UNLOGGED = ("/health", "/ping", "/metrics", "/live", "/page/{name}", "/page/vendor/{name}")
POLLED = ("/health", "/ping")  # also not while they say that the server is not ready

BeforeAsking = Callable[[AsyncLLM, Ask], Awaitable[None]]


class Protocol(NamedTuple):
    """One of the ways to ask for text, as functions."""

    prefix: str  # of the ids of its answers
    parse: Callable[[Any], Any]
    prepare: Callable[..., Prepared]
    response: Callable[..., dict[str, Any]]
    stream: Callable[..., Any]
    framing: Framing = AS_EVENTS  # of a stream
    uses_chat_defaults: bool = False  # for what requests leave out


class Service:
    """What all requests share."""

    def __init__(self, models: Models, settings: ServerSettings, before_asking: BeforeAsking | None = None):
        """`before_asking` is awaited with each prompt before the engine is asked for its answer."""
        self.models, self.settings = models, settings
        self.storage = Storage(None if settings.state_dir is None else Path(settings.state_dir))
        self.stored = StoredResponses(settings.max_stored_responses, settings.max_stored_bytes, self.storage)
        self.files = StoredFiles(settings.max_file_bytes, self.storage)
        self.batches = Batches(settings.max_batches, self.files, self.serve, self.trace, self.width, self.beside)
        self.pool = ThreadPoolExecutor(32, "quire-parse")  # most of them wait: for a template, or for a grammar
        self.draining = False
        self.started = False  # the first model was loaded
        self.open = 0  # requests that are being answered
        self.idle = asyncio.Event()
        self.idle.set()
        self.http_metrics = HttpMetrics()
        self.tracer = make_tracer(settings.otlp_traces_endpoint)
        self.stop: Callable[[], None] = lambda: None  # what a signal does; set by the server
        self.address = ""
        self.before_asking = before_asking
        self.ignored: set[str] = set()  # fields of messages that the log has named

    def note(self, scope: Any, status: int, seconds: float) -> None:
        """Count, log and trace a request that is over: numbers and names, nothing of its text."""
        route, state = scope.get("route"), scope["state"]
        path = "other" if route is None else route.path
        method = scope["method"] if route is not None and scope["method"] in route.methods else "other"
        self.http_metrics.request(path, method, status)
        shown = scope["path"][:200]
        facts = state["facts"]
        if path not in UNLOGGED or (status >= 400 and path not in POLLED):
            access(scope["method"], shown, status, seconds, state["request_id"], **facts)
        self.trace(state, seconds, f"HTTP {status}" if status >= 400 else facts.get("ended"))

    def trace(self, state: Mapping[str, Any], seconds: float, failed: str | None) -> None:
        """End the span of a request, if it has one."""
        if (span := state.get("span")) is not None:
            own = {"request_id": state["request_id"], "e2e": seconds, "error": failed}
            span.finish(own | span_facts(state["facts"], state["asked"]))

    async def load_first(self) -> None:
        """Load the first model; without it the server does not start."""
        try:
            async with self.models.use(None):
                self.started = True
            tenants = {tenant_of(key) for key in self.settings.api_keys} or {None}
            self.batches.resume(tenants.__contains__)
        except HttpError:
            first = self.models.find(None)
            alone = len(self.models.models) == 1
            raise ModelError(first.why if alone else f"model {first.name}: {first.why}") from None

    def refuses(self) -> HttpError | None:
        """The error with which work is refused while the server shuts down."""
        if self.draining:
            headers = {"Retry-After": "5", "Connection": "close"}
            return HttpError(503, "the server is shutting down", code=DRAINING, headers=headers)
        return None

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Count a request as open: a server that shuts down waits for it."""
        self.open += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self.idle.set()

    async def beside(self, job: Callable, *given: Any) -> Any:
        """Run work in a thread that would block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, job, *given)

    async def body(self, request: Request) -> bytes:
        """All of it, within its time and size."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.settings.receive_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > self.settings.max_body_bytes:
                        raise too_large(self.settings)
                    parts.append(part)
        except TimeoutError:
            raise HttpError(408, "the body did not come in time", headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise ClientLeft from None
        return b"".join(parts)

    async def read(self, request: Request, parse: Callable[[Any], Any], reads_stored: bool = False) -> tuple[Any, Any]:
        """What is asked, and the JSON that it was read from; a small body may name much that is stored."""
        raw = await self.body(request)
        is_quick = len(raw) <= SMALL_BODY and not reads_stored
        found = read(parse, raw) if is_quick else await self.beside(read, parse, raw)
        if ignored := getattr(found[0], "ignored", ()):  # only conversations have messages
            self.tell_ignored(request, ignored)
        return found

    def tell_ignored(self, request: Request, names: Sequence[str]) -> None:
        """Say which fields of messages have no effect: to the client in a header, and once in the log."""
        request.scope["state"]["ignored"] = ", ".join(names[:MOST_IGNORED])
        for name in names[:MOST_IGNORED]:
            if name not in self.ignored and len(self.ignored) < MOST_NAMES:
                self.ignored.add(name)
                log.warning("%s is no field that this server knows; it is ignored (said once)", name)

    def key(self, request: Request) -> str | None:
        """The tenant of a request: a digest, so that no cache and no trace holds a key."""
        if "tenant" in request.scope["state"]:  # of a batch's request, which has no client
            return request.state.tenant
        return tenant_of(request.state.key)

    def engine_id(self, request: Request, name: str) -> str:
        """The engine's id of a request, which no other key's request can have."""
        key = self.key(request)
        return name if key is None else f"{key}/{name}"

    def head(self, name: str, model: str, prompts: Sequence[Prompted] = (), created: int = 0) -> Head:
        return Head(name, model, created or int(time.time()), f"quire-{self.settings.version}", prompts)

    def terms(self, given: Terms, key: str | None) -> Terms:
        """Pages are shared among requests of one key only; each key is a tenant."""
        most = self.settings.request_seconds
        if most is not None and (given.timeout or 0) > most:
            raise RequestError("timeout", f"must be at most {most:g} seconds here, got {given.timeout:g}")
        given = replace(given, timeout=given.timeout or most)
        if key is None:
            return given
        return replace(given, cache_salt=f"{key} {given.cache_salt or ''}", share_key=key)

    def delivery(self, given: Delivery) -> Delivery:
        """With the usage in each chunk of a stream and with times, where this server always tells them."""
        given = replace(given, metrics=self.settings.enable_per_request_metrics)
        if not self.settings.enable_force_include_usage:
            return given
        return replace(given, include_usage=True, continuous_usage=True)

    async def adapted(self, model: Model, name: str | None, terms: Terms) -> Terms:
        """With the adapter that the model's name is one of, if it is; read again where host memory has it no more."""
        if name is None or name in model.names:
            return terms
        if (wanted := model.adapters.get(name)) is None:  # unloaded while the model woke up
            raise self.models.unknown(name)
        try:
            return await self.beside(with_adapter, terms, model.llm.engine.adapters, wanted)
        except RequestError as error:
            log.error("adapter %s: %s", name, error)
            why = f"adapter {name} cannot be read; the server's log says why"
            raise HttpError(503, why, "model", "model_failed") from None

    async def answer(self, request: Request, protocol: Protocol) -> Any:
        """Text, in any of the protocols."""
        parsed, body = await self.read(request, protocol.parse)
        return await self.serve(request, protocol, parsed, body)

    async def serve(self, request: Request, protocol: Protocol, parsed: Any, body: Any) -> Any:
        """The answer to a request that was read."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.counted())
            terms = self.terms(parsed.terms, self.key(request))
            began = time.monotonic()
            try:
                async with asyncio.timeout(terms.timeout):
                    model = await stack.enter_async_context(self.models.use(parsed.model))
            except TimeoutError:
                raise HttpError(408, "timeout: the time was over before the model was awake", "timeout") from None
            if terms.timeout is not None:
                seconds_left = terms.timeout - (time.monotonic() - began)
                terms = replace(terms, timeout=max(seconds_left, 1e-3))
            engine = model.llm.engine
            defaults = engine.chat_defaults if protocol.uses_chat_defaults else engine.defaults
            params = with_defaults(parsed.params, parsed.given, defaults)
            terms = await self.adapted(model, parsed.model, terms)
            parsed = replace(parsed, params=params, terms=terms, delivery=self.delivery(parsed.delivery))
            try:
                prepared = await self.beside(prepare, protocol.prepare, model.llm.engine, parsed, self.settings.formats)
            except RequestError as error:
                raise as_sent(error, body) from None
            choices = parsed.params.n
            if len(prepared.asks) * choices > self.settings.max_choices:
                most = self.settings.max_choices
                raise RequestError("n", f"times the prompts must be at most {most} (--max-choices), got {choices}")
            journal: Journal | None = request.scope["state"].get("journal") if parsed.delivery.stream else None
            before = journal or Journal()
            name = before.name or f"{protocol.prefix}{parsed.delivery.request_id or new_id()}"
            head = self.head(name, parsed.model or model.name, prepared.prompts, before.created)
            request.state.facts |= {"model": model.name, "prompt_tokens": sum(len(ask.tokens) for ask in prepared.asks)}
            if self.tracer is not None:
                request.state.span = self.tracer.request("llm_request", request.headers)
                request.state.asked = parsed.params
            if parsed.length_penalty is not None:
                return await self.searched(request, protocol, head, parsed, body, prepared, model.llm)
            read_as = (Served.take, False) if parsed.delivery.stream else (Served.output, True)
            own = self.engine_id(request, name)
            names = [own if len(prepared.asks) == 1 else f"{own}-{index}" for index in range(len(prepared.asks))]
            if self.before_asking is not None:
                for ask in prepared.asks:
                    await self.before_asking(model.llm, ask)
            asks = [reseeded(*both) for both in zip_longest(prepared.asks, before.seeds)]
            answers = await model.llm.ask(names, asks, *read_as, before.streamed)
            stack.callback(answers.close)
            answering = Answering(prepared, answers, choices, journal)
            if not parsed.delivery.stream:
                return await self.whole(request, protocol, head, parsed, body, answering)
            if journal is not None:
                journal.name, journal.created = name, head.created
                journal.seeds = [seed_of(asked) for asked in answers.requests]
            stream, counted = protocol.stream(head, parsed, body), parsed.delivery.continuous_usage
            events = answering.stream(stream, counted, protocol.framing.alive)
            keep = stack.pop_all()  # the model stays awake until the last event
            return EventStream(events, answering, keep, self.http_metrics, protocol.framing)

    async def width(self) -> int:
        """How many sequences the first model computes together."""
        async with self.models.use(None) as model:
            scheduler = model.llm.engine.scheduler
            return scheduler.shape.max_seqs * len(scheduler.replicas)

    async def whole(
        self, request: Request, protocol: Protocol, head: Head, parsed: Any, body: Any, answering: Answering
    ) -> JsonResponse:
        """The answer in one piece, unless the client leaves before it is there."""
        async with watched(request.receive, answering.answers):
            answers, outputs = await answering.whole()
        prompts = [
            replace(prompt, logprobs=output.prompt_logprobs)
            for prompt, output in zip(head.prompts, outputs, strict=True)
        ]
        request.state.facts |= answering.facts()
        usage = answering.usage

        def respond() -> JsonResponse:
            return JsonResponse(protocol.response(replace(head, prompts=prompts), parsed, body, answers, usage))

        # The log-probabilities of a long prompt take a second to write.
        return await self.beside(respond) if any(prompt.logprobs for prompt in prompts) else respond()

    async def searched(
        self,
        request: Request,
        protocol: Protocol,
        head: Head,
        parsed: Any,
        body: Any,
        prepared: Prepared,
        llm: AsyncLLM,
    ) -> JsonResponse:
        """The answers that a beam search finds, unless the client leaves or its time is over before they are there."""
        params = parsed.params
        beams = BeamSearchParams(
            beam_width=params.n,
            max_tokens=params.max_tokens or INT32_MAX,
            ignore_eos=params.ignore_eos,
            length_penalty=parsed.length_penalty,
        )
        asks = [ask._replace(terms=replace(ask.terms, timeout=None)) for ask in prepared.asks]
        finding = asyncio.create_task(llm.beams(self.engine_id(request, head.id), asks, beams))
        leaving = asyncio.create_task(until_gone(request.receive))
        try:
            timeout = parsed.terms.timeout
            ended, _ = await asyncio.wait((finding, leaving), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                raise HttpError(408, "timeout: the time was over before the search was", "timeout")
            if finding not in ended:
                raise ClientLeft
            searches = finding.result()
        finally:
            finding.cancel()
            leaving.cancel()
            await asyncio.wait((finding, leaving))
        choices = Choices(prepared.parser, params.n, prepared.most_calls)
        answers = choices.answers([found_by(*both, llm.engine) for both in zip(searches, asks, strict=True)])
        reasons = ",".join(sorted(choices.reasons))
        cached = sum(search.cached for search in searches)
        request.state.facts |= {"tokens": choices.written, "cached_tokens": cached, "finish_reason": reasons}
        usage = Usage(sum(len(ask.tokens) for ask in asks), choices.written, cached, choices.thought)
        return JsonResponse(protocol.response(head, parsed, body, answers, usage))

    async def heartbeat(self) -> None:
        """Watch the event loop and the engines: how late a timer is, and whether a step never ends."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + BEAT
            await asyncio.sleep(BEAT)
            self.http_metrics.beat(loop.time() - due)
            for model in self.models.ready():
                model.check_stall(self.settings.stall_seconds)
                if isinstance(failure := model.llm.thread.failure, DeviceLost):
                    return await self.abandon(model.name, failure)

    async def abandon(self, name: str, failure: DeviceLost) -> None:
        """End the process, for no engine in it can use the device again; those who wait have been told."""
        log.critical("model %s: %s; this process ends, and its supervisor has to start another", name, failure)
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await self.idle.wait()
        os._exit(EXIT)  # what would be done on the way out calls the device

    async def drain(self, grace: float) -> None:
        """Take no new work; requests have `grace` seconds to end, and then they end with what they have."""
        self.draining = True
        self.batches.close()
        try:
            async with asyncio.timeout(grace):
                await self.idle.wait()
        except TimeoutError:
            log.warning("%d requests did not end within %g seconds; they are cut off", self.open, grace)
            for model in self.models.ready():
                await model.llm.call(lambda thread=model.llm.thread: abort_all(thread))
            try:
                async with asyncio.timeout(2):
                    await self.idle.wait()
            except TimeoutError:
                log.warning("%d connections are left open", self.open)

    def close(self) -> None:
        if self.tracer is not None:
            self.tracer.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.storage.close()
        self.models.close()


def tenant_of(key: str | None) -> str | None:
    return None if key is None else digest(f"salt {key}").hex()[:32]


def found_by(search: Search, ask: Ask, engine: Engine) -> RequestOutput:
    """What a search found, as an answer to its prompt; the end token has no text."""
    outputs = []
    for index, beam in enumerate(search.best()):
        said = beam.tokens[: len(beam.tokens) - (beam.finish_reason == "stop")]
        text = needs_tokenizer(engine).decode(list(said), skip_special_tokens=ask.params.skip_special_tokens)
        outputs.append(CompletionOutput(index, text, beam.tokens, beam.cum_logprob, finish_reason=beam.finish_reason))
    return RequestOutput("", ask.text, ask.tokens, outputs)


def reseeded(ask: Ask, seed: int | None) -> Ask:
    return ask if seed is None else ask._replace(params=replace(ask.params, seed=seed))


def abort_all(thread: Any) -> None:
    thread.outbox.note([thread.engine.abort(name) for name in list(thread.engine.requests)])


def read(parse: Callable[[Any], Any], raw: bytes) -> tuple[Any, Any]:
    body = decode(raw)
    try:
        return parse(body), body
    except RequestError as error:
        raise as_sent(error, body) from None


def prepare(of: Callable[..., Prepared], engine: Engine, parsed: Any, formats: Formats) -> Prepared:
    """The prompts; what can never be served is refused here, since the engine says so only after its step."""
    prepared = of(engine, parsed, formats)
    for ask in prepared.asks:
        engine.admission.check(ask.tokens, ask.params)
    return prepared


def decode(raw: bytes) -> Any:
    """JSON; msgspec refuses what is none, as NaN, numbers beyond a double and broken UTF-8."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise RequestError("body", f"must be JSON in UTF-8: {str(error)[:200]}") from None
