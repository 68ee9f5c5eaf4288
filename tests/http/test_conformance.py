"""docs/api.md matches the server: every field of every endpoint, every path, and what clients were
tested to do.
"""

import pytest

from quire.serving.api.errors import RequestError
from quire.serving.protocol.schema import BODIES
from quire.tests.support import conformance
from quire.tests.support.conformance import ENDPOINTS, NEEDS, PAGE, VALUES, Endpoint


def rejection_error(endpoint: Endpoint, **body) -> RequestError:
    with pytest.raises(RequestError) as caught:
        endpoint.parse({**endpoint.base, **body})
    return caught.value


def test_every_endpoint_has_a_field_table():
    assert [endpoint.path for endpoint in ENDPOINTS] == list(BODIES)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_fields_behave_as_documented(endpoint):
    default_request = endpoint.parse(endpoint.base)
    for name in endpoint.fields:
        if name in endpoint.labels:
            assert endpoint.parse({**endpoint.base, name: {"any": ["thing"]}}) == default_request, (
                name
            )
            continue
        if name in endpoint.idle:
            assert (
                endpoint.parse({**endpoint.base, name: endpoint.idle[name]}) == default_request
            ), name
            assert rejection_error(endpoint, **{name: object()}).param == name
            continue
        base = {**endpoint.base, **NEEDS.get(name, {}), **endpoint.required_with.get(name, {})}
        value = endpoint.values.get(name, VALUES.get(name))
        # a complete body that has this field instead of another
        if isinstance(value, dict) and name in value:
            assert endpoint.parse(value) != default_request
        else:
            assert endpoint.parse({**base, name: value}) != endpoint.parse(base), name
        if name not in endpoint.base:
            assert endpoint.parse({**endpoint.base, name: None}) == default_request, name
        with pytest.raises(RequestError):  # the field is checked
            endpoint.parse({**base, name: object()})
    for name, neutral_value in endpoint.neutral.items():
        assert endpoint.parse({**endpoint.base, name: neutral_value}) == default_request
        assert rejection_error(endpoint, **{name: "x"}).param == name
    for name, message in endpoint.refused.items():
        error = rejection_error(endpoint, **{name: "x"})
        assert (error.param, error.message) == (name, message)
    assert rejection_error(endpoint, colour="red").param == "colour"


def test_api_page_is_up_to_date():
    assert PAGE.read_text() == conformance.document(), (
        "python tests/support/conformance.py > docs/api.md"
    )
