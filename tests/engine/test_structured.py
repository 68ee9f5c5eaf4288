"""Structured outputs: answers follow their grammar whatever the model prefers, and other requests
are not affected.
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
# tokenizers whose token texts are bytes, as grammars need them
BYTE_TEXT_TOKENIZERS = ("byte_level", "byte_fallback", "byte_fallback_unstripped", "unigram")


def make_params(**fields) -> SamplingParams:
    defaults = {"temperature": 1.0, "max_tokens": 100}
    return SamplingParams(
        **{
            **defaults,
            **{k: v for k, v in fields.items() if k in SamplingParams.__dataclass_fields__},
        }
    )


def structured_params(key: str, value, **fields) -> SamplingParams:
    return make_params(structured_outputs={key: value}, **fields)


@pytest.fixture(scope="module")
def llm():
    return LLM(max_num_seqs=16, max_num_batched_tokens=64)


@pytest.fixture(scope="module", params=BYTE_TEXT_TOKENIZERS)
def random_llm(request, tmp_path_factory):
    """A model with random weights, which generates anything, with each type of tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    core = ZOO[request.param]()
    tiny.write(
        folder,
        {**tiny.LLAMA, "vocab_size": core.get_vocab_size() + 7, "max_position_embeddings": 256},
    )
    return LLM(str(save(folder, core)), max_num_seqs=4, max_num_batched_tokens=64)


def generate(llm: LLM, prompts: list, params: list[SamplingParams]) -> list:
    """Returns (text, finish reason) of every answer, by request, and checks for recompiles."""
    recompiles = llm.engine.runner.compiles.recompiles
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.runner.compiles.recompiles == recompiles
    llm.engine.scheduler.check()
    return [
        [(answer.text, answer.finish_reason) for answer in output.outputs] for output in outputs
    ]


# Outputs
@settings(
    max_examples=cases(12, least=3), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(SCHEMAS, min_size=12, max_size=12), st.integers(0, 2**31), st.booleans())
@pytest.mark.slow
def test_json_output_is_valid_for_its_schema(llm, schemas, seed, disables_whitespace):
    params = [
        make_params(
            structured_outputs={"json": schema, "disable_any_whitespace": disables_whitespace},
            seed=seed + i,
            n=2,
        )
        for i, schema in enumerate(schemas)
    ]
    num_stopped = 0
    for schema, schema_answers in zip(schemas, generate(llm, PROMPTS * 3, params), strict=True):
        for text, reason in schema_answers:
            assert reason in ("stop", "length")
            num_stopped += reason == "stop"
            assert reason == "length" or valid(json.loads(text), schema), (schema, text)
            assert not disables_whitespace or "\n" not in text
    assert num_stopped  # `max_tokens` may end answers within whitespace


def test_reference_validator_refuses_invalid_values():
    for schema, value in [
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
        assert not valid(value, schema)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_regex_output_matches_on_random_models(random_llm, seed):
    tokenizer = random_llm.get_tokenizer()
    knows_printable_ascii = {bytes([byte]) for byte in b"-@~"} <= {
        tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)
    }
    num_stopped = 0
    for regex in REGEXES:
        try:
            (samples,) = generate(
                random_llm, ["fox"], [structured_params("regex", regex, seed=seed, n=3)]
            )
        except RequestError as error:
            # the tokens cannot spell any match
            assert "no text" in error.message and not knows_printable_ascii
            continue
        for text, reason in samples:
            num_stopped += reason == "stop"
            assert (
                reason == "length"
                or re.fullmatch(regex, text)
                or (reason == "error" and not knows_printable_ascii)
            ), (regex, text)
    assert num_stopped > 5


