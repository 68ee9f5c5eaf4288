"""The Python faces on the bundled model: prompts of every kind, streams, stops, errors, threads and
asyncio.
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
from quire.serving.api.params import Terms
from quire.serving.api.prompts import PromptTerms
from quire.serving.engine import engine
from quire.serving.engine.cache_size import whole_page_bytes
from quire.serving.engine.turns import Turns
from quire.serving.http import prompting
from quire.serving.http.settings import Formats
from quire.serving.protocol import chat

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
    assert all(
        output.finished and output.outputs[0].finish_reason in ("stop", "length")
        for output in outputs
    )


def test_prompts_of_every_kind_are_the_same_prompt(llm, texts):
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
        assert output.outputs[0].text == texts[0]
        assert list(output.prompt_token_ids) == ids


def test_terms_ride_with_a_prompt(llm, texts):
    story = "Once upon a time there was a girl who had a red ball and a dog. " * 4
    llm.reset_prefix_cache()
    cached = [
        llm.generate(
            {"prompt": story, "cache_salt": salt, "priority": -2, "timeout": 60.0}, GREEDY
        )[0]
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
    for output in llm.generate(
        PROMPTS, SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=2)
    ):
        for answer in output.outputs:
            assert answer.text == llm.get_tokenizer().decode(answer.token_ids)


def test_chat_answers_and_takes_many_conversations(llm):
    ask = [[{"role": "user", "content": f"Repeat: {word}"}] for word in ("a b c", "k l m")]
    both = [output.outputs[0].text for output in llm.chat(ask, GREEDY)]
    assert both == [llm.chat(one, GREEDY)[0].outputs[0].text for one in ask]
    assert both == ["a b c", "k l m"]


ASKED = [{"role": "user", "content": "Repeat: a b c"}]
TOLD = (
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
            "messages": [*ASKED, {"role": "assistant", "content": "a b"}],
            "continue_final_message": True,
        },
        {"add_generation_prompt": False},
        {"chat_template": TOLD, "chat_template_kwargs": {"mood": "gay"}},
        {"chat_template": TOLD, "tools": [TOOL]},
        {"messages": [{"role": "developer", "content": "Be brief."}, *ASKED]},
    ],
)
def test_a_conversation_is_the_same_prompt_as_over_http(llm, fields):
    body = {"messages": ASKED, **fields}
    if "tools" in body:
        body["tool_choice"] = "required"
    ((ask,), *_) = vars(prompting.chat(llm.engine, chat.parse(body), Formats())).values()
    given = {"messages": ASKED, **fields}
    (output,) = llm.chat(**given, sampling_params=SamplingParams(max_tokens=1))
    assert (output.prompt, list(output.prompt_token_ids)) == (ask.text, ask.tokens)
    assert "[{" not in output.prompt


@pytest.mark.parametrize(
    ("fields", "words"),
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
            "must be 'text'",
        ),
    ],
)
def test_what_a_conversation_cannot_have_is_refused(llm, fields, words):
    with pytest.raises(RequestError, match=words):
        llm.chat(**{"messages": ASKED, **fields})
    with pytest.raises(TypeError, match="enable_thinking"):
        llm.chat(ASKED, enable_thinking=True)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="enable_thinking: unknown field"):
        llm.chat_prompt(ASKED, enable_thinking=True)


def test_fields_of_messages_that_are_ignored_are_named(llm):
    plain = llm.chat_prompt([{"role": "user", "content": "hello"}])
    with pytest.warns(UserWarning, match=r"messages\[\].audio: unknown here, and ignored"):
        assert llm.chat_prompt([{"role": "user", "content": "hello", "audio": 1}]) == plain


def test_priorities_are_of_all_prompts_or_one_each(llm, texts, monkeypatch):
    given = []
    add = llm.engine.add
    monkeypatch.setattr(
        llm.engine, "add", lambda *args: given.append(args[4].priority) or add(*args)
    )
    assert [
        o.outputs[0].text for o in llm.generate(PROMPTS, GREEDY, priority=[3, -1, 0, 2])
    ] == texts
    llm.generate(PROMPTS[:2], GREEDY, priority=5)
    llm.generate({"prompt": PROMPTS[0], "timeout": 60.0}, GREEDY, priority=1)
    assert given == [3, -1, 0, 2, 5, 5, 1]
    for wrong in ([1], "high", 10**6, True):
        with pytest.raises(RequestError, match="priority"):
            llm.generate(PROMPTS[:2], GREEDY, priority=wrong)
    with pytest.raises(RequestError, match="leave one of them out"):
        llm.generate({"prompt": "x", "priority": 1}, GREEDY, priority=1)
    assert not llm.engine.observers[1:]  # calls that were refused leave nothing behind


def test_a_beam_search_of_few_prompts_at_a_time_is_the_same(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    whole = llm.beam_search(PROMPTS[:3], params)
    assert llm.beam_search(PROMPTS[:3], params, concurrency_limit=2) == whole
    assert llm.beam_search([], params) == []
    with pytest.raises(RequestError, match="concurrency_limit"):
        llm.beam_search(PROMPTS[:3], params, concurrency_limit=0)


def test_prompt_dicts_have_the_terms():
    names = {field.name for field in fields(Terms)} - {"adapter"}  # which `lora_request` names
    assert set(PromptTerms.__annotations__) == names
    assert set(TextPrompt.__annotations__) == {"prompt", *names}
    assert set(TokensPrompt.__annotations__) == {"prompt", "prompt_token_ids", *names}


def test_structured_outputs_by_their_class(llm):
    params = SamplingParams(
        temperature=0, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].text in ("yes", "no")


def test_flat_logprobs_say_the_same(llm):
    plain, flat = (
        llm.generate(
            PROMPTS[0],
            SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=1, **more),
        )[0]
        for more in ({}, {"flat_logprobs": True})
    )
    for one, other in (
        (plain.outputs[0].logprobs, flat.outputs[0].logprobs),
        ([{}, *plain.prompt_logprobs[1:]], flat.prompt_logprobs),
    ):
        assert (
            isinstance(other, FlatLogprobs) and list(other) == one and list(other[1:3]) == one[1:3]
        )
        assert (
            len(other.token_ids)
            == sum(map(len, one))
            == len(other.ranks)
            == len(other.decoded_tokens)
        )


def test_results_have_what_scripts_for_vllm_read(llm):
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


def test_the_whole_vocabulary_has_log_probabilities(llm):
    """They are one distribution, and begin with those that every engine lists."""
    whole = LLM(**SIZES, max_logprobs=-1)
    vocabulary = whole.engine.config.vocab_size
    params = SamplingParams(
        temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1, flat_logprobs=True
    )
    (output,) = whole.generate(PROMPTS[0], params)
    listed = SamplingParams(temperature=0, max_tokens=2, logprobs=20, prompt_logprobs=20)
    (best,) = llm.generate(PROMPTS[0], listed)
    for all_of_them, likeliest in (
        (output.outputs[0].logprobs, best.outputs[0].logprobs),
        (output.prompt_logprobs[1:], best.prompt_logprobs[1:]),
    ):
        for entries, first in zip(all_of_them, likeliest, strict=True):
            assert sorted(entries) == list(range(vocabulary))
            assert math.fsum(
                math.exp(entry.logprob) for entry in entries.values()
            ) == pytest.approx(1, abs=1e-5)
            assert {token: (entry.logprob, entry.rank) for token, entry in first.items()} == {
                token: (pytest.approx(entries[token].logprob, abs=1e-4), entries[token].rank)
                for token in first
            }
    with pytest.raises(
        RequestError, match=rf"^logprobs: .* max_logprobs, 20, got -1 \(-1: the {vocabulary} of"
    ):
        llm.generate(PROMPTS[0], SamplingParams(logprobs=-1))
    with pytest.raises(RequestError, match="^prompt_logprobs: .* max_logprobs, 20, got 21"):
        llm.generate(PROMPTS[0], SamplingParams(prompt_logprobs=21))


def test_chosen_tokens_have_log_probabilities(llm):
    """Those that are likely have the bits that they have among the likeliest; all are the same in
    company.
    """
    # those of other engines in this process count too
    compiled = llm.engine.runner.compiles.recompiles
    listed = SamplingParams(temperature=0, max_tokens=6, logprobs=20, ignore_eos=True)
    (best,) = llm.generate(PROMPTS[0], listed)
    wanted = [*list(best.outputs[0].logprobs[2])[:5], 7, 3, 7]
    params = replace(listed, logprobs=None, logprob_token_ids=wanted)
    (alone,) = llm.generate(PROMPTS[0], params)
    assert alone.outputs[0].token_ids == best.outputs[0].token_ids
    seen = 0
    for token, entry, likeliest in zip(
        best.outputs[0].token_ids, alone.outputs[0].logprobs, best.outputs[0].logprobs, strict=True
    ):
        assert (
            list(entry) == list(dict.fromkeys([token, *wanted]))
            and entry[token] == likeliest[token]
        )
        both = entry.keys() & likeliest.keys()
        assert {t: entry[t].logprob for t in both} == {t: likeliest[t].logprob for t in both}
        seen += len(both)
    assert seen >= 5 + 5
    others = [
        listed,
        replace(params, logprob_token_ids=[9], logprobs=3),
        replace(params, logprob_token_ids=[]),
    ]
    mixed, few, one, none = llm.generate([PROMPTS[0]] * 4, [params, *others])
    for entry, own in zip(mixed.outputs[0].logprobs, alone.outputs[0].logprobs, strict=True):
        assert {t: each.logprob for t, each in entry.items()} == {
            t: pytest.approx(each.logprob, abs=1e-4) for t, each in own.items()
        }
    assert all(len(entry) in (20, 21) for entry in few.outputs[0].logprobs)
    assert all(
        entry.keys() == {t, 9}
        for t, entry in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)
    )
    assert none.outputs[0].logprobs is None
    (flat,) = llm.generate(PROMPTS[0], replace(params, flat_logprobs=True))
    assert (
        isinstance(flat.outputs[0].logprobs, FlatLogprobs)
        and list(flat.outputs[0].logprobs) == alone.outputs[0].logprobs
    )
    with pytest.raises(RequestError, match="^logprob_token_ids: has the token id 999999"):
        llm.generate(PROMPTS[0], replace(params, logprob_token_ids=[999999]))
    assert llm.engine.runner.compiles.recompiles == compiled


def test_the_vocabulary_is_known_by_its_tokens(llm):
    tokenizer = llm.get_tokenizer()
    vocabulary = tokenizer.get_vocab()
    assert max(vocabulary.values()) + 1 == tokenizer.vocab_size
    assert all(tokenizer.token_bytes(id) for id in list(vocabulary.values())[:50])


def test_what_each_result_of_a_stream_holds(llm, texts, monkeypatch):
    monkeypatch.setattr(engine, "STREAMING_LATENCY", 0.0)  # a token at a time

    def stream(kind):
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, output_kind=kind)
        return list(llm.stream(PROMPTS[0], params))

    whole = stream(RequestOutputKind.CUMULATIVE)
    parts = stream(RequestOutputKind.DELTA)
    (last,) = stream(RequestOutputKind.FINAL_ONLY)
    end = whole[-1].outputs[0]
    assert last.finished and last.outputs[0] == end and end.text == texts[0]
    answers = [answer for part in parts for answer in part.outputs]
    assert "".join(answer.text for answer in answers) == end.text
    assert [token for answer in answers for token in answer.token_ids] == end.token_ids
    assert [entry for answer in answers for entry in answer.logprobs] == end.logprobs
    assert answers[-1].cumulative_logprob == end.cumulative_logprob and len(parts) > 5
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]


def test_threads_share_the_engine(llm, texts):
    """Everybody gets his own answer, of a batch, a stream, a conversation or a search."""
    story = BeamSearchParams(beam_width=2, max_tokens=4)
    jobs = {
        lambda: [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]: texts,
        lambda: [*llm.stream(PROMPTS[1], GREEDY)][-1].outputs[0].text: texts[1],
        lambda: llm.chat(ASKED, GREEDY)[0].outputs[0].text: "a b c",
        lambda: llm.beam_search(PROMPTS[0], story): llm.beam_search(PROMPTS[0], story),
        lambda: llm.reset_prefix_cache(): True,
    }
    begin = threading.Barrier(2 * len(jobs))

    def act(job):
        begin.wait()
        return [job() for _ in range(3)]

    with ThreadPoolExecutor(2 * len(jobs)) as pool:
        found = [(pool.submit(act, job), expected) for job, expected in [*jobs.items()] * 2]
        assert [future.result() for future, _ in found] == [[expected] * 3 for _, expected in found]
    assert not llm.engine.busy and llm.engine.tables[0].used() == 0 and not llm.engine.observers[1:]


def test_turns_come_in_the_order_in_which_they_are_asked_for():
    turns = Turns()
    order = []

    def take(number):
        with turns:
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
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


def test_who_is_interrupted_while_he_waits_leaves_the_row():
    turns = Turns()
    begun = threading.get_ident()
    # a shell's background jobs ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        while not turns.waiting:
            time.sleep(0.001)
        signal.pthread_kill(begun, signal.SIGINT)

    with turns:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt), turns:
            pass
        thread.join()
        assert turns.taken and not turns.waiting
    assert not turns.taken
    signal.signal(signal.SIGINT, before)


def test_a_sleeping_engine_refuses_and_does_not_hang(llm, texts):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.sleep()
    for act in (lambda: next(stream), lambda: llm.generate(PROMPTS, GREEDY)):
        with pytest.raises(NotServing, match="wake_up"):
            act()
    llm.wake_up()
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text == texts[0]


def in_a_fork(act) -> str:
    """What it raises in a child process."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of forks
        child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            act()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


