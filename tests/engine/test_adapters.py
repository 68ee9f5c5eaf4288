"""Serves many LoRA adapters at once: answers do not depend on the batch, the slot or the order of
requests, and no step is recompiled.
"""

import random
import shutil
from dataclasses import replace

import pytest
from safetensors.numpy import load_file

from quire import LLM, LoRARequest, RequestError, SamplingParams
from quire.model.config import ModelError
from quire.serving.api.options import make_options
from quire.serving.engine.adapter_slots import PATIENCE, AdapterSlots
from quire.serving.engine.snapshot import take_snapshot
from quire.tests.support import peft, tiny, tiny_moe
from quire.tests.support.cases import nightly_from, thinned

NUM_ADAPTERS = 64
NUM_SLOTS = 4
CONFIG = tiny.LLAMA | {"intermediate_size": 64}
OPTIONS = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 22,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "enable_lora": True,
    "max_loras": NUM_SLOTS,
    "max_lora_rank": 8,
    "max_cpu_loras": NUM_ADAPTERS,
}
PARAMS = SamplingParams(max_tokens=6, temperature=0.9, seed=7, logprobs=2)


@pytest.fixture(scope="module")
def adapters_folder(tmp_path_factory):
    """Writes a model and adapters of several ranks: for some or all layers, some also for the LM
    head, some with DoRA.
    """
    folder = tmp_path_factory.mktemp("adapters")
    tensors = tiny.write(folder / "base", CONFIG, tiny.even(tiny.shapes(CONFIG)))
    for number in range(NUM_ADAPTERS):
        rank = 1 + number % 8
        names = peft.EVERY if number % 3 else ("q_proj", "v_proj")
        names = (*names, "lm_head") if number % 4 == 1 else names
        adapter_tensors = peft.draw(tensors, names, rank=rank, seed=number)
        adapter_tensors |= (
            peft.magnitude_vectors(tensors, adapter_tensors, number) if number % 5 == 0 else {}
        )
        adapter_config = {"r": rank, "use_rslora": number % 2 == 0, "use_dora": number % 5 == 0}
        peft.write(folder / str(number), adapter_tensors, adapter_config)
    return folder


def lora_request(adapters_folder, number: int | None) -> LoRARequest | None:
    return (
        None
        if number is None
        else LoRARequest(f"adapter-{number}", number + 1, str(adapters_folder / str(number)))
    )


@pytest.fixture(scope="module")
def llm(adapters_folder):
    with LLM(str(adapters_folder / "base"), **OPTIONS) as llm:
        yield llm


def generate_answers(llm, prompts, adapters, params=PARAMS):
    """Generates, and returns tokens and log-probabilities, to be compared bit for bit."""
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    llm.engine.scheduler.check()
    return [
        (
            tuple(o.outputs[0].token_ids),
            [{t: e.logprob for t, e in step.items()} for step in o.outputs[0].logprobs],
        )
        for o in outputs
    ]


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(rng.choice([1, 5, 17, 40]))] for _ in range(count)]


@pytest.mark.slow
def test_adapter_answers_are_batch_invariant(llm, adapters_folder):
    """There are more adapters than slots, requests without adapters and several of one adapter."""
    adapter_numbers = [*range(NUM_ADAPTERS), None, None, 3, 3, 60, None]
    prompts = random_prompts(len(adapter_numbers))
    batch_answers = generate_answers(
        llm, prompts, [lora_request(adapters_folder, number) for number in adapter_numbers]
    )
    order = list(range(len(adapter_numbers)))
    random.Random(2).shuffle(order)
    shuffled_answers = generate_answers(
        llm,
        [prompts[i] for i in order],
        [lora_request(adapters_folder, adapter_numbers[i]) for i in order],
    )
    assert [shuffled_answers[order.index(i)] for i in range(len(adapter_numbers))] == batch_answers
    for i in (0, 1, 5, 30, 63, 64, 66, 68):
        llm.reset_prefix_cache()
        assert generate_answers(
            llm, [prompts[i]], lora_request(adapters_folder, adapter_numbers[i])
        ) == [batch_answers[i]], adapter_numbers[i]
    assert len({tokens for tokens, _ in batch_answers}) > NUM_ADAPTERS // 2
    assert take_snapshot(llm.engine).recompiles == 0


ALL_ADAPTERS_OPTIONS = {
    "max_loras": NUM_ADAPTERS,
    "max_num_seqs": NUM_ADAPTERS,
    "max_num_batched_tokens": NUM_ADAPTERS,
    "kv_cache_memory_bytes": 1 << 24,
}


