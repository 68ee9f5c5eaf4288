"""Models with trained weights: a test that needs one says so, and is left out where it is not
there.
"""

import pytest

from quire.tests.support import real_models


@pytest.fixture(scope="session")
def model():
    """The path of a model of the list by its name; the test is skipped without it, or fails where
    the list wants it.
    """

    def path_of(name: str) -> str:
        reason = real_models.missing(name)
        if reason is not None:
            (pytest.fail if real_models.is_needed(name) else pytest.skip)(reason)
        return str(real_models.path_of(name))

    return path_of


@pytest.fixture(scope="module")
def reference(model):
    """transformers in float32 on a model's own weights, dequantised; loaded once for a file of
    tests.
    """
    pytest.importorskip("torch", reason="torch is not installed: make parity")
    from quire.tests.support.real_reference import Reference

    loaded: dict[str, Reference] = {}

    def reference_of(name: str) -> Reference:
        if name not in loaded:
            loaded[name] = Reference(model(name))
        return loaded[name]

    return reference_of