def test_json_output_of_random_models_is_valid(random_llm):
    """The schema bounds the length of strings, as a random model may not close them."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "is": {"enum": ["é", "<s>", "</s>", None]},
        },
        "required": ["is"],
        "additionalProperties": False,
    }
    params = make_params(structured_outputs={"json": schema, "disable_any_whitespace": True}, n=8)
    if "{" not in "".join(map(random_llm.get_tokenizer().token_text, range(200))):
        with pytest.raises(RequestError, match="no text"):
            generate(random_llm, ["x"], [params])
        return
    (texts,) = generate(random_llm, ["x"], [params])
    assert all(reason == "stop" and valid(json.loads(text), schema) for text, reason in texts)


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
def test_choice_output_is_one_of_the_choices(llm, choices):
    (samples,) = generate(llm, ["The"], [structured_params("choice", choices, n=4)])
    assert all(text in choices and reason == "stop" for text, reason in samples)


def test_choices_spelling_special_tokens_use_ordinary_tokens(llm, random_llm):
    for any_llm, names in ((llm, ["<|end|>", "<|user|>"]), (random_llm, ["<s>", "</s>"])):
        tokenizer = any_llm.get_tokenizer()
        assert {tokenizer._core.token_to_id(name) for name in names} <= tokenizer.special_ids
        try:
            outputs = any_llm.generate(
                "x",
                structured_params("choice", names, n=4, skip_special_tokens=False),
                use_tqdm=False,
            )
        except RequestError as error:
            assert "no text" in error.message
            continue
        for answer in outputs[0].outputs:
            assert answer.text in names and tokenizer.special_ids.isdisjoint(answer.token_ids)


def test_grammar_output_follows_lark_and_gbnf(llm):
    sum_grammar = 'start: sum "=" NUMBER\nsum: NUMBER ("+" NUMBER)+\nNUMBER: /[1-9][0-9]?/'
    (samples,) = generate(llm, ["Add:"], [structured_params("grammar", sum_grammar, n=4)])
    assert all(
        re.fullmatch(r"([1-9]\d?)(\+[1-9]\d?)+=[1-9]\d?", text)
        for text, reason in samples
        if reason == "stop"
    )
    (samples,) = generate(
        llm,
        ["Add:"],
        [structured_params("grammar", 'start: <|user|> "x" <|end|>', n=2, ignore_eos=True)],
    )
    assert samples == [("x", "stop")] * 2
    (samples,) = generate(
        llm, ["Add:"], [structured_params("grammar", 'root ::= "yes" | "no" # GBNF', n=4)]
    )
    assert {text for text, reason in samples} <= {"yes", "no"} and {
        reason for _, reason in samples
    } == {"stop"}
    tree_grammar = r'root ::= "(" [a-z]{1,2} root* ")" | [^a-zA-Z()\x00-\x7F]'
    (samples,) = generate(
        llm, ["Add:"], [structured_params("grammar", tree_grammar, n=4, max_tokens=40)]
    )
    for text, reason in samples:
        assert reason == "length" or (
            text.count("(") == text.count(")") and re.fullmatch(r"[^a-zA-Z]|\(.*\)", text)
        )


def test_structural_tags_constrain_only_tagged_text(llm):
    """Text is free up to a trigger; a tag's `$ref` uses the definitions of its own schema."""
    integer_schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"A": {"type": "integer"}},
    }
    letter_schema = integer_schema | {"$defs": {"A": {"enum": ["x", "y"]}}}
    schemas = {"f": integer_schema, "g": letter_schema}
    old_tags = [
        {"begin": f"<call={name}>", "schema": schema, "end": "</call>"}
        for name, schema in schemas.items()
    ]
    new_tags = [
        {
            "begin": tag["begin"],
            "content": {"type": "json_schema", "json_schema": tag["schema"]},
            "end": tag["end"],
        }
        for tag in old_tags
    ]
    old_tag: dict = {"structures": old_tags, "triggers": ["<call="]}
    new_tag = {"format": {"type": "triggered_tags", "tags": new_tags, "triggers": ["<call="]}}
    tokenizer = llm.engine.tokenizer
    grammars = llm.engine.admission.grammars
    eos_token_ids = tokenizer.eos_token_ids

    def is_accepted(structure, text: str) -> bool:
        (constraint,) = grammars.constraints(structure, 1)
        for token in tokenizer.encode(text, add_special_tokens=False):
            if not constraint.allowed(eos_token_ids)[token]:
                return False
            constraint.advance(token)
        return bool(constraint.allowed(eos_token_ids)[list(eos_token_ids)].all())

    structures = [
        structured_params("structural_tag", tag).structured_outputs
        for tag in (old_tag, new_tag, json.dumps(old_tag))
    ]
    assert structures[0] == structures[1] == structures[2]
    valid_text = 'I call <call=f>{"a": 1}</call> and <call=g>{"a": "x"}</call>.'
    assert all(is_accepted(structures[0], text) for text in ("Just text.", valid_text))
    for invalid_text in (
        '<call=f>{"a": "x"}</call>',
        '<call=g>{"a": 1}</call>',
        "<call=h>",
        '<call=f>{"a": 1}',
    ):
        assert not is_accepted(structures[0], invalid_text)
    for change, message in (
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
        with pytest.raises(RequestError, match=message):
            structured_params("structural_tag", old_tag | change)
    stopping_tag = {"format": {**new_tag["format"], "stop_after_first": True}}
    with pytest.raises(RequestError, match="stop_after_first: is not implemented"):
        structured_params("structural_tag", stopping_tag)


def test_json_whitespace_options(llm):
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "required": ["a", "b"],
    }
    schema["additionalProperties"] = False
    params = [
        make_params(
            structured_outputs={"json": json.dumps(schema), "disable_any_whitespace": True}, n=3
        ),
        make_params(
            structured_outputs={"json_object": True, "disable_any_whitespace": True}, n=3, seed=3
        ),
    ]
    compact_answers, object_answers = generate(llm, ["x"] * 2, params)
    assert {text for text, _ in compact_answers} == {'{"a":1,"b":2}'}
    assert all(
        isinstance(json.loads(text), dict) for text, reason in object_answers if reason == "stop"
    )
    for options, expected in (
        ({}, b" \n"),
        ({"whitespace_pattern": "~"}, b"~"),
        ({"whitespace_pattern": "[ ]{2}"}, b" "),
        ({"whitespace_pattern": "[ \t\r\n]+"}, b" \n\r\t"),
        ({"json": {**schema, "x-guidance": {"whitespace_flexible": True}}}, b" \n\r\t"),
        ({"json": {**schema, "x-guidance": {"whitespace_flexible": False}}}, b""),
        ({"json": {**schema, "x-guidance": {"whitespace_pattern": "~"}}}, b"~"),
    ):
        structure = SamplingParams(
            structured_outputs={"json": schema, **options}
        ).structured_outputs
        (constraint,) = llm.engine.admission.grammars.constraints(structure, 1)
        (brace,) = llm.get_tokenizer().encode("{", add_special_tokens=False)
        constraint.advance(brace)
        allowed_bytes = {
            llm.get_tokenizer().token_bytes(token)
            for token in np.flatnonzero(constraint.allowed(()))
        }
        assert {text for text in allowed_bytes if len(text) == 1} == {b'"'} | {
            bytes([byte]) for byte in expected
        }