@pytest.mark.parametrize(
    ("name", "options"), nightly_from(1, [("qwen3_moe", ALL_ADAPTERS_OPTIONS), ("mixtral", {})])
)
@pytest.mark.slow
def test_expert_adapters_are_batch_invariant_and_match_merged_weights(name, options, tmp_path):
    """Adapters take turns in a few slots, or all of them are in one batch."""
    tensors = tiny_moe.write(tmp_path / "base", name)
    module_names = (*peft.EVERY, *tiny_moe.EXPERTS[name], "gate", "lm_head")
    for number in range(NUM_ADAPTERS):
        rank = 1 + number % 8
        names = module_names if number % 3 else tiny_moe.EXPERTS[name]
        adapter_tensors = peft.draw(tensors, names, rank=rank, seed=number)
        adapter_tensors |= (
            peft.magnitude_vectors(tensors, adapter_tensors, number) if number % 5 == 0 else {}
        )
        peft.write(
            tmp_path / str(number), adapter_tensors, {"r": rank, "use_dora": number % 5 == 0}
        )
    adapter_numbers = [*range(NUM_ADAPTERS), None, None, 3, 3, 60, None]
    params = replace(PARAMS, temperature=0)
    prompts = random_prompts(len(adapter_numbers))
    requests = [lora_request(tmp_path, number) for number in adapter_numbers]
    with LLM(
        str(tmp_path / "base"), **OPTIONS | options, lora_target_modules=tiny_moe.MODULES[name]
    ) as llm:
        batch_answers = generate_answers(llm, prompts, requests, params)
        for i in (0, 1, 5, 30, 63, 64, 66, 68):
            llm.reset_prefix_cache()
            assert generate_answers(llm, [prompts[i]], requests[i], params) == [batch_answers[i]], (
                adapter_numbers[i]
            )
        # adapter 60 is replaced by adapter 1
        shutil.copytree(tmp_path / "1", tmp_path / "60", dirs_exist_ok=True)
        changed_answers = generate_answers(llm, prompts, requests, params)
        assert [changed_answers[i] == batch_answers[i] for i in range(len(adapter_numbers))] == [
            number != 60 for number in adapter_numbers
        ]
        assert take_snapshot(llm.engine).recompiles == 0
    assert len({tokens for tokens, _ in batch_answers}) > NUM_ADAPTERS // 2
    plain_options = {option: value for option, value in OPTIONS.items() if "lora" not in option}
    for number in (5, 6):
        adapter_tensors = load_file(tmp_path / str(number) / "adapter_model.safetensors")
        tiny.write(
            tmp_path / "merged",
            tiny_moe.CONFIGS[name],
            peft.merged(tensors, adapter_tensors, {"r": 1 + number}),
        )
        with LLM(str(tmp_path / "merged"), **plain_options) as merged:
            ((tokens, scores),) = generate_answers(merged, [prompts[number]], None, params)
        assert tokens == batch_answers[number][0]
        for merged_logprobs, adapter_logprobs in zip(scores, batch_answers[number][1], strict=True):
            assert merged_logprobs == pytest.approx(adapter_logprobs, abs=1e-3)


def test_adapter_matches_the_merged_model(llm, adapters_folder, tmp_path):
    """The reference is a model with the adapter added to the weights on disk."""
    tensors = load_file(adapters_folder / "base" / "model.safetensors")
    adapter_tensors = load_file(adapters_folder / "5" / "adapter_model.safetensors")
    adapter_config = {"r": 6, "use_rslora": False}
    tiny.write(tmp_path, CONFIG, tensors=peft.merged(tensors, adapter_tensors, adapter_config))
    greedy = replace(PARAMS, temperature=0)
    prompts = random_prompts(5)
    plain_options = {name: value for name, value in OPTIONS.items() if "lora" not in name}
    with LLM(str(tmp_path), **plain_options) as merged:
        expected = generate_answers(merged, prompts, None, greedy)
    actual = generate_answers(llm, prompts, lora_request(adapters_folder, 5), greedy)
    for (tokens, steps), (expected_tokens, expected_steps) in zip(actual, expected, strict=True):
        assert tokens == expected_tokens
        for logprobs, expected_logprobs in zip(steps, expected_steps, strict=True):
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


