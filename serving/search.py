"""Search at test time: more answers than one are written, and the best is given.

    best_of_n    all answers at once; the one that the reward likes best
    majority     all answers at once; the one that most say, or that has most reward in all
    beam         step by step: of what goes on from the best beginnings, the best go on

A reward is a function of a prompt and its answers, or a model with one class. What answers begin with is computed once,
where the prefix cache is on.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .api.errors import RequestError
from .api.outputs import PoolingRequestOutput
from .api.params import SamplingParams
from .api.prompts import TokensPrompt
from .api.validation import integer, shown
from .request import classes

METHODS = ("best_of_n", "majority", "beam")
SAMPLING = SamplingParams(temperature=1.0, max_tokens=256, seed=0)

Reward = Callable[[Any, Seq[str]], Iterable[float]]  # of a prompt as it was given, and of answers to it
Writer = Any  # an `LLM`, which has this for a method


@dataclass(frozen=True)
class SearchParams:
    """How to search. `sampling` is of each answer; its `n` is the search's own."""

    method: str = "best_of_n"
    n: int = 8  # answers; beam: beginnings that are looked at in each round
    width: int = 2  # beam: how many of these go on
    step: str = "\n"  # beam: where a step ends
    max_steps: int = 16  # beam: steps of an answer, at most
    answer: str | None = None  # majority: a pattern whose last match, or its last group, is what an answer says
    sampling: SamplingParams = SAMPLING

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise RequestError("method", f"must be {', '.join(METHODS)}, got {shown(self.method)}")
        integer("n", self.n, 1, 1 << 10)
        integer("width", self.width, 1, self.n, " (n)")
        integer("max_steps", self.max_steps, 1, 1 << 10)
        if not isinstance(self.step, str) or not self.step:
            raise RequestError("step", f"must be a text of one character or more, got {shown(self.step)}")
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError("sampling", f"must be SamplingParams, got {shown(self.sampling)}")
        try:
            re.compile(self.answer or "")
        except (re.error, TypeError) as error:
            raise RequestError("answer", f"must be a regular expression: {error}") from None


