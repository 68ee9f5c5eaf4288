"""What is taken of a request bit by bit is what it has in the end: text, tokens, log-probabilities,
reasons.
"""

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest

from quire.model.text.tokenizer import Tokenizer
from quire.serving.api.outputs import CompletionDelta, CompletionOutput, Logprob
from quire.serving.api.params import SamplingParams
from quire.serving.request.request import Request
from quire.serving.request.sequence import Score, Sequence
from quire.tests.support.tokenizer_zoo import ZOO, save


@pytest.fixture(scope="module", params=ZOO)
def tokenizer(request, tmp_path_factory):
    return Tokenizer(save(tmp_path_factory.mktemp(request.param), ZOO[request.param]()))


def make(tokenizer: Tokenizer, params: SamplingParams, max_tokens: int = 40) -> Request:
    eos = tokenizer.eos_token_ids
    sequences = [
        Sequence(
            index, [5, 6], 2, params, max_tokens, 0.0, eos | frozenset(params.stop_token_ids), eos
        )
        for index in range(params.num_sequences)
    ]
    return Request("r", None, params, sequences, tokenizer, 0.0)


def draw(request: Request, index: int, token: int, rng: random.Random) -> None:
    """What the engine does with a token."""
    best = np.array([rng.randrange(100) for _ in range(20)])
    others = -np.sort(np.random.default_rng(token).random(20))
    score = Score(token, -rng.random(), rng.randint(1, 50), best, others, others)
    request.sequences[index].tokens.append(token)
    if reason := request.push(index, token, score if request.params.scored else None, 0.0):
        request.end(index, reason)


def joined(parts: list[CompletionDelta], params: SamplingParams) -> dict[int, CompletionOutput]:
    """Each answer from its parts; of one that is over nothing more may come."""
    found: dict[int, CompletionOutput] = {}
    for part in parts:
        before = found.get(part.index, CompletionOutput(part.index, "", [], logprobs=None))
        assert before.finish_reason is None
        assert part.text or part.token_ids or part.finish_reason, "a part with nothing new"
        assert part.finish_reason or part.stop_reason is None
        assert (part.logprobs is None) == (not params.gives_logprobs)
        found[part.index] = replace(
            before,
            text=before.text + part.text,
            token_ids=[*before.token_ids, *part.token_ids],
            logprobs=None if part.logprobs is None else [*(before.logprobs or []), *part.logprobs],
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )
    return found


def random_params(rng: random.Random, tokenizer: Tokenizer, ids: list[int]) -> SamplingParams:
    text = tokenizer.decode(rng.choices(ids, k=40))
    stops = [
        text[at : at + rng.randint(1, 3)]
        for at in rng.choices(range(len(text)), k=rng.choice((0, 0, 1, 3)))
    ]
    n = rng.choice((1, 1, 2, 3))
    return SamplingParams(
        n=n,
        best_of=rng.choice((None, None, None, n + 2)),
        stop=[stop for stop in stops if stop],
        stop_token_ids=rng.choices(ids, k=rng.choice((0, 0, 3))),
        min_tokens=rng.choice((0, 0, 5)),
        logprobs=rng.choice((None, 0, 3)),
        logprob_token_ids=rng.choice((None, None, None, ids[:3])),
        skip_special_tokens=rng.random() < 0.5,
        include_stop_str_in_output=rng.random() < 0.5,
        detokenize=any(stops) or rng.random() < 0.8,
    )


@pytest.mark.slow
def test_what_is_taken_adds_up(tokenizer):
    ids = sorted(set(range(tokenizer.vocab_size)) - tokenizer.eos_token_ids)
    rng = random.Random(0)
    reasons = set()
    several = 0
    for _ in range(300):
        params = random_params(rng, tokenizer, ids)
        request = make(tokenizer, params)
        parts = []
        eager = rng.random()  # how often somebody looks
        while not request.finished:
            live = [
                i for i, stream in enumerate(request.completions) if stream.finish_reason is None
            ]
            if rng.random() < 0.02:
                request.end(rng.choice(live), rng.choice(("abort", "timeout", "error")))
            else:
                end = rng.random() < 0.02
                token = rng.choice(sorted(tokenizer.eos_token_ids)) if end else rng.choice(ids)
                draw(request, rng.choice(live), token, rng)
            if rng.random() < eager:
                delta = request.take()
                assert (
                    not delta.completions or len(request.completions) == params.n or delta.finished
                )
                parts += delta.completions
            if rng.random() < 0.1:
                request.output()
        delta = request.take()
        assert delta.finished
        parts += delta.completions
        assert not request.take().completions
        several += len(parts) > 2 * params.n
        whole = {
            answer.index: replace(answer, cumulative_logprob=None)
            for answer in request.output().outputs
        }
        assert joined(parts, params) == whole
        reasons |= {answer.finish_reason for answer in whole.values()}
    assert reasons == {"stop", "length", "abort", "timeout", "error"} and several > 50


