"""Answers that must have a form have it, whatever the model would rather write, and nobody else
notices.
"""

import json
import os
import random
import re
import socket
import threading
import time
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.model.checkpoint import hub, loader
from quire.model.text.tokenizer import Tokenizer
from quire.serving.api.errors import RequestError
from quire.serving.cache.page_table import PageTable
from quire.serving.device.step_shape import StepShape
from quire.serving.engine import runner as runner_module
from quire.serving.engine.engine import Engine
from quire.serving.engine.runner import Runner
from quire.serving.request import grammar
from quire.serving.request.grammar import MAX_CACHED, Grammars
from quire.tests.support import staggered_requests, tiny
from quire.tests.support.cases import cases
from quire.tests.support.shapes import SCHEMAS, hostile, valid
from quire.tests.support.tokenizer_zoo import ZOO, save

PROMPTS = ["Once upon a time", "Tom went to the", "{", "name:"]
REGEXES = [
    "[a-z]{3,8} (cat|dog)",
    " [a-z]+!",
    "(é|日本|🙂){2,5}",
    "[0-9]{4}-[0-9]{2}",
    ("(yes|no)( or (yes|no)){0,3}"),
    "  x{2,4}",
    "[^a-zA-Z0-9]{1,3}",
    "[a-z]+@[a-z]+\\.(com|org)",
    "(a|b)*abb",
]
# their texts are bytes of their tokens
SPOKEN = ("byte_level", "byte_fallback", "byte_fallback_unstripped", "unigram")


def form(**fields) -> SamplingParams:
    settings = {"temperature": 1.0, "max_tokens": 100}
    return SamplingParams(
        **{
            **settings,
            **{k: v for k, v in fields.items() if k in SamplingParams.__dataclass_fields__},
        }
    )


def shaped(shape: str, value, **fields) -> SamplingParams:
    return form(structured_outputs={shape: value}, **fields)


@pytest.fixture(scope="module")
def llm():
    return LLM(max_num_seqs=16, max_num_batched_tokens=64)


