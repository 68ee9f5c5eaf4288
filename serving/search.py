"""Test-time search: several answers are generated and the best one is returned.

    best_of_n    all answers at once; the one with the highest reward
    majority     all answers at once; the most frequent one, or the one with most total reward
    beam         step by step; the best partial answers continue

A reward is a function of a prompt and its answers, or a model with one class. With the prefix
cache, common prefixes are computed once.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from .api.content import refuse_images
from .api.errors import RequestError
from .api.outputs import PoolingRequestOutput
from .api.params import SamplingParams
from .api.prompts import TokensPrompt
from .api.validation import integer, shown
from .request import classes

METHODS = ("best_of_n", "majority", "beam")
SAMPLING = SamplingParams(temperature=1.0, max_tokens=256, seed=0)

Reward = Callable[[Any, Seq[str]], Iterable[float]]  # (prompt as given, answers) -> rewards
Writer = Any  # an `LLM`, whose method `search` uses this module


@dataclass(frozen=True)
class SearchParams:
    """How to search. `sampling` applies to each answer, except for its `n`."""

    method: str = "best_of_n"
    n: int = 8  # answers; beam: partial answers generated in each round
    width: int = 2  # beam: partial answers that continue
    step: str = "\n"  # beam: separator of steps
    max_steps: int = 16  # beam: maximum number of steps
    answer: str | None = None  # majority: pattern whose last match (its last group) is the answer
    sampling: SamplingParams = SAMPLING

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise RequestError("method", f"must be {', '.join(METHODS)}, got {shown(self.method)}")
        integer("n", self.n, 1, 1 << 10)
        integer("width", self.width, 1, self.n, " (n)")
        integer("max_steps", self.max_steps, 1, 1 << 10)
        if not isinstance(self.step, str) or not self.step:
            raise RequestError(
                "step", f"must be a text of one character or more, got {shown(self.step)}"
            )
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError("sampling", f"must be SamplingParams, got {shown(self.sampling)}")
        try:
            re.compile(self.answer or "")
        except (re.error, TypeError) as error:
            raise RequestError("answer", f"must be a regular expression: {error}") from None


@dataclass
class Candidate:
    """A complete or partial answer."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # None: it was not continued
    reward: float | None = None
    answer: str | None = None  # majority: the extracted answer


@dataclass
class SearchOutput:
    """The best answer to a prompt, and all candidates."""

    text: str
    best: Candidate
    candidates: list[Candidate] = field(default_factory=list)
    num_generated_tokens: int = 0
    num_scored_tokens: int = 0  # tokens computed by a reward model


class SearchPrompt(NamedTuple):
    """A prompt as given, and its tokens."""

    prompt: Any
    tokens: list[int]


def search(
    llm: Writer, prompts: Seq[Any], params: SearchParams, reward: Reward | Writer | None
) -> list[SearchOutput]:
    """Return the best answer to each prompt."""
    if params.method != "majority" and reward is None:
        raise RequestError(
            "reward", f"must be given for {params.method}: a function, or a model with one class"
        )
    if reward is not None and not callable(reward):
        classes.check_classifier(reward.engine.config, reward=True)
    for prompt in prompts:
        refuse_images(prompt, "LLM.search")
    search_prompts = [SearchPrompt(prompt, prompt_tokens(llm, prompt)) for prompt in prompts]
    return AnswerSearch(llm, params, reward).run(search_prompts)


def is_chat(prompt: Any) -> bool:
    """Return whether a prompt is a single conversation: a list of messages."""
    is_nonempty_list = isinstance(prompt, Seq) and not isinstance(prompt, str) and bool(prompt)
    return is_nonempty_list and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def prompt_tokens(llm: Writer, prompt: Any) -> list[int]:
    if is_chat(prompt):
        return list(llm.chat_prompt(prompt)["prompt_token_ids"])
    if isinstance(prompt, Mapping):
        prompt = (
            prompt["prompt"]
            if prompt.get("prompt_token_ids") is None
            else prompt["prompt_token_ids"]
        )
    return llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)