def test_a_fork_is_refused_in_one_line(llm, texts, tmp_path):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    acts = (
        lambda: llm.generate(PROMPTS[0]),
        lambda: llm.chat(ASKED),
        lambda: next(stream),
        lambda: llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=2)),
        lambda: llm.embed(PROMPTS[0]),
        lambda: llm.sleep(),
    )
    for act in acts:
        said = in_a_fork(act)
        assert said.startswith(
            f"NotServing: engine: belongs to process {os.getpid()}, and process "
        )
        assert "spawn" in said and "\n" not in said
    assert in_a_fork(llm.close) == ""  # the end of a `with` block is no error
    assert [*stream][-1].outputs[0].text == texts[0]


def test_a_stream_grows_to_the_whole_text(llm, texts, monkeypatch):
    monkeypatch.setattr(engine, "STREAMING_LATENCY", 0.0)  # a token at a time
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
    assert llm.engine.tables[0].used() == 0
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
    assert (out.outputs[0].text, out.outputs[0].finish_reason, out.outputs[0].stop_reason) == (
        cut,
        "stop",
        stop,
    )
    params = SamplingParams(
        temperature=0, max_tokens=24, stop=["never there", stop], include_stop_str_in_output=True
    )
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].text == cut + stop
    for output in llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop=stop)):
        assert stop[0] not in output.outputs[0].text[len(cut) :], (
            "the head of a stop string was shown"
        )


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
        sum(
            entry[token].logprob
            for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)
        )
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
        ({"max_logprobs": -2}, "max_logprobs"),
    ],
)
def test_a_bad_option_is_one_clear_line(options, words):
    with pytest.raises(ModelError, match=words) as error:
        LLM(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_the_options_are_keyword_arguments(kind):
    """Those of EngineOptions, and what loading needs beside them; an editor and `help()` show
    them.
    """
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


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="bananas'; the options are model, "):
        LLM(bananas=3)
    with pytest.raises(TypeError, match="max_modellen'; did you mean 'max_model_len'"):
        LLM(max_modellen=3)
    with pytest.raises(TypeError, match="n_ctx'; here it is 'max_model_len'"):
        LLM(n_ctx=512)