def test_json_whitespace_is_bounded_by_default(llm):
    """A model with a strong bias to whitespace still completes its answer."""
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
    params = {"logit_bias": dict.fromkeys(spaces, 100), "temperature": 0, "max_tokens": 500}
    unbounded = {"json": schema, "whitespace_pattern": "[ \t\r\n]+"}
    ((bounded_text, bounded_reason),), ((unbounded_text, unbounded_reason),) = generate(
        llm,
        ["x"] * 2,
        [
            make_params(structured_outputs=shape, **params)
            for shape in ({"json": schema}, unbounded)
        ],
    )
    assert (
        bounded_reason == "stop"
        and valid(json.loads(bounded_text), schema)
        and json.loads(bounded_text)["a"] == 1
    )
    assert unbounded_reason == "length" and unbounded_text.strip() == '{"a":'
    for indent in (None, 2, "\t"):  # usual formats of JSON
        text = json.dumps({"a": 1, "b": [2, 2]}, indent=indent)
        assert is_complete_match(llm, {"json": json.dumps(schema)}, text), text


def is_complete_match(llm: LLM, structure: dict, text: str) -> bool:
    """Returns whether the grammar accepts the text, token by token, as a complete answer."""
    (constraint,) = llm.engine.admission.grammars.constraints(structure, 1)
    tokens = llm.get_tokenizer().encode(text, add_special_tokens=False)
    return (
        "error" not in [constraint.advance(token) for token in tokens]
        and constraint.matcher.is_accepting()
    )


