"""Validation of sampling parameters: accepted values, and one-line errors for all others."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.serving.api import structured
from quire.serving.api.errors import RequestError
from quire.serving.api.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.serving.api.params import RequestOutputKind, SamplingParams
from quire.serving.api.structured import StructuredOutputsParams

INFINITY = float("inf")
NAN = float("nan")
INTEGERS = {  # field: (lowest, highest, default)
    "n": (1, 128, 1),
    "best_of": (1, 128, None),  # n bounds it
    "top_k": (-1, 2**31 - 1, 0),
    "seed": (-(2**63), 2**63 - 1, None),
    "max_tokens": (1, 2**31 - 1, 16),
    "min_tokens": (0, 16, 0),  # max_tokens bounds it
    "logprobs": (-1, 2**31 - 1, None),  # the engine bounds them
    "prompt_logprobs": (-1, 2**31 - 1, None),
}
NUMBERS = {
    "presence_penalty": (-2, 2, 0.0),
    "frequency_penalty": (-2, 2, 0.0),
    "repetition_penalty": (0.01, 100, 1.0),
    "temperature": (0, 100, 1.0),
    "top_p": (1e-9, 1, 1.0),
    "min_p": (0, 1, 0.0),
}
SWITCHES = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
)
LISTS = ("stop", "stop_token_ids", "bad_words")
OTHERS = ("logit_bias", "allowed_token_ids", "structured_outputs", "logprob_token_ids")


def make_params(**fields: Any) -> SamplingParams:
    """Makes SamplingParams from untyped fields."""
    return SamplingParams(**fields)


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as error_info:
        make_params(**fields)
    error = error_info.value
    assert "\n" not in str(error) and len(str(error)) < 250
    assert str(error).startswith(f"{error.param}: ")
    return error


def test_all_fields_are_tested_here():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {*INTEGERS, *NUMBERS, *SWITCHES, *LISTS, *OTHERS, "output_kind"}


def test_defaults():
    params = SamplingParams()
    for name, (*_, default) in (INTEGERS | NUMBERS).items():
        assert getattr(params, name) == default
    assert [getattr(params, name) for name in SWITCHES] == [False, True, True, False, False]
    assert [getattr(params, name) for name in (*LISTS, *OTHERS)] == [
        (),
        (),
        (),
        None,
        None,
        None,
        None,
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_fields(name):
    lowest, highest, default = INTEGERS[name]
    for value in (
        lowest,
        highest,
        np.int64(highest),
        np.int32(lowest) if abs(lowest) < 2**31 else lowest,
    ):
        value_set = getattr(make_params(**{name: value}), name)
        assert value_set == max(value, 0) if name == "top_k" else value_set == value
        assert type(value_set) is int
    for value in (
        lowest - 1,
        highest + 1,
        2**63,
        10**400,
        10**5000,
        True,
        1.0,
        "1",
        NAN,
        INFINITY,
        [1],
        b"1",
    ):
        if name == "prompt_logprobs" and value is True:  # vLLM's clients send it
            assert make_params(prompt_logprobs=True).prompt_logprobs == 1
            continue
        assert refusal(**{name: value}).param == name
    if default is None or name == "max_tokens":
        assert getattr(make_params(**{name: None}), name) is None
    else:
        assert "got None" in str(refusal(**{name: None}))


def test_positional_arguments_have_vllms_order():
    params = SamplingParams(2, 0.5, 0.25, 1.5, 0.7, 0.9, 40, 0.1, 7, "END", [3], True, 64, 2, 5, 1)
    names = (
        "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k "
        "min_p seed stop "
    )
    names += "stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs"
    values = (2, 0.5, 0.25, 1.5, 0.7, 0.9, 40, 0.1, 7, ("END",), (3,), True, 64, 2, 5, 1)
    assert [getattr(params, name) for name in names.split()] == list(values)
    with pytest.raises(TypeError):
        SamplingParams(*values, False)


def test_all_fields_are_documented():
    lines = [line.partition(": ") for line in (SamplingParams.__doc__ or "").splitlines()[2:]]
    assert [name for name, *_ in lines] == [
        field.name for field in dataclasses.fields(SamplingParams)
    ]
    assert all(text for *_, text in lines)
    structure_lines = [
        line.strip() for line in (StructuredOutputsParams.__doc__ or "").splitlines()[2:]
    ]
    structure_fields = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
    assert (
        [line.partition(": ")[0] for line in structure_lines if line]
        == structure_fields
        == [*structured.SHAPES, *structured.SPACING]
    )


def test_clone_is_an_equal_copy():
    params = make_params(temperature=0.5, stop=["a"], structured_outputs={"regex": "a+"})
    twin = params.clone()
    assert twin == params and twin is not params


def test_output_kinds():
    assert make_params().output_kind is RequestOutputKind.CUMULATIVE
    assert make_params(output_kind=RequestOutputKind.DELTA).output_kind is RequestOutputKind.DELTA
    for value in ("DELTA", 1, None):
        assert refusal(output_kind=value).param == "output_kind"


def test_structured_outputs_params_class():
    for fields in (
        {"json": {"type": "object"}},
        {"choice": ["a", "b"]},
        {"json_object": True},
        {"regex": "a+"},
    ):
        assert make_params(structured_outputs=StructuredOutputsParams(**fields)) == make_params(
            structured_outputs=fields
        )
    for fields in ({}, {"regex": "a", "choice": ["b"]}, {"regex": ""}):
        with pytest.raises(RequestError, match="structured_outputs"):
            StructuredOutputsParams(**fields)


@pytest.mark.parametrize("name", NUMBERS)
def test_float_fields(name):
    lowest, highest, _ = NUMBERS[name]
    for value in (lowest, highest, (lowest + highest) / 2, np.float32(1)):
        value_set = getattr(make_params(**{name: value}), name)
        assert value_set == float(value) and type(value_set) is float
    for value in (
        lowest - 0.001,
        highest + 0.001,
        -1e400,
        1e400,
        NAN,
        10**400,
        -(10**400),
        True,
        "1",
        None,
        [1.0],
        1j,
    ):
        assert refusal(**{name: value}).param == name


def test_temperatures_that_float32_cannot_divide_by_are_refused():
    assert make_params(temperature=1e-6).temperature == 1e-6
    assert "0 (greedy)" in str(refusal(temperature=1e-40))
    assert (
        str(refusal(temperature=-1))
        == "temperature: must be a number from 0 to 100 (0 is greedy), got -1"
    )
    assert (
        str(refusal(top_p=0)) == "top_p: must be a number above 0 and at most 1 (1 is off), got 0"
    )


@pytest.mark.parametrize("name", SWITCHES)
def test_boolean_fields(name):
    assert getattr(make_params(**{name: True}), name) is True
    for value in (0, 1, None, "true", [], NAN):
        assert refusal(**{name: value}).param == name


def test_top_k_off_is_zero():
    assert make_params(top_k=-1).top_k == make_params(top_k=0).top_k == 0


def test_stop_strings():
    assert make_params(stop="END").stop == ("END",)
    assert make_params(stop=["a", "日\n"]).stop == ("a", "日\n")
    assert make_params(stop=None).stop == make_params(stop=[]).stop == ()
    assert len(make_params(stop=["x" * 1024] * 64).stop) == 64
    assert refusal(stop="").param == "stop[0]"
    assert refusal(stop=["a", ""]).param == "stop[1]"
    assert refusal(stop=["a", 5]).param == "stop[1]"
    assert refusal(stop=["x" * 1025]).param == "stop[0]"
    assert "surrogate" in str(refusal(stop=["\ud83d"]))
    assert "at most 64" in str(refusal(stop=["x"] * 65))
    for value in (5, True, {"a": 1}, b"end", NAN):
        assert refusal(stop=value).param == "stop"
    assert "detokenize=True" in str(refusal(stop="x", detokenize=False))


def test_bad_words():
    assert make_params(bad_words=["a", " b"]).bad_words == ("a", " b")
    assert refusal(bad_words="word").param == "bad_words"
    assert refusal(bad_words=[""]).param == "bad_words[0]"
    assert refusal(bad_words=["a"] * 65).param == "bad_words"


def test_token_ids():
    assert make_params(stop_token_ids=[3, 0]).stop_token_ids == (3, 0)
    assert make_params(allowed_token_ids=np.array([5, 7])).allowed_token_ids == (5, 7)
    assert make_params(allowed_token_ids=range(3)).allowed_token_ids == (0, 1, 2)
    assert "at least one" in str(refusal(allowed_token_ids=[]))
    for name in ("stop_token_ids", "allowed_token_ids"):
        for value in (-1, 2**31, 1.0, True, "1", None):
            assert refusal(**{name: [0, value]}).param == f"{name}[1]"
        assert refusal(**{name: 5}).param == name
        assert refusal(**{name: "5"}).param == name
    assert refusal(stop_token_ids=range(257)).param == "stop_token_ids"


def test_logit_bias():
    given_bias = {"5": 1, 6: -100.0, np.int64(7): np.float32(0.5)}
    bias = make_params(logit_bias=given_bias).logit_bias
    assert bias == {5: 1.0, 6: -100.0, 7: 0.5}
    given_bias["5"] = 99
    assert bias == {5: 1.0, 6: -100.0, 7: 0.5}
    for key in ("x", "-1", "1.0", -1, 1.5, True, None, 2**31, "9" * 30, "٣"):
        assert refusal(logit_bias={key: 1.0}).param == "logit_bias"
    message = str(refusal(logit_bias={"b": 1.0, "5": 1.0, "a": 1.0}))
    assert message == "logit_bias: must have token ids as keys, got ['a', 'b']"
    for value in (100.1, -101, NAN, INFINITY, "1", None, True):
        assert refusal(logit_bias={5: value}).param == "logit_bias[5]"
    for value in ([5, 1.0], 5, "5"):
        assert refusal(logit_bias=value).param == "logit_bias"
    assert "1025 entries" in str(refusal(logit_bias=dict.fromkeys(range(1025), 0.0)))


def test_min_tokens_is_at_most_max_tokens():
    assert make_params(min_tokens=16).min_tokens == 16
    assert make_params(min_tokens=100, max_tokens=None).min_tokens == 100
    assert (
        str(refusal(min_tokens=9, max_tokens=8))
        == "min_tokens: must be at most max_tokens (8), got 9"
    )


def test_unknown_fields_are_refused_with_a_suggestion():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="did you mean 'temperature'") as error_info:
        SamplingParams.from_dict({"top_p": 0.5, "temprature": 1.0})
    assert error_info.value.param == "temprature"
    with pytest.raises(RequestError, match="the known fields are .*top_p"):
        SamplingParams.from_dict({"zzzz": 1})
    with pytest.raises(RequestError, match="unknown field"):
        SamplingParams.from_dict({5: 1})  # type: ignore[dict-item]
    with pytest.raises(RequestError, match="map field names"):
        SamplingParams.from_dict([("n", 1)])  # type: ignore[arg-type]


def test_unknown_arguments_and_assignment_name_alternatives():
    with pytest.raises(
        TypeError, match="SamplingParams has no 'temprature'; did you mean 'temperature'"
    ):
        SamplingParams(temprature=1)
    with pytest.raises(TypeError, match="has no 'max_new_tokens'; here it is 'max_tokens'"):
        SamplingParams(max_new_tokens=1)
    with pytest.raises(TypeError, match="has no 'wibble'; the fields are n, "):
        SamplingParams(wibble=1)
    with pytest.raises(
        AttributeError, match=r"dataclasses.replace\(params, max_tokens=...\) makes another"
    ):
        SamplingParams().max_tokens = 3


def test_from_dict():
    fields = {"n": 2, "stop": "x", "logit_bias": {"3": 1}, "seed": None}
    assert SamplingParams.from_dict(fields) == make_params(n=2, stop=["x"], logit_bias={3: 1.0})


def test_params_and_errors_survive_copies():
    params = make_params(stop=["a"], logit_bias={3: 1.0}, allowed_token_ids=[3])
    for twin in (
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        dataclasses.replace(params),
    ):
        assert twin == params
    error = refusal(n=0)
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(twin), twin.param) == (str(error), "n")
    assert isinstance(error, ValueError)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from([*INTEGERS, *NUMBERS, *SWITCHES, *LISTS, *OTHERS]), ANYTHING, max_size=3
    )
)
def test_any_value_is_accepted_or_refused_by_name(fields):
    try:
        params = make_params(**fields)
    except RequestError as error:
        assert error.param.split("[")[0].split(".")[0] in [*fields, "min_tokens"]
        assert "\n" not in str(error) and str(error).isascii()
        return
    for name in NUMBERS:
        assert np.isfinite(getattr(params, name))
    hash((params.stop, params.stop_token_ids, params.bad_words, params.allowed_token_ids))


STRUCTURES = st.dictionaries(
    st.sampled_from(
        [
            "json",
            "regex",
            "choice",
            "grammar",
            "json_object",
            "whitespace_pattern",
            "disable_any_whitespace",
        ]
    )
    | st.text(),
    ANYTHING,
    max_size=3,
)


@given(STRUCTURES)
def test_any_structure_is_accepted_or_refused_by_name(fields):
    try:
        structure = make_params(structured_outputs=fields).structured_outputs
    except RequestError as error:
        assert error.param.startswith("structured_outputs") and len(str(error)) < 300
        assert "\n" not in str(error) and str(error).isascii()
        return
    assert make_params(structured_outputs=structure).structured_outputs == structure
    assert all(isinstance(value, str | tuple | bool) for value in structure.values())


def test_output_classes():
    answer = CompletionOutput(0, "text", (1, 2), -1.5, [{1: Logprob(-0.5, 1, "te")}])
    assert not answer.finished
    assert dataclasses.replace(answer, finish_reason="stop").finished
    metrics = RequestMetrics(arrival_time=1.0)
    assert metrics.time_to_first_token is metrics.time_in_queue is None
    later = dataclasses.replace(metrics, first_scheduled_time=1.5, first_token_time=3.0)
    assert (later.time_in_queue, later.time_to_first_token) == (0.5, 2.0)
    result = RequestOutput("r", None, (5,), [answer], metrics=later)
    assert (result.prompt_logprobs, result.num_cached_tokens, result.finished) == (None, 0, True)


def test_params_and_outputs_import_no_jax():
    code = (
        "import sys, quire.serving.api.params, quire.serving.api.outputs; sys.exit('jax' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
