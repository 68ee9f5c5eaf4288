"""Tests `LLM` and `AsyncLLM` on the bundled model: prompt types, streams, stop strings, errors,
threads and asyncio.
"""

import asyncio
import inspect
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import jax
import pytest

from quire import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from quire.model.config import ModelError
from quire.serving import build
from quire.serving.api.errors import NotServing, RequestError
from quire.serving.api.options import EngineOptions
from quire.serving.api.outputs import FlatLogprobs
from quire.serving.api.params import RequestOptions
from quire.serving.api.prompts import PromptTerms
from quire.serving.engine import engine
from quire.serving.engine.cache_size import whole_page_bytes
from quire.serving.engine.turns import Turns
from quire.serving.http import prompting
from quire.serving.http.settings import Formats
from quire.serving.protocol import chat

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["Once upon a time", "One day", "There was a", "The"]
STEP_SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def llm():
    return LLM(**STEP_SIZES)


@pytest.fixture(scope="module")
def greedy_texts(llm):
    """The text that greedy decoding generates for each prompt alone."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS]


def test_batched_outputs_are_ordered_and_match_single_ones(llm, greedy_texts):
    outputs = llm.generate(PROMPTS * 3, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS * 3
    assert [output.outputs[0].text for output in outputs] == greedy_texts * 3
    assert all(
        output.finished and output.outputs[0].finish_reason in ("stop", "length")
        for output in outputs
    )


def test_prompt_types_are_equivalent(llm, greedy_texts):
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    for prompt in (
        PROMPTS[0],
        ids,
        {"prompt": PROMPTS[0]},
        {"prompt_token_ids": ids},
        [PROMPTS[0]],
        [ids],
        tuple(ids),
        TextPrompt(prompt=PROMPTS[0]),
        TokensPrompt(prompt_token_ids=ids),
    ):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.outputs[0].text == greedy_texts[0]
        assert list(output.prompt_token_ids) == ids


def test_prompt_dicts_carry_request_terms(llm, greedy_texts):
    story = "Once upon a time there was a girl who had a red ball and a dog. " * 4
    llm.reset_prefix_cache()
    outputs = [
        llm.generate(
            {"prompt": story, "cache_salt": salt, "priority": -2, "timeout": 60.0}, GREEDY
        )[0]
        for salt in ("a", "b", "a")
    ]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, True]
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert llm.reset_prefix_cache()
    repeated_output = llm.generate({"prompt": story, "cache_salt": "a"}, GREEDY)[0]
    assert (
        repeated_output.num_cached_tokens == 0
        and repeated_output.outputs[0].text == outputs[0].outputs[0].text
    )
    (timed_out,) = llm.generate({"prompt": story, "timeout": 1e-9}, GREEDY)
    assert timed_out.outputs[0].finish_reason == "timeout" and not timed_out.outputs[0].token_ids
    for invalid_terms in ({"priority": "high"}, {"timeout": -1}, {"cache_salt": ""}, {"salt": "a"}):
        with pytest.raises(RequestError, match=next(iter(invalid_terms))):
            llm.generate({"prompt": story, **invalid_terms}, GREEDY)


def test_prefix_caching_can_be_disabled(greedy_texts):
    uncached_llm = LLM(**STEP_SIZES, enable_prefix_caching=False, max_queued_requests=2)
    story = "Once upon a time there was a girl who had a red ball and a dog. " * 4
    assert [uncached_llm.generate(story, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]
    with pytest.raises(RequestError, match="queue"):
        uncached_llm.generate([story] * 3, GREEDY)
    assert uncached_llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text == greedy_texts[0]


def test_sampling_params_per_prompt(llm, greedy_texts):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 5, 9, 24)]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in outputs][:3] == [1, 5, 9]
    assert all(
        text.startswith(output.outputs[0].text)
        for text, output in zip(greedy_texts, outputs, strict=True)
    )


def test_text_equals_the_decoded_token_ids(llm):
    for output in llm.generate(
        PROMPTS, SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=2)
    ):
        for answer in output.outputs:
            assert answer.text == llm.get_tokenizer().decode(answer.token_ids)


def test_chat_accepts_several_conversations(llm):
    conversations = [
        [{"role": "user", "content": f"Repeat: {word}"}] for word in ("a b c", "k l m")
    ]
    answers = [output.outputs[0].text for output in llm.chat(conversations, GREEDY)]
    assert answers == [
        llm.chat(conversation, GREEDY)[0].outputs[0].text for conversation in conversations
    ]
    assert answers == ["a b c", "k l m"]


MESSAGES = [{"role": "user", "content": "Repeat: a b c"}]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools | length if "
    "tools }}{{ mood }}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                }
            ]
        },
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "a b"}],
            "continue_final_message": True,
        },
        {"add_generation_prompt": False},
        {"chat_template": CHAT_TEMPLATE, "chat_template_kwargs": {"mood": "gay"}},
        {"chat_template": CHAT_TEMPLATE, "tools": [TOOL]},
        {"messages": [{"role": "developer", "content": "Be brief."}, *MESSAGES]},
    ],
)
def test_chat_builds_the_same_prompt_as_the_http_api(llm, fields):
    body = {"messages": MESSAGES, **fields}
    if "tools" in body:
        body["tool_choice"] = "required"
    ((parsed_prompt,), *_) = vars(prompting.chat(llm.engine, chat.parse(body), Formats())).values()
    arguments = {"messages": MESSAGES, **fields}
    (output,) = llm.chat(**arguments, sampling_params=SamplingParams(max_tokens=1))
    assert (output.prompt, list(output.prompt_token_ids)) == (
        parsed_prompt.text,
        parsed_prompt.tokens,
    )
    assert "[{" not in output.prompt


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [TOOL]}, "tools: cannot be told to this model"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\].type: must be"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs: must be a JSON object"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message: needs",
        ),
        ({"messages": "hello"}, "messages: must be a list"),
        ({"messages": [{"content": "hello"}]}, r"messages\[0\].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "must be a URL",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
                        ],
                    }
                ]
            },
            r"\[0\].image_url: is an image, and this model reads text only",
        ),
    ],
)
def test_invalid_chat_fields_are_refused(llm, fields, message):
    with pytest.raises(RequestError, match=message):
        llm.chat(**{"messages": MESSAGES, **fields})
    with pytest.raises(TypeError, match="enable_thinking"):
        llm.chat(MESSAGES, enable_thinking=True)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="enable_thinking: unknown field"):
        llm.chat_prompt(MESSAGES, enable_thinking=True)


def test_unknown_message_fields_are_ignored_with_a_warning(llm):
    prompt = llm.chat_prompt([{"role": "user", "content": "hello"}])
    with pytest.warns(UserWarning, match=r"messages\[\].audio: unknown here, and ignored"):
        assert llm.chat_prompt([{"role": "user", "content": "hello", "audio": 1}]) == prompt


def test_priority_for_all_prompts_or_for_each(llm, greedy_texts, monkeypatch):
    priorities = []
    add = llm.engine.add
    monkeypatch.setattr(
        llm.engine, "add", lambda *args: priorities.append(args[4].priority) or add(*args)
    )
    assert [
        o.outputs[0].text for o in llm.generate(PROMPTS, GREEDY, priority=[3, -1, 0, 2])
    ] == greedy_texts
    llm.generate(PROMPTS[:2], GREEDY, priority=5)
    llm.generate({"prompt": PROMPTS[0], "timeout": 60.0}, GREEDY, priority=1)
    assert priorities == [3, -1, 0, 2, 5, 5, 1]
    for invalid_priority in ([1], "high", 10**6, True):
        with pytest.raises(RequestError, match="priority"):
            llm.generate(PROMPTS[:2], GREEDY, priority=invalid_priority)
    with pytest.raises(RequestError, match="leave one of them out"):
        llm.generate({"prompt": "x", "priority": 1}, GREEDY, priority=1)
    assert not llm.engine.observers[1:]  # refused calls leave no observer behind


def test_beam_search_concurrency_limit_keeps_the_results(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    expected = llm.beam_search(PROMPTS[:3], params)
    assert llm.beam_search(PROMPTS[:3], params, concurrency_limit=2) == expected
    assert llm.beam_search([], params) == []
    with pytest.raises(RequestError, match="concurrency_limit"):
        llm.beam_search(PROMPTS[:3], params, concurrency_limit=0)


def test_prompt_types_have_the_fields_of_terms():
    # the argument `lora_request` sets the adapter
    names = {field.name for field in fields(RequestOptions)} - {"adapter"}
    assert set(PromptTerms.__annotations__) == names
    names |= {"multi_modal_data", "prompt"}
    assert set(TextPrompt.__annotations__) == names
    assert set(TokensPrompt.__annotations__) == {"prompt_token_ids", *names}


def test_structured_outputs_params_choice(llm):
    params = SamplingParams(
        temperature=0, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].text in ("yes", "no")


def test_flat_logprobs_equal_nested_ones(llm):
    output, flat_output = (
        llm.generate(
            PROMPTS[0],
            SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=1, **options),
        )[0]
        for options in ({}, {"flat_logprobs": True})
    )
    for logprobs, flat_logprobs in (
        (output.outputs[0].logprobs, flat_output.outputs[0].logprobs),
        ([{}, *output.prompt_logprobs[1:]], flat_output.prompt_logprobs),
    ):
        assert (
            isinstance(flat_logprobs, FlatLogprobs)
            and list(flat_logprobs) == logprobs
            and list(flat_logprobs[1:3]) == logprobs[1:3]
        )
        assert (
            len(flat_logprobs.token_ids)
            == sum(map(len, logprobs))
            == len(flat_logprobs.ranks)
            == len(flat_logprobs.decoded_tokens)
        )


def test_outputs_have_the_attributes_of_vllm(llm):
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=3, n=2, ignore_eos=True))
    for name in (
        "lora_request",
        "encoder_prompt",
        "encoder_prompt_token_ids",
        "kv_transfer_params",
    ):
        assert getattr(output, name) is None
    assert output.outputs[0].lora_request is None
    times = output.metrics
    assert (
        times.num_generation_tokens == 6 and times.first_token_latency == times.time_to_first_token
    )
    assert (
        times.arrival_time
        <= times.first_scheduled_time
        <= times.first_token_time
        <= times.last_token_time
    )
    (embedding,) = llm.encode(PROMPTS[0])
    assert embedding.outputs.data == embedding.outputs.embedding
    assert (
        embedding.outputs.hidden_size == len(embedding.outputs.embedding) == llm.engine.config.dim
    )


def test_logprobs_of_the_whole_vocabulary(llm):
    """They are one distribution, and contain the likeliest tokens that other engines list."""
    unlimited_llm = LLM(**STEP_SIZES, max_logprobs=-1)
    vocabulary = unlimited_llm.engine.config.vocab_size
    params = SamplingParams(
        temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1, flat_logprobs=True
    )
    (output,) = unlimited_llm.generate(PROMPTS[0], params)
    limited_params = SamplingParams(temperature=0, max_tokens=2, logprobs=20, prompt_logprobs=20)
    (limited_output,) = llm.generate(PROMPTS[0], limited_params)
    for all_entries, likeliest_entries in (
        (output.outputs[0].logprobs, limited_output.outputs[0].logprobs),
        (output.prompt_logprobs[1:], limited_output.prompt_logprobs[1:]),
    ):
        for entries, listed_entry in zip(all_entries, likeliest_entries, strict=True):
            assert sorted(entries) == list(range(vocabulary))
            assert math.fsum(
                math.exp(entry.logprob) for entry in entries.values()
            ) == pytest.approx(1, abs=1e-5)
            assert {
                token: (entry.logprob, entry.rank) for token, entry in listed_entry.items()
            } == {
                token: (pytest.approx(entries[token].logprob, abs=1e-4), entries[token].rank)
                for token in listed_entry
            }
    (entry_output,) = unlimited_llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    )
    assert entry_output.prompt_logprobs.to_array().tolist() == [
        [entries[token].logprob for token in range(vocabulary)]
        for entries in entry_output.prompt_logprobs[1:]
    ]
    (entry_output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, prompt_logprobs=20))
    with pytest.raises(ValueError, match="prompt_logprobs is 20; it must be -1"):
        entry_output.prompt_logprobs.to_array()
    with pytest.raises(
        RequestError, match=rf"^logprobs: .* max_logprobs, 20, got -1 \(-1: the {vocabulary} of"
    ):
        llm.generate(PROMPTS[0], SamplingParams(logprobs=-1))
    with pytest.raises(RequestError, match="^prompt_logprobs: .* max_logprobs, 20, got 21"):
        llm.generate(PROMPTS[0], SamplingParams(prompt_logprobs=21))


def test_logprob_token_ids_select_tokens(llm):
    """Selected tokens have the same log-probabilities as among the 20 likeliest."""
    # recompiles of other engines in this process count too
    recompiles = llm.engine.runner.compiles.recompiles
    top_params = SamplingParams(temperature=0, max_tokens=6, logprobs=20, ignore_eos=True)
    (top_output,) = llm.generate(PROMPTS[0], top_params)
    token_ids = [*list(top_output.outputs[0].logprobs[2])[:5], 7, 3, 7]
    params = replace(top_params, logprobs=None, logprob_token_ids=token_ids)
    (output,) = llm.generate(PROMPTS[0], params)
    assert output.outputs[0].token_ids == top_output.outputs[0].token_ids
    num_shared = 0
    for token, entry, likeliest in zip(
        top_output.outputs[0].token_ids,
        output.outputs[0].logprobs,
        top_output.outputs[0].logprobs,
        strict=True,
    ):
        assert (
            list(entry) == list(dict.fromkeys([token, *token_ids]))
            and entry[token] == likeliest[token]
        )
        shared_ids = entry.keys() & likeliest.keys()
        assert {t: entry[t].logprob for t in shared_ids} == {
            t: likeliest[t].logprob for t in shared_ids
        }
        num_shared += len(shared_ids)
    assert num_shared >= 5 + 5
    other_params = [
        top_params,
        replace(params, logprob_token_ids=[9], logprobs=3),
        replace(params, logprob_token_ids=[]),
    ]
    batched_output, top_3_output, one_token_output, no_logprobs_output = llm.generate(
        [PROMPTS[0]] * 4, [params, *other_params]
    )
    for entry, single_entry in zip(
        batched_output.outputs[0].logprobs, output.outputs[0].logprobs, strict=True
    ):
        assert {t: logprob.logprob for t, logprob in entry.items()} == {
            t: pytest.approx(logprob.logprob, abs=1e-4) for t, logprob in single_entry.items()
        }
    assert all(len(entry) in (20, 21) for entry in top_3_output.outputs[0].logprobs)
    assert all(
        entry.keys() == {t, 9}
        for t, entry in zip(
            one_token_output.outputs[0].token_ids, one_token_output.outputs[0].logprobs, strict=True
        )
    )
    assert no_logprobs_output.outputs[0].logprobs is None
    (flat_output,) = llm.generate(PROMPTS[0], replace(params, flat_logprobs=True))
    assert (
        isinstance(flat_output.outputs[0].logprobs, FlatLogprobs)
        and list(flat_output.outputs[0].logprobs) == output.outputs[0].logprobs
    )
    with pytest.raises(RequestError, match="^logprob_token_ids: has the token id 999999"):
        llm.generate(PROMPTS[0], replace(params, logprob_token_ids=[999999]))
    assert llm.engine.runner.compiles.recompiles == recompiles


def test_tokenizer_vocabulary_and_token_bytes(llm):
    tokenizer = llm.get_tokenizer()
    vocabulary = tokenizer.get_vocab()
    assert max(vocabulary.values()) + 1 == tokenizer.vocab_size
    assert all(tokenizer.token_bytes(id) for id in list(vocabulary.values())[:50])


def test_output_kinds_of_a_stream_agree(llm, greedy_texts, monkeypatch):
    monkeypatch.setattr(engine, "STREAMING_LATENCY", 0.0)  # one token per result

    def stream(kind):
        kind_params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, output_kind=kind)
        return list(llm.stream(PROMPTS[0], kind_params))

    cumulative = stream(RequestOutputKind.CUMULATIVE)
    deltas = stream(RequestOutputKind.DELTA)
    (final,) = stream(RequestOutputKind.FINAL_ONLY)
    final_answer = cumulative[-1].outputs[0]
    assert (
        final.finished and final.outputs[0] == final_answer and final_answer.text == greedy_texts[0]
    )
    answers = [answer for delta in deltas for answer in delta.outputs]
    assert "".join(answer.text for answer in answers) == final_answer.text
    assert [token for answer in answers for token in answer.token_ids] == final_answer.token_ids
    assert [entry for answer in answers for entry in answer.logprobs] == final_answer.logprobs
    assert answers[-1].cumulative_logprob == final_answer.cumulative_logprob and len(deltas) > 5
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_threads_share_the_engine(llm, greedy_texts):
    """Batches, streams, chats and beam searches in parallel threads return their own results."""
    beam_params = BeamSearchParams(beam_width=2, max_tokens=4)
    jobs = {
        lambda: [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]: greedy_texts,
        lambda: [*llm.stream(PROMPTS[1], GREEDY)][-1].outputs[0].text: greedy_texts[1],
        lambda: llm.chat(MESSAGES, GREEDY)[0].outputs[0].text: "a b c",
        lambda: llm.beam_search(PROMPTS[0], beam_params): llm.beam_search(PROMPTS[0], beam_params),
        lambda: llm.reset_prefix_cache(): True,
    }
    barrier = threading.Barrier(2 * len(jobs))

    def run_job(job):
        barrier.wait()
        return [job() for _ in range(3)]

    with ThreadPoolExecutor(2 * len(jobs)) as pool:
        futures = [(pool.submit(run_job, job), expected) for job, expected in [*jobs.items()] * 2]
        assert [future.result() for future, _ in futures] == [
            [expected] * 3 for _, expected in futures
        ]
    assert not llm.engine.busy and llm.engine.tables[0].used() == 0 and not llm.engine.observers[1:]


def test_turns_are_first_come_first_served():
    turns = Turns()
    order = []

    def take_turn(number):
        with turns:
            order.append(number)

    threads = [threading.Thread(target=take_turn, args=(number,)) for number in range(8)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            while len(turns.waiting) <= number:
                time.sleep(0.001)
    with turns:
        assert order == list(range(8))
    for thread in threads:
        thread.join()
    assert not turns.taken


def test_interrupted_waiter_leaves_the_queue_of_turns():
    turns = Turns()
    main_thread = threading.get_ident()
    # background jobs of a shell ignore SIGINT
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        while not turns.waiting:
            time.sleep(0.001)
        signal.pthread_kill(main_thread, signal.SIGINT)

    with turns:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt), turns:
            pass
        thread.join()
        assert turns.taken and not turns.waiting
    assert not turns.taken
    signal.signal(signal.SIGINT, previous_handler)


def test_sleeping_engine_refuses_requests_without_hanging(llm, greedy_texts):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.sleep()
    for call in (lambda: next(stream), lambda: llm.generate(PROMPTS, GREEDY)):
        with pytest.raises(NotServing, match="wake_up"):
            call()
    llm.wake_up()
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text == greedy_texts[0]


def error_in_fork(call) -> str:
    """Calls it in a forked process, and returns the error that it raises there."""
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn about forks
        pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            call()
        except BaseException as error:
            os.write(write_fd, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write_fd)
    os.waitpid(pid, 0)
    with os.fdopen(read_fd) as pipe:
        return pipe.read()


def test_use_in_a_forked_process_is_refused(llm, greedy_texts, tmp_path):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    calls = (
        lambda: llm.generate(PROMPTS[0]),
        lambda: llm.chat(MESSAGES),
        lambda: next(stream),
        lambda: llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=2)),
        lambda: llm.embed(PROMPTS[0]),
        lambda: llm.sleep(),
    )
    for call in calls:
        message = error_in_fork(call)
        assert message.startswith(
            f"NotServing: engine: belongs to process {os.getpid()}, and process "
        )
        assert "spawn" in message and "\n" not in message
    assert error_in_fork(llm.close) == ""  # `close()`, as at the end of a `with` block, is allowed
    assert [*stream][-1].outputs[0].text == greedy_texts[0]


def test_streamed_text_grows_to_the_full_answer(llm, greedy_texts, monkeypatch):
    monkeypatch.setattr(engine, "STREAMING_LATENCY", 0.0)  # one token per result
    partial_texts = [output.outputs[0].text for output in llm.stream(PROMPTS[0], GREEDY)]
    assert partial_texts[-1] == greedy_texts[0]
    assert all(
        later.startswith(earlier)
        for earlier, later in zip(partial_texts, partial_texts[1:], strict=False)
    )
    assert len(partial_texts) > 10


def test_closing_a_stream_aborts_its_request(llm, greedy_texts):
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(3):
        next(stream)
    stream.close()
    assert not llm.engine.busy
    assert llm.engine.tables[0].used() == 0
    assert llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].text == greedy_texts[1]


def test_interleaved_streams_end_with_the_full_text(llm, greedy_texts):
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
    outputs = {}
    while len(outputs) < 3 or any(not output.finished for output in outputs.values()):
        for index, stream in enumerate(streams):
            outputs[index] = next(stream, outputs.get(index))
    assert [outputs[index].outputs[0].text for index in range(3)] == greedy_texts[:3]


def test_too_many_bad_words_are_refused(llm):
    words = [f"unheard of words number {index}" for index in range(40)]
    with pytest.raises(RequestError, match="bad_words"):
        llm.generate(PROMPTS[0], SamplingParams(bad_words=words))


def test_stop_string_matches_an_incomplete_character(llm):
    """An incomplete character becomes U+FFFD at the end of the text, and may be a stop string."""
    first_byte = llm.get_tokenizer().encode("é", add_special_tokens=False)[0]
    params = SamplingParams(
        temperature=0, max_tokens=1, allowed_token_ids=[first_byte], stop="\ufffd"
    )
    answer = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", "\ufffd")


def test_failed_engine_thread_aborts_all_requests(monkeypatch):
    llm = AsyncLLM(**STEP_SIZES)

    async def scenario():
        def explode():
            raise RuntimeError("injected")

        monkeypatch.setattr(llm.engine.scheduler, "schedule", explode)
        outputs = await asyncio.wait_for(collect_outputs(llm, PROMPTS[0], GREEDY), 30)
        assert outputs[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(RequestError, match="closed"):
            await collect_outputs(llm, PROMPTS[0], GREEDY)

    monkeypatch.setattr(threading, "excepthook", lambda details: None)
    asyncio.run(scenario())


def test_stop_strings_truncate_the_text(llm, greedy_texts):
    text = greedy_texts[0]
    stop = text[10:14]
    expected = text[: text.index(stop)]
    (final_output,) = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop=stop)
    )
    assert (
        final_output.outputs[0].text,
        final_output.outputs[0].finish_reason,
        final_output.outputs[0].stop_reason,
    ) == (
        expected,
        "stop",
        stop,
    )
    params = SamplingParams(
        temperature=0, max_tokens=24, stop=["never there", stop], include_stop_str_in_output=True
    )
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].text == expected + stop
    for output in llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop=stop)):
        assert stop[0] not in output.outputs[0].text[len(expected) :], (
            "the beginning of a stop string was streamed"
        )


def test_bad_words_are_never_generated(llm, greedy_texts):
    word = greedy_texts[0].split()[2].strip(",.")
    params = SamplingParams(temperature=0, max_tokens=24, bad_words=[word])
    answer = llm.generate(PROMPTS[0], params)[0].outputs[0].text
    assert word in greedy_texts[0].split()[2]
    assert word not in answer.split()


def test_cumulative_logprob_is_the_sum_of_logprobs(llm):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[0], params)
    answer = output.outputs[0]
    assert answer.cumulative_logprob == pytest.approx(
        sum(
            entry[token].logprob
            for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)
        )
    )
    assert all(len(entry) == 3 for entry in answer.logprobs)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_skip_tokenizer_init_takes_and_returns_token_ids(llm):
    llm_without_tokenizer = LLM(skip_tokenizer_init=True, **STEP_SIZES)
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    answer = llm_without_tokenizer.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs[0]
    assert answer.token_ids[:8] == llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids[:8]
    assert answer.text == ""
    for call in (
        lambda: llm_without_tokenizer.generate("text", GREEDY),
        llm_without_tokenizer.get_tokenizer,
    ):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            call()


@pytest.mark.parametrize(
    ("prompt", "message"),
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
def test_invalid_prompt_error_is_one_line_and_the_engine_continues(
    llm, greedy_texts, prompt, message
):
    with pytest.raises(RequestError, match=message) as error:
        llm.generate([PROMPTS[0], prompt, PROMPTS[1]], GREEDY)
    assert "\n" not in str(error.value)
    assert not llm.engine.busy
    assert [o.outputs[0].text for o in llm.generate(PROMPTS[:2], GREEDY)] == greedy_texts[:2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no/such/folder/here"}, "no/such/folder/here"),
        ({"dtype": "int3"}, "int3"),
        ({"max_model_len": 10**6}, "at most"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"kv_cache_memory_bytes": 1000}, "--kv-cache-memory-bytes"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching"),
        ({"max_queued_requests": 0}, "max_queued_requests"),
        ({"max_logprobs": -2}, "max_logprobs"),
    ],
)
def test_invalid_option_error_is_one_line(options, message):
    with pytest.raises(ModelError, match=message) as error:
        LLM(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_engine_options_are_documented_keyword_arguments(kind):
    """The signature has the fields of EngineOptions and those for loading, all with a docstring."""
    parameters = inspect.signature(kind).parameters
    options = {field.name: field for field in fields(EngineOptions)}
    assert set(parameters) == {*options, "progress", "engine"}
    for name, parameter in parameters.items():
        assert parameter.default is (options[name].default if name in options else None)
        assert parameter.kind is (
            parameter.POSITIONAL_OR_KEYWORD if name == "model" else parameter.KEYWORD_ONLY
        )
    lines = [line.partition(": ") for line in inspect.getdoc(kind.__init__).splitlines()[2:]]
    assert [name for name, *_ in lines] == list(parameters) and all(text for *_, text in lines)


def test_unknown_option_error_suggests_names():
    with pytest.raises(TypeError, match="bananas'; the options are model, "):
        LLM(bananas=3)
    with pytest.raises(TypeError, match="max_modellen'; did you mean 'max_model_len'"):
        LLM(max_modellen=3)
    with pytest.raises(TypeError, match="n_ctx'; here it is 'max_model_len'"):
        LLM(n_ctx=512)


def test_unwritable_cache_dir_disables_the_compile_cache(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache_dir = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        build.use_compile_cache()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", cache_dir)
    (message,) = caplog.messages
    assert message.endswith(
        "quire/jax cannot be made: Not a directory; XDG_CACHE_HOME names another place"
    )


def test_engine_is_usable_after_keyboard_interrupt(llm, greedy_texts, monkeypatch):
    step = llm.engine.step

    def interrupt():
        monkeypatch.setattr(llm.engine, "step", step)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert not llm.engine.busy
    assert [o.outputs[0].text for o in llm.generate(PROMPTS, GREEDY)] == greedy_texts


async def collect_outputs(llm: AsyncLLM, prompt, params, **options) -> list:
    return [output async for output in llm.generate(prompt, params, **options)]


ENDING_SCRIPT = """
import asyncio, sys
from quire import LLM, AsyncLLM, SamplingParams
options = dict(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=256, kv_cache_memory_bytes=1 << 24)
options |= dict(kv_cache_disk=sys.argv[2], kv_cache_host_bytes=PAGE)
story = "Once upon a time there was a girl who had a red ball and a dog. " * 2
if sys.argv[1] == "LLM":
    llm = LLM(**options)
    print(llm.generate(story, SamplingParams(max_tokens=2))[0].num_cached_tokens)