def test_multiple_of_is_exact_in_decimals(llm):
    """76.6 is a multiple of 0.01, although a division in binary floating point has a remainder."""
    params = structured_params(
        "json", {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1000}, n=16
    )
    (samples,) = generate(llm, ["The price is"], [params])
    assert all(Decimal(text) % Decimal("0.01") == 0 for text, reason in samples if reason == "stop")
    assert is_complete_match(llm, {"json": '{"type": "number", "multipleOf": 0.01}'}, "76.6")


# Interaction with other sampling parameters
def test_eos_is_allowed_only_where_the_grammar_may_end(llm):
    tokenizer = llm.get_tokenizer()
    (eos,) = tokenizer.eos_token_ids
    repeating = structured_params("regex", "(ab)+", n=8, max_tokens=30)
    samples = llm.generate("x", repeating, use_tqdm=False)[0].outputs
    for answer in samples:
        assert re.fullmatch("(ab)*a?", answer.text)
        assert (answer.finish_reason == "stop") == (answer.token_ids[-1] == eos)
    assert any(answer.finish_reason == "stop" for answer in samples)
    unstopped_samples = llm.generate("x", replace(repeating, ignore_eos=True), use_tqdm=False)[
        0
    ].outputs
    assert all(
        answer.finish_reason == "length" and eos not in answer.token_ids
        for answer in unstopped_samples
    )
    min_token_samples = llm.generate("x", replace(repeating, min_tokens=12), use_tqdm=False)[
        0
    ].outputs
    assert all(len(answer.token_ids) >= 12 for answer in min_token_samples)
    exhausted = llm.generate("x", structured_params("regex", "ab", min_tokens=12), use_tqdm=False)[
        0
    ].outputs[0]
    assert (exhausted.text, exhausted.finish_reason) == (
        "ab",
        "stop",
    ) and eos not in exhausted.token_ids
    stopped = llm.generate("x", replace(repeating, stop="ba", ignore_eos=True), use_tqdm=False)[
        0
    ].outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("a", "stop", "ba")
    stop_token = tokenizer.encode("a", add_special_tokens=False)[0]
    stop_token_samples = llm.generate(
        "x", replace(repeating, stop_token_ids=[stop_token], ignore_eos=True), use_tqdm=False
    )[0].outputs
    # every match begins with the stop token, so that no token is left
    assert all(
        answer.finish_reason == "error" and not answer.token_ids for answer in stop_token_samples
    )


def test_grammar_completed_by_the_last_token_is_a_stop(llm):
    assert generate(llm, ["x"], [structured_params("choice", ["~"], max_tokens=1)]) == [
        [("~", "stop")]
    ]
    assert (
        generate(llm, ["x"], [structured_params("choice", ["~~~"], max_tokens=1)])[0][0][1]
        == "length"
    )


