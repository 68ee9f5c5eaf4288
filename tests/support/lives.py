"""Random long runs of an engine: chats of several turns, stop tokens and strings, aborts, failed
steps, sleep.

Every answer is compared bitwise with that of a cold engine, which has no prefix cache, no fused
steps and no drafts, and serves all requests anew.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from quire import LLM, SamplingParams
from quire.serving.request.request import Request

MOST_RUNNING = 6  # requests at once


@dataclass(frozen=True)
class Turn:
    """A finished or interrupted request."""

    tokens: list[int]
    params: SamplingParams
    request: Request
    # interrupted by an abort or a failed step: its answers are prefixes of the expected ones
    cut: bool
    num_cached: int


@dataclass
class Life:
    """Drives one engine.

    With `reopen`, `llm` is closed at the end of `live` and replaced by a new engine on the same
    disk.
    """

    llm: LLM
    rng: random.Random
    prompts: list[list[int]]
    common: list[int]  # frequent tokens of answers, used as stop tokens
    longest: int  # maximum number of prompt tokens
    reopen: Callable[[], LLM] | None = None
    strings: tuple[str, ...] = ()  # stop strings, if there is a tokenizer
    chats: list[list[int]] = field(default_factory=list)
    running: dict[str, tuple[list[int], SamplingParams, Request]] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    number: int = 0

    def live(self, num_turns: int) -> None:
        """Run until `num_turns` more turns have ended."""
        rng = self.rng
        end = len(self.turns) + num_turns
        rare_events = [
            self.abort,
            self.fail_launch,
            self.fail_collect,
            self.sleep,
            self.clear,
            self.fuse,
            self.fuse,
        ]
        while len(self.turns) < end:
            self.llm.engine.max_fused_steps = self.max_fused_steps
            if len(self.running) < MOST_RUNNING and rng.random() < 0.6:
                self.begin()
            elif rng.random() < 0.12:
                rng.choice(rare_events)()
            for _ in range(rng.choice((1, 1, 2, 5, 20))):
                self.step()
        while self.running:
            self.step()
        if self.reopen is not None:
            self.llm.close()
            self.llm = self.reopen()

    limit = 8  # maximum number of fused steps

    def max_fused_steps(self, plan) -> int:
        return min(self.limit, self.llm.engine.runner.max_fused_steps(plan))

    def fuse(self) -> None:
        self.limit = self.rng.randint(1, 8)

    def count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    def begin(self) -> None:
        """Start a first turn, or another turn of a chat (its prompt may contain stop tokens)."""
        rng = self.rng
        if self.chats and rng.random() < 0.7:
            chat = rng.choice(self.chats[-12:])
            tokens = chat + [rng.choice(self.common) for _ in range(rng.choice((0, 1, 3, 9)))]
        else:
            prompt = rng.choice(self.prompts)
            tokens = prompt[: rng.randint(1, len(prompt))]
        if len(tokens) > self.longest:
            tokens = tokens[: rng.randint(1, self.longest)]
        params = self.params()
        self.number = self.number + 1
        name = str(self.number)
        request = self.llm.engine.add(name, list(tokens), params)
        self.running[name] = tokens, params, request

    def params(self) -> SamplingParams:
        rng = self.rng
        settings: dict[str, Any] = {
            "max_tokens": rng.choice((1, 4, 12, 30)),
            "ignore_eos": rng.random() < 0.7,
        }
        settings |= rng.choice(
            ({"temperature": 0.0}, {"temperature": 1.0, "seed": rng.randrange(99)})
        )
        if rng.random() < 0.7:
            settings["stop_token_ids"] = rng.sample(self.common, rng.choice((1, 3, 6, 10)))
        if self.strings and rng.random() < 0.3:
            settings["stop"] = rng.sample(self.strings, 2)
        if rng.random() < 0.3:
            settings["logprobs"] = 2
        if rng.random() < 0.1:
            settings["n"], settings["seed"], settings["temperature"] = (
                rng.choice((2, 3)),
                rng.randrange(99),
                1.0,
            )
        if rng.random() < 0.1:
            settings["min_tokens"] = min(3, settings["max_tokens"])
        if rng.random() < 0.1:
            settings["repetition_penalty"] = 1.2
        if rng.random() < 0.1:
            settings["prompt_logprobs"] = 1
        return SamplingParams(**settings, detokenize=bool(self.strings))

    def step(self) -> None:
        engine = self.llm.engine
        engine.step()
        engine.scheduler.check()
        for name, (tokens, params, request) in list(self.running.items()):
            if request.finished:
                del self.running[name]
                output = request.output()
                was_cut = any(
                    answer.finish_reason in ("error", "abort") for answer in output.outputs
                )
                self.turns.append(Turn(tokens, params, request, was_cut, output.num_cached_tokens))
                self.chats += [tokens + list(answer.token_ids) for answer in output.outputs]

    def abort(self) -> None:
        if self.running:
            self.count("abort")
            self.llm.engine.abort(self.rng.choice(list(self.running)))

    def fail_launch(self) -> None:
        self.fail("launch")

    def fail_collect(self) -> None:
        self.fail("collect")

    def fail(self, method: str) -> None:
        """Make the next launch or collection of a step fail."""
        runner = self.llm.engine.runner
        working = getattr(runner, method)

        def failing(*_):
            setattr(runner, method, working)
            self.count(method)
            raise RuntimeError(f"{method} fails, as it was told to")

        setattr(runner, method, failing)

    def sleep(self) -> None:
        self.count("sleep")
        self.llm.engine.sleep(self.rng.choice((1, 2)), keep_pages=self.rng.random() < 0.5)
        self.llm.engine.scheduler.check()
        self.llm.engine.lifecycle.wake_up()

    def clear(self) -> None:
        self.count("clear")
        self.llm.engine.reset_prefix_cache()


def bits(request: Request) -> list[tuple]:
    """Every field of each answer, for bitwise comparison."""
    output = request.output()
    return [
        (
            list(answer.token_ids),
            answer.text,
            answer.finish_reason,
            answer.stop_reason,
            [
                {token: entry.logprob for token, entry in row.items()}
                for row in answer.logprobs or ()
            ],
        )
        for answer in output.outputs
    ]


def check(cold: LLM, turns: list[Turn]) -> None:
    """Check that each answer equals the cold engine's, or is a prefix of it if interrupted."""
    engine = cold.engine
    expected = {}
    for number, turn in enumerate(turns):
        params = replace(turn.params, prompt_logprobs=None)
        expected[number] = engine.add(str(number), list(turn.tokens), params)
    while engine.busy:
        engine.step()
    for number, turn in enumerate(turns):
        for actual, cold_answer in zip(bits(turn.request), bits(expected[number]), strict=True):
            if actual[2] in ("error", "abort"):
                assert actual[0] == cold_answer[0][: len(actual[0])], failure_message(number, turn)
                assert actual[4] == cold_answer[4][: len(actual[4])], failure_message(number, turn)
            else:
                assert actual == cold_answer, failure_message(number, turn)


def failure_message(number: int, turn: Turn) -> str:
    return (
        f"turn {number}: {turn.num_cached} of {len(turn.tokens)} tokens were cached; {turn.params}"
    )
