"""Each argument of vLLM is supported, ignored with a warning, or refused with a reason."""

import warnings
from dataclasses import fields

import pytest

from quire.model.config import ModelError
from quire.serving.api import params, vllm_names
from quire.serving.api.errors import RequestError
from quire.serving.api.options import EngineOptions, make_options
from quire.serving.api.vllm_names import UnsupportedArgument
from quire.tests.support import vllm_table

KINDS = {
    "EngineArgs": (
        lambda **arguments: make_options(None, **arguments),
        EngineOptions,
        vllm_names.ENGINE,
        ModelError,
    ),
    "SamplingParams": (
        params.SamplingParams,
        params.SamplingParams,
        vllm_names.SAMPLING,
        RequestError,
    ),
}
CASES = [(kind, name) for kind, (*_, table, _) in KINDS.items() for name in table]


@pytest.mark.parametrize("kind", KINDS)
def test_published_names_are_fields_or_in_the_table(kind):
    _, cls, table, _ = KINDS[kind]
    published_names = set(vllm_table.published()[kind])
    field_names = {field.name for field in fields(cls)}
    assert published_names - field_names == set(table), (
        "a supported option must not be in serving/api/vllm_names.py"
    )


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_unsupported_and_ignored_arguments_of_vllm(kind, name):
    make, _, table, error = KINDS[kind]
    entry = table[name]
    if isinstance(entry, UnsupportedArgument):
        with pytest.raises(error, match=name) as error_info:
            make(**{name: object()})
        assert entry.reason in str(error_info.value)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for value in (None, *entry.harmless):
                assert make(**{name: value}) == make()
    else:
        with pytest.warns(UserWarning, match=f"^without effect: {name} ") as caught_warnings:
            assert make(**{name: object()}) == make()
        assert len(caught_warnings) == 1


def test_one_warning_names_all_ignored_arguments():
    with pytest.warns(UserWarning) as caught_warnings:
        make_options(None, trust_remote_code=True, enforce_eager=True, max_num_seqs=4)
    assert (
        len(caught_warnings) == 1
        and "enforce_eager" in str(caught_warnings[0].message)
        and "trust_remote" in str(caught_warnings[0].message)
    )


def test_disabled_values_are_compared_by_type():
    for value in (1, True):
        with pytest.raises(ModelError, match="enable_prompt_embeds"):
            make_options(None, enable_prompt_embeds=value)
    with pytest.raises(ModelError, match="nnodes is True"):
        make_options(None, nnodes=True)


def test_compatibility_page_is_up_to_date():
    assert vllm_table.PAGE.read_text() == vllm_table.page()