else:
    async def main():
        async for output in llm.generate(story * 2, SamplingParams(max_tokens=2)):
            pass
        print(output.num_cached_tokens)
    llm = AsyncLLM(**options)
    asyncio.run(main())
"""


@pytest.mark.slow
def test_pages_are_written_to_disk_at_process_exit(llm, tmp_path):
    """The script does not call `close()`.

    The host cache has room for one page only, so that writing all pages to disk takes long.
    """
    script = ENDING_SCRIPT.replace(
        "PAGE", str(max(whole_page_bytes(llm.engine.config, group, 16, None) for group in (0, 1)))
    )
    num_pages = []
    for kind in ("LLM", "AsyncLLM"):
        completed = subprocess.run(
            [sys.executable, "-c", script, kind, tmp_path], capture_output=True, text=True
        )
        assert (completed.returncode, completed.stderr) == (0, "")
        # the second script reuses the first one's pages
        assert (int(completed.stdout) > 0) == bool(num_pages)
        num_pages.append(len(list(tmp_path.glob("*.page"))))
    assert 0 < num_pages[0] < num_pages[1]


def test_garbage_collected_llm_closes_its_engine(tmp_path):
    llm = LLM(**STEP_SIZES, kv_cache_disk=str(tmp_path))
    engine = llm.engine
    llm.generate("Once upon a time there was a girl who had a red ball and a dog. " * 2, GREEDY)
    second_llm = LLM(engine=engine)
    del llm
    assert engine.lifecycle.is_closed and list(tmp_path.glob("*.page"))
    del second_llm


def test_async_streams_share_the_engine(greedy_texts):
    llm = AsyncLLM(**STEP_SIZES)
    assert error_in_fork(lambda: asyncio.run(collect_outputs(llm, PROMPTS[0], GREEDY))).startswith(
        "NotServing: engine: belongs"
    )

    async def check_output_kinds():
        outputs = {}
        for kind in RequestOutputKind:
            params = SamplingParams(temperature=0, max_tokens=24, output_kind=kind)
            outputs[kind] = await collect_outputs(llm, PROMPTS[0], params, priority=1)
        assert len(outputs[RequestOutputKind.FINAL_ONLY]) == 1
        assert outputs[RequestOutputKind.FINAL_ONLY][0].outputs[0].text == greedy_texts[0]
        assert outputs[RequestOutputKind.CUMULATIVE][-1].outputs[0].text == greedy_texts[0]
        deltas = [answer for delta in outputs[RequestOutputKind.DELTA] for answer in delta.outputs]
        assert "".join(delta.text for delta in deltas) == greedy_texts[0] and len(deltas) > 1

    asyncio.run(check_output_kinds())

    async def check_concurrent_requests():
        results = await asyncio.gather(
            *(collect_outputs(llm, prompt, GREEDY) for prompt in PROMPTS * 5)
        )
        assert [outputs[-1].outputs[0].text for outputs in results] == greedy_texts * 5
        assert all(outputs[-1].finished and not outputs[0].finished for outputs in results)

        with pytest.raises(RequestError, match="empty"):
            await collect_outputs(llm, "", GREEDY)
        with pytest.raises(RequestError, match="at most"):
            await collect_outputs(llm, [1] * 5000, GREEDY)

        long_params = SamplingParams(max_tokens=900, ignore_eos=True)
        async for _ in llm.generate(PROMPTS[0], long_params):
            break  # the client stops reading
        task = asyncio.create_task(collect_outputs(llm, PROMPTS[0], long_params))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        aborted = asyncio.create_task(
            collect_outputs(llm, PROMPTS[0], long_params, request_id="mine")
        )
        while "mine" not in llm.thread.outbox.listeners:
            await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="mine"):
            await collect_outputs(llm, PROMPTS[0], GREEDY, request_id="mine")
        await llm.abort("mine")
        assert (await aborted)[-1].outputs[0].finish_reason == "abort"

        outputs = await collect_outputs(llm, PROMPTS[1], GREEDY)
        assert outputs[-1].outputs[0].text == greedy_texts[1]
        for _ in range(200):
            if not llm.engine.busy:
                break
            await asyncio.sleep(0.02)
        assert llm.engine.tables[0].used() == 0
        assert not llm.engine.requests
        assert not llm.thread.outbox.listeners

    asyncio.run(check_concurrent_requests())
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        asyncio.run(collect_outputs(llm, PROMPTS[0], GREEDY))
