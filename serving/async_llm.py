"""`AsyncLLM`: the engine in its own thread, with results as async streams."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from ..model.config import FAR
from .adapter_store import with_adapter
from .api.errors import NotServing
from .api.lora import LoRARequest
from .api.options import Pooling, make_options, takes_options
from .api.outputs import CompletionDelta, RequestDelta, RequestOutput
from .api.params import PLAIN, RequestOptions, RequestOutputKind, SamplingParams
from .api.prompts import Prompt
from .build import make_engine
from .defaults import default_params
from .engine.beam_search import BeamSearchParams, Search, begin, likeliest, next_token
from .engine.delivery import Inbox, Listener
from .engine.engine import Engine
from .engine.thread import EngineFailed, EngineThread
from .llm import Arguments, close_at_exit, parse_prompt, read_media
from .observe.live_view import LiveView
from .observe.metrics import Metrics
from .request.media import PromptMedia
from .request.request import Request
from .resume import Streamed, resume


class EngineRequest(NamedTuple):
    """A prompt, and how to serve it."""

    tokens: list[int]
    params: SamplingParams
    text: str | None = None
    request_options: RequestOptions = PLAIN
    pooling: Pooling | None = None  # set if hidden states are wanted instead of tokens
    second_start: int = FAR  # where the second text of a pair starts
    media: PromptMedia | None = None  # the images among the tokens


class Answers:
    """The results of requests that were accepted together."""

    def __init__(self, thread: EngineThread, inbox: Inbox, names: list[str]):
        self.thread = thread
        self.inbox = inbox
        self.names = names
        self.requests: list[Request] = []
        # What the reader received from another engine.
        self.resumed: list[tuple[int, CompletionDelta]] = []
        self.is_closed = False

    async def updates(self) -> list[tuple[int, Any]]:
        """Return (index of the prompt, its update) pairs in order; raise if the engine has
        failed.
        """
        items = await self.inbox.take()
        for item in items:
            if isinstance(item, Exception):
                raise item
        return items

    async def outputs(self) -> list[RequestOutput]:
        """Return the results of all prompts, which were queued with `at_end`."""
        outputs: dict[int, RequestOutput] = {}
        try:
            while len(outputs) < len(self.names):
                outputs |= dict(await self.updates())
        finally:
            self.close()
        if self.thread.failure is not None:
            raise EngineFailed("the engine has stopped")
        return [outputs[index] for index in range(len(outputs))]

    def close(self) -> None:
        """Stop reading: requests that still run are aborted before the next step."""
        if not self.is_closed:
            self.is_closed = True
            with suppress(NotServing):  # then the requests have ended
                self.thread.post(self.end)

    def end(self) -> None:
        """Abort the requests in the engine's thread, unless their names belong to new requests by
        now.
        """
        engine = self.thread.engine
        listeners = self.thread.outbox.listeners
        for request in self.requests:
            if engine.requests.get(request.request_id) is request:
                listeners.pop(request.request_id, None)
                engine.abort(request.request_id)


class AsyncLLM:
    """Serves many callers in one event loop; each `generate` is a stream of results.

    It cannot be used in a fork of its process.
    """

    @takes_options(Arguments)
    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[str], Any] | None = None,
        engine: Engine | None = None,
        **options: Any,
    ):
        self.engine = engine or make_engine(
            make_options(model, **options), progress or (lambda note: None)
        )
        self.ids = itertools.count()
        self.metrics = Metrics(self.engine)
        self.live = LiveView()
        self.engine.observers += [self.metrics, self.live]
        self.thread = EngineThread(self.engine)
        if engine is None:
            close_at_exit(self, self.thread.close_at_exit)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the result as it grows; leaving the loop early, or cancelling it, aborts the
        request.

        `sampling_params.output_kind` determines the contents of each result.
        """
        self.engine.lifecycle.check_process()
        text, tokens, request_options = await asyncio.to_thread(
            parse_prompt, prompt, self.engine.tokenizer, priority
        )
        request_options = await asyncio.to_thread(
            with_adapter, request_options, self.engine.adapters, lora_request
        )
        tokens, media = await asyncio.to_thread(read_media, self.engine, tokens, prompt)
        name = f"request-{next(self.ids)}" if request_id is None else request_id
        params = sampling_params or self.get_default_sampling_params()
        kind = getattr(params, "output_kind", None)  # the engine refuses other types
        read = Request.delta if kind is RequestOutputKind.DELTA else Request.output
        requests = [EngineRequest(tokens, params, text, request_options, media=media)]
        answers = await self.ask(
            [name], requests, read, at_end=kind is RequestOutputKind.FINAL_ONLY
        )
        try:
            while True:
                updates = await answers.updates()
                for _, output in (
                    updates if kind is RequestOutputKind.DELTA else updates[-1:]
                ):  # cumulative results need only the last one
                    yield output
                    if output.finished:
                        return
        finally:
            answers.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        return default_params(self.engine)

    async def ask(
        self,
        names: list[str],
        asks: Sequence[EngineRequest],
        read: Callable[[Request], RequestDelta | RequestOutput] = Request.output,
        at_end: bool = False,
        streamed: Sequence[Streamed] = (),
    ) -> Answers:
        """Queue prompts, all of them or none.

        Args:
            read: Makes what the caller receives, at each delivery or at the end.
            streamed: Tokens that another engine has sent already; generation continues after them.
        """
        answers = Answers(self.thread, Inbox(), names)

        def add() -> None:
            try:
                for index, (name, ask) in enumerate(zip(names, asks, strict=True)):
                    answers.requests.append(self.add(name, ask))
                    self.thread.outbox.listeners[name] = Listener(
                        answers.inbox, index, read, at_end
                    )
                answers.resumed = resume(self.engine, answers.requests, streamed)
                self.thread.outbox.note(
                    [request for request in answers.requests if request.finished]
                )
            except BaseException:
                for request in answers.requests:
                    self.thread.outbox.listeners.pop(request.request_id, None)
                    self.engine.abort(request.request_id)
                raise

        try:
            await self.call(add)
        except asyncio.CancelledError:
            answers.close()
            raise
        return answers

    async def beams(
        self, name: str, asks: Sequence[EngineRequest], params: BeamSearchParams
    ) -> list[Search]:
        """Run the beam search of each prompt; every step computes what all beams need."""
        tokens = [ask.tokens for ask in asks]
        request_options = [ask.request_options for ask in asks]
        searches = await self.call(lambda: begin(self.engine, tokens, params, request_options))
        step_params = next_token(params)
        step = 0
        while beam_asks := [
            EngineRequest(beam, step_params, None, beam_search.request_options)
            for beam_search in searches
            for beam in beam_search.asked()
        ]:
            names = [f"{name}-{step}-{index}" for index in range(len(beam_asks))]
            outputs = iter(await (await self.ask(names, beam_asks, at_end=True)).outputs())
            for beam_search in searches:
                beam_outputs = list(islice(outputs, len(beam_search.live)))
                if not step:
                    beam_search.cached = beam_outputs[0].num_cached_tokens
                if beam_outputs:
                    beam_search.take(
                        likeliest(output.outputs[0], step_params) for output in beam_outputs
                    )
            step += 1
        return searches

    def add(self, name: str, ask: EngineRequest) -> Request:
        """Queue one prompt, in the engine's thread."""
        return self.engine.add(
            name,
            ask.tokens,
            ask.params,
            ask.text,
            ask.request_options,
            ask.pooling,
            ask.second_start,
            ask.media,
        )

    async def call(self, job: Callable[[], Any]) -> Any:
        """Run a job in the engine's thread and return its result."""
        return await asyncio.wrap_future(self.thread.submit(job))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream yields the tokens so far, with the finish reason "abort"."""

        def abort() -> None:
            if (request := self.engine.abort(request_id)) is not None:
                self.thread.outbox.note([request])

        await self.call(abort)

    async def sleep(self, level: int = 1, keep_pages: bool = False) -> None:
        """See `LLM.sleep`; streams in flight continue after `wake_up()`."""
        await self.call(lambda: self.thread.outbox.note(self.engine.sleep(level, keep_pages)))

    async def wake_up(self) -> None:
        """Serve again."""
        await self.call(self.engine.lifecycle.wake_up)

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        await self.call(self.engine.reset_prefix_cache)
        return True

    async def rebalance_experts(self) -> dict[str, float]:
        """See `LLM.rebalance_experts`."""
        return await self.call(self.engine.runner.rebalance_experts)

    async def expert_loads(self) -> dict[int, dict[str, list]]:
        """See `LLM.expert_loads`."""
        return await self.call(self.engine.runner.read_expert_loads)

    def close(self) -> None:
        """Stop the engine's thread; requests in flight end."""
        self.thread.close()
