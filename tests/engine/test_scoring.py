"""Scores of text pairs by a decoder: the mean log-probability of the second text's tokens."""

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


def test_pair_tokens_encode_both_texts_together(tokenizer):
    """Tokens before the first scored one end within the first text, the others after its end."""
    rng = random.Random(0)
    for _ in range(300):
        text_1 = random_text(rng)
        text_2 = random_text(rng)
        token_ids, token_ends = tokenizer.encode_with_ends(text_1 + text_2)
        assert token_ids == tokenizer.encode(text_1 + text_2)
        try:
            pair_ids, first = pair_tokens(tokenizer, text_1, text_2)
        except RequestError as error:
            assert "no token" in error.message and max(token_ends[1:], default=0) <= len(text_1)
            continue
        assert pair_ids == token_ids and 1 <= first < len(pair_ids)
        assert all(end <= len(text_1) for end in token_ends[1:first])
        assert token_ends[first] > len(text_1)


def test_pair_tokens_score_the_second_text_only(tmp_path):
    tokenizer = Tokenizer(save(tmp_path, ZOO["byte_level"]()))
    tokens, first = pair_tokens(tokenizer, "", "fox")
    assert tokens[0] == tokenizer.bos_token_id and first == 1
    tokens, first = pair_tokens(tokenizer, "the ", "fox")
    assert tokenizer.decode(tokens[first:]) in ("fox", " fox")


@pytest.fixture(scope="module")
def llm():
    return LLM(max_num_seqs=4, max_num_batched_tokens=32, dtype="float32")


def test_scores_match_the_uncached_decoder(llm):
    config = llm.engine.runner.config
    weights = llm.engine.runner.weights
    forward = jax.jit(partial(uncached.forward, config=config))
    outputs = llm.score(
        [text_1 for text_1, _ in PAIRS], [text_2 for _, text_2 in PAIRS], use_tqdm=False
    )
    for (text_1, text_2), output in zip(PAIRS, outputs, strict=True):
        tokens, first = pair_tokens(llm.get_tokenizer(), text_1, text_2)
        assert list(output.prompt_token_ids) == tokens
        logits = np.asarray(forward(weights, np.array([tokens])), np.float64)[0]
        logits -= logits.max(axis=-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        expected = np.mean(
            [logprobs[position - 1, tokens[position]] for position in range(first, len(tokens))]
        )
        assert output.outputs.score == pytest.approx(expected, abs=1e-4)
    assert outputs[0].outputs.score > outputs[1].outputs.score
    repeated_outputs = llm.score("Once upon a", [" time", " cat"], use_tqdm=False)
    assert [output.outputs for output in repeated_outputs] == [
        output.outputs for output in outputs[:2]
    ]


def test_pairs_broadcast_a_single_text():
    assert pairs("a", "b") == [("a", "b")]
    assert pairs("a", ["b", "c"]) == pairs(["a"], ["b", "c"]) == [("a", "b"), ("a", "c")]
    assert pairs(["a", "b"], "c") == [("a", "c"), ("b", "c")]
    assert pairs(["a", "b"], ["c", "d"]) == [("a", "c"), ("b", "d")]
    assert pairs([], []) == []
    with pytest.raises(RequestError, match="text_2: has 3 texts for the 2"):
        pairs(["a", "b"], ["c", "d", "e"])


@pytest.mark.parametrize(
    ("text_1", "text_2", "message"),
    [
        ("a", "", "text_2: must have"),
        ("a", 5, "text_2"),
        (None, "b", "text_1"),
        ("a", "\ud800", "text_2.*surrogate"),
    ],
)
def test_invalid_texts_to_score_are_refused(llm, text_1, text_2, message):
    with pytest.raises(RequestError, match=message):
        llm.score([text_1], [text_2], use_tqdm=False)
    assert not llm.engine.busy


def test_incomplete_request_has_no_score():
    output = RequestOutput(
        "r", None, [1, 2, 3], [], prompt_logprobs=[None, {2: Logprob(-1.0)}, {3: Logprob(-2.0)}]
    )
    assert (
        score_output(output, 1).outputs.score == -1.5
        and score_output(output, 2).outputs.score == -2.0
    )
    for logprobs in (None, [None, {2: Logprob(-1.0)}, None]):
        with pytest.raises(RuntimeError, match="no score"):
            score_output(RequestOutput("r", None, [1, 2, 3], [], prompt_logprobs=logprobs), 1)
