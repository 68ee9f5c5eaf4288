"""What of a step becomes CUDA graphs."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from quire.model.config import ModelError
from quire.serving.device import graphs


@pytest.fixture
def card(monkeypatch):
    """(platform version, newest CUDA of the driver) -> a GPU of that kind."""
    graphs.warn_once.cache_clear()
    for name in ("QUIRE_GRAPHS", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)

    def pretend(platform: str, driver: int) -> None:
        device = SimpleNamespace(client=SimpleNamespace(platform_version=platform))
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        monkeypatch.setattr(graphs, "driver_version", lambda: driver)

    return pretend


def test_a_gpu_records_loops_branches_and_collectives(card, monkeypatch):
    card("PJRT C API\ncuda 12090", 12030)
    recorded = graphs.compiler_options()[graphs.OPTION].split(",")
    assert {"FUSION", "CUSTOM_CALL", "CONDITIONAL", "WHILE", "COLLECTIVES"} <= set(recorded)
    monkeypatch.setenv("QUIRE_GRAPHS", "off")
    assert graphs.compiler_options() == {graphs.OPTION: ""}


@pytest.mark.parametrize(("driver", "said"), [(12020, "knows CUDA 12.2"), (0, "does not say")])
def test_an_old_driver_gets_the_default_and_the_log_says_so_once(card, caplog, driver, said):
    card("cuda 12090", driver)
    with caplog.at_level(logging.WARNING, "quire"):
        assert graphs.compiler_options() is None and graphs.compiler_options() is None
    assert len(caplog.records) == 1 and said in caplog.text and "12.3" in caplog.text


def test_xla_flags_have_the_last_word(card, monkeypatch):
    card("cuda 12090", 12090)
    monkeypatch.setenv("XLA_FLAGS", f"--{graphs.OPTION}=FUSION")
    assert graphs.compiler_options() is None


def test_other_devices_are_compiled_as_before(card, monkeypatch):
    assert graphs.compiler_options() is None  # the CPU
    monkeypatch.setenv("QUIRE_GRAPHS", "off")
    assert graphs.compiler_options() is None
    assert graphs.compile_step(jax.jit(lambda x: x + 1).lower(jnp.zeros(2)))(jnp.zeros(2)).tolist() == [1, 1]
    monkeypatch.delenv("QUIRE_GRAPHS")
    card("PJRT C API\nrocm 60300", 12090)
    assert graphs.compiler_options() is None


def test_a_wrong_setting_is_an_error(monkeypatch):
    monkeypatch.setenv("QUIRE_GRAPHS", "on")
    with pytest.raises(ModelError, match="QUIRE_GRAPHS is 'on', and can be off"):
        graphs.compiler_options()