def test_logit_bias_and_bans_apply_within_the_grammar(llm):
    tokenizer = llm.get_tokenizer()
    yes_token, no_token = (
        tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no")
    )
    assert yes_token != no_token

    def sampled_texts(**fields) -> set[str]:
        (samples,) = generate(
            llm, ["Yes or no?"], [structured_params("regex", "yes|no|nay", n=8, **fields)]
        )
        return {text if reason == "stop" else reason for text, reason in samples}

    n_tokens = [
        token
        for token in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token) in (b"n", b"no", b"na")
    ]
    assert sampled_texts(logit_bias=dict.fromkeys(n_tokens, -100)) == {"yes"}
    assert "yes" not in sampled_texts(bad_words=["yes", "y", "ye"]) and "nay" not in sampled_texts(
        bad_words=["yes", "y", "ye", "nay"]
    )
    (q_token,) = {
        token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"q"
    }
    assert sampled_texts(allowed_token_ids=[q_token]) == {"error"}
    assert sampled_texts(presence_penalty=2.0, repetition_penalty=1.5) <= {"yes", "no", "nay"}


def test_logprobs_are_computed_before_the_grammar_mask(llm):
    """They equal the `prompt_logprobs` of the same tokens."""
    prompt = llm.get_tokenizer().encode("Once upon a time")
    answer = llm.generate(
        [prompt], structured_params("regex", "[xyz]{6}", logprobs=1), use_tqdm=False
    )[0].outputs[0]
    token_ids = [*prompt, *answer.token_ids]
    scores = llm.generate(
        [token_ids], make_params(max_tokens=1, prompt_logprobs=1), use_tqdm=False
    )[0].prompt_logprobs
    for index, token in enumerate(answer.token_ids):
        sampled_entry = answer.logprobs[index]
        expected = scores[len(prompt) + index]
        assert sampled_entry[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)
        assert sampled_entry[token].rank == expected[token].rank
    assert (
        max(
            entry[token].rank
            for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)
        )
        > 1
    )


def test_n_samples_have_separate_grammar_states(llm):
    (samples,) = generate(llm, ["x"], [structured_params("regex", "[a-z]{4}[0-9]{4}", n=16)])
    assert len({text for text, _ in samples}) > 4 and all(
        re.fullmatch("[a-z]{4}[0-9]{4}", text) for text, _ in samples
    )
    (samples,) = generate(llm, ["x"], [structured_params("regex", "[a-z]{4}", n=2, best_of=8)])
    assert len(samples) == 2 and all(re.fullmatch("[a-z]{4}", text) for text, _ in samples)


# Other requests in the batch
MAX_LEN = 256


@pytest.fixture(scope="module")
def compiled_model():
    folder = hub.resolve(None)
    config = loader.read_config(folder, "float32", MAX_LEN)
    shape = StepShape.largest(8, 48, 16)
    weights = loader.load(folder, config)
    runner = Runner(config, weights, shape, (400,) * len(config.windows), 16, MAX_LEN)
    runner.warm_up()
    return runner, Tokenizer(folder)


def make_engine(compiled_model, num_pages: int) -> Engine:
    warm_runner, tokenizer = compiled_model
    runner = Runner(
        warm_runner.config,
        warm_runner.weights,
        warm_runner.shape,
        warm_runner.num_pages,
        16,
        MAX_LEN,
    )
    runner.compiled = warm_runner.compiled
    runner.page_copier.programs = warm_runner.page_copier.programs
    return Engine(
        runner,
        tokenizer,
        [PageTable((num_pages,) * len(warm_runner.num_pages), 16, warm_runner.config.windows)],
        MAX_LEN,
    )


