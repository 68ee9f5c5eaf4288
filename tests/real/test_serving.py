"""Serving features with trained models: JSON schemas, cached prefixes, drafts and long prompts."""

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

    def make_or_get_engine(name: str) -> LLM:
        if name not in engines:
            engines[name] = LLM(model(name), max_model_len=1024, **OPTIONS)
        return engines[name]

    return make_or_get_engine


def token_ids(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_answers_follow_a_json_schema(engine, name):
    params = SamplingParams(
        temperature=0, max_tokens=120, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    for person in ("Tom, who is 41 and has a dog", "an old woman with two cats"):
        messages = [
            {"role": "user", "content": f"Describe {person}, as JSON with name, age and pets."}
        ]
        (output,) = engine(name).chat(messages, params, use_tqdm=False)
        jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)


@pytest.mark.parametrize("name", NAMES)
def test_second_chat_turn_matches_a_cold_engine(engine, name):
    """The second prompt reuses pages of the first answer, up to where the template differs."""
    llm = engine(name)
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=1)
    reasons = set()
    for question in (
        "Say hello in three words.",
        "What is two plus two? Answer with a number.",
        "Name a colour.",
    ):
        messages = [{"role": "user", "content": question}]
        (first_output,) = llm.chat(messages, params, use_tqdm=False)
        reasons.add(first_output.outputs[0].finish_reason)
        messages += [
            {"role": "assistant", "content": first_output.outputs[0].text},
            {"role": "user", "content": "And again?"},
        ]
        (warm_output,) = llm.chat(messages, params, use_tqdm=False)
        llm.reset_prefix_cache()
        (cold_output,) = llm.chat(messages, params, use_tqdm=False)
        assert warm_output.num_cached_tokens > cold_output.num_cached_tokens == 0
        assert token_ids([warm_output]) == token_ids([cold_output])
        assert repr(warm_output.outputs[0].logprobs) == repr(cold_output.outputs[0].logprobs)
    assert "stop" in reasons


@pytest.mark.parametrize("name", NAMES)
def test_prefix_restored_from_disk_matches_a_cold_engine(engine, model, tmp_path, name):
    prompts = [f"{TEXT[:1500]}\n\nQuestion: {prompt}" for prompt in PROMPTS[:2]]
    cold_llm = engine(name)
    cold_llm.reset_prefix_cache()
    expected = token_ids(cold_llm.generate(prompts, GREEDY, use_tqdm=False))
    options = OPTIONS | {"max_model_len": 1024, "kv_cache_disk": str(tmp_path / "pages")}
    num_cached_tokens = []
    for _ in range(2):
        llm = LLM(model(name), **options)
        outputs = llm.generate(prompts[:1], GREEDY, use_tqdm=False) + llm.generate(
            prompts[1:], GREEDY, use_tqdm=False
        )
        assert token_ids(outputs) == expected
        num_cached_tokens.append(outputs[0].num_cached_tokens)
        llm.close()
    assert num_cached_tokens[0] == 0 and num_cached_tokens[1] > 200


@pytest.mark.large
def test_draft_model_changes_no_token_or_logprob(model):
    """Tokens and log-probabilities of Qwen 1.5B with and without Qwen 0.5B as its drafter."""
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=1)
    options = OPTIONS | {"max_model_len": 512}

    def generate(**draft_options):
        llm = LLM(model("qwen-1500m"), **options, **draft_options)
        outputs = llm.generate(list(PROMPTS[:4]), params, use_tqdm=False)
        llm.close()
        return token_ids(outputs), [repr(output.outputs[0].logprobs) for output in outputs]

    speculative_config = {
        "method": "draft_model",
        "model": model("qwen-500m"),
        "num_speculative_tokens": 3,
    }
    assert generate(speculative_config=speculative_config) == generate()


@pytest.mark.large
@pytest.mark.parametrize("name", ["smollm2", "qwen-500m"])
def test_long_prompt_logprobs_match_transformers(model, reference, name):
    """A prompt of 4,000 tokens is computed in chunks; its last log-probabilities are compared."""
    llm = LLM(model(name), max_model_len=4096, dtype="float32", **OPTIONS)
    tokens = llm.get_tokenizer().encode(TEXT * 8)[:4000]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([tokens], params, use_tqdm=False)
    actual = np.array(
        [
            step[token].logprob
            for step, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
        ]
    )
    expected = reference(name).logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]
    assert np.abs(actual - expected)[-500:].mean() < 0.02