@pytest.mark.slow
def test_lm_head_adapter_with_tied_embeddings(tmp_path):
    """An adapter of the head leaves the embedding lookup alone; requests without an adapter use
    the model's head.
    """
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = tiny.write(tmp_path / "base", config, tiny.even(tiny.shapes(config)))
    untied_tensors = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    adapter_tensors = peft.draw(untied_tensors, ("lm_head", "o_proj"))
    tiny.write(tmp_path / "merged", CONFIG, peft.merged(untied_tensors, adapter_tensors))
    request = LoRARequest("head", 1, str(peft.write(tmp_path / "head", adapter_tensors)))
    greedy = replace(PARAMS, temperature=0)
    prompts = random_prompts(6)
    plain_options = {name: value for name, value in OPTIONS.items() if "lora" not in name}
    expected = []
    for name in ("merged", "base"):
        with LLM(str(tmp_path / name), **plain_options) as reference_llm:
            expected.append(
                [tokens for tokens, _ in generate_answers(reference_llm, prompts, None, greedy)]
            )
    with LLM(str(tmp_path / "base"), **OPTIONS) as llm:
        outputs = generate_answers(llm, prompts, [request, None] * 3, greedy)
        assert [tokens for tokens, _ in outputs] == [expected[i % 2][i] for i in range(6)]
        assert take_snapshot(llm.engine).recompiles == 0
    assert expected[0] != expected[1]


def test_prefix_cache_is_separate_for_each_adapter(llm, adapters_folder):
    llm.reset_prefix_cache()
    prompt = list(range(40))

    def num_cached_tokens(number) -> int:
        return llm.generate(
            prompt, PARAMS, use_tqdm=False, lora_request=lora_request(adapters_folder, number)
        )[0].num_cached_tokens

    assert [num_cached_tokens(1), num_cached_tokens(2), num_cached_tokens(None)] == [0, 0, 0]
    assert min(num_cached_tokens(1), num_cached_tokens(2), num_cached_tokens(None)) >= 32


def test_replaced_adapter_files_are_reloaded_and_share_no_pages(llm, adapters_folder, tmp_path):
    """Name, id and folder stay the same, but the files change."""
    prompt = [list(range(40))]
    request = LoRARequest("changing", 99, str(tmp_path / "changing"))
    expected_answers = []
    for number in (7, 8):
        llm.reset_prefix_cache()
        expected_answers += generate_answers(llm, prompt, lora_request(adapters_folder, number))
    llm.reset_prefix_cache()
    for number, expected in zip((7, 8), expected_answers, strict=True):
        shutil.copytree(adapters_folder / str(number), tmp_path / "changing", dirs_exist_ok=True)
        assert generate_answers(llm, prompt, request) == [expected]


def test_adapters_evicted_from_host_memory_are_reloaded(llm, adapters_folder):
    """`max_cpu_loras` is smaller than the number of adapters in use."""
    store = llm.engine.adapters
    expected = generate_answers(
        llm, [[1, 2, 3]] * 8, [lora_request(adapters_folder, n) for n in range(8)]
    )
    max_adapters = store.max_adapters
    store.max_adapters = NUM_SLOTS
    try:
        assert (
            generate_answers(
                llm, [[1, 2, 3]] * 8, [lora_request(adapters_folder, n) for n in range(8)]
            )
            == expected
        )
        assert len(store.adapters) == NUM_SLOTS
    finally:
        store.max_adapters = max_adapters


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_survive_sleep(llm, adapters_folder, level):
    expected = generate_answers(llm, [[1, 2, 3]] * 2, [lora_request(adapters_folder, 1), None])
    llm.sleep(level)
    llm.wake_up()
    assert (
        generate_answers(llm, [[1, 2, 3]] * 2, [lora_request(adapters_folder, 1), None]) == expected
    )


def test_adapters_are_reloaded_after_a_failed_step(llm, adapters_folder, monkeypatch):
    expected = generate_answers(llm, [[1, 2, 3]], lora_request(adapters_folder, 1))
    step = llm.engine.runner.step
    monkeypatch.setattr(llm.engine.runner, "step", lambda *arguments: 1 / 0)
    llm.generate([[4, 5]], PARAMS, use_tqdm=False, lora_request=lora_request(adapters_folder, 2))
    monkeypatch.setattr(llm.engine.runner, "step", step)
    assert generate_answers(llm, [[1, 2, 3]], lora_request(adapters_folder, 1)) == expected


