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
from .runner import Drawn, Runner
from .scheduler import Scheduler, StepPlan, rank_of
from .snapshot import OWNED, DraftCounts, ExpertUse, Occupancy, PageCounts, Snapshot, owners_of
from .step_record import Observer, StepRecord, TakenIn, UnderWay

log = logging.getLogger("quire")
# Seconds that a token may wait for those of later steps: one that is read as it comes, and one that is read at the end.
LATE, UNWATCHED = 0.02, 0.1


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
        self.stages = len(runner.pipeline)
        self.scheduler = Scheduler(tables, runner.limits, self.stages)
        self.speculator = None if speculation is None else Speculator(speculation, runner.seconds)
        self.requests: dict[str, Request] = {}
        self.deadlines = Deadlines()
        self.rng = np.random.default_rng(seed)
        self.under_way: deque[UnderWay] = deque()  # the oldest first
        self.step_seconds = 1.0  # that the device took lately for a decode step
        self.device_free = 0.0  # when the device was done with the last step that was taken in
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
        sequences = sequences_of(tokens, params, self.room, rank_of(terms.priority, now), eos, base)
        for seq, constraint in zip(sequences, constraints, strict=True):
            seq.tenant, seq.cache.salt, seq.adapter = terms.share_key, terms.cache_salt, terms.adapter
            if seq.adapter is not None:  # what is computed with another is another's
                seq.cache.salt = seq.adapter.key, terms.cache_salt
            seq.bad_words, seq.constraint, seq.second = bad_words, constraint, second
            seq.lockstep = self.stages > 1 or constraint is not None or any(len(word) > 1 for word in bad_words)
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
        """Launch the next step and take in the one before; the requests that got tokens, or ended.

        Over several pipeline stages as many steps are under way as there are stages, and the oldest is taken in.
        Without `launches` one is taken in only.
        """
        if self.asleep:
            return []
        began = self.clock()
        changed, launched, taken = [*self.expire(began)], None, None
        if self.speculator is not None and launches:
            launches = self.stages > 1 or not any(step.plan.waited for step in self.under_way)
            self.speculator.trim(self.scheduler.running)
        plan = self.scheduler.schedule(self.speculator is not None and not self.speculator.rests) if launches else None
        if plan is not None and (most := self.most_steps(plan)) > 1:
            plan = self.scheduler.go_on(plan, most)
        try:
            if plan is not None:
                launched = self.launch(plan, began)
                self.under_way.append(launched)
            elif not self.under_way:
                for table in self.tables:
                    table.wait(0.05 / len(self.tables))
            if self.under_way and (launched is None or len(self.under_way) > max(1, self.stages - 1)):
                taken = self.collect(self.under_way[0])
                changed += self.take_in(taken)  # where it fails, those before that stay in the list
                self.under_way.popleft()
            if not self.under_way:
                self.runner.rest()
        except Exception as error:
            changed += self.recover(error, plan)
        requests = tuple(dict.fromkeys(changed))
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        record = StepRecord(began, self.clock(), launched, taken, requests, running, waiting)
        for observer in self.observers:
            observer.observe(record)
        return list(requests)

    def launch(self, plan: StepPlan, began: float) -> UnderWay:
        """Send a step to the device."""
        scheduled = self.clock()
        for item in plan.items:
            item.seq.request.scheduled(began)
        for slot, adapter in self.scheduler.take_adapters():
            self.runner.load_adapter(slot, adapter)
        results = self.runner.launch(plan, self.scheduler.take_moves())
        return UnderWay(plan, results, began, scheduled, self.clock())

    def collect(self, step: UnderWay) -> TakenIn:
        """Wait for the results of a step."""
        began = self.clock()
        drawn = self.runner.collect(step.results)
        before, self.device_free = self.device_free, self.clock()
        num_steps = len(drawn[0].tokens) if step.plan.steps > 1 else 1
        if step.plan.decodes and num_steps:
            seconds = (self.device_free - max(step.launched, before)) / num_steps
            self.step_seconds += (seconds - self.step_seconds) / 8 if self.step_seconds < 1 else seconds - 1
            if self.speculator is not None and self.speculator.listens:
                self.tell_pace(step.plan, self.device_free - before)
        return TakenIn(step.plan, drawn, began, self.device_free, max(step.launched, before))

    def most_steps(self, plan: StepPlan) -> int:
        """That may be made at once after this plan, so that nobody's tokens are late."""
        watched = any(item.seq.request is not None and item.seq.request.watched for item in plan.items)
        most = int((LATE if watched else UNWATCHED) / max(self.step_seconds, 1e-6))
        return most if most < 2 else min(most, self.runner.most_steps(plan))

    def tell_pace(self, plan: StepPlan, seconds: float) -> None:
        """Tell what decides about drafts how long after the one before a step was done."""
        items = plan.items
        if any(item.begins for item in items) or all(item.seq.finish_reason is not None for item in items):
            return  # nobody may have waited before it, or for it
        drafts, asks = plan.num_rows - len(items), max(item.asks for item in items)
        waited, branches = plan.waited or drafts > 0, any(item.branches for item in items)
        if plan.behind and (waited or not asks):
            return  # it was for more than this step
        self.speculator.took(len(items), drafts, asks, waited, seconds, branches)

    def take_in(self, step: TakenIn) -> Iterator[Request]:
        """Give each sequence its token, and end those that are done; yields the request of each."""
        for drawn in step.drawn:
            item = drawn.item
            seq = item.seq
            seq.pending -= item.draws
            if seq.finish_reason is not None:
                continue  # ended while this step was under way
            yield seq.request
            if item.drafts:
                self.scheduler.roll_back(item, drawn.path, len(drawn.tokens) - 1)
            elif len(drawn.tokens) < item.draws:
                self.scheduler.shorten(item, len(drawn.tokens))
            if drawn.failure:
                self.fail(seq, drawn.failure)
                continue
            if seq.pool is not None:
                self.pool(seq, drawn)
                continue
            for index, position in enumerate(item.scores):
                seq.prompt_scores[position] = drawn.score(drawn.row + index)
            for row, token in enumerate(drawn.tokens, drawn.row + len(item.scores)):
                if seq.finish_reason is not None:
                    break
                if token < 0:
                    self.fail(seq, token)
                    break
                self.push(seq, token, drawn.score(row) if seq.scored else None, step.collected)
            if self.speculator is not None and item.drafts:
                first, right = item.num_known - seq.num_prompt, drawn.accepted
                seq.num_drafts += item.num_drafts
                seq.accepted.extend(range(first, first + right))
                self.speculator.counts.add(item.num_drafts, right)
            if self.speculator is not None and item.draws and seq.finish_reason is None:
                if not (item.drafts or item.asks or self.speculator.attends):
                    continue
                seq.proposed = drawn.drafts if item.asks and drawn.drafts else []
                more = len(drawn.tokens) - 1 - drawn.chain if item.branches else None
                self.speculator.take_in(seq, len(item.drafts), drawn.chain, more)

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
        plans = [step.plan for step in self.under_way] + [plan] * (plan is not None)
        lost = dict.fromkeys(item.seq for plan in plans for item in plan.items)
        self.under_way.clear()
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
        while self.under_way and not self.asleep:
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
        while self.under_way:
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
        return not self.asleep and (self.scheduler.busy or bool(self.under_way))