class AnswerSearch:
    """A search with one method, for several prompts at once."""

    def __init__(self, llm: Writer, params: SearchParams, reward: Reward | Writer | None):
        self.llm = llm
        self.params = params
        self.reward = reward
        self.generated: list[int] = []
        self.scored: list[int] = []

    def run(self, prompts: list[SearchPrompt]) -> list[SearchOutput]:
        self.generated = [0] * len(prompts)
        self.scored = [0] * len(prompts)
        if self.params.method == "beam":
            candidates_by_prompt = self.beam(prompts)
        else:
            candidates_by_prompt = self.generate_candidates(
                prompts, [[Candidate("", [])] for _ in prompts], self.params.n
            )
            self.assign_rewards(prompts, candidates_by_prompt)
        outputs = []
        for place, candidates in enumerate(candidates_by_prompt):
            best = (
                self.vote(candidates) if self.params.method == "majority" else likeliest(candidates)
            )
            outputs.append(
                SearchOutput(best.text, best, candidates, self.generated[place], self.scored[place])
            )
        return outputs

    def generate_candidates(
        self,
        search_prompts: list[SearchPrompt],
        partial_answers_by_prompt: list[list[Candidate]],
        count: int,
        round_: int = 0,
        stop: str | None = None,
    ) -> list[list[Candidate]]:
        """Sample `count` continuations of every partial answer of every prompt."""
        prompts = []
        params = []
        origins = []
        sampling = self.params.sampling
        step = {}
        if stop is not None:
            stop_strings = (
                [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
            )
            step = {"stop": [stop, *stop_strings], "include_stop_str_in_output": True}
        for place, (search_prompt, partial_answers) in enumerate(
            zip(search_prompts, partial_answers_by_prompt, strict=True)
        ):
            for number, partial in enumerate(partial_answers):
                max_tokens = (
                    None
                    if sampling.max_tokens is None
                    else sampling.max_tokens - len(partial.token_ids)
                )
                # With the same noise, the answers to all prompts would be good or bad together.
                seed_offset = 1009 * (round_ * self.params.n + number) + 1_000_003 * place
                seed = None if sampling.seed is None else sampling.seed + seed_offset
                params.append(replace(sampling, n=count, max_tokens=max_tokens, seed=seed, **step))
                prompts.append(
                    TokensPrompt(prompt_token_ids=search_prompt.tokens + partial.token_ids)
                )
                origins.append((place, partial))
        candidates_by_prompt: list[list[Candidate]] = [[] for _ in search_prompts]
        for (place, partial), output in zip(
            origins, self.llm.generate(prompts, params, use_tqdm=False), strict=True
        ):
            for answer in output.outputs:
                tokens = list(answer.token_ids)
                self.generated[place] += len(tokens)
                ended = answer.finish_reason
                if stop is not None and answer.stop_reason == stop:
                    ended = None
                candidates_by_prompt[place].append(
                    Candidate(partial.text + answer.text, partial.token_ids + tokens, ended)
                )
        return candidates_by_prompt

    def assign_rewards(
        self, search_prompts: list[SearchPrompt], candidates_by_prompt: list[list[Candidate]]
    ) -> None:
        """Assign a reward to each candidate that has none."""
        if self.reward is None:
            return
        new = [
            [answer for answer in candidates if answer.reward is None]
            for candidates in candidates_by_prompt
        ]
        outputs: Iterator[PoolingRequestOutput] = iter(())
        if not callable(self.reward):
            prompts = [
                self.reward_prompt(search_prompt.prompt, answer)
                for search_prompt, answers in zip(search_prompts, new, strict=True)
                for answer in answers
            ]
            outputs = iter(self.reward.reward(prompts, use_tqdm=False))
        for place, (search_prompt, answers) in enumerate(zip(search_prompts, new, strict=True)):
            if callable(self.reward):
                texts = [answer.text for answer in answers]
                rewards: list[Any] = list(cast(Any, self.reward)(search_prompt.prompt, texts))
                if len(rewards) != len(answers):
                    raise RequestError(
                        "reward", f"gave {len(rewards)} numbers for {len(answers)} answers"
                    )
            else:
                scored = [next(outputs) for _ in answers]
                # A process reward: that of the last step.
                rewards = [output.outputs.data[-1] for output in scored]
                self.scored[place] += sum(len(output.prompt_token_ids) for output in scored)
            for answer, value in zip(answers, rewards, strict=True):
                answer.reward = float(value)

    def reward_prompt(self, prompt: Any, answer: Candidate) -> Any:
        """Return the reward model's input: the conversation with the answer, or the continued
        text.
        """
        assert self.reward is not None and not callable(self.reward)
        text = mark_steps(self.reward, answer.text, self.params.step)
        if is_chat(prompt):
            messages = [*prompt, {"role": "assistant", "content": text}]
            return self.reward.chat_prompt(messages, add_generation_prompt=False)
        if isinstance(prompt, str):
            return prompt + text
        return TokensPrompt(prompt_token_ids=prompt_tokens(self.llm, prompt) + answer.token_ids)

    def vote(self, candidates: list[Candidate]) -> Candidate:
        """Return the first, or the best, of the candidates with the most frequent answer."""
        votes: dict[str, float] = {}
        min_reward = min(
            (candidate.reward for candidate in candidates if candidate.reward is not None),
            default=0.0,
        )
        for candidate in candidates:
            candidate.answer = extract_answer(candidate.text, self.params.answer)
            if candidate.answer is not None:
                weight = (
                    1.0 if candidate.reward is None else candidate.reward - min(min_reward, 0.0)
                )
                votes[candidate.answer] = votes.get(candidate.answer, 0.0) + weight
        if not votes:
            return likeliest(candidates)
        winner = max(votes, key=lambda answer: votes[answer])
        return likeliest([candidate for candidate in candidates if candidate.answer == winner])

    def beam(self, prompts: list[SearchPrompt]) -> list[list[Candidate]]:
        """Return each prompt's finished answers, then the partial ones left after the last step."""
        count = max(1, self.params.n // self.params.width)
        partial_by_prompt = [[Candidate("", [])] for _ in prompts]
        finished_by_prompt = [[] for _ in prompts]
        for round_ in range(self.params.max_steps):
            if not any(partial_by_prompt):
                break
            candidates_by_prompt = self.generate_candidates(
                prompts,
                partial_by_prompt,
                count if round_ else self.params.n,
                round_,
                self.params.step,
            )
            self.assign_rewards(prompts, candidates_by_prompt)
            for place in range(len(prompts)):
                best = sorted(
                    unique_candidates(finished_by_prompt[place] + candidates_by_prompt[place]),
                    key=lambda candidate: -value(candidate),
                )[: self.params.width]
                finished_by_prompt[place] = [
                    candidate for candidate in best if self.is_finished(candidate)
                ]
                partial_by_prompt[place] = [
                    candidate for candidate in best if not self.is_finished(candidate)
                ]
        return [
            finished + partial
            for finished, partial in zip(finished_by_prompt, partial_by_prompt, strict=True)
        ]

    def is_finished(self, candidate: Candidate) -> bool:
        max_tokens = self.params.sampling.max_tokens
        return candidate.finish_reason is not None or (
            max_tokens is not None and len(candidate.token_ids) >= max_tokens
        )


def mark_steps(reward: Writer, text: str, step: str) -> str:
    """Return an answer as a reward model reads it; process reward models need a token after each
    step.
    """
    token = reward.engine.config.classes.step
    if token is None:
        return text
    mark = reward.get_tokenizer().decode([token], skip_special_tokens=False)
    return (
        "".join(step_text.strip() + mark for step_text in text.split(step) if step_text.strip())
        or mark
    )


def unique_candidates(candidates: Seq[Candidate]) -> list[Candidate]:
    """Return the candidates without repetitions."""
    by_tokens: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        by_tokens.setdefault(tuple(candidate.token_ids), candidate)
    return list(by_tokens.values())


def value(candidate: Candidate) -> float:
    return 0.0 if candidate.reward is None else candidate.reward


def likeliest(candidates: Seq[Candidate]) -> Candidate:
    """Return the candidate with the highest reward; the first of equal ones."""
    return max(candidates, key=value)


def extract_answer(text: str, pattern: str | None) -> str | None:
    """Return the last match of the pattern (its last group, if any), or the text without a
    pattern.
    """
    if pattern is None:
        return text.strip()
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    last = matches[-1]
    return last.group(last.lastindex or 0)
