"""Scores of pairs of texts: the tokens beyond the first text, and their mean log-probability by the
decoder itself.
"""

import random
from functools import partial

import jax
import numpy as np
import pytest

from quire import LLM
from quire.model.text.tokenizer import Tokenizer
from quire.serving.api.errors import RequestError
from quire.serving.api.outputs import Logprob, RequestOutput
from quire.serving.request.scoring import pair_tokens, pairs, score_output
from quire.tests.support import uncached
from quire.tests.support.tokenizer_zoo import ZOO, random_text, save

PAIRS = [
    ("Once upon a", " time"),
    ("Once upon a", " cat"),
    ("Once upon a t", "ime"),
    ("", "Once upon"),
    ("The fox. ", "x"),
]


@pytest.fixture(scope="module", params=ZOO)
def tokenizer(request, tmp_path_factory):
    return Tokenizer(save(tmp_path_factory.mktemp(request.param), ZOO[request.param]()))


def test_the_tokens_are_those_of_both_texts_in_one(tokenizer):
    """Those before the first scored one lie in the first text, the others reach beyond it."""
    rng = random.Random(0)
    for _ in range(300):
        text_1 = random_text(rng)
        text_2 = random_text(rng)
        whole, ends = tokenizer.encode_with_ends(text_1 + text_2)
        assert whole == tokenizer.encode(text_1 + text_2)
        try:
            tokens, first = pair_tokens(tokenizer, text_1, text_2)
        except RequestError as error:
            assert "no token" in error.message and max(ends[1:], default=0) <= len(text_1)
            continue
        assert tokens == whole and 1 <= first < len(tokens)
        assert all(end <= len(text_1) for end in ends[1:first])
        assert ends[first] > len(text_1)


def test_only_the_second_text_counts_also_after_a_beginning_put_to_it(tmp_path):
    tokenizer = Tokenizer(save(tmp_path, ZOO["byte_level"]()))
    tokens, first = pair_tokens(tokenizer, "", "fox")
    assert tokens[0] == tokenizer.bos_token_id and first == 1
    tokens, first = pair_tokens(tokenizer, "the ", "fox")
    assert tokenizer.decode(tokens[first:]) in ("fox", " fox")


@pytest.fixture(scope="module")
def llm():
    return LLM(max_num_seqs=4, max_num_batched_tokens=32, dtype="float32")


def test_scores_are_the_decoders(llm):
    config = llm.engine.runner.config
    weights = llm.engine.runner.weights
    forward = jax.jit(partial(uncached.forward, config=config))
    found = llm.score([one for one, _ in PAIRS], [two for _, two in PAIRS], use_tqdm=False)
    for (text_1, text_2), output in zip(PAIRS, found, strict=True):
        tokens, first = pair_tokens(llm.get_tokenizer(), text_1, text_2)
        assert list(output.prompt_token_ids) == tokens
        logits = np.asarray(forward(weights, np.array([tokens])), np.float64)[0]
        logits -= logits.max(axis=-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        expected = np.mean(
            [logprobs[place - 1, tokens[place]] for place in range(first, len(tokens))]
        )
        assert output.outputs.score == pytest.approx(expected, abs=1e-4)
    assert found[0].outputs.score > found[1].outputs.score
    again = llm.score("Once upon a", [" time", " cat"], use_tqdm=False)
    assert [output.outputs for output in again] == [output.outputs for output in found[:2]]


def test_one_text_goes_with_each_of_the_others():
    assert pairs("a", "b") == [("a", "b")]
    assert pairs("a", ["b", "c"]) == pairs(["a"], ["b", "c"]) == [("a", "b"), ("a", "c")]
    assert pairs(["a", "b"], "c") == [("a", "c"), ("b", "c")]
    assert pairs(["a", "b"], ["c", "d"]) == [("a", "c"), ("b", "d")]
    assert pairs([], []) == []
    with pytest.raises(RequestError, match="text_2: has 3 texts for the 2"):
        pairs(["a", "b"], ["c", "d", "e"])


@pytest.mark.parametrize(
    ("text_1", "text_2", "words"),
    [
        ("a", "", "text_2: must have"),
        ("a", 5, "text_2"),
        (None, "b", "text_1"),
        ("a", "\ud800", "text_2.*surrogate"),
    ],
)
def test_what_cannot_be_scored_is_refused(llm, text_1, text_2, words):
    with pytest.raises(RequestError, match=words):
        llm.score([text_1], [text_2], use_tqdm=False)
    assert not llm.engine.busy


def test_a_request_that_ended_early_has_no_score():
    whole = RequestOutput(
        "r", None, [1, 2, 3], [], prompt_logprobs=[None, {2: Logprob(-1.0)}, {3: Logprob(-2.0)}]
    )
    assert (
        score_output(whole, 1).outputs.score == -1.5
        and score_output(whole, 2).outputs.score == -2.0
    )
    for logprobs in (None, [None, {2: Logprob(-1.0)}, None]):
        with pytest.raises(RuntimeError, match="no score"):
            score_output(RequestOutput("r", None, [1, 2, 3], [], prompt_logprobs=logprobs), 1)
