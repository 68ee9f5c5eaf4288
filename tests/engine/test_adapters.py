"""Many adapters at once: each request as if it were alone, in any company, slot and order; nothing
is compiled.
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

COUNT = 64
SLOTS = 4
CONFIG = tiny.LLAMA | {"intermediate_size": 64}
OPTIONS = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 22,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "enable_lora": True,
    "max_loras": SLOTS,
    "max_lora_rank": 8,
    "max_cpu_loras": COUNT,
}
PARAMS = SamplingParams(max_tokens=6, temperature=0.9, seed=7, logprobs=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and many adapters of several ranks, some of a part of the layers, some of the head
    too, some of DoRA.
    """
    root = tmp_path_factory.mktemp("adapters")
    tensors = tiny.write(root / "base", CONFIG, tiny.even(tiny.shapes(CONFIG)))
    for number in range(COUNT):
        rank = 1 + number % 8
        names = peft.EVERY if number % 3 else ("q_proj", "v_proj")
        names = (*names, "lm_head") if number % 4 == 1 else names
        drawn = peft.draw(tensors, names, rank=rank, seed=number)
        drawn |= peft.magnitude_vectors(tensors, drawn, number) if number % 5 == 0 else {}
        about = {"r": rank, "use_rslora": number % 2 == 0, "use_dora": number % 5 == 0}
        peft.write(root / str(number), drawn, about)
    return root


def adapter(folders, number: int | None) -> LoRARequest | None:
    return (
        None
        if number is None
        else LoRARequest(f"adapter-{number}", number + 1, str(folders / str(number)))
    )


@pytest.fixture(scope="module")
def llm(folders):
    with LLM(str(folders / "base"), **OPTIONS) as llm:
        yield llm


def answers(llm, prompts, adapters, params=PARAMS):
    """Tokens and log-probabilities, to the last bit."""
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    llm.engine.scheduler.check()
    return [
        (
            tuple(o.outputs[0].token_ids),
            [{t: e.logprob for t, e in step.items()} for step in o.outputs[0].logprobs],
        )
        for o in outputs
    ]


def prompts_for(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(rng.choice([1, 5, 17, 40]))] for _ in range(count)]


@pytest.mark.slow
def test_a_request_is_the_same_alone_and_among_64_adapters(llm, folders):
    """More adapters than slots, requests without any, several of one: bit for bit what each gets
    alone.
    """
    numbers = [*range(COUNT), None, None, 3, 3, 60, None]
    prompts = prompts_for(len(numbers))
    together = answers(llm, prompts, [adapter(folders, number) for number in numbers])
    order = list(range(len(numbers)))
    random.Random(2).shuffle(order)
    again = answers(llm, [prompts[i] for i in order], [adapter(folders, numbers[i]) for i in order])
    assert [again[order.index(i)] for i in range(len(numbers))] == together
    for i in (0, 1, 5, 30, 63, 64, 66, 68):
        llm.reset_prefix_cache()
        assert answers(llm, [prompts[i]], adapter(folders, numbers[i])) == [together[i]], numbers[i]
    assert len({tokens for tokens, _ in together}) > COUNT // 2
    assert take_snapshot(llm.engine).recompiles == 0


WHOLE = {
    "max_loras": COUNT,
    "max_num_seqs": COUNT,
    "max_num_batched_tokens": COUNT,
    "kv_cache_memory_bytes": 1 << 24,
}


@pytest.mark.parametrize(
    ("name", "given"), nightly_from(1, [("qwen3_moe", WHOLE), ("mixtral", {})])
)
@pytest.mark.slow
def test_experts_among_64_adapters(name, given, tmp_path):
    """Each as if alone and as the merged model: a few slots through which all go, or all of them in
    one batch.
    """
    tensors = tiny_moe.write(tmp_path / "base", name)
    every = (*peft.EVERY, *tiny_moe.EXPERTS[name], "gate", "lm_head")
    for number in range(COUNT):
        rank = 1 + number % 8
        names = every if number % 3 else tiny_moe.EXPERTS[name]
        drawn = peft.draw(tensors, names, rank=rank, seed=number)
        drawn |= peft.magnitude_vectors(tensors, drawn, number) if number % 5 == 0 else {}
        peft.write(tmp_path / str(number), drawn, {"r": rank, "use_dora": number % 5 == 0})
    numbers = [*range(COUNT), None, None, 3, 3, 60, None]
    params = replace(PARAMS, temperature=0)
    prompts = prompts_for(len(numbers))
    requests = [adapter(tmp_path, number) for number in numbers]
    with LLM(
        str(tmp_path / "base"), **OPTIONS | given, lora_target_modules=tiny_moe.MODULES[name]
    ) as llm:
        together = answers(llm, prompts, requests, params)
        for i in (0, 1, 5, 30, 63, 64, 66, 68):
            llm.reset_prefix_cache()
            assert answers(llm, [prompts[i]], requests[i], params) == [together[i]], numbers[i]
        # replaced while others run
        shutil.copytree(tmp_path / "1", tmp_path / "60", dirs_exist_ok=True)
        again = answers(llm, prompts, requests, params)
        assert [again[i] == together[i] for i in range(len(numbers))] == [
            number != 60 for number in numbers
        ]
        assert take_snapshot(llm.engine).recompiles == 0
    assert len({tokens for tokens, _ in together}) > COUNT // 2
    plain = {option: value for option, value in OPTIONS.items() if "lora" not in option}
    for number in (5, 6):
        drawn = load_file(tmp_path / str(number) / "adapter_model.safetensors")
        tiny.write(
            tmp_path / "merged",
            tiny_moe.CONFIGS[name],
            peft.merged(tensors, drawn, {"r": 1 + number}),
        )
        with LLM(str(tmp_path / "merged"), **plain) as merged:
            ((tokens, scores),) = answers(merged, [prompts[number]], None, params)
        assert tokens == together[number][0]
        for one, other in zip(scores, together[number][1], strict=True):
            assert one == pytest.approx(other, abs=1e-3)


