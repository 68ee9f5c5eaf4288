"""The Python faces on the bundled model: prompts of every kind, streams, stops, errors, and asyncio."""

import asyncio
import threading

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.model.config import ModelError
from quire.serving.api.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["Once upon a time", "One day", "There was a", "The"]
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def llm():
    return LLM(**SIZES)


@pytest.fixture(scope="module")
def texts(llm):
    """What greedy decoding writes for each prompt alone."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS]


def test_a_batch_comes_back_in_order_and_as_it_would_alone(llm, texts):
    outputs = llm.generate(PROMPTS * 3, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS * 3
    assert [output.outputs[0].text for output in outputs] == texts * 3
    assert all(output.finished and output.outputs[0].finish_reason in ("stop", "length") for output in outputs)


def test_prompts_of_every_kind_are_the_same_prompt(llm, texts):
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    for prompt in (PROMPTS[0], ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}, [PROMPTS[0]], [ids], tuple(ids)):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.outputs[0].text == texts[0]
        assert list(output.prompt_token_ids) == ids


def test_terms_ride_with_a_prompt(llm, texts):
    story = "Once upon a time there was a girl who had a red ball and a dog. " * 4
    llm.reset_prefix_cache()
    cached = [
        llm.generate({"prompt": story, "cache_salt": salt, "priority": -2, "timeout": 60.0}, GREEDY)[0]
        for salt in ("a", "b", "a")
    ]
    assert [output.num_cached_tokens > 0 for output in cached] == [False, False, True]
    assert len({output.outputs[0].text for output in cached}) == 1
    assert llm.reset_prefix_cache()
    again = llm.generate({"prompt": story, "cache_salt": "a"}, GREEDY)[0]
    assert again.num_cached_tokens == 0 and again.outputs[0].text == cached[0].outputs[0].text
    (late,) = llm.generate({"prompt": story, "timeout": 1e-9}, GREEDY)
    assert late.outputs[0].finish_reason == "timeout" and not late.outputs[0].token_ids
    for wrong in ({"priority": "high"}, {"timeout": -1}, {"cache_salt": ""}, {"salt": "a"}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            llm.generate({"prompt": story, **wrong}, GREEDY)


def test_the_cache_can_be_switched_off(texts):
    llm = LLM(**SIZES, enable_prefix_caching=False, max_queued_requests=2)
    story = "Once upon a time there was a girl who had a red ball and a dog. " * 4
    assert [llm.generate(story, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]
    with pytest.raises(RequestError, match="queue"):
        llm.generate([story] * 3, GREEDY)
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text == texts[0]


def test_each_prompt_can_have_its_own_parameters(llm, texts):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 5, 9, 24)]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in outputs][:3] == [1, 5, 9]
    assert all(full.startswith(o.outputs[0].text) for full, o in zip(texts, outputs, strict=True))


def test_the_text_is_the_decoded_tokens(llm):
    for output in llm.generate(PROMPTS, SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=2)):
        for answer in output.outputs:
            assert answer.text == llm.get_tokenizer().decode(answer.token_ids)


def test_chat_answers_and_takes_many_conversations(llm):
    ask = [[{"role": "user", "content": f"Repeat: {word}"}] for word in ("a b c", "k l m")]
    both = [output.outputs[0].text for output in llm.chat(ask, GREEDY)]
    assert both == [llm.chat(one, GREEDY)[0].outputs[0].text for one in ask]
    assert both == ["a b c", "k l m"]


def test_a_stream_grows_to_the_whole_text(llm, texts):
    seen = [output.outputs[0].text for output in llm.stream(PROMPTS[0], GREEDY)]
    assert seen[-1] == texts[0]
    assert all(later.startswith(earlier) for earlier, later in zip(seen, seen[1:], strict=False))
    assert len(seen) > 10


def test_a_closed_stream_leaves_nothing_behind(llm, texts):
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(3):
        next(stream)
    stream.close()
    assert not llm.engine.busy
    assert llm.engine.pages.used() == 0
    assert llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].text == texts[1]


def test_interleaved_streams_each_end_with_their_whole_text(llm, texts):
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
    last = {}
    while len(last) < 3 or any(not output.finished for output in last.values()):
        for index, stream in enumerate(streams):
            last[index] = next(stream, last.get(index))
    assert [last[index].outputs[0].text for index in range(3)] == texts[:3]


def test_too_many_bad_words_are_refused_not_dropped(llm):
    words = [f"unheard of words number {index}" for index in range(40)]
    with pytest.raises(RequestError, match="bad_words"):
        llm.generate(PROMPTS[0], SamplingParams(bad_words=words))


def test_a_stop_string_in_what_was_held_back_is_a_stop(llm):
    """Half a character is shown as U+FFFD at the end alone, and a stop string may be just that."""
    half = llm.get_tokenizer().encode("é", add_special_tokens=False)[0]
    params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[half], stop="\ufffd")
    answer = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", "\ufffd")


def test_a_failing_engine_thread_leaves_nobody_waiting(monkeypatch):
    llm = AsyncLLM(**SIZES)

    async def scenario():
        def explode():
            raise RuntimeError("injected")

        monkeypatch.setattr(llm.engine.scheduler, "schedule", explode)
        outputs = await asyncio.wait_for(collect(llm, PROMPTS[0], GREEDY), 30)
        assert outputs[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(RequestError, match="closed"):
            await collect(llm, PROMPTS[0], GREEDY)

    monkeypatch.setattr(threading, "excepthook", lambda details: None)
    asyncio.run(scenario())


def test_stop_strings_cut_the_text(llm, texts):
    text = texts[0]
    stop = text[10:14]
    cut = text[: text.index(stop)]
    (out,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop=stop))
    assert (out.outputs[0].text, out.outputs[0].finish_reason, out.outputs[0].stop_reason) == (cut, "stop", stop)
    params = SamplingParams(temperature=0, max_tokens=24, stop=["never there", stop], include_stop_str_in_output=True)
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].text == cut + stop
    for output in llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop=stop)):
        assert stop[0] not in output.outputs[0].text[len(cut) :], "the head of a stop string was shown"


def test_bad_words_do_not_appear(llm, texts):
    word = texts[0].split()[2].strip(",.")
    params = SamplingParams(temperature=0, max_tokens=24, bad_words=[word])
    answer = llm.generate(PROMPTS[0], params)[0].outputs[0].text
    assert word in texts[0].split()[2]
    assert word not in answer.split()


def test_logprobs_add_up(llm):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[0], params)
    answer = output.outputs[0]
    assert answer.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True))
    )
    assert all(len(entry) == 3 for entry in answer.logprobs)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_without_a_tokenizer_ids_go_in_and_out(llm):
    bare = LLM(skip_tokenizer_init=True, **SIZES)
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    answer = bare.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs[0]
    assert answer.token_ids[:8] == llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids[:8]
    assert answer.text == ""
    for act in (lambda: bare.generate("text", GREEDY), bare.get_tokenizer):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            act()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([99999], "99999"),
        ({"prompt_token_ids": [-1]}, "-1"),
        ({"text": "x"}, "text"),
        (None, "must be text"),
        ([1.5], "1.5"),
        ("word " * 3000, "tokens"),
    ],
)
def test_a_bad_prompt_is_one_clear_line_and_the_engine_goes_on(llm, texts, prompt, words):
    with pytest.raises(RequestError, match=words) as error:
        llm.generate([PROMPTS[0], prompt, PROMPTS[1]], GREEDY)
    assert "\n" not in str(error.value)
    assert not llm.engine.busy
    assert [o.outputs[0].text for o in llm.generate(PROMPTS[:2], GREEDY)] == texts[:2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "no/such/folder/here"}, "no/such/folder/here"),
        ({"dtype": "int3"}, "int3"),
        ({"max_model_len": 10**6}, "at most"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"kv_cache_memory_bytes": 1000}, "--kv-cache-memory-bytes"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching"),
        ({"max_queued_requests": 0}, "max_queued_requests"),
    ],
)
def test_a_bad_option_is_one_clear_line(options, words):
    with pytest.raises(ModelError, match=words) as error:
        LLM(**options)
    assert "\n" not in str(error.value)


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="bananas"):
        LLM(bananas=3)


def test_an_interrupt_leaves_the_engine_usable(llm, texts, monkeypatch):
    step = llm.engine.step

    def interrupt():
        monkeypatch.setattr(llm.engine, "step", step)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert not llm.engine.busy
    assert [o.outputs[0].text for o in llm.generate(PROMPTS, GREEDY)] == texts


async def collect(llm: AsyncLLM, prompt, params, **options) -> list:
    return [output async for output in llm.generate(prompt, params, **options)]


def test_async_streams_share_the_engine(texts):
    llm = AsyncLLM(**SIZES)

    async def scenario():
        results = await asyncio.gather(*(collect(llm, prompt, GREEDY) for prompt in PROMPTS * 5))
        assert [outputs[-1].outputs[0].text for outputs in results] == texts * 5
        assert all(outputs[-1].finished and not outputs[0].finished for outputs in results)

        with pytest.raises(RequestError, match="empty"):
            await collect(llm, "", GREEDY)
        with pytest.raises(RequestError, match="at most"):
            await collect(llm, [1] * 5000, GREEDY)

        long = SamplingParams(max_tokens=900, ignore_eos=True)
        async for _ in llm.generate(PROMPTS[0], long):
            break  # the reader goes away
        task = asyncio.create_task(collect(llm, PROMPTS[0], long))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        watched = asyncio.create_task(collect(llm, PROMPTS[0], long, request_id="mine"))
        while "mine" not in llm.thread.outbox.listeners:
            await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="mine"):
            await collect(llm, PROMPTS[0], GREEDY, request_id="mine")
        await llm.abort("mine")
        assert (await watched)[-1].outputs[0].finish_reason == "abort"

        outputs = await collect(llm, PROMPTS[1], GREEDY)
        assert outputs[-1].outputs[0].text == texts[1]
        for _ in range(200):
            if not llm.engine.busy:
                break
            await asyncio.sleep(0.02)
        assert llm.engine.pages.used() == 0
        assert not llm.engine.requests
        assert not llm.thread.outbox.listeners

    asyncio.run(scenario())
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        asyncio.run(collect(llm, PROMPTS[0], GREEDY))