def test_without_a_place_for_compiled_steps_none_are_kept(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        build.use_compile_cache()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    (said,) = caplog.messages
    assert said.endswith(
        "quire/jax cannot be made: Not a directory; XDG_CACHE_HOME names another place"
    )


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


ENDS = """
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
def test_pages_are_on_disk_when_the_process_ends(llm, tmp_path):
    """Nobody has called close().

    The host has room for one page, so that the way to the disk is a long one.
    """
    program = ENDS.replace(
        "PAGE", str(max(whole_page_bytes(llm.engine.config, group, 16, None) for group in (0, 1)))
    )
    pages = []
    for kind in ("LLM", "AsyncLLM"):
        run = subprocess.run(
            [sys.executable, "-c", program, kind, tmp_path], capture_output=True, text=True
        )
        assert (run.returncode, run.stderr) == (0, "")
        assert (int(run.stdout) > 0) == bool(pages)  # the second has found what the first one left
        pages.append(len(list(tmp_path.glob("*.page"))))
    assert 0 < pages[0] < pages[1]


def test_an_engine_that_is_collected_is_closed(tmp_path):
    llm = LLM(**SIZES, kv_cache_disk=str(tmp_path))
    engine = llm.engine
    llm.generate("Once upon a time there was a girl who had a red ball and a dog. " * 2, GREEDY)
    kept = LLM(engine=engine)
    del llm
    assert engine.lifecycle.is_closed and list(tmp_path.glob("*.page"))
    del kept


def test_async_streams_share_the_engine(texts):
    llm = AsyncLLM(**SIZES)
    assert in_a_fork(lambda: asyncio.run(collect(llm, PROMPTS[0], GREEDY))).startswith(
        "NotServing: engine: belongs"
    )

    async def kinds():
        found = {}
        for kind in RequestOutputKind:
            params = SamplingParams(temperature=0, max_tokens=24, output_kind=kind)
            found[kind] = await collect(llm, PROMPTS[0], params, priority=1)
        assert len(found[RequestOutputKind.FINAL_ONLY]) == 1
        assert found[RequestOutputKind.FINAL_ONLY][0].outputs[0].text == texts[0]
        assert found[RequestOutputKind.CUMULATIVE][-1].outputs[0].text == texts[0]
        parts = [answer for part in found[RequestOutputKind.DELTA] for answer in part.outputs]
        assert "".join(part.text for part in parts) == texts[0] and len(parts) > 1

    asyncio.run(kinds())

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
        assert llm.engine.tables[0].used() == 0
        assert not llm.engine.requests
        assert not llm.thread.outbox.listeners

    asyncio.run(scenario())
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        asyncio.run(collect(llm, PROMPTS[0], GREEDY))