def test_the_answers_are_those_of_the_merged_model(llm, folders, tmp_path):
    """By another way: the adapter is added to the weights on disk, and that model served."""
    tensors = load_file(folders / "base" / "model.safetensors")
    drawn = load_file(folders / "5" / "adapter_model.safetensors")
    about = {"r": 6, "use_rslora": False}
    tiny.write(tmp_path, CONFIG, tensors=peft.merged(tensors, drawn, about))
    greedy = replace(PARAMS, temperature=0)
    prompts = prompts_for(5)
    plain = {name: value for name, value in OPTIONS.items() if "lora" not in name}
    with LLM(str(tmp_path), **plain) as merged:
        wanted = answers(merged, prompts, None, greedy)
    found = answers(llm, prompts, adapter(folders, 5), greedy)
    for (tokens, scores), (own, others) in zip(found, wanted, strict=True):
        assert tokens == own
        for one, other in zip(scores, others, strict=True):
            assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.slow
def test_a_head_that_is_the_embedding(tmp_path):
    """Its adapter changes what is drawn and not what is looked up; who names none has the model's
    own head.
    """
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = tiny.write(tmp_path / "base", config, tiny.even(tiny.shapes(config)))
    whole = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    drawn = peft.draw(whole, ("lm_head", "o_proj"))
    tiny.write(tmp_path / "merged", CONFIG, peft.merged(whole, drawn))
    one = LoRARequest("head", 1, str(peft.write(tmp_path / "head", drawn)))
    greedy = replace(PARAMS, temperature=0)
    prompts = prompts_for(6)
    plain = {name: value for name, value in OPTIONS.items() if "lora" not in name}
    wanted = []
    for name in ("merged", "base"):
        with LLM(str(tmp_path / name), **plain) as other:
            wanted.append([tokens for tokens, _ in answers(other, prompts, None, greedy)])
    with LLM(str(tmp_path / "base"), **OPTIONS) as llm:
        mixed = answers(llm, prompts, [one, None] * 3, greedy)
        assert [tokens for tokens, _ in mixed] == [wanted[i % 2][i] for i in range(6)]
        assert take_snapshot(llm.engine).recompiles == 0
    assert wanted[0] != wanted[1]


def test_pages_are_shared_within_an_adapter_alone(llm, folders):
    llm.reset_prefix_cache()
    prompt = list(range(40))

    def cached(number) -> int:
        return llm.generate(prompt, PARAMS, use_tqdm=False, lora_request=adapter(folders, number))[
            0
        ].num_cached_tokens

    assert [cached(1), cached(2), cached(None)] == [0, 0, 0]
    assert min(cached(1), cached(2), cached(None)) >= 32


def test_a_replaced_adapter_is_another(llm, folders, tmp_path):
    """Same name, same number, same folder: new files are read, and no page of the old ones is
    used.
    """
    prompt = [list(range(40))]
    changing = LoRARequest("changing", 99, str(tmp_path / "changing"))
    wanted = []
    for number in (7, 8):
        llm.reset_prefix_cache()
        wanted += answers(llm, prompt, adapter(folders, number))
    llm.reset_prefix_cache()
    for number, one in zip((7, 8), wanted, strict=True):
        shutil.copytree(folders / str(number), tmp_path / "changing", dirs_exist_ok=True)
        assert answers(llm, prompt, changing) == [one]