@pytest.fixture(scope="module", params=SPOKEN)
def random_llm(request, tmp_path_factory):
    """A model of random weights, which would write anything, with a tokenizer of each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    core = ZOO[request.param]()
    tiny.write(
        folder,
        {**tiny.LLAMA, "vocab_size": core.get_vocab_size() + 7, "max_position_embeddings": 256},
    )
    return LLM(str(save(folder, core)), max_num_seqs=4, max_num_batched_tokens=64)


def answers(llm: LLM, prompts: list, params: list[SamplingParams]) -> list:
    """(text, finish reason) of every answer, by request; nothing is compiled meanwhile."""
    before = llm.engine.runner.compiles.recompiles
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.runner.compiles.recompiles == before
    llm.engine.scheduler.check()
    return [
        [(answer.text, answer.finish_reason) for answer in output.outputs] for output in outputs
    ]


# What comes out


@settings(
    max_examples=cases(12, least=3), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(SCHEMAS, min_size=12, max_size=12), st.integers(0, 2**31), st.booleans())
@pytest.mark.slow
def test_json_is_what_its_schema_says(llm, schemas, seed, tight):
    params = [
        form(
            structured_outputs={"json": schema, "disable_any_whitespace": tight}, seed=seed + i, n=2
        )
        for i, schema in enumerate(schemas)
    ]
    ended = 0
    for schema, found in zip(schemas, answers(llm, PROMPTS * 3, params), strict=True):
        for text, reason in found:
            assert reason in ("stop", "length")
            ended += reason == "stop"
            assert reason == "length" or valid(json.loads(text), schema), (schema, text)
            assert not tight or "\n" not in text
    assert ended  # spaces may have no end


def test_the_validator_of_these_tests_refuses():
    for schema, wrong in [
        ({"type": "integer"}, True),
        ({"type": "integer"}, 1.5),
        ({"enum": [1]}, True),
        ({"maxLength": 2}, "abc"),
        (
            {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False},
            {"b": 1},
        ),
        ({"required": ["a"]}, {}),
        ({"items": {"type": "null"}}, [0]),
        ({"anyOf": [{"const": 1}]}, 2),
    ]:
        assert not valid(wrong, schema)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_a_regex_is_matched(random_llm, seed):
    tokenizer = random_llm.get_tokenizer()
    spells = {bytes([byte]) for byte in b"-@~"} <= {
        tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)
    }
    found = 0
    for regex in REGEXES:
        try:
            ((one, other, third),) = answers(
                random_llm, ["fox"], [shaped("regex", regex, seed=seed, n=3)]
            )
        except RequestError as error:
            assert "no text" in error.message and not spells  # nor could a person write it
            continue
        for text, reason in (one, other, third):
            found += reason == "stop"
            assert (
                reason == "length"
                or re.fullmatch(regex, text)
                or (reason == "error" and not spells)
            ), (regex, text)
    assert found > 5


def test_json_from_random_models(random_llm):
    """A string ends once the model happens to close it, so the sizes are bounded."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "is": {"enum": ["é", "<s>", "</s>", None]},
        },
        "required": ["is"],
        "additionalProperties": False,
    }
    params = form(structured_outputs={"json": schema, "disable_any_whitespace": True}, n=8)
    if "{" not in "".join(map(random_llm.get_tokenizer().token_text, range(200))):
        with pytest.raises(RequestError, match="no text"):
            answers(random_llm, ["x"], [params])
        return
    (found,) = answers(random_llm, ["x"], [params])
    assert all(reason == "stop" and valid(json.loads(text), schema) for text, reason in found)


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
        min_size=1,
        max_size=6,
    )
)
@settings(
    max_examples=cases(20, least=5), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_choice_is_one_of_them(llm, choice):
    (found,) = answers(llm, ["The"], [shaped("choice", choice, n=4)])
    assert all(text in choice and reason == "stop" for text, reason in found)


def test_special_tokens_are_never_text(llm, random_llm):
    for model, names in ((llm, ["<|end|>", "<|user|>"]), (random_llm, ["<s>", "</s>"])):
        tokenizer = model.get_tokenizer()
        assert {tokenizer._core.token_to_id(name) for name in names} <= tokenizer.special_ids
        try:
            outputs = model.generate(
                "x", shaped("choice", names, n=4, skip_special_tokens=False), use_tqdm=False
            )
        except RequestError as error:
            assert "no text" in error.message
            continue
        for answer in outputs[0].outputs:
            assert answer.text in names and tokenizer.special_ids.isdisjoint(answer.token_ids)


def test_a_grammar_is_followed(llm):
    sums = 'start: sum "=" NUMBER\nsum: NUMBER ("+" NUMBER)+\nNUMBER: /[1-9][0-9]?/'
    (found,) = answers(llm, ["Add:"], [shaped("grammar", sums, n=4)])
    assert all(
        re.fullmatch(r"([1-9]\d?)(\+[1-9]\d?)+=[1-9]\d?", text)
        for text, reason in found
        if reason == "stop"
    )
    (found,) = answers(
        llm, ["Add:"], [shaped("grammar", 'start: <|user|> "x" <|end|>', n=2, ignore_eos=True)]
    )
    assert found == [("x", "stop")] * 2
    (found,) = answers(llm, ["Add:"], [shaped("grammar", 'root ::= "yes" | "no" # GBNF', n=4)])
    assert {text for text, reason in found} <= {"yes", "no"} and {
        reason for _, reason in found
    } == {"stop"}
    tree = r'root ::= "(" [a-z]{1,2} root* ")" | [^a-zA-Z()\x00-\x7F]'
    (found,) = answers(llm, ["Add:"], [shaped("grammar", tree, n=4, max_tokens=40)])
    for text, reason in found:
        assert reason == "length" or (
            text.count("(") == text.count(")") and re.fullmatch(r"[^a-zA-Z]|\(.*\)", text)
        )


def test_tags_in_a_text(llm):
    """Text is free up to a trigger; from there a tag is written, whose references are to its own
    definitions.
    """
    number = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"],
              "additionalProperties": False, "$defs": {"A": {"type": "integer"}}}  # fmt: skip
    words = number | {"$defs": {"A": {"enum": ["x", "y"]}}}
    ends = {"f": number, "g": words}
    tags = [
        {"begin": f"<call={name}>", "schema": schema, "end": "</call>"}
        for name, schema in ends.items()
    ]
    triggered = [
        {
            "begin": tag["begin"],
            "content": {"type": "json_schema", "json_schema": tag["schema"]},
            "end": tag["end"],
        }
        for tag in tags
    ]
    old: dict = {"structures": tags, "triggers": ["<call="]}
    new = {"format": {"type": "triggered_tags", "tags": triggered, "triggers": ["<call="]}}
    tokenizer = llm.engine.tokenizer
    grammars = llm.engine.admission.grammars
    ends_with = tokenizer.eos_token_ids

    def follows(structure, text: str) -> bool:
        (constraint,) = grammars.constraints(structure, 1)
        for token in tokenizer.encode(text, add_special_tokens=False):
            if not constraint.allowed(ends_with)[token]:
                return False
            constraint.advance(token)
        return bool(constraint.allowed(ends_with)[list(ends_with)].all())

    kept = [
        shaped("structural_tag", given).structured_outputs for given in (old, new, json.dumps(old))
    ]
    assert kept[0] == kept[1] == kept[2]
    good = 'I call <call=f>{"a": 1}</call> and <call=g>{"a": "x"}</call>.'
    assert all(follows(kept[0], text) for text in ("Just text.", good))
    for bad in (
        '<call=f>{"a": "x"}</call>',
        '<call=g>{"a": 1}</call>',
        "<call=h>",
        '<call=f>{"a": 1}',
    ):
        assert not follows(kept[0], bad)
    for change, words in (
        ({"triggers": ["<tool"]}, r"structures\[0\].begin: must begin with one of the triggers"),
        ({"structures": []}, "structures: must hold at least one tag"),
        (
            {"structures": [{"begin": "<call="}], "format": {}},
            "format.type: must be 'triggered_tags'",
        ),
        (
            {"structures": [{"begin": "<call=", "schema": 5}]},
            r"structures\[0\]: must be a JSON schema",
        ),
        ({"structures": [{"begin": "<call=", "shema": {}}]}, "did you mean 'schema'"),
    ):
        with pytest.raises(RequestError, match=words):
            shaped("structural_tag", old | change)
    stops = {"format": {**new["format"], "stop_after_first": True}}
    with pytest.raises(RequestError, match="stop_after_first: is not implemented"):
        shaped("structural_tag", stops)


