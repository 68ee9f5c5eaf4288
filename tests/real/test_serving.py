"""What an engine does around the answers of models with trained weights: schemas, kept prefixes,
drafts, length.
"""

import json

import jsonschema
import numpy as np
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.tests.support.real_prompts import PROMPTS, TEXT

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 256 << 20}
GREEDY = SamplingParams(temperature=0, max_tokens=32)
NAMES = ["smollm2", pytest.param("qwen-500m", marks=pytest.mark.large)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "fish"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(model):
    engines: dict[str, LLM] = {}

    def engine_of(name: str) -> LLM:
        if name not in engines:
            engines[name] = LLM(model(name), max_model_len=1024, **OPTIONS)
        return engines[name]

    return engine_of


def token_ids(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_answers_follow_a_json_schema(engine, name):
    params = SamplingParams(
        temperature=0, max_tokens=120, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    for who in ("Tom, who is 41 and has a dog", "an old woman with two cats"):
        messages = [
            {"role": "user", "content": f"Describe {who}, as JSON with name, age and pets."}
        ]
        (output,) = engine(name).chat(messages, params, use_tqdm=False)
        jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)


@pytest.mark.parametrize("name", NAMES)
def test_second_turn_of_a_chat_is_that_of_a_cold_engine(engine, name):
    """Whose pages hold what the first turn's stop token and its answer are followed by in the
    template.
    """
    llm = engine(name)
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=1)
    reasons = set()
    for question in (
        "Say hello in three words.",
        "What is two plus two? Answer with a number.",
        "Name a colour.",
    ):
        messages = [{"role": "user", "content": question}]
        (first,) = llm.chat(messages, params, use_tqdm=False)
        reasons.add(first.outputs[0].finish_reason)
        messages += [
            {"role": "assistant", "content": first.outputs[0].text},
            {"role": "user", "content": "And again?"},
        ]
        (warm,) = llm.chat(messages, params, use_tqdm=False)
        llm.reset_prefix_cache()
        (cold,) = llm.chat(messages, params, use_tqdm=False)
        assert warm.num_cached_tokens > cold.num_cached_tokens == 0
        assert token_ids([warm]) == token_ids([cold])
        assert repr(warm.outputs[0].logprobs) == repr(cold.outputs[0].logprobs)
    assert "stop" in reasons


@pytest.mark.parametrize("name", NAMES)
def test_prefix_kept_on_disk_gives_the_answer_of_a_cold_engine(engine, model, tmp_path, name):
    prompts = [f"{TEXT[:1500]}\n\nQuestion: {prompt}" for prompt in PROMPTS[:2]]
    cold = engine(name)
    cold.reset_prefix_cache()
    expected = token_ids(cold.generate(prompts, GREEDY, use_tqdm=False))
    options = OPTIONS | {"max_model_len": 1024, "kv_cache_disk": str(tmp_path / "pages")}
    cached = []
    for _ in range(2):
        llm = LLM(model(name), **options)
        outputs = llm.generate(prompts[:1], GREEDY, use_tqdm=False) + llm.generate(
            prompts[1:], GREEDY, use_tqdm=False
        )
        assert token_ids(outputs) == expected
        cached.append(outputs[0].num_cached_tokens)
        llm.close()
    assert cached[0] == 0 and cached[1] > 200


@pytest.mark.large
def test_small_model_drafts_for_the_large_one_without_changing_a_bit(model):
    """Tokens and log-probabilities of Qwen 1.5B with and without Qwen 0.5B as its drafter."""
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=1)
    options = OPTIONS | {"max_model_len": 512}

    def answers(**more):
        llm = LLM(model("qwen-1500m"), **options, **more)
        outputs = llm.generate(list(PROMPTS[:4]), params, use_tqdm=False)
        llm.close()
        return token_ids(outputs), [repr(output.outputs[0].logprobs) for output in outputs]

    drafts = {"method": "draft_model", "model": model("qwen-500m"), "num_speculative_tokens": 3}
    assert answers(speculative_config=drafts) == answers()


@pytest.mark.large
@pytest.mark.parametrize("name", ["smollm2", "qwen-500m"])
def test_long_prompt_is_read_as_transformers_reads_it(model, reference, name):
    """Log-probabilities far from the beginning, in chunks: positions, pages and masks at length."""
    llm = LLM(model(name), max_model_len=4096, dtype="float32", **OPTIONS)
    tokens = llm.get_tokenizer().encode(TEXT * 8)[:4000]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([tokens], params, use_tqdm=False)
    found = np.array(
        [
            step[token].logprob
            for step, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
        ]
    )
    expected = reference(name).logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]
    assert np.abs(found - expected)[-500:].mean() < 0.02
