"""`AsyncLLM`: the engine in a thread of its own, its results as async streams."""

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
from .api.options import Pooling, options_of, takes_options
from .api.outputs import Delta, Fresh, RequestOutput
from .api.params import PLAIN, RequestOutputKind, SamplingParams, Terms
from .api.prompts import Prompt
from .build import make_engine
from .defaults import default_params
from .engine.beam_search import BeamSearchParams, Search, begin, likeliest, next_token
from .engine.delivery import Inbox, Listener
from .engine.engine import Engine
from .engine.thread import EngineFailed, EngineThread
from .llm import Arguments, close_at_exit, parse_prompt
from .observe.live_view import LiveView
from .observe.metrics import Metrics
from .request.request import Request
from .resume import Streamed, resume


class Ask(NamedTuple):
    """A prompt, and how it is to be answered."""

    tokens: list[int]
    params: SamplingParams
    text: str | None = None
    terms: Terms = PLAIN
    pooling: Pooling | None = None  # its hidden states are wanted, and no tokens
    second: int = FAR  # where the second text of a pair begins


class Answers:
    """The results of requests that were accepted together."""

    def __init__(self, thread: EngineThread, inbox: Inbox, names: list[str]):
        self.thread, self.inbox, self.names = thread, inbox, names
        self.requests: list[Request] = []
        self.resumed: list[tuple[int, Fresh]] = []  # what the reader got from another engine
        self.over = False

    async def news(self) -> list[tuple[int, Any]]:
        """(which of the prompts, what it got), in order; raises when the engine has failed."""
        items = await self.inbox.take()
        for item in items:
            if isinstance(item, Exception):
                raise item
        return items

    async def outputs(self) -> list[RequestOutput]:
        """The results of all prompts, if they were asked for with `at_end`."""
        found: dict[int, RequestOutput] = {}
        try:
            while len(found) < len(self.names):
                found |= dict(await self.news())
        finally:
            self.close()
        if self.thread.failure is not None:
            raise EngineFailed("the engine has stopped")
        return [found[index] for index in range(len(found))]

    def close(self) -> None:
        """Stop reading: requests that still run are aborted before the next step is planned."""
        if not self.over:
            self.over = True
            with suppress(NotServing):  # then they have ended
                self.thread.post(self.end)

    def end(self) -> None:
        """In the engine's thread: abort the requests, unless their names belong to new ones by now."""
        engine, listeners = self.thread.engine, self.thread.outbox.listeners
        for request in self.requests:
            if engine.requests.get(request.request_id) is request:
                listeners.pop(request.request_id, None)
                engine.abort(request.request_id)


class AsyncLLM:
    """Serves many callers of one event loop; each `generate` is a stream of results. A fork cannot use it."""

    @takes_options(Arguments)
    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[str], Any] | None = None,
        engine: Engine | None = None,
        **options: Any,
    ):
        self.engine = engine or make_engine(options_of(model, **options), progress or (lambda note: None))
        self.ids, self.metrics, self.live = itertools.count(), Metrics(self.engine), LiveView()
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
        """The result as it grows; leaving the loop early, or cancelling it, aborts the request.

        What each result holds is `sampling_params.output_kind`.
        """
        self.engine.lifecycle.check_process()
        text, tokens, terms = await asyncio.to_thread(parse_prompt, prompt, self.engine.tokenizer, priority)
        terms = await asyncio.to_thread(with_adapter, terms, self.engine.adapters, lora_request)
        name = f"request-{next(self.ids)}" if request_id is None else request_id
        params = sampling_params or self.get_default_sampling_params()
        kind = getattr(params, "output_kind", None)  # what is no SamplingParams is refused by the engine
        read = Request.delta if kind is RequestOutputKind.DELTA else Request.output
        asks = [Ask(tokens, params, text, terms)]
        answers = await self.ask([name], asks, read, at_end=kind is RequestOutputKind.FINAL_ONLY)
        try:
            while True:
                news = await answers.news()
                for _, output in news if kind is RequestOutputKind.DELTA else news[-1:]:  # the others hold all before
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
        asks: Sequence[Ask],
        read: Callable[[Request], Delta | RequestOutput] = Request.output,
        at_end: bool = False,
        streamed: Sequence[Streamed] = (),
    ) -> Answers:
        """Queue prompts, all of them or none; `read` makes what the caller gets, at each delivery or at the end.

        They go on after the tokens in `streamed`, which another engine sent; they end at once if those were all.
        """
        answers = Answers(self.thread, Inbox(), names)

        def add() -> None:
            try:
                for index, (name, ask) in enumerate(zip(names, asks, strict=True)):
                    answers.requests.append(self.add(name, ask))
                    self.thread.outbox.listeners[name] = Listener(answers.inbox, index, read, at_end)
                answers.resumed = resume(self.engine, answers.requests, streamed)
                self.thread.outbox.note([request for request in answers.requests if request.finished])
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

    async def beams(self, name: str, asks: Sequence[Ask], params: BeamSearchParams) -> list[Search]:
        """The beam search of each prompt, when it has ended; every step asks for what all beams need."""
        tokens, terms = [ask.tokens for ask in asks], [ask.terms for ask in asks]
        searches = await self.call(lambda: begin(self.engine, tokens, params, terms))
        one, step = next_token(params), 0
        while wanted := [Ask(beam, one, None, each.terms) for each in searches for beam in each.asked()]:
            names = [f"{name}-{step}-{index}" for index in range(len(wanted))]
            outputs = iter(await (await self.ask(names, wanted, at_end=True)).outputs())
            for each in searches:
                own = list(islice(outputs, len(each.live)))
                if not step:
                    each.cached = own[0].num_cached_tokens
                if own:
                    each.take(likeliest(output.outputs[0], one) for output in own)
            step += 1
        return searches

    def add(self, name: str, ask: Ask) -> Request:
        """Queue one prompt, in the engine's thread."""
        return self.engine.add(name, ask.tokens, ask.params, ask.text, ask.terms, ask.pooling, ask.second)

    async def call(self, job: Callable[[], Any]) -> Any:
        """Run a job in the engine's thread; what it returns."""
        return await asyncio.wrap_future(self.thread.submit(job))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream yields what it has, with the finish reason "abort"."""

        def abort() -> None:
            if (request := self.engine.abort(request_id)) is not None:
                self.thread.outbox.note([request])

        await self.call(abort)

    async def sleep(self, level: int = 1, keep_pages: bool = False) -> None:
        """See `LLM.sleep`; streams under way go on after `wake_up()`."""
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
        """Stop the engine's thread; requests under way end."""
        self.thread.close()
