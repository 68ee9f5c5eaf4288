"""The server's state, and the path of a request from its bytes to its answer."""

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
from ..api.params import RequestOptions
from ..api.validation import INT32_MAX
from ..async_llm import AsyncLLM, EngineRequest
from ..defaults import with_defaults
from ..engine.beam_search import BeamSearchParams, Search
from ..engine.engine import Engine
from ..engine.runner import DeviceLost
from ..multihost.leader import EXIT
from ..observe.metrics import HttpMetrics
from ..protocol.answers.answer import AnsweredPrompt, Delivery, ResponseHead, Usage
from ..protocol.answers.choices import Choices
from ..protocol.sent_fields import as_sent
from ..request.request import Request as Served
from ..resume import Journal, seed_of
from .answering import (
    AS_EVENTS,
    AnswerReader,
    ClientLeft,
    EventStream,
    Framing,
    end_on_disconnect,
    wait_for_disconnect,
)
from .batches import Batches
from .errors import HttpError, JsonResponse
from .files import StoredFiles
from .guard import digest, new_id, too_large
from .logs import access
from .models import Model, Models
from .prompting import Prepared, require_tokenizer
from .settings import Formats, ServerSettings
from .storage import Storage
from .stored import StoredResponses
from .telemetry import make_tracer, span_facts

log = logging.getLogger("quire")

DRAINING = "draining"
SMALL_BODY = 4096  # bytes; parsing so few takes less time than handing them to a thread
DEVICE_LOSS_GRACE = 2.0  # seconds to send error responses after the device is lost
HEARTBEAT_SECONDS = 0.05
MAX_HEADER_NAMES = 16  # ignored fields that one response names
MAX_IGNORED_NAMES = 256  # ignored fields that the log names while the server runs
# Polled, or parts of the page: they are logged only when they fail.
UNLOGGED = ("/health", "/ping", "/metrics", "/live", "/page/{name}", "/page/vendor/{name}")
POLLED = ("/health", "/ping")  # not logged even when they fail, as while a model loads

BeforeAsking = Callable[[AsyncLLM, EngineRequest], Awaitable[None]]


class Protocol(NamedTuple):
    """An API for text generation, as functions."""

    prefix: str  # of response ids
    parse: Callable[[Any], Any]
    prepare: Callable[..., Prepared]
    response: Callable[..., dict[str, Any]]
    stream: Callable[..., Any]
    framing: Framing = AS_EVENTS
    uses_chat_defaults: bool = False  # for sampling parameters that the request leaves out


