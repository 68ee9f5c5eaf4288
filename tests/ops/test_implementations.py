"""Choosing one of an op's implementations."""

from types import ModuleType

import pytest

from quire.ops.implementations import NoImplementation, choose

TABLE = {"first": ".linear", "second": ".moe"}


def decline(module: ModuleType) -> str:
    raise NotImplementedError(f"{module.__name__.rpartition('.')[2]} cannot")


def second(module: ModuleType) -> str:
    return decline(module) if module.__name__.endswith("linear") else module.__name__


def test_the_first_that_does_not_decline_serves():
    assert choose(TABLE, "quire.ops", lambda module: module.__name__) == "quire.ops.linear"
    assert choose(TABLE, "quire.ops", second) == "quire.ops.moe"
    assert choose(TABLE, "quire.ops", lambda module: module.__name__, "second") == "quire.ops.moe"


def test_the_error_lists_every_reason():
    with pytest.raises(NotImplementedError, match=r"first: linear cannot; second: moe cannot") as error:
        choose(TABLE, "quire.ops", decline)
    assert isinstance(error.value, NoImplementation)
    assert [str(reason) for reason in error.value.exceptions] == ["first: linear cannot", "second: moe cannot"]


def test_a_forced_one_is_tried_alone():
    with pytest.raises(NoImplementation, match="serves this case: first: linear cannot") as error:
        choose(TABLE, "quire.ops", second, "first")
    assert len(error.value.exceptions) == 1
    with pytest.raises(ValueError, match="implementation is 'third'; it can be first, second"):
        choose(TABLE, "quire.ops", second, "third")