def serve_requests(
    engine: Engine, requests: dict[str, tuple], arrivals: dict[str, int]
) -> tuple[dict[str, tuple], int]:
    """Returns token ids, finish reason and log-probabilities of every answer, and the number of
    preemptions.
    """
    outputs = {
        name: request.output()
        for name, request in staggered_requests.serve(engine, requests, arrivals).items()
    }
    answers_by_name = {
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
    return answers_by_name, sum(output.metrics.num_preemptions for output in outputs.values())


@pytest.mark.slow
def test_constrained_requests_are_batch_invariant(compiled_model):
    """Constrained and unconstrained requests get the same tokens and log-probabilities alone,
    batched, and with preemptions.
    """
    rng = random.Random(5)
    total_preemptions = 0
    recompiles = compiled_model[0].compiles.recompiles
    structures = [
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
                structured_outputs=rng.choice(structures),
            )
            prompt = [rng.randrange(6, 1280) for _ in range(rng.choice((1, 16, 17, 90)))]
            requests[str(index)], arrivals[str(index)] = (prompt, params), rng.randint(0, 12)
        alone_engine = make_engine(compiled_model, 400)
        expected = {
            name: serve_requests(alone_engine, {name: request}, {name: 0})[0][name]
            for name, request in requests.items()
        }
        assert serve_requests(make_engine(compiled_model, 400), requests, arrivals)[0] == expected
        short_of_pages_answers, num_preemptions = serve_requests(
            make_engine(compiled_model, 18), requests, arrivals
        )
        assert short_of_pages_answers == expected
        total_preemptions += num_preemptions
    assert total_preemptions > 0
    assert compiled_model[0].compiles.recompiles == recompiles


def test_unconstrained_requests_write_no_bias(llm, monkeypatch):
    monkeypatch.setattr(runner_module, "set_bias", lambda *arguments: pytest.fail("a bias was set"))
    generate(llm, PROMPTS, [make_params(logprobs=1)] * 4)


def random_answer(
    rng: np.random.Generator, constraint: grammar.Constraint, tokens: list[bytes], max_tokens: int
) -> bytes:
    """Generates a random answer, of letters where the grammar allows them."""
    letters = np.array([token.isalpha() for token in tokens])
    text = b""
    for _ in range(max_tokens):
        allowed = constraint.allowed(())[: len(tokens)]
        choice = np.flatnonzero(allowed & letters)
        token = int(rng.choice(choice if len(choice) else np.flatnonzero(allowed)))
        text += tokens[token]
        if reason := constraint.advance(token):
            assert reason == "stop", constraint.matcher.get_error()
            break
    return text


LONG_SCHEMAS = {
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
    "a distant repetition": {"type": "string", "pattern": "^a.{300}b"},
}


@pytest.mark.parametrize("name", LONG_SCHEMAS)
def test_long_answers_replace_a_full_lexer_table(llm, name):
    """Constraints of a schema share a lexer table, and continue in a new one when it is full."""
    structure = SamplingParams(structured_outputs={"json": LONG_SCHEMAS[name]}).structured_outputs
    grammars = llm.engine.admission.grammars
    rng = np.random.default_rng(0)
    tokens = grammars.vocabulary.tokens
    for _ in range(3):
        (constraint,) = grammars.constraints(structure, 1)
        assert len(random_answer(rng, constraint, tokens, 1100)) > 400


def test_parallel_constraints_survive_a_full_lexer_table(llm, monkeypatch):
    """The table is too small for the masks of one answer: each constraint is replayed in a new
    table, with drafts too.
    """
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 1500)
    structure = {"json": json.dumps({"type": "string", "maxLength": 400})}
    grammars = Grammars(llm.engine.tokenizer, llm.engine.config.vocab_size)
    rng = np.random.default_rng(1)
    tokens = grammars.vocabulary.tokens
    num_matchers = 0
    texts = [""] * 4
    constraints = grammars.constraints(structure, 4)
    compiled = grammars.compile(structure)
    make = compiled.make

    def counting_make(factor: int):
        nonlocal num_matchers
        num_matchers += 1
        return make(factor)

    compiled.make = counting_make
    draft_token = [token for token in range(len(tokens)) if tokens[token] == b"e"]
    for step in range(500):
        for index, constraint in enumerate(constraints):
            if constraint.matcher.is_stopped():
                continue
            drafts = draft_token * (step % 3) if constraint.tokens else []
            allowed, *masks_after = constraint.allowed_after(drafts, ())
            assert (
                allowed.any()
                and len(masks_after) == len(drafts)
                and constraint.longest_allowed_prefix(drafts)
                == [
                    token
                    for token, row in zip(drafts, [allowed, *masks_after], strict=False)
                    if row[token]
                ]
            )
            token = int(rng.choice(np.flatnonzero(allowed[: len(tokens)])))
            texts[index] += tokens[token].decode("latin1")
            assert constraint.advance(token) in (None, "stop"), constraint.matcher.get_error()
    assert 1 <= num_matchers < 200
    assert all(json.loads(text.encode("latin1").decode()) is not None for text in texts)
    is_valid = grammars.checker(structure)
    assert is_valid('"' + "é" * 400 + '"') and not is_valid('"' + "é" * 401 + '"')


