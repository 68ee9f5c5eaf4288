"""A sampling parameter is declared once; endpoints, schemas and step inputs derive from that."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.ops.sampling import MAX_LOGPROBS, MAX_WANTED, SamplingInputs
from quire.serving.api import params
from quire.serving.api.errors import RequestError
from quire.serving.api.params import SAMPLING, SamplingParams, declarations, declared
from quire.serving.api.validation import real
from quire.serving.device.batch import empty, param_arrays
from quire.serving.device.step_shape import Size, StepShape
from quire.serving.engine.batch_builder import BatchBuilder
from quire.serving.protocol import chat, completion, messages, responses
from quire.serving.protocol.fields import REQUEST_OPTIONS, sampling_fields
from quire.serving.protocol.schema import body_schema

ENDPOINTS = {
    "chat": (chat, "/v1/chat/completions"),
    "completions": (completion, "/v1/completions"),
    "responses": (responses, "/v1/responses"),
    "messages": (messages, "/v1/messages"),
}
STEP_PARAMS = [name for name, declaration in SAMPLING.items() if declaration.padding is not None]
OTHER_STEP_INPUTS = {  # sampling inputs of a step that are not parameters
    "slots_R",
    "bias_rows_R",
    "drafted_RJ",
    "positions_R",
    "seeds_R2",
    "ban_stop_R",
    "ban_RX",
    "targets_R",
    "biased_R",
    "wants_logprobs_R",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtendedParams(SamplingParams):
    dryness: float = declared(0.5, real(0, 5, " (0 is off)"), ("chat",), padding=0.25)


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_endpoints_accept_declared_parameters(endpoint, name):
    module, path = ENDPOINTS[endpoint]
    is_accepted = endpoint in SAMPLING[name].endpoints
    assert (name in module.SAMPLING_FIELDS) == is_accepted
    if is_accepted:
        schema = body_schema(path)["properties"][name]
        assert name in module.FIELDS and SAMPLING[name].rule.schema in (
            schema,
            schema.get("anyOf", [None])[0],
        )


def test_all_endpoints_accept_request_terms():
    assert {"cache_salt", "priority", "timeout"} == set(REQUEST_OPTIONS)
    for module, path in ENDPOINTS.values():
        assert set(REQUEST_OPTIONS) <= set(module.FIELDS) and set(REQUEST_OPTIONS) <= set(
            body_schema(path)["properties"]
        )


def test_step_inputs_contain_declared_parameters():
    assert {field.name for field in dataclasses.fields(SamplingInputs)} == OTHER_STEP_INPUTS | {
        f"{name}_R" for name in STEP_PARAMS
    }
    padding = empty(StepShape(Size(8, 4, 4), 4)).sampling
    for name in STEP_PARAMS:
        array = getattr(padding, f"{name}_R")
        assert array.tolist() == [SAMPLING[name].padding] * 4
        assert array.dtype == (
            np.float32 if isinstance(SAMPLING[name].padding, float) else np.int32
        )


@pytest.mark.parametrize("name", STEP_PARAMS)
def test_slot_settings_have_the_values_of_the_request(name):
    builder = BatchBuilder(StepShape.largest(4, 16, 16).with_cache(1, 16, 64))
    value = 7 if isinstance(SAMPLING[name].padding, int) else 0.75
    seq: Any = SimpleNamespace(
        replica=0, slot=2, seed=(1, 2), params=SamplingParams(**{name: value}), scored=False
    )
    builder.assign(seq, False)
    for other_name in STEP_PARAMS:
        slot_values = builder.settings[f"{other_name}_R"].tolist()
        assert slot_values[2] == getattr(seq.params, other_name) and {
            *slot_values[:2],
            slot_values[3],
        } == {SAMPLING[other_name].padding}
    assert builder.settings[f"{name}_R"][2] == value


def test_new_parameter_needs_only_a_declaration(monkeypatch):
    assert (
        ExtendedParams().dryness == 0.5
        and ExtendedParams(dryness=np.float32(2), n=3).dryness == 2.0
    )
    with pytest.raises(RequestError) as caught:
        ExtendedParams(dryness=6)
    assert str(caught.value) == "dryness: must be a number from 0 to 5 (0 is off), got 6"
    with pytest.raises(RequestError, match="did you mean 'dryness'"):
        ExtendedParams.from_dict({"drynes": 1})
    monkeypatch.setitem(SAMPLING, "dryness", declarations(ExtendedParams)["dryness"])
    assert "dryness" in sampling_fields("chat") and "dryness" not in sampling_fields("messages")
    assert param_arrays(3)["dryness_R"].tolist() == [0.25] * 3


def test_logprob_limits_equal_those_of_the_step():
    assert params.MAX_LOGPROBS == MAX_LOGPROBS and params.MAX_WANTED == MAX_WANTED
