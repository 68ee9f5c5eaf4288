"""Fine-tuning of scales and norms: divergence from the dense model on held-out text."""

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
SAMPLES = [np.random.default_rng(seed).integers(0, 96, 16).tolist() for seed in range(160)]
TRAINING_SAMPLES = SAMPLES[:128]
HELD_OUT_SAMPLES = SAMPLES[128:]
RUN = jax.jit(uncached.forward, static_argnums=2)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "llama"
    tiny.write(folder, LLAMA, tiny.even(tiny.shapes(LLAMA)))
    return folder


def held_out_logprobs(folder: Path) -> np.ndarray:
    """Logprobs of the held-out samples with a folder's dequantised weights."""
    config = replace(read_config(folder, "float32"), quant=None)
    weights = load_weights(folder, config)
    return np.asarray(
        jax.nn.log_softmax(RUN(weights, jnp.array(HELD_OUT_SAMPLES), config)), np.float64
    )


def quantize_folder(
    dense: Path, out: Path, name: str, method: str, epochs: int, progress=lambda num_done: None
) -> Path:
    config = read_config(dense, quantization=name)
    session.save(dense, out, config, method, TRAINING_SAMPLES, progress, fine_tune_epochs=epochs)
    return out


@pytest.mark.parametrize(("name", "method"), [("e8p-2", "quip"), ("int2-32", "gptq")])
@pytest.mark.slow
def test_fine_tuning_lowers_the_divergence_on_held_out_text(
    tmp_path, dense, name, method, monkeypatch
):
    monkeypatch.setattr(fine_tune, "ROWS", 256)  # eight steps an epoch
    dense_logprobs = held_out_logprobs(dense)
    steps = []
    untuned = quantize_folder(dense, tmp_path / "plain", name, method, 0)
    tuned = quantize_folder(dense, tmp_path / "tuned", name, method, 8, steps.append)
    assert steps == list(range(1, 11)) and sorted(tmp_path.iterdir()) == [untuned, tuned]

    def divergence(folder: Path) -> float:
        return float(
            (np.exp(dense_logprobs) * (dense_logprobs - held_out_logprobs(folder))).sum(-1).mean()
        )

    assert 0 < divergence(tuned) < 0.9 * divergence(untuned)
    a, b = (load_file(folder / "model.safetensors") for folder in (untuned, tuned))
    assert a.keys() == b.keys()
    for key, value in a.items():
        changed = value.tobytes() != b[key].tobytes()
        assert value.dtype == b[key].dtype and changed == (
            key.endswith(("_scale", "layernorm.weight"))
        ), key


def test_step_matches_optax_adam():
    rng = np.random.default_rng(0)
    value = {"a": rng.standard_normal(5), "b": rng.standard_normal((2, 3))}
    tx = optax.adam(0.03, *fine_tune.DECAYS, eps=fine_tune.LEAST)
    state = tx.init(value)
    state_of_quire = fine_tune.TuningState.start(value)
    optax_value = value
    for number in range(1, 5):
        grads = jax.tree.map(lambda x: rng.standard_normal(x.shape), value)
        state_of_quire = fine_tune.adam(state_of_quire, grads, 0.03, number)
        updates, state = tx.update(grads, state)
        optax_value = optax.apply_updates(optax_value, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        state_of_quire.factors,
        optax_value,
    )


@pytest.mark.slow
def test_interrupted_run_resumes_with_identical_output(tmp_path, dense, monkeypatch):
    """Finished epochs are not repeated."""
    uninterrupted = quantize_folder(dense, tmp_path / "whole", "e8p-2", "quip", 3)

    def stop(num_done):
        if num_done == 4:  # two layers, two epochs
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(dense, tmp_path / "out", "e8p-2", "quip", 3, stop)
    with pytest.raises(ModelError, match="fine_tune_epochs was another"):
        quantize_folder(dense, tmp_path / "out", "e8p-2", "quip", 4)
    steps = []
    step = fine_tune.step
    monkeypatch.setattr(fine_tune, "step", lambda *args: steps.append(args[8]) or step(*args))
    out = quantize_folder(dense, tmp_path / "out", "e8p-2", "quip", 3)
    count = len(steps)
    assert count == 2 and steps == [5, 6]
    assert load_file(out / "model.safetensors").keys() == find_tensors(uninterrupted).keys()
    for name, value in load_file(uninterrupted / "model.safetensors").items():
        assert load_file(out / "model.safetensors")[name].tobytes() == value.tobytes()


def test_unsupported_formats_and_options_are_rejected(tmp_path, dense):
    for name, method in (("codebook-3", "squeezellm"), ("nvfp4", "gptq")):
        with pytest.raises(
            ModelError, match=f"fine_tune_epochs is for .*e8p-2.*quantization is '{name}'"
        ):
            quantize_folder(dense, tmp_path / "out", name, method, 1)
    config = read_config(dense, quantization="int4-32")
    with pytest.raises(ModelError, match="fine_tune_epochs.*laid out as gptq"):
        session.save(
            dense,
            tmp_path / "out",
            config,
            "gptq",
            TRAINING_SAMPLES,
            layout="gptq",
            fine_tune_epochs=1,
        )
    arguments = [
        "quantize",
        str(dense),
        str(tmp_path / "out"),
        "--quantization",
        "e8p-2",
        "--fine-tune-epochs",
        "2",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code and "--fine-tune-epochs 2 needs a --method other than rtn" in str(
        result.exception
    )
    assert not list(tmp_path.iterdir())
