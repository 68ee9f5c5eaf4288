"""Beam search: the likeliest continuations, over an engine whose prefix cache holds what the beams share."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from ..api.errors import RequestError
from ..api.params import MAX_LOGPROBS, PLAIN, SamplingParams, Terms
from ..api.validation import INT32_MAX, boolean, integer, number
from ..request.request import Request
from .engine import Engine


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """The width and the length of a beam search."""

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0  # above 0 favours long ones: scores are divided by the length to this power

    def __post_init__(self):
        # Each beam may fill the whole width, and as many again may end.
        integer("beam_width", self.beam_width, 1, MAX_LOGPROBS // 2)
        integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        number("length_penalty", self.length_penalty, -10, 10)
        boolean("ignore_eos", self.ignore_eos)


@dataclass(frozen=True)
class BeamSearchSequence:
    """One continuation; `logprobs` has the log-probability of each of its tokens."""

    tokens: Seq[int] = ()
    logprobs: Seq[float] = ()
    text: str | None = None
    finish_reason: str | None = None

    @property
    def cum_logprob(self) -> float:
        return sum(self.logprobs)


@dataclass(frozen=True)
class BeamSearchOutput:
    """The continuations of one prompt, the best first."""

    prompt_token_ids: Seq[int]
    sequences: Seq[BeamSearchSequence]


@dataclass
class Search:
    """One prompt's beams under way."""

    prompt: list[int]
    terms: Terms
    limit: int  # tokens that may follow
    live: list[BeamSearchSequence] = field(default_factory=lambda: [BeamSearchSequence()])
    done: list[BeamSearchSequence] = field(default_factory=list)


def search(
    engine: Engine,
    prompts: Seq[Seq[int]],
    params: BeamSearchParams,
    terms: Seq[Terms] | None = None,
    turn: Callable[[], AbstractContextManager] = nullcontext,
    most: int | None = None,
) -> list[BeamSearchOutput]:
    """The beams of every prompt; in each `turn` the engine is this thread's. At most `most` prompts go on together."""
    terms = [PLAIN] * len(prompts) if terms is None else terms
    if any(own.timeout is not None for own in terms):
        raise RequestError("timeout", "is not kept by a beam search; leave it out and choose max_tokens")
    together = max(1, len(prompts)) if most is None else integer("concurrency_limit", most, 1, INT32_MAX, " or None")
    for prompt in prompts:  # before anything is computed
        engine.check(prompt, SamplingParams(max_tokens=params.max_tokens))
    searches = [
        Search(list(prompt), own, min(params.max_tokens, engine.max_len - len(prompt)))
        for prompt, own in zip(prompts, terms, strict=True)
    ]
    found = []
    for at in range(0, len(searches), together):
        found += search_together(engine, searches[at : at + together], params, turn)
    return found


def search_together(
    engine: Engine, searches: Seq[Search], params: BeamSearchParams, turn: Callable[[], AbstractContextManager]
) -> list[BeamSearchOutput]:
    """Every step asks for the likeliest next tokens of all beams of all prompts in one batch."""
    width, eos = params.beam_width, frozenset()
    if engine.tokenizer is not None and not params.ignore_eos:
        eos = engine.tokenizer.eos_token_ids
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True, detokenize=False)

    def score(beam: BeamSearchSequence) -> float:
        return beam.cum_logprob / len(beam.tokens) ** params.length_penalty

    while asked := [(search, beam) for search in searches for beam in search.live]:
        length = len(asked[0][1].tokens) + 1  # the same for all beams
        with turn():
            answers = ask(engine, [(search.prompt + list(beam.tokens), search.terms) for search, beam in asked], one)
        grown: dict[int, list[BeamSearchSequence]] = {id(search): [] for search in searches}
        for (search, beam), likeliest in zip(asked, answers, strict=True):
            for token, logprob in likeliest:
                reason = "stop" if token in eos else "length" if length == search.limit else None
                longer = BeamSearchSequence((*beam.tokens, token), (*beam.logprobs, logprob), None, reason)
                grown[id(search)].append(longer)
        for search in searches:
            best = sorted(grown[id(search)], key=lambda beam: -beam.cum_logprob)[: 2 * width]
            search.done += [beam for beam in best if beam.finish_reason]
            search.live = [beam for beam in best if not beam.finish_reason][:width]
            if len(search.done) >= width and not params.ignore_eos:
                worst = sorted(map(score, search.done), reverse=True)[width - 1]
                if all(beyond_hope(beam, worst, search.limit, params.length_penalty) for beam in search.live):
                    search.live = []
    return [
        BeamSearchOutput(
            search.prompt, [with_text(engine, beam) for beam in sorted(search.done, key=score)[::-1][:width]]
        )
        for search in searches
    ]


def beyond_hope(beam: BeamSearchSequence, worst: float, limit: int, penalty: float) -> bool:
    """Whether a beam cannot reach a better score than `worst`: its sum only falls, at any length up to the limit."""
    return max(beam.cum_logprob / length**penalty for length in (len(beam.tokens) + 1, limit)) <= worst


def ask(engine: Engine, prompts: Seq[tuple[list[int], Terms]], params: SamplingParams) -> list[list[tuple[int, float]]]:
    """The likeliest tokens after each prompt, with their log-probabilities."""
    requests: list[Request] = []
    try:
        for tokens, terms in prompts:
            requests.append(engine.add(f"beam-{id(prompts)}-{len(requests)}", tokens, params, terms=terms))
        while not all(request.finished for request in requests):
            engine.step()
    except BaseException:
        for request in requests:
            engine.abort(request.request_id)
        raise
    found = []
    for request in requests:
        if request.completions[0].finish_reason == "error":
            raise RuntimeError("a step of the beam search failed; the log says why")
        entries = request.completions[0].logprobs[0]
        found.append([(token, entry.logprob) for token, entry in entries.items()][: params.logprobs])
    return found


def with_text(engine: Engine, beam: BeamSearchSequence) -> BeamSearchSequence:
    """The same beam with its text."""
    text = None if engine.tokenizer is None else engine.tokenizer.decode(list(beam.tokens), skip_special_tokens=True)
    return BeamSearchSequence(beam.tokens, beam.logprobs, text, beam.finish_reason)