def test_fewer_in_host_memory_than_are_used(llm, folders):
    """They are read again, and are the same."""
    store = llm.engine.adapters
    wanted = answers(llm, [[1, 2, 3]] * 8, [adapter(folders, n) for n in range(8)])
    most = store.max_adapters
    store.max_adapters = SLOTS
    try:
        assert answers(llm, [[1, 2, 3]] * 8, [adapter(folders, n) for n in range(8)]) == wanted
        assert len(store.adapters) == SLOTS
    finally:
        store.max_adapters = most


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_after_a_sleep(llm, folders, level):
    wanted = answers(llm, [[1, 2, 3]] * 2, [adapter(folders, 1), None])
    llm.sleep(level)
    llm.wake_up()
    assert answers(llm, [[1, 2, 3]] * 2, [adapter(folders, 1), None]) == wanted


def test_a_failed_step_forgets_the_adapters(llm, folders, monkeypatch):
    wanted = answers(llm, [[1, 2, 3]], adapter(folders, 1))
    step = llm.engine.runner.step
    monkeypatch.setattr(llm.engine.runner, "step", lambda *given: 1 / 0)
    llm.generate([[4, 5]], PARAMS, use_tqdm=False, lora_request=adapter(folders, 2))
    monkeypatch.setattr(llm.engine.runner, "step", step)
    assert answers(llm, [[1, 2, 3]], adapter(folders, 1)) == wanted


def test_what_is_refused(llm, folders, tmp_path):
    with pytest.raises(RequestError, match="names 'x': .*is no adapter that can be read"):
        llm.generate([1], PARAMS, lora_request=LoRARequest("x", 1, str(tmp_path / "nowhere")))
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate([1], PARAMS, lora_request=[None, None])
    with pytest.raises(RequestError, match="must be a LoRARequest"):
        llm.generate([1], PARAMS, lora_request="adapter")
    with pytest.raises(RequestError, match="lora_int_id"):
        LoRARequest("x", 0, "path")


@pytest.mark.parametrize(
    ("given", "why"),
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
def test_options_that_do_not_go_together(given, why):
    with pytest.raises(ModelError, match=why):
        make_options(None, enable_lora=True, **given)


class Waiting:
    """As a sequence, as far as slots are concerned."""

    def __init__(self, key: str, rank: float):
        self.adapter = Adapter(key)
        self.rank = rank
        self.slot = -1
        self.finish_reason = None
        self.adapter_slot = -1


class Adapter:
    def __init__(self, key: str):
        self.key = key


def test_nobody_waits_for_ever():
    """One adapter is asked for again and again, and another one's request comes between: it gets
    the slot.
    """
    slots = AdapterSlots(1)
    running = []
    served = 0
    late = Waiting("b", 0.5)
    for number in range(200):
        one = Waiting("a", float(number))
        slots.begin_look()
        if number > 3 and slots.admits(late):
            slots.take(late)
            break
        if slots.admits(one):
            slots.take(one)
            running.append(one)
            served += 1
        if len(running) > 2 or not slots.admits(one):
            slots.give_back(running.pop(0))
    assert slots.slots == {"b": 0} and PATIENCE <= served <= PATIENCE + 8


def test_the_least_recently_used_gives_way_and_only_if_nobody_runs():
    slots = AdapterSlots(2)
    a, b, c = (Waiting(key, rank) for rank, key in enumerate("abc"))
    slots.take(a)
    slots.take(b)
    assert not slots.admits(c) and slots.take_loads() == [(0, a.adapter), (1, b.adapter)]
    slots.give_back(b)
    slots.give_back(a)
    assert slots.admits(c)
    slots.take(c)
    assert slots.take_loads() == [(1, c.adapter)] and set(slots.slots) == {"a", "c"}
    slots.check([c])


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
MORE = [{"quantization": "int8", "dtype": "bfloat16"}, {"quantization": "int4-32"}, DRAFTS]


@pytest.mark.parametrize("given", thinned(MORE, [DRAFTS]), ids=str)
@pytest.mark.slow
def test_with_rounded_weights_and_drafts(folders, given):
    """What each request gets is what it gets alone; drafts, which know no adapter, change
    nothing.
    """
    numbers = [0, 1, 2, None, 5, 6]
    prompts = [[7, 8, 9] * 6] * 6
    params = replace(PARAMS, temperature=0, max_tokens=20)
    with LLM(str(folders / "base"), **OPTIONS | given) as llm:
        together = answers(llm, prompts, [adapter(folders, number) for number in numbers], params)
        for i in (1, 3, 4):
            llm.reset_prefix_cache()
            assert answers(llm, [prompts[i]], adapter(folders, numbers[i]), params) == [
                together[i]
            ], numbers[i]
        assert take_snapshot(llm.engine).recompiles == 0
        assert len({tokens for tokens, _ in together}) > 3
        if "speculative_config" in given:
            assert llm.engine.speculator.counts.drafts > 0
            with LLM(str(folders / "base"), **OPTIONS) as plain:
                undrafted = answers(
                    plain, prompts, [adapter(folders, number) for number in numbers], params
                )
            assert [tokens for tokens, _ in undrafted] == [tokens for tokens, _ in together]
