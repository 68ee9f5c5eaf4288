"""Each argument that vLLM publishes is applied, has no effect, or is refused with what serves in
its place.
"""

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
        lambda **given: make_options(None, **given),
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
def test_every_published_name_has_one_meaning(kind):
    _, cls, table, _ = KINDS[kind]
    names = set(vllm_table.published()[kind])
    own = {field.name for field in fields(cls)}
    assert names - own == set(table), "what is an option now leaves serving/api/vllm_names.py"


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_name_does_what_the_table_says(kind, name):
    make, _, table, error = KINDS[kind]
    entry = table[name]
    if isinstance(entry, UnsupportedArgument):
        with pytest.raises(error, match=name) as caught:
            make(**{name: object()})
        assert entry.reason in str(caught.value)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for value in (None, *entry.harmless):
                assert make(**{name: value}) == make()
    else:
        with pytest.warns(UserWarning, match=f"^without effect: {name} ") as seen:
            assert make(**{name: object()}) == make()
        assert len(seen) == 1


def test_there_is_one_warning_for_all():
    with pytest.warns(UserWarning) as seen:
        make_options(None, trust_remote_code=True, enforce_eager=True, max_num_seqs=4)
    assert (
        len(seen) == 1
        and "enforce_eager" in str(seen[0].message)
        and "trust_remote" in str(seen[0].message)
    )


def test_false_is_no_zero():
    for value in (1, True):
        with pytest.raises(ModelError, match="enable_prompt_embeds"):
            make_options(None, enable_prompt_embeds=value)
    with pytest.raises(ModelError, match="nnodes is True"):
        make_options(None, nnodes=True)


def test_the_page_is_what_is_true():
    assert vllm_table.PAGE.read_text() == vllm_table.page()
