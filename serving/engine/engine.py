"""The engine: requests in, tokens out, one step ahead of the device."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import Any

import numpy as np

from ...model.checkpoint.embedder import Embedder
from ...model.config import FAR
from ...model.text.tokenizer import Tokenizer
from ...ops.sampling import BANNED
from ..api.errors import NotServing, QueueFull, RequestError
from ..api.options import Pooling
from ..api.outputs import NO_TOKEN_ALLOWED
from ..api.params import PLAIN, SamplingParams, Terms
from ..api.speculation import SpeculativeConfig
from ..api.validation import shown
from ..cache.page_table import PageTable
from ..request.grammar import Grammars
from ..request.pooling import Pool
from ..request.request import Request
from ..request.sequence import Sequence, sequences_of
from ..speculative.speculator import Speculator
from .admission import NO_ADAPTERS, check, check_whole, spelled
from .deadlines import Deadlines
from .runner import Runner
from .scheduler import Scheduler, StepPlan, queue_priority
from .snapshot import OWNED, DraftCounts, ExpertUse, Occupancy, PageCounts, Snapshot, owners_of
from .step_record import Observer, StepRecord
from .step_result import InFlightStep, SampledTokens, StepResult

log = logging.getLogger("quire")
# Seconds by which fused steps may delay a token that is streamed, and one of an answer that is sent whole.
STREAMING_LATENCY, LATENCY = 0.02, 0.1


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
        page_identity: Callable[[], tuple[bytes, bytes]] = lambda: (b"", b""),  # of the weights that lie on disk now
    ):
        self.runner, self.tokenizer, self.tables, self.max_len = runner, tokenizer, tables, max_len
        self.config = runner.config
        self.max_queued, self.clock = max_queued, clock
        self.observers: list[Observer] = []
        self.adapters = adapters
        self.page_identity, self.loaded_identity = page_identity, page_identity()
        self.embedder = embedder  # how a request for an embedding is answered
        self.defaults = defaults  # of sampling parameters that a request leaves out: the model's own
        self.chat_defaults = defaults if chat_defaults is None else chat_defaults  # where people talk with the model
        self.grammars = None if tokenizer is None else Grammars(tokenizer, self.config.vocab_size)
        self.num_stages = len(runner.pipeline)
        self.num_ahead = max(1, self.num_stages - 1)  # steps in flight while the host works
        self.scheduler = Scheduler(tables, runner.limits, self.num_stages)
        self.speculator = None if speculation is None else Speculator(speculation, runner.seconds)
        self.requests: dict[str, Request] = {}
        self.deadlines = Deadlines()
        self.rng = np.random.default_rng(seed)
        self.in_flight: deque[InFlightStep] = deque()  # the oldest first
        self.step_seconds = 1.0  # mean of the latest decode steps
        self.device_free = 0.0  # when the last results were there
        self.asleep = self.closed = False
        self.process = os.getpid()

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        terms: Terms = PLAIN,
        pooling: Pooling | None = None,
        second: int = FAR,
    ) -> Request:
        """Queue a request, or refuse it with a `RequestError` that says why.

        With `pooling` it asks for the prompt's hidden states and no token: `RequestOutput.pooled`. Of a pair of texts
        the second begins at the token `second`.
        """
        self.check_serving()
        if request_id in self.requests:
            client_id = request_id.removeprefix(f"{terms.share_key}/")  # the server puts a tenant before its ids
            raise RequestError("request_id", f"{client_id!r} is being served already; ids must differ")
        self.check(tokens, params, pooling is not None)
        if terms.adapter is not None and self.adapters is None:
            raise RequestError("lora_request", NO_ADAPTERS)
        if self.max_queued is not None and len(self.scheduler.waiting) + params.num_sequences > self.max_queued:
            raise QueueFull("queue", f"is full: {self.max_queued} may wait (max_queued_requests); try again later")
        bad_words, shape, n = spelled(params.bad_words, self.tokenizer), params.structured_outputs, params.num_sequences
        constraints = [None] * n if shape is None or self.grammars is None else self.grammars.constraints(shape, n)
        eos = frozenset() if self.tokenizer is None else self.tokenizer.eos_token_ids
        base = int(self.rng.integers(1 << 63)) if params.seed is None else params.seed & ((1 << 64) - 1)
        now = self.clock()
        pooling = "last" if pooling and self.config.encodes else pooling  # the step itself has pooled
        sequences = sequences_of(tokens, params, self.room, queue_priority(terms.priority, now), eos, base)
        for seq, constraint in zip(sequences, constraints, strict=True):
            seq.tenant, seq.cache.salt, seq.adapter = terms.share_key, terms.cache_salt, terms.adapter
            if seq.adapter is not None:  # what is computed with another is another's
                seq.cache.salt = seq.adapter.key, terms.cache_salt
            seq.bad_words, seq.constraint, seq.second = bad_words, constraint, second
            seq.needs_host_token = (
                self.num_stages > 1 or constraint is not None or any(len(word) > 1 for word in bad_words)
            )
            step = None if self.config.classes is None else self.config.classes.step
            seq.pool = None if pooling is None else Pool(pooling, tokens, step)
        if params.prompt_logprobs is not None or pooling in ("mean", "cls", "steps"):
            sequences[0].prompt_scores = [None] * (len(tokens) - 1)
        request = Request(request_id, prompt, params, sequences, self.tokenizer, now)
        self.requests[request_id] = request
        if self.speculator is not None:
            for seq in sequences:
                self.speculator.begin(seq)
        self.scheduler.add(*sequences)
        if terms.timeout is not None:
            self.deadlines.add(now + terms.timeout, request, len(self.requests))
        return request

    @property
    def room(self) -> int:
        """Tokens of a prompt and its answer; what an encoder draws takes none of its positions."""
        return self.max_len + 1 if self.config.encodes else self.max_len

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that is read."""
        limits = self.runner.limits
        return min(self.max_len, limits.max_rows) if limits.whole else self.max_len - 1

    def check_serving(self) -> None:
        """Refuse what would never be answered."""
        self.check_process()
        if self.asleep or self.closed:
            raise NotServing("engine", "is closed" if self.closed else "is asleep; wake_up() makes it serve again")

    def check_process(self) -> None:
        """Refuse to go on in a fork, which has none of the threads: it would wait for ever."""
        if self.forked:
            raise NotServing(
                "engine",
                f"belongs to process {self.process}, and process {os.getpid()} is a fork of it: fork before the engine "
                "is made, or start processes by multiprocessing.get_context('spawn')",
            )

    @property
    def forked(self) -> bool:
        return os.getpid() != self.process

    def check(self, tokens: Seq[int], params: SamplingParams, pooled: bool = False) -> None:
        """Refuse what can never be served; `pooled`: hidden states are wanted, and no tokens."""
        if not pooled and not self.config.writes:
            told = "makes embeddings and writes no text; ask LLM.embed or /v1/embeddings, or another model"
            if self.config.classes is not None:
                told = "classifies texts and writes none; ask LLM.classify or /classify, or another model"
            raise RequestError("model", told)
        limits, has_text = self.runner.limits, self.tokenizer is not None
        vocab, table = self.config.vocab_size, self.tables[0]
        if limits.whole:
            check_whole(tokens, self.max_len, limits.max_rows)
        check(tokens, params, vocab, self.room, lambda n: table.fits(n, limits.max_rows), has_text, limits.listed)

    def step(self, launches: bool = True) -> list[Request]:
        """Launch the next step and process the results of the oldest one; the requests that got tokens, or ended.

        Without `launches` only results are processed.
        """
        if self.asleep:
            return []
        began = self.clock()
        changed, step, result = [*self.expire(began)], None, None
        plan = self.schedule() if launches else None
        try:
            step = self.launch(plan, began)
            result = self.collect(num_kept=self.num_ahead if step else 0)
            changed += self.update(result)
        except Exception as error:
            changed += self.recover(error, plan)
        return self.report(began, step, result, changed)

    def schedule(self) -> StepPlan | None:
        """Plan the next step, as several fused steps where that delays no token; None: nothing can be computed now."""
        if self.speculator is not None:
            is_blocked = self.num_stages == 1 and any(step.plan.needs_host_sync for step in self.in_flight)
            self.speculator.trim(self.scheduler.running)
            if is_blocked:
                return None
        plan = self.scheduler.schedule(self.speculator is not None and not self.speculator.rests)
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
        step = step._replace(began=began, scheduled=scheduled, launched=self.clock())
        self.in_flight.append(step)
        return step

    def collect(self, num_kept: int) -> StepResult | None:
        """Wait for the oldest step; None where no more than `num_kept` steps are in flight."""
        if len(self.in_flight) <= num_kept:
            return None
        began, step = self.clock(), self.in_flight[0]
        result = self.runner.collect(step)
        previous_end, self.device_free = self.device_free, self.clock()
        device_began = max(step.launched, previous_end)
        result = result._replace(began=began, collected=self.device_free, device_began=device_began)
        self.record_step_time(result, self.device_free - previous_end)
        return result

    def update(self, result: StepResult | None) -> Iterator[Request]:
        """Give the sequences of the oldest step its tokens; yields the request of each."""
        if result is None:
            return
        yield from self.process_results(result)
        self.in_flight.popleft()  # a step whose results could not be processed stays, for `recover`
        if not self.in_flight:
            self.runner.settle()

    def report(
        self, began: float, step: InFlightStep | None, result: StepResult | None, changed: list[Request]
    ) -> list[Request]:
        """Tell the observers of a step; each changed request once."""
        requests = tuple(dict.fromkeys(changed))
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        record = StepRecord(began, self.clock(), step, result, requests, running, waiting)
        for observer in self.observers:
            observer.observe(record)
        return list(requests)

    def max_fused_steps(self, plan: StepPlan) -> int:
        """Maximum number of decode steps to fuse without delaying tokens beyond the latency budget."""
        is_streaming = any(item.seq.request is not None and item.seq.request.watched for item in plan.items)
        budget = STREAMING_LATENCY if is_streaming else LATENCY
        num_steps = int(budget / max(self.step_seconds, 1e-6))
        return num_steps if num_steps < 2 else min(num_steps, self.runner.max_fused_steps(plan))

    def record_step_time(self, result: StepResult, seconds_since_previous: float) -> None:
        """Update the mean time of a decode step, and what the speculator knows of it."""
        if not (result.plan.decodes and result.num_steps):
            return
        seconds = (result.collected - result.device_began) / result.num_steps
        self.step_seconds += (seconds - self.step_seconds) / 8 if self.step_seconds < 1 else seconds - 1
        if self.speculator is not None and self.speculator.listens:
            self.record_draft_time(result.plan, seconds_since_previous)

    def record_draft_time(self, plan: StepPlan, seconds_since_previous: float) -> None:
        """Tell the speculator the time of a step, unless requests came or ended around it."""
        items = plan.items
        if any(item.begins for item in items) or all(item.seq.finish_reason is not None for item in items):
            return  # the device may have been idle before it
        num_drafts, asks = plan.num_rows - len(items), max(item.asks for item in items)
        is_synced, branches = plan.needs_host_sync or num_drafts > 0, any(item.branches for item in items)
        if plan.behind and (is_synced or not asks):
            return  # the time includes that of the drafter's own steps
        self.speculator.took(len(items), num_drafts, asks, is_synced, seconds_since_previous, branches)

    def process_results(self, result: StepResult) -> Iterator[Request]:
        """Give each sequence its tokens, and end those that are done; yields the request of each."""
        for output in result.outputs:
            item = output.item
            seq = item.seq
            seq.pending -= item.draws
            if seq.finish_reason is not None:
                continue  # ended while this step was in flight
            yield seq.request
            if item.drafts:
                self.scheduler.roll_back(item, output.branch, len(output.tokens) - 1)
            elif len(output.tokens) < item.draws:
                self.scheduler.shorten(item, len(output.tokens))
            if output.failure:
                self.fail(seq, output.failure)
            elif seq.pool is not None:
                self.pool(result, output)
            else:
                self.push_all(result, output)
                if self.speculator is not None:
                    self.speculate(output)

    def push_all(self, result: StepResult, output: SampledTokens) -> None:
        """Give a sequence the scores of its prompt, and its tokens up to the one that ends it."""
        item, seq = output.item, output.item.seq
        for index, position in enumerate(item.scores):
            seq.prompt_scores[position] = result.score(output.row + index)
        for row, token in enumerate(output.tokens, output.row + len(item.scores)):
            if seq.finish_reason is not None:
                break
            if token < 0:
                self.fail(seq, token)
                break
            self.push(seq, token, result.score(row) if seq.scored else None, result.collected)

    def speculate(self, output: SampledTokens) -> None:
        """Count the draft tokens that were accepted, and let the drafter go on from the new tokens."""
        item, seq, speculator = output.item, output.item.seq, self.speculator
        if item.drafts:
            first, num_accepted = item.num_known - seq.num_prompt, output.num_accepted
            seq.num_drafts += item.num_drafts
            seq.accepted.extend(range(first, first + num_accepted))
            speculator.counts.add(item.num_drafts, num_accepted)
        if item.draws and seq.finish_reason is None and (item.drafts or item.asks or speculator.attends):
            seq.proposed = output.proposals if item.asks and output.proposals else []
            more = len(output.tokens) - 1 - output.num_first_accepted if item.branches else None
            speculator.take_in(seq, len(item.drafts), output.num_first_accepted, more)

    def fail(self, seq: Sequence, failure: int) -> None:
        """End a sequence that has no next token. Where its logits are broken, its pages are not to be found again."""
        if failure == BANNED:
            seq.request.completions[seq.index].stop_reason = NO_TOKEN_ALLOWED
        else:
            self.tables[seq.replica].invalidate(seq)
        self.end(seq, "error")

    def expire(self, now: float) -> Iterator[Request]:
        """End the requests whose time is up, with what they have; yields each."""
        for request in self.deadlines.due(now):
            self.end_all(request, "timeout")
            yield request

    def push(self, seq: Sequence, token: int, score: Any, now: float) -> None:
        """Give a sequence its next token, and end it with the last."""
        seq.tokens.append(token)
        reason = seq.request.push(seq.index, token, score, now)
        if seq.constraint is not None and reason != "stop":  # what ended it is not in its grammar
            reason = seq.constraint.advance(token) or reason
        if reason:
            self.end(seq, reason)

    def pool(self, result: StepResult, output: SampledTokens) -> None:
        """Give a sequence's pool its hidden states; with the last one the request is done."""
        item, seq = output.item, output.item.seq
        positions = [*item.scores, item.start + item.num_rows - 1] if item.draws else item.scores
        for index, position in enumerate(positions):
            seq.pool.add(position, result.hidden_RD[output.row + index])
        for position in item.scores:
            seq.prompt_scores[position] = True
        if item.draws:
            self.end(seq, "stop")

    def end(self, seq: Sequence, reason: str) -> None:
        """End one sequence, and its request with the last of them."""
        self.scheduler.finish(seq, reason)
        if self.speculator is not None:
            self.speculator.end(seq)
        request = seq.request
        request.end(seq.index, reason)
        if request.finished:
            self.requests.pop(request.request_id, None)

    def end_all(self, request: Request, reason: str) -> None:
        """End the sequences of a request that have not ended yet."""
        for seq in request.sequences:
            if seq.finish_reason is None:
                self.end(seq, reason)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; its pages are free before the next step is planned."""
        request = self.requests.get(request_id)
        if request is not None:
            self.end_all(request, "abort")
        return request

    def recover(self, error: Exception, plan: StepPlan | None = None) -> Iterator[Request]:
        """After a failed step: its requests end with an error, the others start over on a fresh device state."""
        plans = [step.plan for step in self.in_flight] + [plan] * (plan is not None)
        lost = dict.fromkeys(item.seq for plan in plans for item in plan.items)
        self.in_flight.clear()
        self.runner.fail(error)
        log.error("a step failed; its requests end, the others are computed again", exc_info=error)
        for seq in lost:
            if seq.finish_reason is None:
                yield seq.request
                self.end(seq, "error")
        for seq in list(self.scheduler.running):
            self.scheduler.preempt(seq)
        for seq in self.scheduler.waiting:
            seq.pending = 0
        self.runner.reset()
        self.scheduler.forget_adapters()
        self.forget_device()

    def forget_device(self) -> None:
        """The device's pages are lost."""
        for table in self.tables:
            table.forget_device()

    def sleep(self, level: int = 1, keep_pages: bool = False) -> list[Request]:
        """Free the device's memory; the requests that still got tokens from the steps under way.

        Weights go to host memory (level 1) or are read again (level 2). Requests wait, and their rows are computed
        again afterwards unless the pages are kept.
        """
        if level not in (1, 2):
            what = "must be 1 (weights to host memory) or 2 (weights dropped)"
            raise RequestError("level", f"{what}, got {shown(level)}")
        changed: list[Request] = []
        while self.in_flight and not self.asleep:
            changed += self.step(launches=False)
        if self.asleep:
            return []
        for seq in list(self.scheduler.running):
            self.scheduler.preempt(seq)
        if not keep_pages:
            self.forget_device()
        self.runner.sleep(level == 1, keep_pages)
        self.asleep = True
        return list(dict.fromkeys(changed))

    def wake_up(self) -> None:
        """Serve again, with what was compiled."""
        if not self.asleep:
            return
        reads_weights = self.runner.weights is None
        identity = self.page_identity() if reads_weights else self.loaded_identity  # before they are read
        self.runner.wake_up()
        if identity != self.loaded_identity:
            self.replace_weights(identity)
        self.scheduler.forget_adapters()
        self.asleep = False

    def replace_weights(self, identity: tuple[bytes, bytes]) -> None:
        """Other weights serve from now on: forget all keys and values of the old ones, those on their way too."""
        self.loaded_identity = identity
        for seq in self.scheduler.waiting:
            seq.cache.load, seq.cache.prefetched = None, False
        for table in self.tables:
            table.replace_weights(*identity)

    def close(self) -> None:
        """End every request and save the cached pages to disk, if there is one."""
        if self.closed or self.forked:
            return
        self.closed = True
        for request_id in list(self.requests):
            self.abort(request_id)
        while self.in_flight:
            self.step()
        if self.asleep:
            self.forget_device()  # copies can be saved, and what is not on the device cannot
        for table in self.tables:
            for moves in table.save():
                for pages in self.runner.move(moves) if moves else ():
                    pages.arrive()
        self.runner.close()
        for observer in self.observers:
            observer.close()

    def snapshot(self) -> Snapshot:
        """What the engine is like now, in numbers. Any thread may ask."""
        tables, runner, experts = self.tables, self.runner, self.runner.expert_loads
        counts = None if self.speculator is None else self.speculator.counts
        pages = (
            PageCounts(table.replica, pool.window, pool.num_pages - 1, len(pool.blank), len(pool.cached))
            for table in tables
            for pool in table.pools
        )
        return Snapshot(
            now=self.clock(),
            asleep=self.asleep,
            weights_dropped=runner.weights is None,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            requests=len(self.requests),
            max_seqs=runner.limits.max_seqs * len(tables),
            max_tokens=runner.limits.max_rows * len(tables),
            max_len=self.max_len,
            page_size=tables[0].page_size,
            pages=tuple(pages),
            pages_used=max(table.used() for table in tables),
            caches_prefixes=tables[0].keeps_prefixes,
            kv_dtype=self.config.kv_dtype,
            recompiles=max(0, runner.compiles.recompiles),
            invariant=not runner.pipeline.variance,
            drafts=counts and DraftCounts(counts.proposals, counts.drafts, tuple(counts.accepted)),
            experts=experts
            and ExpertUse(int(experts.rows_LE.sum()), experts.skew(), experts.device_skew(), experts.moved),
        )

    def occupancy(self, listed: int) -> Occupancy:
        """Who has which slot and page, and the first `listed` that wait. Only the engine's thread may ask."""
        running: dict[Request, list[Sequence]] = {}
        for seq in self.scheduler.running:
            running.setdefault(seq.request, []).append(seq)
        waiting: dict[Request, None] = {}
        for seq in self.scheduler.waiting:
            if seq.request not in running:
                waiting[seq.request] = None
                if len(waiting) == listed:
                    break
        codes = {request: OWNED + index for index, request in enumerate(running)}
        pages = []
        for table in self.tables:
            seqs = [seq for seq in self.scheduler.running if seq.cache.pages and seq.replica == table.replica]
            for index, pool in enumerate(table.pools):
                pages.append(owners_of(pool, [(codes[seq.request], seq.cache.pages[index]) for seq in seqs]))
        return Occupancy(running, list(waiting), pages)

    def read_pages(self, group: int, pages: Seq[int]) -> Any:
        """What a few pages of a cache group hold, a row of bytes each; nothing waits for the device."""
        return self.runner.page_copier.read(self.runner.state.by_page, group, pages)

    def place_block(self, group: int, block_NX: Any) -> Any:
        """Rows that another engine read, put where this engine's devices can write them into pages."""
        return self.runner.page_copier.place(group, block_NX)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; requests that run go on."""
        for table in self.tables:
            table.clear()

    def expert_loads(self) -> dict[int, dict[str, list]]:
        """See `LLM.expert_loads`."""
        if self.runner.expert_loads is None:
            raise RequestError("model", "has no experts")
        return self.runner.expert_loads.loads()

    def rebalance_experts(self) -> dict[str, float]:
        """See `LLM.rebalance_experts`."""
        if self.runner.rebalancer is None:
            raise RequestError("expert_redundancy", "is 0, so every expert stays where it is; start with 1 or more")
        return self.runner.rebalancer.plan()

    @property
    def busy(self) -> bool:
        return not self.asleep and (self.scheduler.busy or bool(self.in_flight))
