"""The engine's loop: it schedules, launches, collects and processes steps."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...model.checkpoint.embedder import Embedder
from ...model.config import FAR
from ...model.text.tokenizer import Tokenizer
from ..api.content import MessageImage
from ..api.errors import QueueFull, RequestError
from ..api.options import Pooling
from ..api.params import PLAIN, RequestOptions, SamplingParams
from ..cache.page_table import PageTable
from ..media_reader import MediaReader
from ..request.media import PromptMedia
from ..request.request import Request
from ..speculative.config import SpeculativeConfig
from ..speculative.speculator import Speculator
from .admission import NO_ADAPTERS, Admission
from .deadlines import Deadlines
from .lifecycle import Lifecycle, PageIdentity
from .results import ResultProcessor
from .runner import Runner
from .scheduler import Scheduler, StepPlan
from .step_record import Observer, StepRecord
from .step_result import InFlightStep, StepResult

log = logging.getLogger("quire")

# Seconds by which fused steps may delay a token that is streamed, and one of an answer that is sent
# whole.
STREAMING_LATENCY = 0.02
LATENCY = 0.1


class Engine:
    """One model, one scheduler, one loop.

    add() ──> schedule ──StepPlan──> launch ──InFlightStep──> device (step n)
                  ^                                              │
                  └──── update <──StepResult── collect <─────────┘ (step n-1, while step n runs)
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        tables: list[PageTable],  # of each replica
        max_len: int,
        seed: int = 0,
        max_queued: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        embedder: Embedder = Embedder(),  # noqa: B008 - it is frozen
        defaults: Mapping[str, Any] = MappingProxyType({}),
        chat_defaults: Mapping[str, Any] | None = None,
        speculation: SpeculativeConfig | None = None,
        adapters: Any = None,  # reads them, where they are served: an `AdapterStore`
        page_identity: PageIdentity = lambda: (b"", b""),
        media_reader: MediaReader | None = None,  # None: text only
    ):
        self.runner = runner
        self.config = runner.config
        self.tokenizer = tokenizer
        self.tables = tables
        self.max_len = max_len
        self.max_queued = max_queued
        self.clock = clock
        self.observers: list[Observer] = []
        self.adapters = adapters
        self.media_reader = media_reader
        self.embedder = embedder  # how a request for an embedding is answered
        # of sampling parameters that a request leaves out: the model's own
        self.defaults = defaults
        # where people talk with the model
        self.chat_defaults = defaults if chat_defaults is None else chat_defaults
        self.num_stages = len(runner.pipeline)
        self.num_ahead = max(1, self.num_stages - 1)  # steps in flight while the host works
        self.scheduler = Scheduler(tables, runner.shape, self.num_stages, runner.media_store)
        self.speculator = None if speculation is None else Speculator(speculation, runner.seconds)
        self.admission = Admission(
            self.config, runner.shape, tables, tokenizer, max_len, seed, self.num_stages > 1
        )
        self.results = ResultProcessor(self.scheduler, tables, self.speculator)
        self.requests = self.results.requests
        self.lifecycle = Lifecycle(runner, self.scheduler, tables, self.results, page_identity)
        self.deadlines = Deadlines()
        self.in_flight: deque[InFlightStep] = deque()  # the oldest first
        self.has_encoded = False  # media, since the last launch
        # mean of the latest decode steps; 1 before the first
        self.step_seconds = min(1.0, runner.decode_seconds or 1.0)
        self.last_collected = 0.0  # when the latest results were there

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        request_options: RequestOptions = PLAIN,
        pooling: Pooling | None = None,
        second: int = FAR,
        media: PromptMedia | None = None,
    ) -> Request:
        """Queue a request, or raise a `RequestError` with the reason.

        With `pooling` the result is the prompt's hidden states (`RequestOutput.pooled`) and no
        token is generated. `second` is where the second text of a pair begins. `media` are the
        images of the prompt, whose placeholders are among the tokens.
        """
        self.lifecycle.check_serving()
        if request_id in self.requests:
            # the server puts a tenant before its ids
            client_id = request_id.removeprefix(f"{request_options.share_key}/")
            raise RequestError(
                "request_id", f"{client_id!r} is being served already; ids must differ"
            )
        self.admission.check(tokens, params, pooling is not None)
        if (
            media is not None
            and params.prompt_logprobs is not None
            and self.runner.shape.sees_spans
        ):
            raise RequestError(
                "prompt_logprobs",
                f"is {params.prompt_logprobs}; prompts with images have none with this model: leave "
                "it out",
            )
        if media is None and self.media_reader is not None:
            self.media_reader.check_text(tokens)
        if request_options.adapter is not None and self.adapters is None:
            raise RequestError("lora_request", NO_ADAPTERS)
        if (
            self.max_queued is not None
            and len(self.scheduler.waiting) + params.num_sequences > self.max_queued
        ):
            raise QueueFull(
                "queue",
                f"is full: {self.max_queued} may wait (max_queued_requests); try again later",
            )
        now = self.clock()
        request = self.admission.make_request(
            request_id, tokens, params, prompt, request_options, pooling, second, now, media
        )
        self.requests[request_id] = request
        if self.speculator is not None:
            for seq in request.sequences:
                self.speculator.add(seq)
        self.scheduler.add(*request.sequences)
        if request_options.timeout is not None:
            self.deadlines.add(now + request_options.timeout, request, len(self.requests))
        return request

    def read_images(
        self, tokens: list[int], images: Sequence[MessageImage], is_client: bool = False
    ) -> tuple[list[int], PromptMedia | None]:
        """A prompt's tokens with the placeholders of all rows of its images, and the images; may be
        called from any thread. `is_client`: they came over HTTP.
        """
        self.check_images(images)
        if self.media_reader is None:
            return tokens, None
        return self.media_reader.read(tokens, images, is_client)

    def check_images(self, images: Sequence[MessageImage]) -> None:
        """Refuse images if the model reads text only."""
        if images and self.media_reader is None:
            raise RequestError(images[0].param, "is an image, and this model reads text only")

    def step(self, launches: bool = True) -> list[Request]:
        """Launch the next step and process the results of the oldest one in flight.

        Returns the requests that got tokens or ended. Without `launches` it only processes results.
        """
        if self.lifecycle.is_asleep:
            return []
        began = self.clock()
        changed = list(self.expire(began))
        step = result = None
        plan = self.schedule() if launches else None
        try:
            step = self.launch(plan, began)
            changed += self.encode_media()
            result = self.collect(num_kept=self.num_ahead if step else 0)
            changed += self.update(result)
        except Exception as error:
            changed += self.recover(error, plan)
        return self.report(began, step, result, changed)

    def schedule(self) -> StepPlan | None:
        """Plan the next step, fused where that delays no token; None if nothing can be computed
        now.
        """
        if self.speculator is not None:
            is_blocked = self.num_stages == 1 and any(
                step.plan.needs_host_sync for step in self.in_flight
            )
            self.speculator.plan_drafts(self.scheduler.running)
            if is_blocked:
                return None
        plan = self.scheduler.schedule(self.speculator is not None and not self.speculator.is_idle)
        if plan is not None:
            return self.scheduler.fuse_steps(plan, self.max_fused_steps(plan))
        if not self.in_flight:
            for table in self.tables:
                table.wait(0.05 / len(self.tables))
        return None

    def launch(self, plan: StepPlan | None, began: float) -> InFlightStep | None:
        """Send a step to the device."""
        if plan is None:
            return None
        scheduled = self.clock()
        for item in plan.items:
            item.seq.request.scheduled(began)
        for slot, adapter in self.scheduler.take_adapters():
            self.runner.load_adapter(slot, adapter)
        step = self.runner.launch(plan, self.scheduler.take_moves())
        step = step._replace(
            began=began, scheduled=scheduled, launched=self.clock(), follows_media=self.has_encoded
        )
        self.has_encoded = False
        self.in_flight.append(step)
        return step

    def encode_media(self) -> Iterator[Request]:
        """Run a part of the encoder for the first item that a sequence waits for; yields the
        requests that end because it failed.
        """
        store = self.runner.media_store
        if store is None:
            return
        while (pending := store.first_pending()) and not self.scheduler.sequences_reading(*pending):
            self.runner.encoding = None
            store.drop(*pending)  # its requests have ended
        if pending is None:
            return
        self.has_encoded = True
        try:
            self.runner.encode_media(*pending, self.step_seconds)
            if not self.in_flight and self.runner.encoding is not None:
                self.runner.encoding.wait()  # so that a new request waits for this part only
        except Exception as error:
            log.error("an image could not be encoded; its requests end", exc_info=error)
            self.runner.encoding = None
            store.drop(*pending)
            for seq in self.scheduler.sequences_reading(*pending):
                yield seq.request
                self.results.end(seq, "error")

    def collect(self, num_kept: int) -> StepResult | None:
        """Wait for the oldest step in flight; None if no more than `num_kept` are in flight."""
        if len(self.in_flight) <= num_kept:
            return None
        began = self.clock()
        step = self.in_flight[0]
        result = self.runner.collect(step)
        collected = self.clock()
        device_began = max(step.launched, self.last_collected)
        result = result._replace(began=began, collected=collected, device_began=device_began)
        self.record_step_time(result, collected - self.last_collected)
        self.last_collected = collected
        return result

    def update(self, result: StepResult | None) -> Iterator[Request]:
        """Give the sequences their sampled tokens; yields the request of each."""
        if result is None:
            return
        yield from self.results.process(result)
        self.in_flight.popleft()  # a step whose results could not be processed stays, for `recover`
        if not self.in_flight:
            self.runner.settle()

    def recover(self, error: Exception, plan: StepPlan | None) -> Iterator[Request]:
        """Start over after a failed step; yields the requests of the lost steps, which end."""
        lost_plans = [step.plan for step in self.in_flight]
        if plan is not None:
            lost_plans.append(plan)
        self.in_flight.clear()
        return self.lifecycle.recover(error, lost_plans)

    def report(
        self,
        began: float,
        step: InFlightStep | None,
        result: StepResult | None,
        changed: list[Request],
    ) -> list[Request]:
        """Pass a step's record to the observers; returns each changed request once."""
        requests = tuple(dict.fromkeys(changed))
        num_running = len(self.scheduler.running)
        num_waiting = len(self.scheduler.waiting)
        record = StepRecord(began, self.clock(), step, result, requests, num_running, num_waiting)
        for observer in self.observers:
            observer.observe(record)
        return list(requests)

    def max_fused_steps(self, plan: StepPlan) -> int:
        """Maximum number of decode steps to fuse without delaying tokens beyond the latency
        budget.
        """
        is_streaming = any(
            item.seq.request is not None and item.seq.request.watched for item in plan.items
        )
        budget = STREAMING_LATENCY if is_streaming else LATENCY
        num_steps = int(budget / max(self.step_seconds, 1e-6))
        return num_steps if num_steps < 2 else min(num_steps, self.runner.max_fused_steps(plan))

    def record_step_time(self, result: StepResult, seconds_since_previous: float) -> None:
        """Update the mean time of a decode step, and the speculator's measurements."""
        if not (result.plan.decodes and result.num_steps) or result.step.follows_media:
            return
        seconds = (result.collected - result.device_began) / result.num_steps
        self.step_seconds += (
            (seconds - self.step_seconds) / 8 if self.step_seconds < 1 else seconds - 1
        )
        if self.speculator is not None:
            self.speculator.record_step(result.plan, seconds_since_previous)

    def expire(self, now: float) -> Iterator[Request]:
        """End the requests that have reached their timeout; yields each."""
        for request in self.deadlines.due(now):
            self.results.end_all(request, "timeout")
            yield request

    def abort(self, request_id: str) -> Request | None:
        """End a request now; its pages are free before the next step is scheduled."""
        request = self.requests.get(request_id)
        if request is not None:
            self.results.end_all(request, "abort")
        return request

    def drain(self) -> list[Request]:
        """Process the results of all steps in flight; returns the requests that got tokens or
        ended.
        """
        changed: list[Request] = []
        while self.in_flight:
            changed += self.step(launches=False)
        return list(dict.fromkeys(changed))

    def sleep(self, level: int = 1, keep_pages: bool = False) -> list[Request]:
        """See `Lifecycle.sleep`; returns the requests that got tokens from the steps in flight."""
        self.lifecycle.check_level(level)
        changed = self.drain()
        self.lifecycle.sleep(level, keep_pages)
        return changed

    def close(self) -> None:
        """End every request and save the cached pages to disk, if there is one."""
        if self.lifecycle.is_closed or self.lifecycle.is_forked:
            return
        for request_id in list(self.requests):
            self.abort(request_id)
        self.drain()
        self.lifecycle.close()
        for observer in self.observers:
            observer.close()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running requests continue."""
        for table in self.tables:
            table.clear()

    @property
    def busy(self) -> bool:
        return not self.lifecycle.is_asleep and (self.scheduler.busy or bool(self.in_flight))
