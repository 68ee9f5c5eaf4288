"""docs/api.md says what is so: every field of every endpoint, every path, and what clients were
seen to do.
"""

import pytest

from quire.serving.api.errors import RequestError
from quire.serving.protocol.schema import BODIES
from quire.tests.support import conformance
from quire.tests.support.conformance import ENDPOINTS, NEEDS, PAGE, VALUES, Endpoint


def refused(endpoint: Endpoint, **body) -> RequestError:
    with pytest.raises(RequestError) as caught:
        endpoint.parse({**endpoint.base, **body})
    return caught.value


def test_every_body_has_a_table():
    assert [endpoint.path for endpoint in ENDPOINTS] == list(BODIES)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_each_field_is_what_its_row_says(endpoint):
    plain = endpoint.parse(endpoint.base)
    for name in endpoint.fields:
        if name in endpoint.labels:
            assert endpoint.parse({**endpoint.base, name: {"any": ["thing"]}}) == plain, name
            continue
        if name in endpoint.idle:
            assert endpoint.parse({**endpoint.base, name: endpoint.idle[name]}) == plain, name
            assert refused(endpoint, **{name: object()}).param == name
            continue
        base = {**endpoint.base, **NEEDS.get(name, {}), **endpoint.required_with.get(name, {})}
        value = endpoint.values.get(name, VALUES.get(name))
        # a whole body, with it in place of another field
        if isinstance(value, dict) and name in value:
            assert endpoint.parse(value) != plain
        else:
            assert endpoint.parse({**base, name: value}) != endpoint.parse(base), name
        if name not in endpoint.base:
            assert endpoint.parse({**endpoint.base, name: None}) == plain, name
        with pytest.raises(RequestError):  # and it is looked at
            endpoint.parse({**base, name: object()})
    for name, nothing in endpoint.neutral.items():
        assert endpoint.parse({**endpoint.base, name: nothing}) == plain
        assert refused(endpoint, **{name: "x"}).param == name
    for name, why in endpoint.refused.items():
        error = refused(endpoint, **{name: "x"})
        assert (error.param, error.message) == (name, why)
    assert refused(endpoint, colour="red").param == "colour"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == conformance.document(), (
        "python tests/support/conformance.py > docs/api.md"
    )