def test_grammar_exceeding_its_limits_fails_only_its_request(llm, monkeypatch):
    """The limit is exceeded in the middle of an answer, too late to refuse the request."""
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 400)
    monkeypatch.setattr(grammar, "RAISED", 1)
    regex = "(.*a.{1000}){10}"
    (failed_answer,), (other_answer,) = generate(
        llm,
        ["x", "x"],
        [structured_params("regex", regex), structured_params("regex", "[a-z]{90}")],
    )
    assert failed_answer[1] == "error" and failed_answer[0]
    assert other_answer[1] == "stop"
    assert not llm.engine.requests


def test_grammar_with_too_much_work_per_token_is_refused(llm, monkeypatch):
    monkeypatch.setitem(grammar.LIMITS, "step_lexer_fuel", 10)
    assert "too much work for each token; use smaller bounds" in str(
        compile_error(llm, regex="(.{9}a){900}")
    )


# Errors
def compile_error(llm: LLM, **structure) -> RequestError:
    with pytest.raises(RequestError) as error_info:
        llm.engine.admission.grammars.compile(
            SamplingParams(structured_outputs=structure).structured_outputs
        )
    error = error_info.value
    assert error.param.startswith("structured_outputs") and str(error).isascii()
    assert "\n" not in str(error) and len(str(error)) < 300
    return error


@pytest.mark.slow
def test_hostile_grammars_are_refused_or_cheap(llm):
    """Grammars are refused in time, accepted ones take little time per step, and the engine still
    works.
    """
    max_seconds = 0.0
    num_refused = 0
    hostile_fields = list(hostile())
    rng = np.random.default_rng(0)
    grammars = llm.engine.admission.grammars
    eos = llm.get_tokenizer().eos_token_ids
    for fields in hostile_fields:
        start_time = time.perf_counter()
        try:
            structure = SamplingParams(structured_outputs=fields).structured_outputs
            (constraint,) = grammars.constraints(structure, 1)
        except RequestError as error:
            seconds = time.perf_counter() - start_time
            assert error.param.startswith("structured_outputs") and str(error).isascii()
            assert "\n" not in str(error) and len(str(error)) < 300
            assert "127.0.0.1" not in str(error) or "127.0.0.1" in str(fields)
            max_seconds = max(max_seconds, seconds)
            num_refused = num_refused + 1
            continue
        for _ in range(20):
            start_time = time.perf_counter()
            allowed = np.flatnonzero(constraint.allowed(eos))
            if not len(allowed) or constraint.advance(int(rng.choice(allowed))):
                break
            assert time.perf_counter() - start_time < 10
    assert len(hostile_fields) > 200 and num_refused > 100
    assert max_seconds < 30  # a second on an idle machine
    assert generate(llm, ["x"], [structured_params("choice", ["alive"])]) == [[("alive", "stop")]]


@pytest.mark.parametrize(
    ("fields", "message"),
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
def test_invalid_structured_outputs_are_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=fields)


def test_structured_outputs_are_normalized_and_compiled_once(llm):
    params = SamplingParams(
        structured_outputs={"json": {"type": "null"}, "regex": None, "json_object": False}
    )
    assert params.structured_outputs == {"json": '{"type": "null"}'}
    assert replace(params, n=2).structured_outputs == params.structured_outputs
    assert SamplingParams(structured_outputs={"choice": ["b", "a"]}).structured_outputs == {
        "choice": ("b", "a")
    }
    grammars = llm.engine.admission.grammars
    compiled_grammar = grammars.compile(params.structured_outputs)
    assert grammars.compile({"json": '{"type": "null"}'}) is compiled_grammar


