"""The engine: requests in, tokens out, one step ahead of the device."""

import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from ...model.text.tokenizer import Tokenizer
from ..api.options import Pooling
from ..api.params import PLAIN, NotServing, QueueFull, RequestError, SamplingParams, Terms, shown
from ..cache.page_table import PageTable
from ..observe.trace import NoTrace
from ..request.grammar import Grammars
from ..request.pooling import Pool
from ..request.request import Request
from ..request.sequence import Sequence, sequences_of
from .admission import check, spelled
from .runner import Drawn, Launched, Runner
from .scheduler import Scheduler, StepPlan, rank_of

log = logging.getLogger("quire")


class Engine:
    """One model, one scheduler, one loop.

    add() ──> scheduler ──plan──> runner.launch ──> device (step n)
                  ^                                   │
                  └── update <── runner.collect <─────┘ (step n-1, while step n runs)
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
        trace: NoTrace | None = None,
        pooling: Pooling = "last",
    ):
        self.runner, self.tokenizer, self.tables, self.max_len = runner, tokenizer, tables, max_len
        self.max_queued, self.clock, self.trace = max_queued, clock, trace or NoTrace()
        self.pooling = pooling  # of a request for an embedding that does not say
        self.grammars = None if tokenizer is None else Grammars(tokenizer, runner.config.vocab_size)
        self.lanes = len(runner.stages)  # steps that can be computed at a time
        self.scheduler = Scheduler(tables, runner.limits, self.lanes)
        self.requests: dict[str, Request] = {}
        self.request_of: dict[Sequence, Request] = {}
        self.count = itertools.count()
        self.deadlines: list[tuple[float, int, Request]] = []  # a heap
        self.rng = np.random.default_rng(seed)
        self.in_flight: deque[Launched] = deque()
        self.asleep = self.closed = False

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        terms: Terms = PLAIN,
        pooling: Pooling | None = None,
    ) -> Request:
        """Queue a request, or refuse it with a `RequestError` that says why.

        With `pooling` it asks for the prompt's hidden states and no token: `RequestOutput.pooled`.
        """
        if self.asleep or self.closed:
            raise NotServing("engine", "is closed" if self.closed else "is asleep; wake_up() makes it serve again")
        if request_id in self.requests:
            raise RequestError("request_id", f"{request_id!r} is being served already; ids must differ")
        self.check(tokens, params)
        if self.max_queued is not None and len(self.scheduler.waiting) + params.num_sequences > self.max_queued:
            raise QueueFull("queue", f"is full: {self.max_queued} may wait (max_queued_requests); try again later")
        bad_words, shape, n = spelled(params.bad_words, self.tokenizer), params.structured_outputs, params.num_sequences
        constraints = [None] * n if shape is None or self.grammars is None else self.grammars.constraints(shape, n)
        eos = frozenset() if self.tokenizer is None else self.tokenizer.eos_token_ids
        base = int(self.rng.integers(1 << 63)) if params.seed is None else params.seed & ((1 << 64) - 1)
        now = self.clock()
        sequences = sequences_of(tokens, params, self.max_len, rank_of(terms.priority, now), eos, base)
        for seq, constraint in zip(sequences, constraints, strict=True):
            seq.tenant, seq.cache.salt = terms.share_key, terms.cache_salt
            seq.bad_words, seq.constraint = bad_words, constraint
            seq.lockstep = self.lanes > 1 or constraint is not None or any(len(word) > 1 for word in bad_words)
            seq.pool = None if pooling is None else Pool(pooling, len(tokens))
        if params.prompt_logprobs is not None or pooling == "mean":
            sequences[0].prompt_scores = [None] * (len(tokens) - 1)
        request = Request(request_id, prompt, params, sequences, self.tokenizer, now)
        self.requests[request_id] = request
        self.request_of.update(dict.fromkeys(sequences, request))
        self.scheduler.add(*sequences)
        if terms.timeout is not None:
            if len(self.deadlines) > 2 * len(self.requests) + 16:  # most are of requests that were done in time
                self.deadlines = [entry for entry in self.deadlines if not entry[2].finished]
                heapq.heapify(self.deadlines)
            heapq.heappush(self.deadlines, (now + terms.timeout, next(self.count), request))
        return request

    def check(self, tokens: Seq[int], params: SamplingParams) -> None:
        """Refuse what can never be served."""
        rows, words = self.runner.limits.max_rows, self.runner.config.vocab_size
        check(tokens, params, words, self.max_len, lambda n: self.tables[0].fits(n, rows), self.tokenizer is not None)

    def step(self) -> list[Request]:
        """Launch one step, take in the one before; the requests that got something new.

        Of several stages as many steps are under way as there are: the one that the last stage is at is taken in.
        """
        if self.asleep:
            return []
        now, launched, changed = self.clock(), None, {}
        self.trace.begin()
        self.expire(now, changed)
        plan = self.scheduler.schedule()
        self.trace.lap("schedule")
        try:
            if plan is not None:
                for item in plan.items:
                    self.request_of[item.seq].scheduled(now)
                launched = self.runner.launch(plan, self.scheduler.take_moves())
                self.trace.launched(plan)
            elif not self.in_flight:
                for table in self.tables:
                    table.wait(0.05 / len(self.tables))
            if launched is None or len(self.in_flight) >= max(1, self.lanes - 1):
                self.collect(changed)
            if launched is not None:
                self.in_flight.append(launched)
            elif not self.in_flight:
                self.runner.rest()
        except Exception:
            self.recover(plan, changed)
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self.trace.end(changed.values(), running=running, waiting=waiting)
        return list(changed.values())

    def collect(self, changed: dict[str, Request]) -> None:
        """Take in the oldest step under way, if there is one."""
        if self.in_flight:
            results = self.runner.collect(self.in_flight[0])
            self.trace.collected()
            self.update(results, changed)
            self.in_flight.popleft()

    def expire(self, now: float, changed: dict[str, Request]) -> None:
        """End those whose time is up, with what they have."""
        while self.deadlines and self.deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self.deadlines)
            for seq in request.sequences:
                if seq in self.request_of:
                    changed[request.request_id] = request
                    self.end(seq, "timeout")

    def update(self, results: list[Drawn], changed: dict[str, Request]) -> None:
        """Give each sequence its token, and end those that are done."""
        now = self.clock()
        for drawn in results:
            item = drawn.item
            seq = item.seq
            seq.pending -= item.draws
            if seq.finish_reason is not None:
                continue  # ended while this step was under way
            request = self.request_of[seq]
            changed[request.request_id] = request
            if not drawn.ok:
                self.tables[seq.replica].invalidate(seq)
                self.end(seq, "error")
                continue
            if seq.pool is not None:
                self.pool(seq, drawn)
                continue
            for index, position in enumerate(item.scores):
                seq.prompt_scores[position] = drawn.score(drawn.row + index)
            if item.draws:
                score = drawn.score(drawn.row + len(item.scores)) if seq.scored else None
                self.push(seq, drawn.token, score, now)

    def push(self, seq: Sequence, token: int, score: Any, now: float) -> None:
        """Give a sequence its next token, and end it with the last."""
        seq.tokens.append(token)
        reason = self.request_of[seq].push(seq.index, token, score, now)
        if seq.constraint is not None and reason != "stop":  # what ended it is not in its grammar
            reason = seq.constraint.advance(token) or reason
        if reason:
            self.end(seq, reason)

    def pool(self, seq: Sequence, drawn: Drawn) -> None:
        """Take in hidden states; with the last one the request is done."""
        item = drawn.item
        positions = [*item.scores, item.start + item.num_rows - 1] if item.draws else item.scores
        for index, position in enumerate(positions):
            seq.pool.add(position, drawn.hidden_RD[drawn.row + index])
        for position in item.scores:
            seq.prompt_scores[position] = True
        if item.draws:
            self.end(seq, "stop")

    def end(self, seq: Sequence, reason: str) -> None:
        """End one sequence, and its request with the last of them."""
        self.scheduler.finish(seq, reason)
        request = self.request_of.pop(seq)
        request.end(seq.index, reason)
        if request.finished:
            self.requests.pop(request.request_id, None)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; its pages are free before the next step is planned."""
        request = self.requests.get(request_id)
        for seq in request.sequences if request else ():
            if seq in self.request_of:
                self.end(seq, "abort")
        return request

    def recover(self, plan: StepPlan | None, changed: dict[str, Request]) -> None:
        """After a failed step: its requests end with an error, the others start over on a fresh device state."""
        plans = [launched.plan for launched in self.in_flight] + [plan] * (plan is not None)
        hit = {item.seq for plan in plans for item in plan.items}
        self.in_flight.clear()
        self.runner.failed()
        log.exception("a step failed; its requests end, the others are computed again")
        self.trace.failed()
        for seq in hit:
            if seq.finish_reason is None:
                request = self.request_of[seq]
                changed[request.request_id] = request
                self.end(seq, "error")
        for seq in list(self.scheduler.running):
            self.scheduler.preempt(seq)
        for seq in self.scheduler.waiting:
            seq.pending = 0
        self.runner.reset()
        self.forget_device()

    def forget_device(self) -> None:
        """The device's pages are lost."""
        for table in self.tables:
            table.forget_device()

    def reset_prefix_cache(self) -> None:
        """Forget every computed page; what runs goes on."""
        for table in self.tables:
            table.clear()

    def sleep(self, level: int = 1, keep_pages: bool = False) -> list[Request]:
        """Give the device's memory to others; the requests to which the step under way has still given something.

        Weights go to host memory (level 1) or are read again (level 2). Requests wait: what they have so far is
        computed again afterwards, where its pages are not kept.
        """
        if level not in (1, 2):
            what = "must be 1 (weights to host memory) or 2 (weights dropped)"
            raise RequestError("level", f"{what}, got {shown(level)}")
        changed: dict[str, Request] = {}
        if self.asleep:
            return []
        self.trace.begin()
        try:
            while self.in_flight:
                self.collect(changed)
        except Exception:
            self.recover(None, changed)
        for seq in list(self.scheduler.running):
            self.scheduler.preempt(seq)
        if not keep_pages:
            self.forget_device()
        self.runner.sleep(level == 1, keep_pages)
        self.asleep = True
        return list(changed.values())

    def wake_up(self) -> None:
        """Serve again, with what was compiled."""
        if self.asleep:
            self.runner.wake_up()
            self.asleep = False

    def close(self) -> None:
        """End every request and let the disk have the pages that are kept, where there is one to keep them."""
        if self.closed:
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
        self.trace.close()

    @property
    def running_requests(self) -> int:
        """Requests of which a sequence holds a slot; the others of `requests` wait. Any thread may ask."""
        return len({owner.request_id for seq in list(self.scheduler.running) if (owner := self.request_of.get(seq))})

    @property
    def busy(self) -> bool:
        return not self.asleep and (self.scheduler.busy or bool(self.in_flight))