def test_spaces_of_json(llm):
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "required": ["a", "b"],
    }
    schema["additionalProperties"] = False
    params = [
        form(structured_outputs={"json": json.dumps(schema), "disable_any_whitespace": True}, n=3),
        form(structured_outputs={"json_object": True, "disable_any_whitespace": True}, n=3, seed=3),
    ]
    tight, free = answers(llm, ["x"] * 2, params)
    assert {text for text, _ in tight} == {'{"a":1,"b":2}'}
    assert all(isinstance(json.loads(text), dict) for text, reason in free if reason == "stop")
    for spacing, wanted in (
        ({}, b" \n"),
        ({"whitespace_pattern": "~"}, b"~"),
        ({"whitespace_pattern": "[ ]{2}"}, b" "),
        ({"whitespace_pattern": "[ \t\r\n]+"}, b" \n\r\t"),
        ({"json": {**schema, "x-guidance": {"whitespace_flexible": True}}}, b" \n\r\t"),
        ({"json": {**schema, "x-guidance": {"whitespace_flexible": False}}}, b""),
        ({"json": {**schema, "x-guidance": {"whitespace_pattern": "~"}}}, b"~"),
    ):
        structure = SamplingParams(
            structured_outputs={"json": schema, **spacing}
        ).structured_outputs
        (constraint,) = llm.engine.admission.grammars.constraints(structure, 1)
        (opening,) = llm.get_tokenizer().encode("{", add_special_tokens=False)
        constraint.advance(opening)
        spaces = {
            llm.get_tokenizer().token_bytes(token)
            for token in np.flatnonzero(constraint.allowed(()))
        }
        assert {text for text in spaces if len(text) == 1} == {b'"'} | {
            bytes([byte]) for byte in wanted
        }