@dataclass
class Candidate:
    """One of the answers that were written, or the beginning of one."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # None: it was not gone on with
    reward: float | None = None
    answer: str | None = None  # majority: what it says


@dataclass
class SearchOutput:
    """The best answer to a prompt, and what it was chosen from."""

    text: str
    best: Candidate
    candidates: list[Candidate] = field(default_factory=list)
    num_generated_tokens: int = 0
    num_scored_tokens: int = 0  # that a reward model was given


class Asked(NamedTuple):
    """A prompt as it was given, and its tokens."""

    given: Any
    tokens: list[int]


def search(llm: Writer, prompts: Seq[Any], params: SearchParams, reward: Reward | Writer | None) -> list[SearchOutput]:
    """The best answer to each prompt."""
    if params.method != "majority" and reward is None:
        raise RequestError("reward", f"must be given for {params.method}: a function, or a model with one class")
    if reward is not None and not callable(reward):
        classes.check(reward.engine.config, reward=True)
    asked = [Asked(prompt, tokens_of(llm, prompt)) for prompt in prompts]
    return Search(llm, params, reward).run(asked)


def is_chat(prompt: Any) -> bool:
    """Whether it is one conversation: a list of messages."""
    several = isinstance(prompt, Seq) and not isinstance(prompt, str) and bool(prompt)
    return several and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def tokens_of(llm: Writer, prompt: Any) -> list[int]:
    if is_chat(prompt):
        return list(llm.chat_prompt(prompt)["prompt_token_ids"])
    if isinstance(prompt, Mapping):
        prompt = prompt["prompt"] if prompt.get("prompt_token_ids") is None else prompt["prompt_token_ids"]
    return llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)


class Search:
    """A search of one kind for some prompts at once."""

    def __init__(self, llm: Writer, params: SearchParams, reward: Reward | Writer | None):
        self.llm, self.params, self.reward = llm, params, reward
        self.generated: list[int] = []
        self.scored: list[int] = []

    def run(self, asked: list[Asked]) -> list[SearchOutput]:
        self.generated, self.scored = [0] * len(asked), [0] * len(asked)
        if self.params.method == "beam":
            found = self.beam(asked)
        else:
            found = self.write(asked, [[Candidate("", [])] for _ in asked], self.params.n)
            self.judge(asked, found)
        outputs = []
        for place, candidates in enumerate(found):
            best = self.vote(candidates) if self.params.method == "majority" else likeliest(candidates)
            outputs.append(SearchOutput(best.text, best, candidates, self.generated[place], self.scored[place]))
        return outputs

    def write(
        self, asked: list[Asked], beginnings: list[list[Candidate]], each: int, round_: int = 0, stop: str | None = None
    ) -> list[list[Candidate]]:
        """So many ways to go on from each beginning of each prompt."""
        prompts, params, whose = [], [], []
        sampling, step = self.params.sampling, {}
        if stop is not None:
            others = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
            step = {"stop": [stop, *others], "include_stop_str_in_output": True}
        for place, (one, own) in enumerate(zip(asked, beginnings, strict=True)):
            for number, beginning in enumerate(own):
                left = None if sampling.max_tokens is None else sampling.max_tokens - len(beginning.token_ids)
                # The same noise for all prompts would make their answers good or bad together.
                own_seed = 1009 * (round_ * self.params.n + number) + 1_000_003 * place
                seed = None if sampling.seed is None else sampling.seed + own_seed
                params.append(replace(sampling, n=each, max_tokens=left, seed=seed, **step))
                prompts.append(TokensPrompt(prompt_token_ids=one.tokens + beginning.token_ids))
                whose.append((place, beginning))
        found: list[list[Candidate]] = [[] for _ in asked]
        for (place, beginning), output in zip(whose, self.llm.generate(prompts, params, use_tqdm=False), strict=True):
            for answer in output.outputs:
                tokens = list(answer.token_ids)
                self.generated[place] += len(tokens)
                ended = answer.finish_reason
                if stop is not None and answer.stop_reason == stop:
                    ended = None
                found[place].append(Candidate(beginning.text + answer.text, beginning.token_ids + tokens, ended))
        return found

    def judge(self, asked: list[Asked], found: list[list[Candidate]]) -> None:
        """Give each candidate that has none its reward."""
        if self.reward is None:
            return
        new = [[one for one in candidates if one.reward is None] for candidates in found]
        outputs: Iterator[PoolingRequestOutput] = iter(())
        if not callable(self.reward):
            prompts = [self.judged(one.given, answer) for one, own in zip(asked, new, strict=True) for answer in own]
            outputs = iter(self.reward.reward(prompts, use_tqdm=False))
        for place, (one, own) in enumerate(zip(asked, new, strict=True)):
            if callable(self.reward):
                rewards = list(self.reward(one.given, [answer.text for answer in own]))
                if len(rewards) != len(own):
                    raise RequestError("reward", f"gave {len(rewards)} numbers for {len(own)} answers")
            else:
                given = [next(outputs) for _ in own]
                rewards = [output.outputs.data[-1] for output in given]  # of a model that judges steps the last one's
                self.scored[place] += sum(len(output.prompt_token_ids) for output in given)
            for answer, value in zip(own, rewards, strict=True):
                answer.reward = float(value)

    def judged(self, prompt: Any, answer: Candidate) -> Any:
        """What the reward model reads: the conversation with the answer, or the text that goes on with it."""
        assert self.reward is not None and not callable(self.reward)
        text = in_steps(self.reward, answer.text, self.params.step)
        if is_chat(prompt):
            told = [*prompt, {"role": "assistant", "content": text}]
            return self.reward.chat_prompt(told, add_generation_prompt=False)
        if isinstance(prompt, str):
            return prompt + text
        return TokensPrompt(prompt_token_ids=tokens_of(self.llm, prompt) + answer.token_ids)

    def vote(self, candidates: list[Candidate]) -> Candidate:
        """The first, or the best, of those that say what most say."""
        votes: dict[str, float] = {}
        least = min((one.reward for one in candidates if one.reward is not None), default=0.0)
        for one in candidates:
            one.answer = said(one.text, self.params.answer)
            if one.answer is not None:
                weight = 1.0 if one.reward is None else one.reward - min(least, 0.0)
                votes[one.answer] = votes.get(one.answer, 0.0) + weight
        if not votes:
            return likeliest(candidates)
        most = max(votes, key=lambda answer: votes[answer])
        return likeliest([one for one in candidates if one.answer == most])

    def beam(self, asked: list[Asked]) -> list[list[Candidate]]:
        """Of each prompt, the finished answers and the beginnings that were left when the steps were over."""
        each = max(1, self.params.n // self.params.width)
        open_, done = [[Candidate("", [])] for _ in asked], [[] for _ in asked]
        for round_ in range(self.params.max_steps):
            if not any(open_):
                break
            found = self.write(asked, open_, each if round_ else self.params.n, round_, self.params.step)
            self.judge(asked, found)
            for place in range(len(asked)):
                best = sorted(distinct(done[place] + found[place]), key=lambda one: -value(one))[: self.params.width]
                done[place] = [one for one in best if self.over(one)]
                open_[place] = [one for one in best if not self.over(one)]
        return [finished + left for finished, left in zip(done, open_, strict=True)]

    def over(self, one: Candidate) -> bool:
        most = self.params.sampling.max_tokens
        return one.finish_reason is not None or (most is not None and len(one.token_ids) >= most)


def in_steps(reward: Writer, text: str, step: str) -> str:
    """An answer as a reward model reads it: where it judges steps, with a token of its own after each."""
    token = reward.engine.config.classes.step
    if token is None:
        return text
    mark = reward.get_tokenizer().decode([token], skip_special_tokens=False)
    return "".join(part.strip() + mark for part in text.split(step) if part.strip()) or mark


def distinct(candidates: Seq[Candidate]) -> list[Candidate]:
    """Each once."""
    found: dict[tuple[int, ...], Candidate] = {}
    for one in candidates:
        found.setdefault(tuple(one.token_ids), one)
    return list(found.values())


def value(one: Candidate) -> float:
    return 0.0 if one.reward is None else one.reward


def likeliest(candidates: Seq[Candidate]) -> Candidate:
    """The one with most reward; of equal ones the first."""
    return max(candidates, key=value)


def said(text: str, pattern: str | None) -> str | None:
    """What an answer says: the last match of the pattern, or its last group; without a pattern the whole text."""
    if pattern is None:
        return text.strip()
    found = list(re.finditer(pattern, text))
    if not found:
        return None
    last = found[-1]
    return last.group(last.lastindex or 0)
