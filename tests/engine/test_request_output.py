"""Deltas taken from a request add up to its output: text, tokens, logprobs and reasons."""

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


def make_request(tokenizer: Tokenizer, params: SamplingParams, max_tokens: int = 40) -> Request:
    eos = tokenizer.eos_token_ids
    sequences = [
        Sequence(
            index, [5, 6], 2, params, max_tokens, 0.0, eos | frozenset(params.stop_token_ids), eos
        )
        for index in range(params.num_sequences)
    ]
    return Request("r", None, params, sequences, tokenizer, 0.0)


def push_token(request: Request, index: int, token: int, rng: random.Random) -> None:
    """Adds a sampled token with random scores to a request, as the engine does."""
    top_ids = np.array([rng.randrange(100) for _ in range(20)])
    top_logprobs = -np.sort(np.random.default_rng(token).random(20))
    score = Score(token, -rng.random(), rng.randint(1, 50), top_ids, top_logprobs, top_logprobs)
    request.sequences[index].tokens.append(token)
    if reason := request.push(index, token, score if request.params.scored else None, 0.0):
        request.end(index, reason)


def join_deltas(
    deltas: list[CompletionDelta], params: SamplingParams
) -> dict[int, CompletionOutput]:
    """Joins deltas to outputs, and checks that no delta follows a finish reason."""
    outputs: dict[int, CompletionOutput] = {}
    for delta in deltas:
        previous = outputs.get(delta.index, CompletionOutput(delta.index, "", [], logprobs=None))
        assert previous.finish_reason is None
        assert delta.text or delta.token_ids or delta.finish_reason, "an empty delta"
        assert delta.finish_reason or delta.stop_reason is None
        assert (delta.logprobs is None) == (not params.gives_logprobs)
        outputs[delta.index] = replace(
            previous,
            text=previous.text + delta.text,
            token_ids=[*previous.token_ids, *delta.token_ids],
            logprobs=None
            if delta.logprobs is None
            else [*(previous.logprobs or []), *delta.logprobs],
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
    return outputs


def random_params(rng: random.Random, tokenizer: Tokenizer, ids: list[int]) -> SamplingParams:
    text = tokenizer.decode(rng.choices(ids, k=40))
    stop_strings = [
        text[start : start + rng.randint(1, 3)]
        for start in rng.choices(range(len(text)), k=rng.choice((0, 0, 1, 3)))
    ]
    n = rng.choice((1, 1, 2, 3))
    return SamplingParams(
        n=n,
        best_of=rng.choice((None, None, None, n + 2)),
        stop=[stop for stop in stop_strings if stop],
        stop_token_ids=rng.choices(ids, k=rng.choice((0, 0, 3))),
        min_tokens=rng.choice((0, 0, 5)),
        logprobs=rng.choice((None, 0, 3)),
        logprob_token_ids=rng.choice((None, None, None, ids[:3])),
        skip_special_tokens=rng.random() < 0.5,
        include_stop_str_in_output=rng.random() < 0.5,
        detokenize=any(stop_strings) or rng.random() < 0.8,
    )


@pytest.mark.slow
def test_deltas_add_up_to_the_output(tokenizer):
    ids = sorted(set(range(tokenizer.vocab_size)) - tokenizer.eos_token_ids)
    rng = random.Random(0)
    reasons = set()
    num_with_many_deltas = 0
    for _ in range(300):
        params = random_params(rng, tokenizer, ids)
        request = make_request(tokenizer, params)
        deltas = []
        take_probability = rng.random()  # per token
        while not request.finished:
            running = [
                i for i, stream in enumerate(request.completions) if stream.finish_reason is None
            ]
            if rng.random() < 0.02:
                request.end(rng.choice(running), rng.choice(("abort", "timeout", "error")))
            else:
                is_eos = rng.random() < 0.02
                token = rng.choice(sorted(tokenizer.eos_token_ids)) if is_eos else rng.choice(ids)
                push_token(request, rng.choice(running), token, rng)
            if rng.random() < take_probability:
                last_delta = request.take()
                assert (
                    not last_delta.completions
                    or len(request.completions) == params.n
                    or last_delta.finished
                )
                deltas += last_delta.completions
            if rng.random() < 0.1:
                request.output()
        last_delta = request.take()
        assert last_delta.finished
        deltas += last_delta.completions
        assert not request.take().completions
        num_with_many_deltas += len(deltas) > 2 * params.n
        expected = {
            answer.index: replace(answer, cumulative_logprob=None)
            for answer in request.output().outputs
        }
        assert join_deltas(deltas, params) == expected
        reasons |= {answer.finish_reason for answer in expected.values()}
    assert reasons == {"stop", "length", "abort", "timeout", "error"} and num_with_many_deltas > 50


class CopyCountingList(list):
    """Counts the items that slices copy."""

    copied = 0

    def __getitem__(self, index):
        items = super().__getitem__(index)
        if isinstance(index, slice):
            self.copied += len(items)
        return items


def test_take_copies_only_new_tokens(tokenizer):
    request = make_request(
        tokenizer, SamplingParams(logprobs=1, stop=["never there"]), max_tokens=4000
    )
    stream = request.completions[0]
    rng = random.Random(1)
    stream.seq.tokens, stream.text_parts, stream.logprobs = (
        CopyCountingList([5, 6]),
        CopyCountingList(),
        CopyCountingList(),
    )
    ids = sorted(set(range(tokenizer.vocab_size)) - tokenizer.eos_token_ids)
    while not request.finished:
        push_token(request, 0, rng.choice(ids), rng)
        request.take()
    assert len(stream.seq.tokens) == 4002
    for recorded in (stream.seq.tokens, stream.text_parts, stream.logprobs):
        assert recorded.copied <= 4001


@pytest.mark.parametrize("is_flat", [False, True])
def test_prompt_logprobs_are_built_when_read(tokenizer, monkeypatch, is_flat):
    """`output()` builds no entries of nested logprobs, and each entry of flat ones once."""
    rng = random.Random(1)
    scores = [
        Score(rng.randrange(100), -rng.random(), rng.randint(1, 50), best, -np.sort(values), values)
        for best, values in (
            (np.array(rng.sample(range(100), 20)), np.random.default_rng(0).random(20))
            for _ in range(9)
        )
    ]
    request = make_request(tokenizer, SamplingParams(prompt_logprobs=20, flat_logprobs=is_flat))
    request.sequences[0].prompt_scores = list(scores)
    decoded_ids = []
    token_text = tokenizer.token_text
    monkeypatch.setattr(
        tokenizer, "token_text", lambda token: decoded_ids.append(token) or token_text(token)
    )
    logprobs = [request.output().prompt_logprobs for _ in range(3)][-1]
    assert len(decoded_ids) == (
        sum(len({score.token, *score.best.tolist()}) for score in scores) if is_flat else 0
    )
    entries: list[dict[int, Logprob] | None] = [{} if is_flat else None]
    for score in scores:
        top_entries = zip(
            score.best.tolist(), score.best_logprobs.tolist(), range(1, 21), strict=True
        )
        entry = {
            token: Logprob(logprob, rank, token_text(token)) for token, logprob, rank in top_entries
        }
        logprob_of_token = Logprob(score.logprob, score.rank, token_text(score.token))
        entries.append({score.token: logprob_of_token} | entry | {score.token: logprob_of_token})
    assert logprobs is not None and len(logprobs) == 10
    assert (
        list(logprobs) == entries
        and list(logprobs[2:4]) == entries[2:4]
        and logprobs[-1] == entries[-1]
    )
    assert list(logprobs[1]) == list(entries[1] or ())  # the token itself comes first
    assert pickle.loads(pickle.dumps(logprobs)) == logprobs
    if not is_flat:
        assert logprobs == entries and logprobs != entries[:-1] and repr(logprobs) == repr(entries)


def test_prompt_logprobs_grow_while_the_prompt_is_computed(tokenizer):
    request = make_request(tokenizer, SamplingParams(prompt_logprobs=0))
    score = Score(7, -1.0, 1, np.array([7]), np.array([-1.0]), np.array([]))
    request.sequences[0].prompt_scores = [score, None]
    incomplete = request.output().prompt_logprobs
    request.sequences[0].prompt_scores[1] = score
    assert incomplete is not None and incomplete[2] is None
    assert request.output().prompt_logprobs == [
        None,
        {7: Logprob(-1.0, 1, tokenizer.token_text(7))},
        incomplete[1],
    ]