def test_grammar_errors_name_their_location(llm):
    assert "unclosed group" in str(compile_error(llm, regex="(a"))
    assert "unknown name" in str(compile_error(llm, grammar="start: x"))
    assert str(compile_error(llm, grammar='root ::= "a"\n  | é')).startswith(
        "structured_outputs.grammar: line 2, column 5: expected a text"
    )
    assert "the schema accepts no value" in str(compile_error(llm, json={"not": {}}))
    assert "too much time" in str(
        compile_error(llm, json={"type": "integer", "multipleOf": 1_000_003})
    )
    assert "no text" in str(compile_error(llm, json={"$ref": "#"}))


def test_grammars_are_parsed_in_the_worker_process(llm, monkeypatch):
    """A client's grammar is parsed in a worker process with a time limit, not in the server."""
    requests: list[bytes] = []
    worker, ask = llm.engine.admission.grammars.worker, llm.engine.admission.grammars.worker.ask
    monkeypatch.setattr(worker, "ask", lambda request: requests.append(request) or ask(request))
    assert generate(llm, ["x"], [structured_params("grammar", 'root ::= "yes" # once')]) == [
        [("yes", "stop")]
    ]
    assert "yes" in json.loads(requests[0])[0]["grammar"]
    # as if the operating system ended the worker
    monkeypatch.setattr(worker, "ask", lambda request: None)
    assert "too much time" in str(compile_error(llm, grammar='root ::= "yes" # twice'))
    assert not any(name in vars(grammar) for name in ("to_lark", "is_gbnf", "build_body"))


def test_remote_schema_references_are_not_fetched(llm):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        compile_error(llm, json={"$ref": address})
        compile_error(llm, json={"$schema": address, "properties": {"a": {"$ref": address}}})
        compile_error(llm, json={"$id": address, "$ref": "other.json"})
        with pytest.raises(TimeoutError):
            server.accept()


def test_tokenizers_without_byte_texts_refuse_grammars(tmp_path):
    for name in set(ZOO) - set(BYTE_TEXT_TOKENIZERS):
        folder = tmp_path / name
        folder.mkdir()
        with pytest.raises(RequestError, match="needs a tokenizer whose texts"):
            Grammars(Tokenizer(save(folder, ZOO[name]())), 300).compile({"regex": "a"})
    llm = LLM(skip_tokenizer_init=True, max_num_seqs=4, max_num_batched_tokens=32)
    with pytest.raises(RequestError, match="structured_outputs: needs a tokenizer"):
        llm.generate([[1, 2]], structured_params("regex", "a"), use_tqdm=False)


def resident_bytes() -> int:
    """Returns the resident memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.random
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_grammar_cache_is_bounded(llm):
    grammars = llm.engine.admission.grammars

    def compile_some(first: int, last: int) -> None:
        for i in range(first, last):
            properties = {
                f"p{i}_{j}": {"type": "string", "maxLength": i % 50 + 1} for j in range(i % 30)
            }
            grammars.compile({"json": json.dumps({"type": "object", "properties": properties})})

    compile_some(0, 200)
    num_bytes = resident_bytes()
    compile_some(200, 200 + cases(1000))
    assert resident_bytes() - num_bytes < 100 << 20
    assert len(grammars.cached) <= MAX_CACHED and grammars.cached_characters == sum(
        size for _, size in grammars.cached.values()
    )


def test_threads_can_compile_grammars_in_parallel(llm):
    grammars = llm.engine.admission.grammars
    masks = []

    def compile_some(start: int) -> None:
        for i in range(30):
            masks.append(grammars.constraints({"regex": f"{(start + i) % 40}x*"}, 1)[0].allowed(()))

    threads = [threading.Thread(target=compile_some, args=(start,)) for start in range(0, 40, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(masks) == 120 and all(np.isfinite(row).any() for row in masks)