def test_invalid_lora_requests_are_refused(llm, adapters_folder, tmp_path):
    with pytest.raises(RequestError, match="names 'x': .*is no adapter that can be read"):
        llm.generate([1], PARAMS, lora_request=LoRARequest("x", 1, str(tmp_path / "nowhere")))
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate([1], PARAMS, lora_request=[None, None])
    with pytest.raises(RequestError, match="must be a LoRARequest"):
        llm.generate([1], PARAMS, lora_request="adapter")
    with pytest.raises(RequestError, match="lora_int_id"):
        LoRARequest("x", 0, "path")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_parallel_size": 2},
            "data_parallel_size is 2: with adapters a model is split by tensor_parallel_size",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"weights_host_bytes": 1}, "weights_host_bytes"),
        ({"max_loras": 0}, "max_loras is 0; it must be an integer from 1"),
        ({"max_lora_rank": 257}, "max_lora_rank is 257; it must be an integer from 1 to 256"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "must be at least max_loras, 4"),
        (
            {"lora_target_modules": "experts"},
            r"lora_target_modules is 'experts'; it must be a list, as in \['q_proj'",
        ),
    ],
)
def test_invalid_adapter_options_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        make_options(None, enable_lora=True, **options)


class FakeSequence:
    """Has those attributes of a sequence that `AdapterSlots` uses."""

    def __init__(self, key: str, rank: float):
        self.adapter = FakeAdapter(key)
        self.rank = rank
        self.slot = -1
        self.finish_reason = None
        self.adapter_slot = -1


class FakeAdapter:
    def __init__(self, key: str):
        self.key = key


def test_waiting_adapter_gets_a_slot_eventually():
    """Requests for one adapter keep arriving; one request for another adapter still gets a slot."""
    slots = AdapterSlots(1)
    running = []
    num_served = 0
    late_sequence = FakeSequence("b", 0.5)
    for number in range(200):
        sequence = FakeSequence("a", float(number))
        slots.begin_look()
        if number > 3 and slots.admits(late_sequence):
            slots.take(late_sequence)
            break
        if slots.admits(sequence):
            slots.take(sequence)
            running.append(sequence)
            num_served += 1
        if len(running) > 2 or not slots.admits(sequence):
            slots.give_back(running.pop(0))
    assert slots.slots == {"b": 0} and PATIENCE <= num_served <= PATIENCE + 8


def test_least_recently_used_idle_adapter_is_evicted():
    slots = AdapterSlots(2)
    a, b, c = (FakeSequence(key, rank) for rank, key in enumerate("abc"))
    slots.take(a)
    slots.take(b)
    assert not slots.admits(c) and slots.take_loads() == [(0, a.adapter), (1, b.adapter)]
    slots.give_back(b)
    slots.give_back(a)
    assert slots.admits(c)
    slots.take(c)
    assert slots.take_loads() == [(1, c.adapter)] and set(slots.slots) == {"a", "c"}
    slots.check([c])


DRAFT_OPTIONS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
ENGINE_OPTIONS = [
    {"quantization": "int8", "dtype": "bfloat16"},
    {"quantization": "int4-32"},
    DRAFT_OPTIONS,
]


@pytest.mark.parametrize("options", thinned(ENGINE_OPTIONS, [DRAFT_OPTIONS]), ids=str)
@pytest.mark.slow
def test_adapters_with_quantized_weights_and_drafts(adapters_folder, options):
    """Answers are batch invariant; drafts, which are proposed without adapters, change nothing."""
    adapter_numbers = [0, 1, 2, None, 5, 6]
    prompts = [[7, 8, 9] * 6] * 6
    params = replace(PARAMS, temperature=0, max_tokens=20)
    with LLM(str(adapters_folder / "base"), **OPTIONS | options) as llm:
        batch_answers = generate_answers(
            llm,
            prompts,
            [lora_request(adapters_folder, number) for number in adapter_numbers],
            params,
        )
        for i in (1, 3, 4):
            llm.reset_prefix_cache()
            assert generate_answers(
                llm, [prompts[i]], lora_request(adapters_folder, adapter_numbers[i]), params
            ) == [batch_answers[i]], adapter_numbers[i]
        assert take_snapshot(llm.engine).recompiles == 0
        assert len({tokens for tokens, _ in batch_answers}) > 3
        if "speculative_config" in options:
            assert llm.engine.speculator.counts.drafts > 0
            with LLM(str(adapters_folder / "base"), **OPTIONS) as undrafted_llm:
                undrafted_answers = generate_answers(
                    undrafted_llm,
                    prompts,
                    [lora_request(adapters_folder, number) for number in adapter_numbers],
                    params,
                )
            assert [tokens for tokens, _ in undrafted_answers] == [
                tokens for tokens, _ in batch_answers
            ]