class Service:
    """The state that all requests share."""

    def __init__(
        self, models: Models, settings: ServerSettings, before_asking: BeforeAsking | None = None
    ):
        """`before_asking` is awaited with each engine request before it is submitted."""
        self.models = models
        self.settings = settings
        self.storage = Storage(None if settings.state_dir is None else Path(settings.state_dir))
        self.stored = StoredResponses(
            settings.max_stored_responses, settings.max_stored_bytes, self.storage
        )
        self.files = StoredFiles(settings.max_file_bytes, self.storage)
        self.batches = Batches(
            settings.max_batches,
            self.files,
            self.serve,
            self.trace,
            self.max_running_sequences,
            self.run_in_thread,
        )
        # Most threads wait for a template or a grammar.
        self.pool = ThreadPoolExecutor(32, "quire-parse")
        self.draining = False
        self.started = False  # the first model was loaded
        self.open = 0  # running requests
        self.idle = asyncio.Event()
        self.idle.set()
        self.http_metrics = HttpMetrics()
        self.tracer = make_tracer(settings.otlp_traces_endpoint)
        self.stop: Callable[[], None] = lambda: None  # shuts the server down; set by `server.serve`
        self.address = ""
        self.before_asking = before_asking
        self.ignored: set[str] = set()  # ignored fields that the log has named

    def record_request(self, scope: Any, status: int, seconds: float) -> None:
        """Count, log and trace a finished request: numbers and names, nothing of its text."""
        route = scope.get("route")
        state = scope["state"]
        path = "other" if route is None else route.path
        method = (
            scope["method"] if route is not None and scope["method"] in route.methods else "other"
        )
        self.http_metrics.request(path, method, status)
        log_path = scope["path"][:200]
        facts = state["facts"]
        if path not in UNLOGGED or (status >= 400 and path not in POLLED):
            access(scope["method"], log_path, status, seconds, state["request_id"], **facts)
        self.trace(state, seconds, f"HTTP {status}" if status >= 400 else facts.get("ended"))

    def trace(self, state: Mapping[str, Any], seconds: float, failed: str | None) -> None:
        """End the span of a request, if it has one."""
        if (span := state.get("span")) is not None:
            request_facts = {"request_id": state["request_id"], "e2e": seconds, "error": failed}
            span.finish(request_facts | span_facts(state["facts"], state["params"]))

    async def load_first(self) -> None:
        """Load the first model, which is required, and resume stored batches."""
        try:
            async with self.models.use(None):
                self.started = True
            tenants = {tenant_id(key) for key in self.settings.api_keys} or {None}
            self.batches.resume(tenants.__contains__)
        except HttpError:
            first = self.models.find(None)
            alone = len(self.models.models) == 1
            raise ModelError(
                first.failure if alone else f"model {first.name}: {first.failure}"
            ) from None

    def shutdown_error(self) -> HttpError | None:
        """The error with which new work is refused while the server shuts down.

        None before that.
        """
        if self.draining:
            headers = {"Retry-After": "5", "Connection": "close"}
            return HttpError(503, "the server is shutting down", code=DRAINING, headers=headers)
        return None

    @asynccontextmanager
    async def open_request(self) -> AsyncIterator[None]:
        """Count a request as open; the shutdown waits until none is."""
        self.open += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self.idle.set()

    async def run_in_thread(self, function: Callable, *args: Any) -> Any:
        """Run a function that would block the event loop in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *args)

    async def body(self, request: Request) -> bytes:
        """Receive a request's body within the limits of time and size."""
        chunks = []
        size = 0
        try:
            async with asyncio.timeout(self.settings.receive_seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > self.settings.max_body_bytes:
                        raise too_large(self.settings)
                    chunks.append(chunk)
        except TimeoutError:
            raise HttpError(
                408, "the body did not come in time", headers={"Connection": "close"}
            ) from None
        except ClientDisconnect:
            raise ClientLeft from None
        return b"".join(chunks)

    async def read(
        self, request: Request, parse: Callable[[Any], Any], reads_stored: bool = False
    ) -> tuple[Any, Any]:
        """Receive and parse a request: (the parsed request, its JSON body).

        `reads_stored` says that `parse` may read large stored items, so that even a small body is
        parsed in a thread.
        """
        raw = await self.body(request)
        is_quick = len(raw) <= SMALL_BODY and not reads_stored
        parsed_and_body = (
            read(parse, raw) if is_quick else await self.run_in_thread(read, parse, raw)
        )
        if ignored := getattr(parsed_and_body[0], "ignored", ()):  # only chat requests have it
            self.report_ignored_fields(request, ignored)
        return parsed_and_body

    def report_ignored_fields(self, request: Request, names: Sequence[str]) -> None:
        """Report unknown fields of messages: to the client in a header, and once in the log."""
        request.scope["state"]["ignored"] = ", ".join(names[:MAX_HEADER_NAMES])
        for name in names[:MAX_HEADER_NAMES]:
            if name not in self.ignored and len(self.ignored) < MAX_IGNORED_NAMES:
                self.ignored.add(name)
                log.warning(
                    "%s is no field that this server knows; it is ignored (said once)", name
                )

    def key(self, request: Request) -> str | None:
        """The tenant of a request: a digest of its API key, which caches and traces may hold."""
        if "tenant" in request.scope["state"]:  # a request of a batch
            return request.state.tenant
        return tenant_id(request.state.key)

    def engine_id(self, request: Request, name: str) -> str:
        """The engine's id of a request; it contains the tenant, so that tenants cannot collide."""
        key = self.key(request)
        return name if key is None else f"{key}/{name}"

    def head(
        self, name: str, model: str, prompts: Sequence[AnsweredPrompt] = (), created: int = 0
    ) -> ResponseHead:
        return ResponseHead(
            name, model, created or int(time.time()), f"quire-{self.settings.version}", prompts
        )

    def tenant_options(self, request_options: RequestOptions, key: str | None) -> RequestOptions:
        """Add the server's time limit, and separate the tenants' prefix caches and queue shares."""
        max_seconds = self.settings.request_seconds
        if max_seconds is not None and (request_options.timeout or 0) > max_seconds:
            raise RequestError(
                "timeout",
                f"must be at most {max_seconds:g} seconds here, got {request_options.timeout:g}",
            )
        request_options = replace(request_options, timeout=request_options.timeout or max_seconds)
        if key is None:
            return request_options
        return replace(
            request_options, cache_salt=f"{key} {request_options.cache_salt or ''}", share_key=key
        )

    def server_delivery(self, delivery: Delivery) -> Delivery:
        """Delivery options with the usage and metrics that the server's settings add."""
        delivery = replace(delivery, metrics=self.settings.enable_per_request_metrics)
        if not self.settings.enable_force_include_usage:
            return delivery
        return replace(delivery, include_usage=True, continuous_usage=True)

    async def terms_with_adapter(
        self, model: Model, name: str | None, request_options: RequestOptions
    ) -> RequestOptions:
        """Options with the adapter called `name`, if it is not the model itself.

        The adapter is loaded again if host memory has dropped it.
        """
        if name is None or name in model.names:
            return request_options
        if (adapter := model.adapters.get(name)) is None:  # unloaded while the model woke up
            raise self.models.unknown(name)
        try:
            return await self.run_in_thread(
                with_adapter, request_options, model.llm.engine.adapters, adapter
            )
        except RequestError as error:
            log.error("adapter %s: %s", name, error)
            reason = f"adapter {name} cannot be read; the server's log says why"
            raise HttpError(503, reason, "model", "model_failed") from None

    async def answer(self, request: Request, protocol: Protocol) -> Any:
        """Receive and answer a generation request of any protocol."""
        parsed, body = await self.read(request, protocol.parse)
        return await self.serve(request, protocol, parsed, body)

    async def serve(self, request: Request, protocol: Protocol, parsed: Any, body: Any) -> Any:
        """Answer a parsed request: a JsonResponse or an EventStream."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.open_request())
            request_options = self.tenant_options(parsed.request_options, self.key(request))
            began = time.monotonic()
            try:
                async with asyncio.timeout(request_options.timeout):
                    model = await stack.enter_async_context(self.models.use(parsed.model))
            except TimeoutError:
                raise HttpError(
                    408, "timeout: the time was over before the model was awake", "timeout"
                ) from None
            if request_options.timeout is not None:
                seconds_left = request_options.timeout - (time.monotonic() - began)
                request_options = replace(request_options, timeout=max(seconds_left, 1e-3))
            engine = model.llm.engine
            defaults = engine.chat_defaults if protocol.uses_chat_defaults else engine.defaults
            params = with_defaults(parsed.params, parsed.explicit_params, defaults)
            request_options = await self.terms_with_adapter(model, parsed.model, request_options)
            parsed = replace(
                parsed,
                params=params,
                request_options=request_options,
                delivery=self.server_delivery(parsed.delivery),
            )
            try:
                prepared = await self.run_in_thread(
                    prepare, protocol.prepare, model.llm.engine, parsed, self.settings.formats
                )
            except RequestError as error:
                raise as_sent(error, body) from None
            choices = parsed.params.n
            if len(prepared.engine_requests) * choices > self.settings.max_choices:
                max_choices = self.settings.max_choices
                raise RequestError(
                    "n",
                    f"times the prompts must be at most {max_choices} (--max-choices), got "
                    f"{choices}",
                )
            journal: Journal | None = (
                request.scope["state"].get("journal") if parsed.delivery.stream else None
            )
            resumed = journal or Journal()
            name = resumed.name or f"{protocol.prefix}{parsed.delivery.request_id or new_id()}"
            head = self.head(name, parsed.model or model.name, prepared.prompts, resumed.created)
            request.state.facts |= {
                "model": model.name,
                "prompt_tokens": sum(len(ask.tokens) for ask in prepared.engine_requests),
            }
            if self.tracer is not None:
                request.state.span = self.tracer.request("llm_request", request.headers)
                request.state.params = parsed.params
            if parsed.length_penalty is not None:
                return await self.answer_by_beam_search(
                    request, protocol, head, parsed, body, prepared, model.llm
                )
            read_options = (Served.take, False) if parsed.delivery.stream else (Served.output, True)
            engine_id = self.engine_id(request, name)
            names = [
                engine_id if len(prepared.engine_requests) == 1 else f"{engine_id}-{index}"
                for index in range(len(prepared.engine_requests))
            ]
            if self.before_asking is not None:
                for ask in prepared.engine_requests:
                    await self.before_asking(model.llm, ask)
            engine_requests = [
                with_seed(*pair) for pair in zip_longest(prepared.engine_requests, resumed.seeds)
            ]
            answers = await model.llm.ask(names, engine_requests, *read_options, resumed.streamed)
            stack.callback(answers.close)
            reader = AnswerReader(prepared, answers, choices, journal)
            if not parsed.delivery.stream:
                return await self.answer_at_once(request, protocol, head, parsed, body, reader)
            if journal is not None:
                journal.name = name
                journal.created = head.created
                journal.seeds = [seed_of(engine_request) for engine_request in answers.requests]
            stream = protocol.stream(head, parsed, body)
            with_usage = parsed.delivery.continuous_usage
            events = reader.stream(stream, with_usage, protocol.framing.keepalive)
            resources = stack.pop_all()  # the model stays awake until the last event
            return EventStream(events, reader, resources, self.http_metrics, protocol.framing)

    async def max_running_sequences(self) -> int:
        """How many sequences the first model runs at once."""
        async with self.models.use(None) as model:
            scheduler = model.llm.engine.scheduler
            return scheduler.shape.max_seqs * len(scheduler.replicas)

    async def answer_at_once(
        self,
        request: Request,
        protocol: Protocol,
        head: ResponseHead,
        parsed: Any,
        body: Any,
        reader: AnswerReader,
    ) -> JsonResponse:
        """The complete answer in one response."""
        async with end_on_disconnect(request.receive, reader.answers):
            answers, outputs = await reader.collect()
        prompts = [
            replace(prompt, logprobs=output.prompt_logprobs)
            for prompt, output in zip(head.prompts, outputs, strict=True)
        ]
        request.state.facts |= reader.facts()
        usage = reader.usage

        def respond() -> JsonResponse:
            return JsonResponse(
                protocol.response(replace(head, prompts=prompts), parsed, body, answers, usage)
            )

        # The log-probabilities of a long prompt take a second to write.
        return (
            await self.run_in_thread(respond)
            if any(prompt.logprobs for prompt in prompts)
            else respond()
        )

    async def answer_by_beam_search(
        self,
        request: Request,
        protocol: Protocol,
        head: ResponseHead,
        parsed: Any,
        body: Any,
        prepared: Prepared,
        llm: AsyncLLM,
    ) -> JsonResponse:
        """The answers of a beam search.

        It ends early if the client disconnects or its timeout is over.
        """
        params = parsed.params
        beams = BeamSearchParams(
            beam_width=params.n,
            max_tokens=params.max_tokens or INT32_MAX,
            ignore_eos=params.ignore_eos,
            length_penalty=parsed.length_penalty,
        )
        engine_requests = [
            ask._replace(request_options=replace(ask.request_options, timeout=None))
            for ask in prepared.engine_requests
        ]
        search_task = asyncio.create_task(
            llm.beams(self.engine_id(request, head.id), engine_requests, beams)
        )
        disconnect_task = asyncio.create_task(wait_for_disconnect(request.receive))
        try:
            timeout = parsed.request_options.timeout
            done, _ = await asyncio.wait(
                (search_task, disconnect_task), timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise HttpError(408, "timeout: the time was over before the search was", "timeout")
            if search_task not in done:
                raise ClientLeft
            searches = search_task.result()
        finally:
            search_task.cancel()
            disconnect_task.cancel()
            await asyncio.wait((search_task, disconnect_task))
        choices = Choices(prepared.parser, params.n, prepared.max_calls)
        answers = choices.answers(
            [
                beam_search_output(*pair, llm.engine)
                for pair in zip(searches, engine_requests, strict=True)
            ]
        )
        reasons = ",".join(sorted(choices.finish_reasons))
        cached = sum(search.cached for search in searches)
        request.state.facts |= {
            "tokens": choices.num_tokens,
            "cached_tokens": cached,
            "finish_reason": reasons,
        }
        usage = Usage(
            sum(len(ask.tokens) for ask in engine_requests),
            choices.num_tokens,
            cached,
            choices.num_reasoning_tokens,
        )
        return JsonResponse(protocol.response(head, parsed, body, answers, usage))

    async def heartbeat(self) -> None:
        """Measure the event loop's delay, and check the engines for hung steps and lost devices."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + HEARTBEAT_SECONDS
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self.http_metrics.observe_delay(loop.time() - due)
            for model in self.models.ready():
                model.check_stall(self.settings.stall_seconds)
                if isinstance(failure := model.llm.thread.failure, DeviceLost):
                    return await self.exit_after_device_loss(model.name, failure)

    async def exit_after_device_loss(self, name: str, failure: DeviceLost) -> None:
        """End the process, whose engines cannot use the device again."""
        log.critical(
            "model %s: %s; this process ends, and its supervisor has to start another",
            name,
            failure,
        )
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(DEVICE_LOSS_GRACE):
                await self.idle.wait()
        os._exit(EXIT)  # a normal exit would call the device

    async def drain(self, grace: float) -> None:
        """Refuse new requests.

        Running ones have `grace` seconds to finish, then they end with what they have. Background
        responses are left unfinished instead: the next server marks them as failed.
        """
        self.draining = True
        self.batches.close()
        try:
            async with asyncio.timeout(grace):
                await self.idle.wait()
                await self.stored.wait_until_idle()
        except TimeoutError:
            num_unfinished = self.open + len(self.stored.running)
            log.warning(
                "%d requests did not end within %g seconds; they are cut off",
                num_unfinished,
                grace,
            )
            self.stored.interrupt()
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


def tenant_id(key: str | None) -> str | None:
    return None if key is None else digest(f"salt {key}").hex()[:32]


def beam_search_output(search: Search, ask: EngineRequest, engine: Engine) -> RequestOutput:
    """The result of a beam search as an engine output; the end token has no text."""
    outputs = []
    for index, beam in enumerate(search.best()):
        text_tokens = beam.tokens[: len(beam.tokens) - (beam.finish_reason == "stop")]
        text = require_tokenizer(engine).decode(
            list(text_tokens), skip_special_tokens=ask.params.skip_special_tokens
        )
        outputs.append(
            CompletionOutput(
                index, text, beam.tokens, beam.cum_logprob, finish_reason=beam.finish_reason
            )
        )
    return RequestOutput("", ask.text, ask.tokens, outputs)


def with_seed(ask: EngineRequest, seed: int | None) -> EngineRequest:
    return ask if seed is None else ask._replace(params=replace(ask.params, seed=seed))


def abort_all(thread: Any) -> None:
    thread.outbox.note([thread.engine.abort(name) for name in list(thread.engine.requests)])


def read(parse: Callable[[Any], Any], raw: bytes) -> tuple[Any, Any]:
    body = decode(raw)
    try:
        return parse(body), body
    except RequestError as error:
        raise as_sent(error, body) from None


def prepare(
    prepare_prompts: Callable[..., Prepared], engine: Engine, parsed: Any, formats: Formats
) -> Prepared:
    """Prepare the prompts, and refuse what the engine can never serve before it is submitted."""
    prepared = prepare_prompts(engine, parsed, formats)
    for ask in prepared.engine_requests:
        engine.admission.check(ask.tokens, ask.params)
    return prepared


def decode(raw: bytes) -> Any:
    """Parse JSON strictly: NaN, numbers beyond a double and broken UTF-8 are errors."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise RequestError("body", f"must be JSON in UTF-8: {str(error)[:200]}") from None
