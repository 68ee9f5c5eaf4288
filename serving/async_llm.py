"""`AsyncLLM`: the engine in a thread of its own, its results as async streams."""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from .llm import Prompt, parse_prompt
from .options import options_of
from .outputs import RequestOutput
from .request import RequestError, SamplingParams
from .setup import make_engine


class AsyncLLM:
    """Serves many callers of one event loop; each `generate` is a stream of ever longer results.

    Only the engine's thread touches the engine; callers leave it jobs and read their own queue.
    """

    def __init__(self, model: str | None = None, **options: Any):
        self.engine = make_engine(options_of(model, **options))
        self.ids = itertools.count()
        self.jobs: deque[tuple[Callable[[], Any], Future]] = deque()
        self.listeners: dict[str, Callable[[RequestOutput], None]] = {}
        self.wake = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self.loop, name="quire-engine", daemon=True)
        self.thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """The result as it grows; leaving the loop early, or cancelling it, aborts the request."""
        params = sampling_params or SamplingParams()
        text, tokens, terms = await asyncio.to_thread(parse_prompt, prompt, self.engine.tokenizer)
        name = f"request-{next(self.ids)}" if request_id is None else request_id
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def hear(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, output)

        def add() -> None:
            self.engine.add(name, tokens, params, text, terms)
            self.listeners[name] = hear

        try:
            await asyncio.wrap_future(self.submit(add))
            while True:
                output = await queue.get()
                while not queue.empty():  # each result holds all before it: a slow reader skips to the newest
                    output = queue.get_nowait()
                yield output
                if output.finished:
                    return
        finally:
            if not self.closed:
                self.submit(lambda: self.stop_listening(name, hear))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream yields what it has, with the finish reason "abort"."""
        await asyncio.wrap_future(self.submit(lambda: self.tell(self.engine.abort(request_id))))

    async def sleep(self, level: int = 1, keep_pages: bool = False) -> None:
        """See `LLM.sleep`; streams under way go on after `wake_up()`."""

        def sleep() -> None:
            for request in self.engine.sleep(level, keep_pages):
                self.tell(request)

        await asyncio.wrap_future(self.submit(sleep))

    async def wake_up(self) -> None:
        """Serve again."""
        await asyncio.wrap_future(self.submit(self.engine.wake_up))

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        await asyncio.wrap_future(self.submit(self.engine.pages.forget))
        return True

    def close(self) -> None:
        """Stop the engine's thread; requests under way end."""
        with self.wake:
            self.closed = True
            self.wake.notify()
        self.thread.join()

    def submit(self, job: Callable[[], Any]) -> Future:
        """Run a job in the engine's thread, between two steps."""
        future: Future = Future()
        with self.wake:
            if self.closed:
                raise RequestError("engine", "is closed")
            self.jobs.append((job, future))
            self.wake.notify()
        return future

    def loop(self) -> None:
        """Serve until closed; however that ends, nobody is left waiting."""
        try:
            self.serve()
        finally:
            with self.wake:
                self.closed = True
            for request in list(self.engine.requests.values()):
                self.tell(self.engine.abort(request.request_id))
            for _, future in self.jobs:
                if future.set_running_or_notify_cancel():
                    future.set_exception(RequestError("engine", "is closed"))
            self.engine.close()

    def serve(self) -> None:
        """Jobs, then a step, for as long as there is either."""
        while True:
            with self.wake:
                while not (self.jobs or self.engine.busy or self.closed):
                    self.wake.wait()
                if self.closed:
                    return
                jobs = list(self.jobs)
                self.jobs.clear()
            for job, future in jobs:
                if not future.set_running_or_notify_cancel():
                    continue  # its caller has gone before it began
                try:
                    future.set_result(job())
                except Exception as error:
                    future.set_exception(error)
            for request in self.engine.step():
                self.tell(request)

    def tell(self, request) -> None:
        if request is None:
            return
        find = self.listeners.pop if request.finished else self.listeners.get
        if hear := find(request.request_id, None):
            hear(request.output())

    def stop_listening(self, request_id: str, hear: Callable) -> None:
        """The reader has gone: end its request, unless the name has since gone to another."""
        if self.listeners.get(request_id) is hear:
            del self.listeners[request_id]
            self.engine.abort(request_id)
