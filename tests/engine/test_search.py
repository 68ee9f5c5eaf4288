"""Test-time search: the chosen answers, their candidates, and the number of generated tokens."""

import random

import pytest

from quire import LLM, RequestError, SamplingParams, SearchParams
from quire.serving.search import Candidate, extract_answer

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
STORY = "Once upon a time"
CHAT = [{"role": "user", "content": "12 + 30 ="}]
SAMPLING = SamplingParams(temperature=2.0, max_tokens=24, seed=3)


@pytest.fixture(scope="module")
def llm():
    return LLM(**OPTIONS)


def text_lengths(prompt, texts):
    return [float(len(answer)) for answer in texts]


def test_best_of_n_picks_among_the_samples_of_generate(llm):
    """Prompts are texts, token ids or chats."""
    token_ids = llm.get_tokenizer().encode(STORY)
    search_params = SearchParams(n=5, sampling=SAMPLING)
    results = [
        llm.search(prompt, search_params, reward=text_lengths)[0]
        for prompt in (STORY, token_ids, {"prompt": STORY})
    ]
    first_result, second_result = llm.search([STORY, STORY], search_params, reward=text_lengths)
    assert first_result == results[0] and second_result != first_result, (
        "equal prompts must have different noise"
    )
    params = SamplingParams(temperature=2.0, max_tokens=24, seed=3, n=5)
    (output,) = llm.generate(STORY, params, use_tqdm=False)
    texts = [answer.text for answer in output.outputs]
    for result in results:
        assert [candidate.text for candidate in result.candidates] == texts
        assert result.text == max(texts, key=len) and result.best.reward == len(result.text)
        assert result.num_generated_tokens == sum(
            len(answer.token_ids) for answer in output.outputs
        )
        assert result.num_scored_tokens == 0
    (chat_result,) = llm.search(CHAT, SearchParams(n=3, sampling=SAMPLING), reward=text_lengths)
    (chat_output,) = llm.chat(
        CHAT, SamplingParams(temperature=2.0, max_tokens=24, seed=3, n=3), use_tqdm=False
    )
    assert [candidate.text for candidate in chat_result.candidates] == [
        answer.text for answer in chat_output.outputs
    ]


def test_majority_picks_the_most_frequent_or_best_rewarded_answer(llm):
    reward_calls = []

    def reward(prompt, answers):
        reward_calls.append((prompt, list(answers)))
        return [1.0 if answer.strip().startswith("4") else 0.1 for answer in answers]

    params = SearchParams("majority", n=9, answer=r"(\d)\d*", sampling=SAMPLING)
    (result,) = llm.search(CHAT, params)
    digits = [extract_answer(candidate.text, r"(\d)\d*") for candidate in result.candidates]
    counts = {digit: digits.count(digit) for digit in digits if digit is not None}
    assert counts[result.best.answer] == max(counts.values())
    (weighted_result,) = llm.search(CHAT, params, reward=reward)
    assert reward_calls == [(CHAT, [candidate.text for candidate in result.candidates])]
    rewards = {
        digit: sum(
            candidate.reward
            for candidate in weighted_result.candidates
            if candidate.answer == digit
        )
        for digit in counts
    }
    assert rewards[weighted_result.best.answer] == max(rewards.values())


@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        ("so 12, no: 14", r"\d+", "14"),
        (" the answer is (B).", r"\(([A-D])\)", "B"),
        ("none", r"\d+", None),
        (" x ", None, "x"),
    ],
)
def test_extract_answer(text, pattern, expected):
    assert extract_answer(text, pattern) == expected


def test_beam_search_with_rewards_matches_a_naive_search(llm):
    """The naive search generates each continuation in a separate request."""
    rng = random.Random(0)
    rewards: dict[str, float] = {}

    def reward(prompt, answers):
        return [rewards.setdefault(answer, rng.random()) for answer in answers]

    params = SearchParams("beam", n=6, width=2, step=" ", max_steps=4, sampling=SAMPLING)
    (result,) = llm.search(STORY, params, reward=reward)
    prompt = llm.get_tokenizer().encode(STORY)
    partials = [Candidate("", [])]
    finished = []
    num_generated = 0
    for step in range(4):
        candidates = []
        for index, partial in enumerate(partials):
            sampling_params = SamplingParams(
                temperature=2.0,
                max_tokens=24 - len(partial.token_ids),
                seed=3 + 1009 * (step * 6 + index),
                n=3 if step else 6,
                stop=[" "],
                include_stop_str_in_output=True,
            )
            (output,) = llm.generate(
                {"prompt_token_ids": prompt + partial.token_ids}, sampling_params, use_tqdm=False
            )
            for answer in output.outputs:
                num_generated += len(answer.token_ids)
                finish_reason = None if answer.stop_reason == " " else answer.finish_reason
                candidate = Candidate(
                    partial.text + answer.text,
                    partial.token_ids + list(answer.token_ids),
                    finish_reason,
                )
                if candidate.token_ids not in [c.token_ids for c in candidates]:
                    candidates.append(candidate)
        best_candidates = sorted(finished + candidates, key=lambda c: -rewards[c.text])[:2]
        is_finished = [
            c.finish_reason is not None or len(c.token_ids) >= 24 for c in best_candidates
        ]
        finished = [c for c, is_over in zip(best_candidates, is_finished, strict=True) if is_over]
        partials = [
            c for c, is_over in zip(best_candidates, is_finished, strict=True) if not is_over
        ]
    assert {c.text for c in result.candidates} == {c.text for c in finished + partials}
    assert result.best.reward == max(rewards[c.text] for c in finished + partials)
    assert result.num_generated_tokens == num_generated
    assert llm.search(STORY, params, reward=reward)[0].text == result.text, (
        "a seed must repeat the search"
    )


def test_invalid_search_is_refused(llm):
    for options, field in (
        ({"method": "best"}, "method"),
        ({"n": 0}, "n"),
        ({"n": 2, "width": 3}, "width"),
        ({"step": ""}, "step"),
        ({"max_steps": 0}, "max_steps"),
        ({"answer": "("}, "answer"),
        ({"sampling": {}}, "sampling"),
    ):
        with pytest.raises(RequestError, match=f"^{field}: "):
            SearchParams(**options)
    with pytest.raises(RequestError, match="reward: must be given for best_of_n"):
        llm.search(STORY)
    with pytest.raises(RequestError, match="model: has no classes"):
        llm.search(STORY, reward=llm)
    with pytest.raises(RequestError, match="reward: gave 1 numbers for 2 answers"):
        llm.search(
            STORY, SearchParams(n=2, sampling=SAMPLING), reward=lambda prompt, answers: [1.0]
        )
    assert not llm.engine.busy