class Watched(list):
    """Counts the items that are copied out of it."""

    copied = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        if isinstance(at, slice):
            self.copied += len(found)
        return found


def test_taking_costs_what_is_new(tokenizer):
    request = make(tokenizer, SamplingParams(logprobs=1, stop=["never there"]), max_tokens=4000)
    stream = request.completions[0]
    rng = random.Random(1)
    stream.seq.tokens, stream.text_parts, stream.logprobs = Watched([5, 6]), Watched(), Watched()
    ids = sorted(set(range(tokenizer.vocab_size)) - tokenizer.eos_token_ids)
    while not request.finished:
        draw(request, 0, rng.choice(ids), rng)
        request.take()
    assert len(stream.seq.tokens) == 4002
    for watched in (stream.seq.tokens, stream.text_parts, stream.logprobs):
        assert watched.copied <= 4001


@pytest.mark.parametrize("flat", [False, True])
def test_prompt_logprobs_are_made_when_they_are_read(tokenizer, monkeypatch, flat):
    """What the engine's thread does for an output: no entry, and of flat ones all entries once."""
    rng = random.Random(1)
    scores = [
        Score(rng.randrange(100), -rng.random(), rng.randint(1, 50), best, -np.sort(values), values)
        for best, values in (
            (np.array(rng.sample(range(100), 20)), np.random.default_rng(0).random(20))
            for _ in range(9)
        )
    ]
    request = make(tokenizer, SamplingParams(prompt_logprobs=20, flat_logprobs=flat))
    request.sequences[0].prompt_scores = list(scores)
    texts = []
    token_text = tokenizer.token_text
    monkeypatch.setattr(
        tokenizer, "token_text", lambda token: texts.append(token) or token_text(token)
    )
    logprobs = [request.output().prompt_logprobs for _ in range(3)][-1]
    assert len(texts) == (
        sum(len({score.token, *score.best.tolist()}) for score in scores) if flat else 0
    )
    entries: list[dict[int, Logprob] | None] = [{} if flat else None]
    for score in scores:
        listed = zip(score.best.tolist(), score.best_logprobs.tolist(), range(1, 21), strict=True)
        entry = {
            token: Logprob(logprob, rank, token_text(token)) for token, logprob, rank in listed
        }
        own = Logprob(score.logprob, score.rank, token_text(score.token))
        entries.append({score.token: own} | entry | {score.token: own})
    assert logprobs is not None and len(logprobs) == 10
    assert (
        list(logprobs) == entries
        and list(logprobs[2:4]) == entries[2:4]
        and logprobs[-1] == entries[-1]
    )
    assert list(logprobs[1]) == list(entries[1] or ())  # the token itself comes first
    assert pickle.loads(pickle.dumps(logprobs)) == logprobs
    if not flat:
        assert logprobs == entries and logprobs != entries[:-1] and repr(logprobs) == repr(entries)


def test_prompt_logprobs_grow_with_the_prompt_that_is_computed(tokenizer):
    request = make(tokenizer, SamplingParams(prompt_logprobs=0))
    known = Score(7, -1.0, 1, np.array([7]), np.array([-1.0]), np.array([]))
    request.sequences[0].prompt_scores = [known, None]
    before = request.output().prompt_logprobs
    request.sequences[0].prompt_scores[1] = known
    assert before is not None and before[2] is None
    assert request.output().prompt_logprobs == [
        None,
        {7: Logprob(-1.0, 1, tokenizer.token_text(7))},
        before[1],
    ]
