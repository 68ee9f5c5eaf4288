"""Fine-tuning of scales and norms: nearer to the dense model on text that it has not seen, by the
reference decoder.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from quire.__main__ import app
from quire.model.checkpoint.loader import load_weights, read_config
from quire.model.checkpoint.safetensors import find_tensors
from quire.model.config import ModelError
from quire.model.quantize import fine_tune, session
from quire.tests.support import tiny, uncached

pytestmark = pytest.mark.usefixtures("few_programs", "compiled_quickly")
LLAMA = tiny.LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
TEXT = [np.random.default_rng(seed).integers(0, 96, 16).tolist() for seed in range(160)]
LEARNED = TEXT[:128]
HELD = TEXT[128:]
RUN = jax.jit(uncached.forward, static_argnums=2)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "llama"
    tiny.write(folder, LLAMA, tiny.even(tiny.shapes(LLAMA)))
    return folder


def said(folder: Path) -> np.ndarray:
    """Log-probabilities over what was held out, of what a folder's tensors decode to."""
    config = replace(read_config(folder, "float32"), quant=None)
    weights = load_weights(folder, config)
    return np.asarray(jax.nn.log_softmax(RUN(weights, jnp.array(HELD), config)), np.float64)


def make(
    dense: Path, out: Path, name: str, method: str, epochs: int, progress=lambda done: None
) -> Path:
    config = read_config(dense, quantization=name)
    session.save(dense, out, config, method, LEARNED, progress, fine_tune_epochs=epochs)
    return out


@pytest.mark.parametrize(("name", "method"), [("e8p-2", "quip"), ("int2-32", "gptq")])
@pytest.mark.slow
def test_what_was_not_seen_is_nearer_to_the_dense_model(tmp_path, dense, name, method, monkeypatch):
    monkeypatch.setattr(fine_tune, "ROWS", 256)  # eight steps an epoch
    right = said(dense)
    steps = []
    plain = make(dense, tmp_path / "plain", name, method, 0)
    tuned = make(dense, tmp_path / "tuned", name, method, 8, steps.append)
    assert steps == list(range(1, 11)) and sorted(tmp_path.iterdir()) == [plain, tuned]

    def divergence(folder: Path) -> float:
        return float((np.exp(right) * (right - said(folder))).sum(-1).mean())

    assert 0 < divergence(tuned) < 0.9 * divergence(plain)
    a, b = (load_file(folder / "model.safetensors") for folder in (plain, tuned))
    assert a.keys() == b.keys()
    for key, value in a.items():
        changed = value.tobytes() != b[key].tobytes()
        assert value.dtype == b[key].dtype and changed == (
            key.endswith(("_scale", "layernorm.weight"))
        ), key


def test_a_step_is_adams():
    rng = np.random.default_rng(0)
    value = {"a": rng.standard_normal(5), "b": rng.standard_normal((2, 3))}
    tx = optax.adam(0.03, *fine_tune.DECAYS, eps=fine_tune.LEAST)
    state = tx.init(value)
    mine = fine_tune.TuningState.start(value)
    theirs = value
    for number in range(1, 5):
        grads = jax.tree.map(lambda x: rng.standard_normal(x.shape), value)
        mine = fine_tune.adam(mine, grads, 0.03, number)
        updates, state = tx.update(grads, state)
        theirs = optax.apply_updates(theirs, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), mine.factors, theirs
    )


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path, dense, monkeypatch):
    """Epochs that are done are not done again, and the bytes are the same."""
    whole = make(dense, tmp_path / "whole", "e8p-2", "quip", 3)

    def stop(done):
        if done == 4:  # two layers, two epochs
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(dense, tmp_path / "out", "e8p-2", "quip", 3, stop)
    with pytest.raises(ModelError, match="fine_tune_epochs was another"):
        make(dense, tmp_path / "out", "e8p-2", "quip", 4)
    steps = []
    own = fine_tune.step
    monkeypatch.setattr(fine_tune, "step", lambda *args: steps.append(args[8]) or own(*args))
    out = make(dense, tmp_path / "out", "e8p-2", "quip", 3)
    count = len(steps)
    assert count == 2 and steps == [5, 6]
    assert load_file(out / "model.safetensors").keys() == find_tensors(whole).keys()
    for name, value in load_file(whole / "model.safetensors").items():
        assert load_file(out / "model.safetensors")[name].tobytes() == value.tobytes()


def test_what_is_refused(tmp_path, dense):
    for name, method in (("codebook-3", "squeezellm"), ("nvfp4", "gptq")):
        with pytest.raises(
            ModelError, match=f"fine_tune_epochs is for .*e8p-2.*quantization is '{name}'"
        ):
            make(dense, tmp_path / "out", name, method, 1)
    config = read_config(dense, quantization="int4-32")
    with pytest.raises(ModelError, match="fine_tune_epochs.*laid out as gptq"):
        session.save(
            dense, tmp_path / "out", config, "gptq", LEARNED, layout="gptq", fine_tune_epochs=1
        )
    asked = [
        "quantize",
        str(dense),
        str(tmp_path / "out"),
        "--quantization",
        "e8p-2",
        "--fine-tune-epochs",
        "2",
    ]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code and "--fine-tune-epochs 2 needs a --method other than rtn" in str(
        done.exception
    )
    assert not list(tmp_path.iterdir())
