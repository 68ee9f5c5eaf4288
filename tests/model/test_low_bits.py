"""SqueezeLLM and QuIP# quantisation: choosing codes, and writing and reading checkpoints."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from quire import LLM, SamplingParams
from quire.model.checkpoint import quantized
from quire.model.checkpoint.loader import find_sources, load_weights, read_config
from quire.model.checkpoint.published.compressed_tensors import quantization_config, stored_format
from quire.model.config import ModelError
from quire.model.quantize import sensitivity, session
from quire.model.quantize.quip import quip
from quire.model.quantize.source import CheckpointSource
from quire.ops.quant import e8p
from quire.ops.quant.hadamard import rotated
from quire.tests.support import tiny, uncached
from quire.tests.support.low_bits import dequantize

D = 64
F = 96
LLAMA = tiny.LLAMA | {
    "hidden_size": D,
    "intermediate_size": F,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
FORMATS = ("codebook-4", "codebook-3", "e8p-2", "e8p-4")
SAMPLES = [
    np.random.default_rng(length).integers(0, 96, length).tolist() for length in (5, 21, 1, 17)
]


def source_of(folder: Path, name: str) -> CheckpointSource:
    config = read_config(folder, "float32", quantization=name)
    return CheckpointSource.open(folder, config, stored_format(quantization_config(name, [])))


def load_host_weights(folder: Path, quantization: str | None = None):
    return load_weights(
        folder, read_config(folder, quantization=quantization), place=lambda spec, leaf: leaf
    )


def assert_same_leaves(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for actual_leaf, expected_leaf in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (actual_leaf.dtype, actual_leaf.shape) == (expected_leaf.dtype, expected_leaf.shape)
        assert np.asarray(actual_leaf).tobytes() == np.asarray(expected_leaf).tobytes()


@pytest.mark.slow
def test_squared_gradients_match_the_whole_model(tmp_path):
    """Summed over single sequences; a sequence of one token has no loss."""
    tiny.write(tmp_path, LLAMA, tiny.even(tiny.shapes(LLAMA)))
    source = source_of(tmp_path, "codebook-4")
    config = source.dense
    squared_gradients = {}
    sensitivity.squared_gradients(
        source, SAMPLES, lambda index, layer_gradients: squared_gradients.update(layer_gradients)
    )
    weights = load_weights(tmp_path, config, place=lambda spec, leaf: jnp.asarray(leaf))

    @jax.jit
    @jax.grad
    def gradient(weights, ids, count):
        logprobs = jax.nn.log_softmax(uncached.forward(weights, ids[None], config)[0])
        token_logprobs = jnp.take_along_axis(logprobs[:-1], ids[1:, None], axis=1)[:, 0]
        # attention is causal: padding does not change the tokens before it
        return -jnp.where(jnp.arange(1, len(ids)) < count, token_logprobs, 0).sum()

    gradients = [
        gradient(weights, jnp.array(ids + [0] * (21 - len(ids))), len(ids))
        for ids in SAMPLES
        if len(ids) > 1
    ]
    total = jax.tree.map(
        lambda *grads: sum(np.square(np.asarray(g, np.float64)) for g in grads), *gradients
    )
    assert len(squared_gradients) == 14
    for i, layer in enumerate(total.layers):
        prefix = f"model.layers.{i}"
        head = D // LLAMA["num_attention_heads"]
        qkv = layer.attention.qkv_DGH.reshape(D, -1).T
        expected = {
            "self_attn.q_proj": qkv[:D],
            "self_attn.k_proj": qkv[D : D + 2 * head],
            "self_attn.v_proj": qkv[-2 * head :],
            "self_attn.o_proj": layer.attention.out_NHD.reshape(D, D).T,
            "mlp.gate_proj": layer.mlp.up_DGF[:, 0].T,
            "mlp.up_proj": layer.mlp.up_DGF[:, 1].T,
            "mlp.down_proj": layer.mlp.down_FD.T,
        }
        for name, value in expected.items():
            actual = squared_gradients[f"{prefix}.{name}.weight"]
            np.testing.assert_allclose(actual, value, rtol=2e-3, atol=1e-5 * value.max())


def naive_quip(W, H, bits: int, damp: float = 0.01):
    """Reference QuIP# in float64: eight columns at a time, nearest of all 65,536 lattice points.

    The update of the later columns is solved anew for each block.
    """
    W = rotated(W.astype(np.float32)).astype(np.float64)
    H = rotated(rotated(H.astype(np.float32)).T).astype(np.float64)
    H = H + damp * np.mean(np.diag(H)) * np.eye(len(H))
    exact = W.copy()
    scale = e8p.output_scales(W, bits).astype(np.float64)
    points = e8p.decode_points(np.arange(1 << 16, dtype=np.uint16)) / 4.0
    Q = np.zeros_like(W)
    for i in range(0, W.shape[1], 8):
        for o in range(len(W)):
            target = W[o, i : i + 8] / scale[o]
            finer = 1
            for _ in range(bits // 2):
                point = points[np.square(points - target * finer).sum(1).argmin()] / finer
                Q[o, i : i + 8] += point
                target = target - point
                finer = finer * 4
        later_columns = np.s_[i + 8 :]
        error = W[:, i : i + 8] - Q[:, i : i + 8] * scale
        # The best update zeroes the derivative of (error, update) H (error, update)^T by `update`.
        W[:, later_columns] += (
            error @ H[i : i + 8, later_columns] @ np.linalg.inv(H[later_columns, later_columns])
        )
    H -= damp * np.mean(np.diag(H)) / (1 + damp) * np.eye(len(H))
    best = np.array([np.dot(w @ H, q) / np.dot(q @ H, q) for w, q in zip(exact, Q, strict=True)])
    return Q, best[:, None]


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 4]))
def test_quip_matches_gptq_over_blocks_of_eight_columns(seed, bits):
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((3, 32)).astype(np.float32)
    X = rng.standard_normal((60, 8)) @ rng.standard_normal((8, 32)) + 0.3 * rng.standard_normal(
        (60, 32)
    )
    codes, scale = quip(W, X.T @ X, bits)
    Q, best = naive_quip(W, X.T @ X, bits)
    points = e8p.decode_points(codes) / 4
    values = points[0] if bits == 2 else points[0] + points[1] / 4
    is_same_row = (values.reshape(3, 32) == Q).all(1)
    assert is_same_row.mean() > 0.6  # between equally near points float32 may choose the other
    np.testing.assert_allclose(scale[is_same_row], best[is_same_row], rtol=1e-3)


def test_quip_has_lower_output_error_than_nearest_points():
    rng = np.random.default_rng(0)
    W = rng.standard_normal((48, 160)).astype(np.float32)
    X = rng.standard_normal((500, 20)) @ rng.standard_normal((20, 160)) + 0.3 * rng.standard_normal(
        (500, 160)
    )
    for bits, max_ratio in ((2, 0.5), (4, 0.5)):
        rotated_weight = rotated(W)
        scale = e8p.output_scales(rotated(W), bits)
        nearest = e8p.quantize_points(rotated_weight / scale, bits)[1] * scale
        codes, scale = quip(W, X.T @ X, bits)
        points = e8p.decode_points(codes) / 4
        quip_weight = (points[0] if bits == 2 else points[0] + points[1] / 4).reshape(
            W.shape
        ) * scale
        rows = rotated(X.astype(np.float32))
        errors = [np.square(rows @ (Q - rotated_weight).T).sum() for Q in (quip_weight, nearest)]
        assert errors[0] < max_ratio * errors[1]
    codes, scale = quip(np.zeros((2, 16), np.float32), np.eye(16), 2)
    assert not scale.any()


@pytest.mark.parametrize("name", FORMATS)
def test_written_folder_matches_quantization_at_load_time(tmp_path, name):
    tiny.write(tmp_path / "dense", LLAMA, tiny.even(tiny.shapes(LLAMA)))
    quantized.save(
        tmp_path / "dense", tmp_path / "out", read_config(tmp_path / "dense", quantization=name)
    )
    assert_same_leaves(
        load_host_weights(tmp_path / "out"), load_host_weights(tmp_path / "dense", name)
    )
    quantization_config_json = json.loads((tmp_path / "out" / "config.json").read_text())[
        "quantization_config"
    ]
    assert (
        quantization_config_json["quant_method"] == "quire"
        and read_config(tmp_path / "out").quant == name
    )


@pytest.mark.parametrize("name, method", [("codebook-3", "squeezellm"), ("e8p-2", "quip")])
@pytest.mark.slow
def test_calibrated_quantization_is_written_and_served(tmp_path, name, method):
    """Codes differ from the nearest ones, the error is bounded, and the engine loads the folder."""
    dense = tmp_path / "dense"
    out = tmp_path / "out"
    tensors = tiny.write(dense, LLAMA, tiny.even(tiny.shapes(LLAMA)))
    config = read_config(dense, quantization=name)
    assert session.save(dense, out, config, method, SAMPLES) == 14
    assert sorted(tmp_path.iterdir()) == [dense, out]
    calibrated = load_host_weights(out)
    nearest = load_host_weights(dense, name)
    for index, (layer, nearest_layer) in enumerate(
        zip(calibrated.layers, nearest.layers, strict=True)
    ):
        for leaf, nearest_leaf, tensor in (
            (layer.mlp.down_FD, nearest_layer.mlp.down_FD, "mlp.down_proj"),
            (layer.attention.out_NHD, nearest_layer.attention.out_NHD, "self_attn.o_proj"),
        ):
            assert any(
                np.any(calibrated_array != nearest_array)
                for calibrated_array, nearest_array in zip(
                    jax.tree.leaves(leaf), jax.tree.leaves(nearest_leaf), strict=True
                )
            )
            W = tensors[f"model.layers.{index}.{tensor}.weight"].T
            assert (
                np.square(dequantize(leaf, name) - W).mean()
                < {"3": 0.15, "2": 0.4}[name[-1]] * np.square(W).mean()
            )
    options = {"skip_tokenizer_init": True, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    request = [5, 17, 3], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(out, **options) as llm:
        assert len(llm.generate(*request)[0].outputs[0].token_ids) == 6


@pytest.mark.slow
def test_interrupted_run_resumes_with_identical_output(tmp_path, monkeypatch):
    """The second run does not compute the gradients again."""
    dense = tmp_path / "dense"
    tiny.write(dense, LLAMA, tiny.even(tiny.shapes(LLAMA)))
    config = read_config(dense, quantization="codebook-4")
    session.save(dense, tmp_path / "whole", config, "squeezellm", SAMPLES)

    def stop(num_done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.save(dense, tmp_path / "out", config, "squeezellm", SAMPLES, stop)
    monkeypatch.setattr("quire.model.quantize.sensitivity.squared_gradients", None)
    session.save(dense, tmp_path / "out", config, "squeezellm", SAMPLES)
    expected, actual = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out")
    )
    assert expected.keys() == actual.keys() and all(
        expected[name].tobytes() == actual[name].tobytes() for name in expected
    )


def random_stored_matrix(
    rng, name: str, rows: int, columns: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random tensors of a matrix in the documented layout, and its float64 [out, in] values."""
    tensors = {".weight_shape": np.array([rows, columns])}
    if name.startswith("codebook"):
        bits = int(name[-1])
        codes = rng.integers(0, 1 << bits, (rows, columns))
        codes_per_word = 32 // int(name[-1])
        words = np.zeros((rows, -(-columns // codes_per_word)), np.int64)
        for (o, k), code in np.ndenumerate(codes):
            words[o, k // codes_per_word] += int(code) << k % codes_per_word * bits
        table = np.sort(rng.standard_normal((rows, 1 << bits)), 1).astype(np.float16)
        sparse_columns = np.stack(
            [np.sort(rng.permutation(columns)[: -(-columns * 45 // 10000)]) for _ in range(rows)]
        )
        sparse_values = rng.standard_normal(sparse_columns.shape).astype(np.float16)
        dense = np.take_along_axis(table, codes, 1).astype(np.float64)
        np.put_along_axis(dense, sparse_columns, sparse_values.astype(np.float64), 1)
        lists = {
            ".weight_table": table,
            ".weight_apart": sparse_values,
            ".weight_columns": sparse_columns.astype(np.int32),
        }
        return tensors | lists | {".weight_packed": words.astype(np.uint32).view(np.int32)}, dense
    tensors[".weight_packed"] = rng.integers(-(1 << 15), 1 << 15, (rows, columns // 8)).astype(
        np.int16
    )
    if name == "e8p-4":
        tensors[".weight_rest"] = rng.integers(-(1 << 15), 1 << 15, (rows, columns // 8)).astype(
            np.int16
        )
    tensors[".weight_scale"] = rng.uniform(0.01, 0.1, rows).astype(np.float32)
    second_codes = tensors.get(".weight_rest")
    node = e8p.E8p(
        codes=tensors[".weight_packed"].view(np.uint16).T,
        rest=None if second_codes is None else second_codes.view(np.uint16).T,
        scale=tensors[".weight_scale"],
        into=(columns,),
        out=(rows,),
        inputs=(0,),
    )
    return tensors, dequantize(node, name).T


@pytest.mark.parametrize("name", FORMATS)
def test_documented_tensor_layout_is_read(tmp_path, name):
    """Also for projections that are fused into one weight; then each matrix is dequantised."""
    rng = np.random.default_rng(0)
    dense = tiny.even(tiny.shapes(LLAMA))
    tensors = {}
    expected = {}
    for key, value in dense.items():
        if not key.endswith("_proj.weight"):
            tensors[key] = value
            continue
        matrix_tensors, expected[key] = random_stored_matrix(rng, name, *value.shape)
        tensors |= {
            key.removesuffix(".weight") + ending: np.ascontiguousarray(x)
            for ending, x in matrix_tensors.items()
        }
    config = quantization_config(name, ["lm_head"])
    tiny.write(tmp_path, LLAMA | {"quantization_config": config}, tensors)
    weights = load_host_weights(tmp_path)
    for i, layer in enumerate(weights.layers):
        q, k, v, o, gate, up, down = (
            expected[f"model.layers.{i}.{x}_proj.weight"]
            for x in (
                "self_attn.q",
                "self_attn.k",
                "self_attn.v",
                "self_attn.o",
                "mlp.gate",
                "mlp.up",
                "mlp.down",
            )
        )
        tolerance = {"rtol": 0, "atol": 1e-5 if name.startswith("e8p") else 0}
        np.testing.assert_allclose(
            dequantize(layer.attention.qkv_DGH, name).T, np.concatenate([q, k, v]), **tolerance
        )
        np.testing.assert_allclose(
            dequantize(layer.mlp.up_DGF, name).T, np.concatenate([gate, up]), **tolerance
        )
        np.testing.assert_allclose(dequantize(layer.attention.out_NHD, name).T, o, **tolerance)
        np.testing.assert_allclose(dequantize(layer.mlp.down_FD, name).T, down, **tolerance)
    source = find_sources(tmp_path, read_config(tmp_path))[0]
    for key, value in expected.items():
        np.testing.assert_allclose(source[key].read(), value, rtol=1e-5, atol=1e-5)


def test_unsupported_methods_and_bad_tensors_are_rejected(tmp_path):
    dense = tmp_path / "dense"
    tiny.write(dense, LLAMA, tiny.even(tiny.shapes(LLAMA)))

    def save(name: str, method: str, samples=SAMPLES):
        session.save(
            dense, tmp_path / "out", read_config(dense, quantization=name), method, samples
        )

    with pytest.raises(
        ModelError, match="'squeezellm', which is for formats .*: codebook-4, codebook-3; .* 'int8'"
    ):
        save("int8", "squeezellm")
    with pytest.raises(
        ModelError,
        match="'quip', which is for formats of points of a lattice: e8p-2, e8p-4; .*'codebook-4'",
    ):
        save("codebook-4", "quip")
    with pytest.raises(ModelError, match="codes are no integers"):
        save("e8p-2", "gptq")
    with pytest.raises(ModelError, match="no piece of two tokens"):
        save("codebook-4", "squeezellm", [[3]])
    out = tmp_path / "written"
    quantized.save(dense, out, read_config(dense, quantization="codebook-4"))
    tensors = load_file(out / "model.safetensors")
    stem = "model.layers.1.mlp.down_proj.weight"
    for ending, value, message in (
        ("_columns", np.full((D, 1), F, np.int32), "inputs that it has not: there are 96"),
        ("_table", np.full((D, 16), np.nan, np.float16), "not finite"),
        ("_apart", np.zeros((D, 2), np.float16), r"\[64, 2\] of float16; it must be \[64, 1\]"),
    ):
        save_file(tensors | {stem + ending: value}, out / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            load_host_weights(out)
    indivisible = tmp_path / "narrow"
    tiny.write(indivisible, LLAMA | {"intermediate_size": 100})
    with pytest.raises(ModelError, match="quantization.*100 inputs do not divide by 8|100 inputs"):
        quantized.save(
            indivisible, tmp_path / "again", read_config(indivisible, quantization="e8p-2")
        )
