"""Beam search over an engine; the prefix cache holds what beams share."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice

from ..api.errors import EngineError, RequestError
from ..api.outputs import CompletionOutput, FinishReason
from ..api.params import MAX_LOGPROBS, PLAIN, RequestOptions, SamplingParams
from ..api.validation import INT32_MAX, boolean, integer, number
from ..request.request import Completion, Request
from .engine import Engine


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, with vLLM's names."""

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    # above 0 favours long ones: scores are divided by the length to this power
    length_penalty: float = 1.0

    def __post_init__(self):
        # Each beam may fill the whole width, and as many again may end.
        integer("beam_width", self.beam_width, 1, MAX_LOGPROBS // 2)
        integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        number("length_penalty", self.length_penalty, -10, 10)
        boolean("ignore_eos", self.ignore_eos)


@dataclass(frozen=True)
class BeamSearchSequence:
    """One beam; `logprobs` has the log-probability of each token."""

    tokens: Seq[int] = ()
    logprobs: Seq[float] = ()
    text: str | None = None
    finish_reason: FinishReason | None = None

    @property
    def cum_logprob(self) -> float:
        return sum(self.logprobs)


@dataclass(frozen=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    prompt_token_ids: Seq[int]
    sequences: Seq[BeamSearchSequence]


@dataclass
class Search:
    """The running search of one prompt."""

    prompt: list[int]
    request_options: RequestOptions
    params: BeamSearchParams
    limit: int  # tokens that may follow
    eos: frozenset[int]
    live: list[BeamSearchSequence] = field(default_factory=lambda: [BeamSearchSequence()])
    done: list[BeamSearchSequence] = field(default_factory=list)
    cached: int = 0  # tokens of the prompt that were computed already

    def asked(self) -> list[list[int]]:
        """The prompt followed by each live beam."""
        return [self.prompt + list(beam.tokens) for beam in self.live]

    def take(self, answers: Iterable[Seq[tuple[int, float]]]) -> None:
        """Extend the live beams with their most likely next tokens."""
        width = self.params.beam_width
        length = len(self.live[0].tokens) + 1
        grown = []
        for beam, likeliest in zip(self.live, answers, strict=True):
            for token, logprob in likeliest:
                reason: FinishReason | None = (
                    "stop" if token in self.eos else "length" if length == self.limit else None
                )
                grown.append(
                    BeamSearchSequence(
                        (*beam.tokens, token), (*beam.logprobs, logprob), None, reason
                    )
                )
        best = sorted(grown, key=lambda beam: -beam.cum_logprob)[: 2 * width]
        self.done += [beam for beam in best if beam.finish_reason]
        self.live = [beam for beam in best if not beam.finish_reason][:width]
        if len(self.done) >= width and not self.params.ignore_eos:
            worst = sorted(map(self.score, self.done), reverse=True)[width - 1]
            if all(
                beyond_hope(beam, worst, self.limit, self.params.length_penalty)
                for beam in self.live
            ):
                self.live = []

    def score(self, beam: BeamSearchSequence) -> float:
        return beam.cum_logprob / len(beam.tokens) ** self.params.length_penalty

    def best(self) -> list[BeamSearchSequence]:
        """The finished beams, best first."""
        return sorted(self.done, key=self.score)[::-1][: self.params.beam_width]


def search(
    engine: Engine,
    prompts: Seq[Seq[int]],
    params: BeamSearchParams,
    request_options: Seq[RequestOptions] | None = None,
    turn: Callable[[], AbstractContextManager] = nullcontext,
    most: int | None = None,
) -> list[BeamSearchOutput]:
    """Search all prompts, at most `most` at a time; each engine step runs within a `turn`."""
    together = (
        max(1, len(prompts))
        if most is None
        else integer("concurrency_limit", most, 1, INT32_MAX, " or None")
    )
    searches = begin(
        engine,
        prompts,
        params,
        [PLAIN] * len(prompts) if request_options is None else request_options,
    )
    for at in range(0, len(searches), together):
        search_together(engine, searches[at : at + together], next_token(params), turn)
    return [
        BeamSearchOutput(search.prompt, [with_text(engine, beam) for beam in search.best()])
        for search in searches
    ]


def begin(
    engine: Engine,
    prompts: Seq[Seq[int]],
    params: BeamSearchParams,
    request_options: Seq[RequestOptions],
) -> list[Search]:
    """Make a search for each prompt; unservable ones are refused before anything is computed."""
    if any(options.timeout is not None for options in request_options):
        raise RequestError(
            "timeout", "is not kept by a beam search; leave it out and choose max_tokens"
        )
    for prompt in prompts:
        engine.admission.check(prompt, SamplingParams(max_tokens=params.max_tokens))
    eos = frozenset()
    if engine.tokenizer is not None and not params.ignore_eos:
        eos = engine.tokenizer.eos_token_ids
    return [
        Search(
            list(prompt),
            options,
            params,
            min(params.max_tokens, engine.max_len - len(prompt)),
            eos,
        )
        for prompt, options in zip(prompts, request_options, strict=True)
    ]


def next_token(params: BeamSearchParams) -> SamplingParams:
    """Sampling parameters that return the most likely next tokens."""
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        logprobs=2 * params.beam_width,
        ignore_eos=True,
        detokenize=False,
    )


def search_together(
    engine: Engine,
    searches: Seq[Search],
    params: SamplingParams,
    turn: Callable[[], AbstractContextManager],
) -> None:
    """Extend all live beams of all prompts in one batch, until none is live."""
    while prompts := [
        (tokens, search.request_options) for search in searches for tokens in search.asked()
    ]:
        with turn():
            answers = iter(ask(engine, prompts, params))
        for search in searches:
            if search.live:
                search.take(islice(answers, len(search.live)))


def beyond_hope(beam: BeamSearchSequence, worst: float, limit: int, penalty: float) -> bool:
    """Whether a beam cannot exceed the score `worst` at any length up to the limit."""
    return (
        max(beam.cum_logprob / length**penalty for length in (len(beam.tokens) + 1, limit)) <= worst
    )


def ask(
    engine: Engine, prompts: Seq[tuple[list[int], RequestOptions]], params: SamplingParams
) -> list[list[tuple[int, float]]]:
    """The most likely next tokens of each prompt, with log-probabilities."""
    requests: list[Request] = []
    try:
        for tokens, request_options in prompts:
            requests.append(
                engine.add(
                    f"beam-{id(prompts)}-{len(requests)}",
                    tokens,
                    params,
                    request_options=request_options,
                )
            )
        while not all(request.finished for request in requests):
            engine.step()
    except BaseException:
        for request in requests:
            engine.abort(request.request_id)
        raise
    return [likeliest(request.completions[0], params) for request in requests]


def likeliest(
    answer: Completion | CompletionOutput, params: SamplingParams
) -> list[tuple[int, float]]:
    """The most likely next tokens of a completion, with log-probabilities."""
    if answer.finish_reason != "length" or answer.logprobs is None:
        raise EngineError("a step of the beam search failed; the log says why")
    return [(token, entry.logprob) for token, entry in answer.logprobs[0].items()][
        : params.logprobs
    ]


def with_text(engine: Engine, beam: BeamSearchSequence) -> BeamSearchSequence:
    """The beam with its decoded text."""
    text = (
        None
        if engine.tokenizer is None
        else engine.tokenizer.decode(list(beam.tokens), skip_special_tokens=True)
    )
    return BeamSearchSequence(beam.tokens, beam.logprobs, text, beam.finish_reason)