def test_spaces_of_json_have_an_end(llm):
    """A model that would rather write spaces than anything is done all the same."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"const": 1},
            "b": {"type": "array", "items": {"const": 2}, "maxItems": 2},
        },
    }
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    tokenizer = llm.get_tokenizer()
    spaces = [
        token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token).isspace()
    ]
    loves = {"logit_bias": dict.fromkeys(spaces, 100), "temperature": 0, "max_tokens": 500}
    free = {"json": schema, "whitespace_pattern": "[ \t\r\n]+"}
    ((bound, reason),), ((endless, length),) = answers(
        llm,
        ["x"] * 2,
        [form(structured_outputs=shape, **loves) for shape in ({"json": schema}, free)],
    )
    assert reason == "stop" and valid(json.loads(bound), schema) and json.loads(bound)["a"] == 1
    assert length == "length" and endless.strip() == '{"a":'
    for style in (None, 2, "\t"):  # as people and programs write it
        text = json.dumps({"a": 1, "b": [2, 2]}, indent=style)
        assert follows(llm, {"json": json.dumps(schema)}, text), text


def follows(llm: LLM, structure: dict, text: str) -> bool:
    """Whether a text, token by token, has a form and is complete."""
    (constraint,) = llm.engine.admission.grammars.constraints(structure, 1)
    tokens = llm.get_tokenizer().encode(text, add_special_tokens=False)
    return (
        "error" not in [constraint.advance(token) for token in tokens]
        and constraint.matcher.is_accepting()
    )


def test_multiples_are_exact_in_decimals(llm):
    """76.6 is 7660 times 0.01, though a division in binary leaves something over."""
    params = shaped(
        "json", {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1000}, n=16
    )
    (found,) = answers(llm, ["The price is"], [params])
    assert all(Decimal(text) % Decimal("0.01") == 0 for text, reason in found if reason == "stop")
    assert follows(llm, {"json": '{"type": "number", "multipleOf": 0.01}'}, "76.6")


# What it meets


def test_the_end_is_open_where_the_grammar_may_end(llm):
    tokenizer = llm.get_tokenizer()
    (eos,) = tokenizer.eos_token_ids
    free = shaped("regex", "(ab)+", n=8, max_tokens=30)
    outputs = llm.generate("x", free, use_tqdm=False)[0].outputs
    for answer in outputs:
        assert re.fullmatch("(ab)*a?", answer.text)
        assert (answer.finish_reason == "stop") == (answer.token_ids[-1] == eos)
    assert any(answer.finish_reason == "stop" for answer in outputs)
    endless = llm.generate("x", replace(free, ignore_eos=True), use_tqdm=False)[0].outputs
    assert all(
        answer.finish_reason == "length" and eos not in answer.token_ids for answer in endless
    )
    held = llm.generate("x", replace(free, min_tokens=12), use_tqdm=False)[0].outputs
    assert all(len(answer.token_ids) >= 12 for answer in held)
    over = llm.generate("x", shaped("regex", "ab", min_tokens=12), use_tqdm=False)[0].outputs[0]
    assert (over.text, over.finish_reason) == ("ab", "stop") and eos not in over.token_ids
    cut = llm.generate("x", replace(free, stop="ba", ignore_eos=True), use_tqdm=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("a", "stop", "ba")
    a = tokenizer.encode("a", add_special_tokens=False)[0]
    own = llm.generate("x", replace(free, stop_token_ids=[a], ignore_eos=True), use_tqdm=False)[
        0
    ].outputs
    # nothing else begins it
    assert all(answer.finish_reason == "error" and not answer.token_ids for answer in own)


def test_the_last_token_allowed_may_be_the_last(llm):
    assert answers(llm, ["x"], [shaped("choice", ["~"], max_tokens=1)]) == [[("~", "stop")]]
    assert answers(llm, ["x"], [shaped("choice", ["~~~"], max_tokens=1)])[0][0][1] == "length"


def test_biases_and_bans_count_within_the_grammar(llm):
    tokenizer = llm.get_tokenizer()
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    assert yes != no

    def texts(**fields) -> set[str]:
        (found,) = answers(llm, ["Yes or no?"], [shaped("regex", "yes|no|nay", n=8, **fields)])
        return {text if reason == "stop" else reason for text, reason in found}

    starts = [
        token
        for token in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token) in (b"n", b"no", b"na")
    ]
    assert texts(logit_bias=dict.fromkeys(starts, -100)) == {"yes"}
    assert "yes" not in texts(bad_words=["yes", "y", "ye"]) and "nay" not in texts(
        bad_words=["yes", "y", "ye", "nay"]
    )
    (letter,) = {
        token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"q"
    }
    assert texts(allowed_token_ids=[letter]) == {"error"}
    assert texts(presence_penalty=2.0, repetition_penalty=1.5) <= {"yes", "no", "nay"}


def test_log_probabilities_are_the_models_own(llm):
    """Of the logits before the grammar: what they are when the same tokens are a prompt."""
    prompt = llm.get_tokenizer().encode("Once upon a time")
    answer = llm.generate([prompt], shaped("regex", "[xyz]{6}", logprobs=1), use_tqdm=False)[
        0
    ].outputs[0]
    whole = [*prompt, *answer.token_ids]
    scores = llm.generate([whole], form(max_tokens=1, prompt_logprobs=1), use_tqdm=False)[
        0
    ].prompt_logprobs
    for place, token in enumerate(answer.token_ids):
        own = answer.logprobs[place]
        again = scores[len(prompt) + place]
        assert own[token].logprob == pytest.approx(again[token].logprob, abs=1e-4)
        assert own[token].rank == again[token].rank
    assert (
        max(
            entry[token].rank
            for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)
        )
        > 1
    )


def test_each_of_n_has_its_own_place_in_the_grammar(llm):
    (found,) = answers(llm, ["x"], [shaped("regex", "[a-z]{4}[0-9]{4}", n=16)])
    assert len({text for text, _ in found}) > 4 and all(
        re.fullmatch("[a-z]{4}[0-9]{4}", text) for text, _ in found
    )
    (found,) = answers(llm, ["x"], [shaped("regex", "[a-z]{4}", n=2, best_of=8)])
    assert len(found) == 2 and all(re.fullmatch("[a-z]{4}", text) for text, _ in found)


# Who else is there


LENGTH = 256


@pytest.fixture(scope="module")
def compiled():
    folder = hub.resolve(None)
    config = loader.read_config(folder, "float32", LENGTH)
    shape = StepShape.largest(8, 48, 16)
    weights = loader.load(folder, config)
    runner = Runner(config, weights, shape, (400,) * len(config.windows), 16, LENGTH)
    runner.warm_up()
    return runner, Tokenizer(folder)


def engine_of(compiled, num_pages: int) -> Engine:
    old, tokenizer = compiled
    runner = Runner(old.config, old.weights, old.shape, old.num_pages, 16, LENGTH)
    runner.compiled, runner.page_copier.programs = old.compiled, old.page_copier.programs
    return Engine(
        runner,
        tokenizer,
        [PageTable((num_pages,) * len(old.num_pages), 16, old.config.windows)],
        LENGTH,
    )


def serve(
    engine: Engine, requests: dict[str, tuple], arrivals: dict[str, int]
) -> tuple[dict[str, tuple], int]:
    """The bits of every answer, and how often somebody gave way."""
    outputs = {
        name: request.output()
        for name, request in staggered_requests.serve(engine, requests, arrivals).items()
    }
    found = {
        name: [
            (
                list(a.token_ids),
                a.finish_reason,
                [sorted((t, e.logprob) for t, e in entry.items()) for entry in a.logprobs or ()],
            )
            for a in output.outputs
        ]
        for name, output in outputs.items()
    }
    return found, sum(output.metrics.num_preemptions for output in outputs.values())


@pytest.mark.slow
def test_company_changes_no_bit(compiled):
    """Constrained and free ones, alone, together, and where pages are short: the same tokens and
    the same scores.
    """
    rng = random.Random(5)
    gave_way = 0
    recompiled = compiled[0].compiles.recompiles
    forms = [
        None,
        None,
        {"regex": "[a-z ]{20,60}"},
        {"json_object": True},
        {"choice": ["yes", "no"]},
    ]
    for _ in range(6):
        requests = {}
        arrivals = {}
        for index in range(rng.randint(3, 8)):
            params = SamplingParams(
                temperature=rng.choice((0, 1.0)),
                seed=index,
                n=rng.choice((1, 1, 2)),
                max_tokens=rng.randint(1, 60),
                logprobs=2,
                repetition_penalty=rng.choice((1, 1.2)),
                min_tokens=rng.choice((0, 1)),
                logit_bias=rng.choice((None, {100: 2.0})),
                structured_outputs=rng.choice(forms),
            )
            prompt = [rng.randrange(6, 1280) for _ in range(rng.choice((1, 16, 17, 90)))]
            requests[str(index)], arrivals[str(index)] = (prompt, params), rng.randint(0, 12)
        alone = engine_of(compiled, 400)
        expected = {
            name: serve(alone, {name: own}, {name: 0})[0][name] for name, own in requests.items()
        }
        assert serve(engine_of(compiled, 400), requests, arrivals)[0] == expected
        found, count = serve(engine_of(compiled, 18), requests, arrivals)
        assert found == expected
        gave_way += count
    assert gave_way > 0
    assert compiled[0].compiles.recompiles == recompiled


def test_who_asks_for_no_form_pays_nothing(llm, monkeypatch):
    monkeypatch.setattr(runner_module, "set_bias", lambda *given: pytest.fail("a bias was written"))
    answers(llm, PROMPTS, [form(logprobs=1)] * 4)


def written(
    rng: np.random.Generator, constraint: grammar.Constraint, tokens: list[bytes], most: int
) -> bytes:
    """A random answer of letters where they may come, token by token; it fails where a step
    does.
    """
    letters = np.array([token.isalpha() for token in tokens])
    text = b""
    for _ in range(most):
        allowed = constraint.allowed(())[: len(tokens)]
        choice = np.flatnonzero(allowed & letters)
        token = int(rng.choice(choice if len(choice) else np.flatnonzero(allowed)))
        text += tokens[token]
        if reason := constraint.advance(token):
            assert reason == "stop", constraint.matcher.get_error()
            break
    return text


LONG = {
    "a long text": {"type": "string", "maxLength": 3000},
    "two long texts": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "minLength": 1000, "maxLength": 1500},
            "b": {"type": "string", "pattern": "^.{0,2000}$"},
        },
        "required": ["a"],
    },
    "a map of long names": {
        "type": "object",
        "patternProperties": {"^.{1,255}$": {"type": "string", "maxLength": 200}},
    },
    "a place far behind": {"type": "string", "pattern": "^a.{300}b"},
}


@pytest.mark.parametrize("name", LONG)
def test_long_answers_do_not_exhaust_a_schema(llm, name):
    """Its copies share a table that is full after some of them: then each goes on with another."""
    structure = SamplingParams(structured_outputs={"json": LONG[name]}).structured_outputs
    grammars = llm.engine.admission.grammars
    rng = np.random.default_rng(0)
    tokens = grammars.vocabulary.tokens
    for _ in range(3):
        (constraint,) = grammars.constraints(structure, 1)
        assert len(written(rng, constraint, tokens, 1100)) > 400


def test_answers_side_by_side_survive_a_full_table(llm, monkeypatch):
    """With a table too small for one answer's masks: every one is replayed in a new table, drafts
    included.
    """
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 1500)
    structure = {"json": json.dumps({"type": "string", "maxLength": 400})}
    grammars = Grammars(llm.engine.tokenizer, llm.engine.config.vocab_size)
    rng = np.random.default_rng(1)
    tokens = grammars.vocabulary.tokens
    made = 0
    texts = [""] * 4
    constraints = grammars.constraints(structure, 4)
    compiled = grammars.compile(structure)
    make = compiled.make

    def counted(factor: int):
        nonlocal made
        made += 1
        return make(factor)

    compiled.make = counted
    draft = [token for token in range(len(tokens)) if tokens[token] == b"e"]
    for step in range(500):
        for index, constraint in enumerate(constraints):
            if constraint.matcher.is_stopped():
                continue
            drafts = draft * (step % 3) if constraint.tokens else []
            allowed, *after = constraint.allowed_after(drafts, ())
            assert (
                allowed.any()
                and len(after) == len(drafts)
                and constraint.longest_allowed_prefix(drafts)
                == [
                    token
                    for token, row in zip(drafts, [allowed, *after], strict=False)
                    if row[token]
                ]
            )
            token = int(rng.choice(np.flatnonzero(allowed[: len(tokens)])))
            texts[index] += tokens[token].decode("latin1")
            assert constraint.advance(token) in (None, "stop"), constraint.matcher.get_error()
    assert 1 <= made < 200
    assert all(json.loads(text.encode("latin1").decode()) is not None for text in texts)
    holds = grammars.checker(structure)
    assert holds('"' + "é" * 400 + '"') and not holds('"' + "é" * 401 + '"')


def test_a_grammar_that_outgrows_its_limits_ends_alone(llm, monkeypatch):
    """It is found out in the middle of an answer, where nobody can refuse it any more."""
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 400)
    monkeypatch.setattr(grammar, "RAISED", 1)
    regex = "(.*a.{1000}){10}"
    (hurt,), (fine,) = answers(
        llm, ["x", "x"], [shaped("regex", regex), shaped("regex", "[a-z]{90}")]
    )
    assert hurt[1] == "error" and hurt[0]
    assert fine[1] == "stop"
    assert not llm.engine.requests


def test_a_grammar_that_no_token_can_follow_is_refused(llm, monkeypatch):
    monkeypatch.setitem(grammar.LIMITS, "step_lexer_fuel", 10)
    assert "too much work for each token; use smaller bounds" in str(
        refused(llm, regex="(.{9}a){900}")
    )


# What is refused


def refused(llm: LLM, **shape) -> RequestError:
    with pytest.raises(RequestError) as caught:
        llm.engine.admission.grammars.compile(
            SamplingParams(structured_outputs=shape).structured_outputs
        )
    error = caught.value
    assert error.param.startswith("structured_outputs") and str(error).isascii()
    assert "\n" not in str(error) and len(str(error)) < 300
    return error


@pytest.mark.slow
def test_hostile_grammars_are_refused_or_served_in_time(llm):
    """Refused in a second; what is let in costs little a step.

    The server is the same, and serves.
    """
    slowest = 0.0
    said = 0
    shapes = list(hostile())
    rng = np.random.default_rng(0)
    grammars = llm.engine.admission.grammars
    eos = llm.get_tokenizer().eos_token_ids
    for shape in shapes:
        begun = time.perf_counter()
        try:
            structure = SamplingParams(structured_outputs=shape).structured_outputs
            (constraint,) = grammars.constraints(structure, 1)
        except RequestError as error:
            took = time.perf_counter() - begun
            assert error.param.startswith("structured_outputs") and str(error).isascii()
            assert "\n" not in str(error) and len(str(error)) < 300
            assert "127.0.0.1" not in str(error) or "127.0.0.1" in str(shape)
            slowest = max(slowest, took)
            said = said + 1
            continue
        for _ in range(20):
            begun = time.perf_counter()
            allowed = np.flatnonzero(constraint.allowed(eos))
            if not len(allowed) or constraint.advance(int(rng.choice(allowed))):
                break
            assert time.perf_counter() - begun < 10
    assert len(shapes) > 200 and said > 100
    assert slowest < 30  # a second where nobody else computes
    assert answers(llm, ["x"], [shaped("choice", ["alive"])]) == [[("alive", "stop")]]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({}, "got none"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"jsn": {}}, "did you mean 'json'"),
        ({"json": []}, "a JSON schema"),
        ({"json": {"a": float("nan")}}, "a JSON schema"),
        ({"json": {"type": "string", "pattern": "x" * 70_000}}, "1 to 65536 bytes"),
        ({"json_object": 1}, "true or false"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "whitespace_pattern": " "}, "leave it out beside regex"),
        (
            {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "contradict",
        ),
        ({"regex": "é" * 9000}, "1 to 16384 bytes"),
        ({"choice": "yes"}, "must be a list"),
        ({"choice": ["a", ""]}, r"choice\[1\]"),
        ({"choice": ["a"] * 1025}, "at most 1024"),
        ("json", "must be an object"),
        (
            {"json": {"$schema": "json-schema.org/draft-03/schema#"}},
            r"json.\$schema: must be draft 4 or later",
        ),
        ({"json": {"x-guidance": {"lenient": True}}}, "json.x-guidance.lenient: unknown field"),
        (
            {"json": {"x-guidance": {"whitespace_flexible": 1}}},
            "x-guidance.whitespace_flexible: must be true or false",
        ),
        (
            {"json": {"x-guidance": {"whitespace_flexible": True}}, "disable_any_whitespace": True},
            "say the same",
        ),
    ],
)
def test_what_has_no_form_is_refused_when_it_is_made(shape, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(structured_outputs=shape)


def test_what_is_kept_is_kept(llm):
    made = SamplingParams(
        structured_outputs={"json": {"type": "null"}, "regex": None, "json_object": False}
    )
    assert made.structured_outputs == {"json": '{"type": "null"}'}
    assert replace(made, n=2).structured_outputs == made.structured_outputs
    assert SamplingParams(structured_outputs={"choice": ["b", "a"]}).structured_outputs == {
        "choice": ("b", "a")
    }
    grammars = llm.engine.admission.grammars
    first = grammars.compile(made.structured_outputs)
    assert grammars.compile({"json": '{"type": "null"}'}) is first


def test_the_reason_names_the_place(llm):
    assert "unclosed group" in str(refused(llm, regex="(a"))
    assert "unknown name" in str(refused(llm, grammar="start: x"))
    assert str(refused(llm, grammar='root ::= "a"\n  | é')).startswith(
        "structured_outputs.grammar: line 2, column 5: expected a text"
    )
    assert "the schema accepts no value" in str(refused(llm, json={"not": {}}))
    assert "too much time" in str(refused(llm, json={"type": "integer", "multipleOf": 1_000_003}))
    assert "no text" in str(refused(llm, json={"$ref": "#"}))


def test_grammars_are_read_in_the_worker(llm, monkeypatch):
    """What a stranger wrote is read where a limit of time ends it, and in no thread of the
    server.
    """
    asked: list[bytes] = []
    worker, ask = llm.engine.admission.grammars.worker, llm.engine.admission.grammars.worker.ask
    monkeypatch.setattr(worker, "ask", lambda request: asked.append(request) or ask(request))
    assert answers(llm, ["x"], [shaped("grammar", 'root ::= "yes" # once')]) == [[("yes", "stop")]]
    assert "yes" in json.loads(asked[0])[0]["grammar"]
    monkeypatch.setattr(worker, "ask", lambda request: None)  # ended by the operating system
    assert "too much time" in str(refused(llm, grammar='root ::= "yes" # twice'))
    assert not any(name in vars(grammar) for name in ("to_lark", "is_gbnf", "build_body"))


def test_nothing_is_fetched(llm):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        refused(llm, json={"$ref": address})
        refused(llm, json={"$schema": address, "properties": {"a": {"$ref": address}}})
        refused(llm, json={"$id": address, "$ref": "other.json"})
        with pytest.raises(TimeoutError):
            server.accept()


def test_who_cannot_know_its_texts_refuses(tmp_path):
    for name in set(ZOO) - set(SPOKEN):
        folder = tmp_path / name
        folder.mkdir()
        with pytest.raises(RequestError, match="needs a tokenizer whose texts"):
            Grammars(Tokenizer(save(folder, ZOO[name]())), 300).compile({"regex": "a"})
    llm = LLM(skip_tokenizer_init=True, max_num_seqs=4, max_num_batched_tokens=32)
    with pytest.raises(RequestError, match="structured_outputs: needs a tokenizer"):
        llm.generate([[1, 2]], shaped("regex", "a"), use_tqdm=False)


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.random
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_distinct_schemas_do_not_pile_up(llm):
    grammars = llm.engine.admission.grammars

    def compile_some(first: int, last: int) -> None:
        for i in range(first, last):
            properties = {
                f"p{i}_{j}": {"type": "string", "maxLength": i % 50 + 1} for j in range(i % 30)
            }
            grammars.compile({"json": json.dumps({"type": "object", "properties": properties})})

    compile_some(0, 200)
    before = resident()
    compile_some(200, 200 + cases(1000))
    assert resident() - before < 100 << 20
    assert len(grammars.cached) <= MAX_CACHED and grammars.cached_characters == sum(
        size for _, size in grammars.cached.values()
    )


def test_threads_compile_side_by_side(llm):
    grammars = llm.engine.admission.grammars
    found = []

    def work(start: int) -> None:
        for i in range(30):
            found.append(grammars.constraints({"regex": f"{(start + i) % 40}x*"}, 1)[0].allowed(()))

    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 40, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120 and all(np.isfinite(row).any() for row in found)
