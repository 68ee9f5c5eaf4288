"""Search at test time: what is chosen, from what, and at what cost."""

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
SUM = [{"role": "user", "content": "12 + 30 ="}]
SAMPLING = SamplingParams(temperature=2.0, max_tokens=24, seed=3)


@pytest.fixture(scope="module")
def llm():
    return LLM(**OPTIONS)


def longest(prompt, answers):
    return [float(len(answer)) for answer in answers]


def test_best_of_n_is_the_best_of_those_that_generate_gives(llm):
    """Texts, tokens and conversations; with a model as the reward, too."""
    tokens = llm.get_tokenizer().encode(STORY)
    asked = SearchParams(n=5, sampling=SAMPLING)
    found = [
        llm.search(prompt, asked, reward=longest)[0]
        for prompt in (STORY, tokens, {"prompt": STORY})
    ]
    first, other = llm.search([STORY, STORY], asked, reward=longest)
    assert first == found[0] and other != first, "prompts have noise of their own"
    params = SamplingParams(temperature=2.0, max_tokens=24, seed=3, n=5)
    (output,) = llm.generate(STORY, params, use_tqdm=False)
    texts = [answer.text for answer in output.outputs]
    for one in found:
        assert [candidate.text for candidate in one.candidates] == texts
        assert one.text == max(texts, key=len) and one.best.reward == len(one.text)
        assert one.num_generated_tokens == sum(len(answer.token_ids) for answer in output.outputs)
        assert one.num_scored_tokens == 0
    (chat,) = llm.search(SUM, SearchParams(n=3, sampling=SAMPLING), reward=longest)
    (answered,) = llm.chat(
        SUM, SamplingParams(temperature=2.0, max_tokens=24, seed=3, n=3), use_tqdm=False
    )
    assert [one.text for one in chat.candidates] == [answer.text for answer in answered.outputs]


def test_the_majority_wins(llm):
    seen = []

    def reward(prompt, answers):
        seen.append((prompt, list(answers)))
        return [1.0 if answer.strip().startswith("4") else 0.1 for answer in answers]

    params = SearchParams("majority", n=9, answer=r"(\d)\d*", sampling=SAMPLING)
    (plain,) = llm.search(SUM, params)
    digits = [extract_answer(one.text, r"(\d)\d*") for one in plain.candidates]
    counts = {digit: digits.count(digit) for digit in digits if digit is not None}
    assert counts[plain.best.answer] == max(counts.values())
    (weighted,) = llm.search(SUM, params, reward=reward)
    assert seen == [(SUM, [one.text for one in plain.candidates])]
    sums = {
        digit: sum(one.reward for one in weighted.candidates if one.answer == digit)
        for digit in counts
    }
    assert sums[weighted.best.answer] == max(sums.values())


@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        ("so 12, no: 14", r"\d+", "14"),
        (" the answer is (B).", r"\(([A-D])\)", "B"),
        ("none", r"\d+", None),
        (" x ", None, "x"),
    ],
)
def test_what_an_answer_says(text, pattern, expected):
    assert extract_answer(text, pattern) == expected


def test_beam_goes_on_from_the_best_beginnings(llm):
    """Beside a naive search that asks for each continuation by itself."""
    rng = random.Random(0)
    values: dict[str, float] = {}

    def reward(prompt, answers):
        return [values.setdefault(answer, rng.random()) for answer in answers]

    params = SearchParams("beam", n=6, width=2, step=" ", max_steps=4, sampling=SAMPLING)
    (found,) = llm.search(STORY, params, reward=reward)
    prompt = llm.get_tokenizer().encode(STORY)
    beginnings = [Candidate("", [])]
    done = []
    generated = 0
    for round_ in range(4):
        made = []
        for number, own in enumerate(beginnings):
            asked = SamplingParams(
                temperature=2.0,
                max_tokens=24 - len(own.token_ids),
                seed=3 + 1009 * (round_ * 6 + number),
                n=3 if round_ else 6,
                stop=[" "],
                include_stop_str_in_output=True,
            )
            (output,) = llm.generate(
                {"prompt_token_ids": prompt + own.token_ids}, asked, use_tqdm=False
            )
            for answer in output.outputs:
                generated += len(answer.token_ids)
                ended = None if answer.stop_reason == " " else answer.finish_reason
                one = Candidate(
                    own.text + answer.text, own.token_ids + list(answer.token_ids), ended
                )
                if one.token_ids not in [other.token_ids for other in made]:
                    made.append(one)
        best = sorted(done + made, key=lambda one: -values[one.text])[:2]
        over = [one.finish_reason is not None or len(one.token_ids) >= 24 for one in best]
        done = [one for one, end in zip(best, over, strict=True) if end]
        beginnings = [one for one, end in zip(best, over, strict=True) if not end]
    assert {one.text for one in found.candidates} == {one.text for one in done + beginnings}
    assert found.best.reward == max(values[one.text] for one in done + beginnings)
    assert found.num_generated_tokens == generated
    assert llm.search(STORY, params, reward=reward)[0].text == found.text, "the seed decides"


def test_what_cannot_be_searched_is_refused(llm):
    for wrong, field in (
        ({"method": "best"}, "method"),
        ({"n": 0}, "n"),
        ({"n": 2, "width": 3}, "width"),
        ({"step": ""}, "step"),
        ({"max_steps": 0}, "max_steps"),
        ({"answer": "("}, "answer"),
        ({"sampling": {}}, "sampling"),
    ):
        with pytest.raises(RequestError, match=f"^{field}: "):
            SearchParams(**wrong)
    with pytest.raises(RequestError, match="reward: must be given for best_of_n"):
        llm.search(STORY)
    with pytest.raises(RequestError, match="model: has no classes"):
        llm.search(STORY, reward=llm)
    with pytest.raises(RequestError, match="reward: gave 1 numbers for 2 answers"):
        llm.search(
            STORY, SearchParams(n=2, sampling=SAMPLING), reward=lambda prompt, answers: [1.0]
        )
    assert not llm.engine.busy
