"""Fixtures for trained models; tests are skipped if their model is not downloaded."""

import pytest

from quire.tests.support import real_models


@pytest.fixture(scope="session")
def model():
    """Returns the path of a listed model by name; without it the test is skipped, or fails if the
    list requires the model.
    """

    def path_of(name: str) -> str:
        reason = real_models.missing(name)
        if reason is not None:
            (pytest.fail if real_models.is_needed(name) else pytest.skip)(reason)
        return str(real_models.path_of(name))

    return path_of


@pytest.fixture(scope="module")
def reference(model):
    """Returns a model by name in transformers, in float32 and loaded once per module."""
    pytest.importorskip("torch", reason="torch is not installed: make parity")
    from quire.tests.support.real_reference import Reference

    loaded: dict[str, Reference] = {}

    def reference_of(name: str) -> Reference:
        if name not in loaded:
            loaded[name] = Reference(model(name))
        return loaded[name]

    return reference_of
