"""`quire quantize` with calibration text: input statistics, folded scales and resumed runs."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.__main__ import app
from quire.model import decoder
from quire.model.checkpoint import hub, quantized
from quire.model.checkpoint.loader import load_weights, read_config
from quire.model.checkpoint.published.compressed_tensors import quantization_config, stored_format
from quire.model.checkpoint.safetensors import find_tensors
from quire.model.config import LatentAttention, ModelError
from quire.model.mixers import LayerHooks
from quire.model.quantize import session, whole
from quire.model.quantize.folds import find_folds
from quire.model.quantize.inputs import Inputs
from quire.model.quantize.layer import Method, apply_fold, round_layer
from quire.model.quantize.samples import BUNDLED, read_samples
from quire.model.quantize.source import CheckpointSource
from quire.model.text.tokenizer import Tokenizer
from quire.tests.support import tiny, uncached
from quire.tests.support.cases import thinned
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.families_moe import MOE_VARIANTS
from quire.tests.support.golden.folder import HERE, write_folder

pytestmark = pytest.mark.usefixtures("few_programs", "compiled_quickly")
LLAMA = tiny.LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_key_value_heads": 4,
    "vocab_size": 96,
}
RAGGED = (5, 21, 17, 1, 33, 16)
RUN = jax.jit(uncached.forward, static_argnums=2)


def has_sparse_attention(config) -> bool:
    return any(
        isinstance(layer.attention, LatentAttention) and layer.attention.indexer
        for layer in config.layers
    )


UNQUANTIZED_VARIANTS = [
    variant for variant in VARIANTS if "quantization_config" not in variant.config
]


def thinned_variants(*names: str) -> list:
    """Every variant in full runs; the named ones in `make test`."""
    assert {*names} <= {variant.name for variant in UNQUANTIZED_VARIANTS}
    return thinned(
        UNQUANTIZED_VARIANTS, [variant for variant in UNQUANTIZED_VARIANTS if variant.name in names]
    )


def source_of(folder: Path, name: str = "int8") -> CheckpointSource:
    config = read_config(folder, "float32", quantization=name)
    return CheckpointSource.open(folder, config, stored_format(quantization_config(name, [])))


def variant_source(variant, folder: Path, name: str = "int8") -> CheckpointSource:
    with np.load(HERE / f"{variant.name}.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    return source_of(write_folder(folder, variant.config, meta["tensors"], meta["seed"]), name)


def random_samples(vocab: int, lengths=RAGGED, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def load_float32(folder: Path, **options):
    """(weights in float32, their configuration)."""
    config = read_config(folder, "float32", **options)
    return load_weights(folder, config), config


def reference_logits(weights, config, samples) -> np.ndarray:
    """Reference logits of all samples, computed one sample at a time."""
    longest = max(map(len, samples))
    sample_logits = [
        RUN(weights, jnp.array([ids + [0] * (longest - len(ids))]), config)[0, : len(ids)]
        for ids in samples
    ]
    return np.concatenate(sample_logits)


@pytest.mark.parametrize(
    "variant",
    thinned_variants(
        "llama", "gemma4-shared", "deepseek-v3", "deepseek-v32", "llama4-text", "qwen3-next"
    ),
    ids=lambda variant: variant.name,
)
@pytest.mark.slow
def test_layer_by_layer_run_matches_the_model(tmp_path, variant, monkeypatch):
    """Batches of sequences of different lengths against the reference's single sequences."""
    monkeypatch.setattr(whole, "QUERIES", 24)
    source = variant_source(variant, tmp_path)
    config = source.dense
    if has_sparse_attention(config):
        with pytest.raises(ModelError, match="sparse attention"):
            whole.check(config)
        return
    whole.check(config)
    samples = random_samples(config.vocab_size)
    weights = load_weights(tmp_path, replace(config, stored=None))
    expected = np.split(reference_logits(weights, config, samples), np.cumsum(RAGGED)[:-1])
    expected = dict(zip(RAGGED, expected, strict=True))

    @jax.jit
    def run(weights):
        batches = whole.embed_samples(weights, samples, config)
        for index, layer in enumerate(weights.layers):
            batches = [batch.run_layer(index, layer, config) for batch in batches]
        hidden = [decoder.final_norm(weights, batch.x[0], config) for batch in batches]
        outputs = [decoder.logits(weights, x, config) for x in hidden]
        return [x.reshape(*batch.shape, -1) for x, batch in zip(outputs, batches, strict=True)]

    num_compared = 0
    for batch_logits, (_, positions_BT) in zip(
        run(weights), whole.pad_batches(samples), strict=True
    ):
        for row, positions in zip(batch_logits, positions_BT, strict=True):
            if count := int((positions >= 0).sum()):
                np.testing.assert_allclose(row[:count], expected[count], rtol=0, atol=2e-3)
                num_compared += count
    assert num_compared == sum(RAGGED)


def test_input_statistics_of_the_first_layer_match_numpy(tmp_path):
    """The reference computes on the checkpoint's tensors."""
    tensors = tiny.write(tmp_path, LLAMA, tiny.even(tiny.shapes(LLAMA)))
    source = source_of(tmp_path)
    samples = random_samples(96)
    inputs = source.inputs(0, whole.embed_samples(source.embedding(), samples, source.dense))
    x = tensors["model.embed_tokens.weight"][np.concatenate(samples)].astype(np.float64)
    x = (
        x
        / np.sqrt(np.square(x).mean(1, keepdims=True) + 1e-5)
        * tensors["model.layers.0.input_layernorm.weight"]
    )
    statistics = inputs["attention.qkv_DGH", None]
    np.testing.assert_allclose(statistics.H, x.T @ x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(statistics.total, np.abs(x).sum(0), rtol=1e-5)
    np.testing.assert_allclose(statistics.top, np.abs(x).max(0), rtol=1e-5)
    assert {name: statistics.H.shape for (name, _), statistics in inputs.items()} == {
        "attention.qkv_DGH": (64, 64),
        "attention.out_NHD": (64, 64),
        "mlp.up_DGF": (64, 64),
        "mlp.down_FD": (96, 96),
    }


@pytest.mark.slow
def test_expert_input_statistics_sum_to_top_k_times_all_inputs(tmp_path):
    """Each token is sent to two experts, so the statistics sum to twice those of all tokens."""
    variant = next(variant for variant in MOE_VARIANTS if variant.name == "qwen3-moe")
    source = variant_source(variant, tmp_path)
    config = source.dense
    index = source.dense.expert_layers[0]
    samples = random_samples(config.vocab_size)
    moe = source.dense.layers[index].moe
    weights = load_weights(tmp_path, config)
    batches = whole.embed_samples(source.embedding(), samples, config)
    for previous in range(index):
        batches = [batch.run_layer(previous, source.layer(previous), config) for batch in batches]
    inputs = source.inputs(index, batches)
    rows = []
    layer = config.layers[index]
    for batch in batches:
        x, _, _ = decoder.attention_block(
            layer,
            weights.layers[index],
            decoder.Residual(batch.x[0]),
            layer.attention.rope
            and decoder.angles(
                batch.positions_T, layer.attention.rope.inv_freq, layer.attention.rope.factor
            ),
            batch.positions_T >= 0,
            {},
            LayerHooks(whole.attention_hook(config, *batch.shape)).of_layer(index),
            config,
            decoder.ONE_DEVICE,
        )
        x = decoder.norm_alone(
            x.x_TD + x.y_TD, weights.layers[index].pre_mlp_norm_D, config.norm_eps
        )
        rows.append(np.asarray(x)[np.asarray(batch.positions_T) >= 0])
    x = np.concatenate(rows)
    H = sum(inputs["moe.up_EDGF", e].H for e in range(moe.experts))
    np.testing.assert_allclose(H, moe.top_k * x.T @ x, rtol=1e-3, atol=1e-3)
    assert len({inputs["moe.up_EDGF", e].H[0, 0].item() for e in range(moe.experts)}) > 1


@pytest.mark.parametrize(
    "variant",
    thinned_variants(
        "llama",
        "llama-biases",
        "gemma3-text",
        "phi3",
        "cohere2",
        "olmo2-gqa",
        "qwen3-moe",
        "qwen3-next-dense",
    ),
    ids=lambda variant: variant.name,
)
@pytest.mark.slow
def test_folded_scales_preserve_the_logits(tmp_path, variant, monkeypatch):
    """Random scales in every fold that the family's layers support."""
    source = variant_source(variant, tmp_path / "dense")
    rng = np.random.default_rng(0)
    method = Method("smoothquant", source.stored)
    count = 0

    def draw(self, W, inputs, fold):
        return fold.reduce_heads(np.exp(rng.standard_normal(W.shape[1])).astype(np.float32), np.max)

    monkeypatch.setattr(Method, "scales", draw)
    changed = {}
    for index in range(len(source.config.layers)):
        leaves = source.leaves(index)
        rounded = [tensor for leaf in leaves.values() if leaf.rounded for tensor in leaf.sources]
        W = {tensor.name: source.tensors[tensor.name].read() for tensor in rounded}
        inputs = {
            leaf.key(tensor): ones(leaf.size)
            for leaf in leaves.values()
            for tensor in leaf.sources
            if leaf.rounded
        }
        for fold in find_folds(source.config, index, leaves):
            W, inputs, other_tensors = apply_fold(source, leaves, fold, W, inputs, method)
            changed |= other_tensors
            count += 1
        changed |= W
    changed_by_name = {source.tensors[name].name: value for name, value in changed.items()}
    (tmp_path / "folded").mkdir()
    originals = {tensor.name: tensor.read() for tensor in source.tensors.values()}
    save_file(
        {name: np.ascontiguousarray(x) for name, x in (originals | changed_by_name).items()},
        tmp_path / "folded/a.safetensors",
    )
    (tmp_path / "folded" / "config.json").write_text(json.dumps(variant.config))
    samples = random_samples(source.config.vocab_size, (40,))
    expected = reference_logits(*load_float32(tmp_path / "dense"), samples)
    np.testing.assert_allclose(
        reference_logits(*load_float32(tmp_path / "folded"), samples), expected, rtol=0, atol=5e-3
    )
    if count:
        changed_names = [
            name
            for name, value in changed_by_name.items()
            if not np.array_equal(value, originals[name])
        ]
        assert len(changed_names) >= 2 * min(count, 2)
    if variant.config["model_type"] in ("llama", "qwen3", "gemma3_text"):
        assert count >= 3 * len(source.config.layers)


def ones(size: int) -> Inputs:
    return Inputs(
        np.eye(size, dtype=np.float32), np.ones(size, np.float32), np.ones(size, np.float32)
    )


def test_fold_into_bfloat16_norm_compensates_rounding(tmp_path):
    """The norm's scale is rounded; the weights are multiplied by the rounded quotient."""
    import ml_dtypes

    shapes = tiny.shapes(LLAMA)
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tiny.even(shapes).items()}
    tiny.write(tmp_path, LLAMA | {"torch_dtype": "bfloat16"}, tensors)
    source = source_of(tmp_path)
    leaves = source.leaves(0)
    method = Method("smoothquant", source.stored)
    fold = find_folds(source.config, 0, source.leaves(0))[0]
    W = {
        tensor.name: source.tensors[tensor.name].read().astype(np.float32)
        for leaf in leaves.values() if leaf.rounded for tensor in leaf.sources
    }  # fmt: skip
    rng = np.random.default_rng(0)
    inputs = {(name, None): ones(leaf.size) for name, leaf in leaves.items()}
    inputs["attention.qkv_DGH", None] = replace(
        ones(64), top=np.exp(rng.standard_normal(64)).astype(np.float32)
    )
    folded, _, norms = apply_fold(source, leaves, fold, W, inputs, method)
    ((norm, scale),) = norms.items()
    assert scale.dtype == ml_dtypes.bfloat16
    original_scale = tensors[norm].astype(np.float32)
    assert not np.array_equal(scale, tensors[norm])
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_allclose(
        folded[name] * scale.astype(np.float32), W[name] * original_scale, rtol=1e-6
    )


# Whole runs


METHODS = [
    ("gptq", "int4"),
    ("gptq", "int8-weights"),
    ("awq", "int4-32-zero"),
    ("smoothquant", "int8"),
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "llama"
    tiny.write(folder, LLAMA, tiny.even(tiny.shapes(LLAMA)), shards=2)
    (folder / "tokenizer.json").write_text((hub.resolve("quill") / "tokenizer.json").read_text())
    return folder


def quantize_folder(
    folder: Path, out: Path, method: str, name: str, samples=None, **options
) -> Path:
    session.save(
        folder,
        out,
        read_config(folder, quantization=name),
        method,
        samples or random_samples(96),
        **options,
    )
    return out


@pytest.mark.parametrize(("method", "name"), METHODS)
@pytest.mark.slow
def test_calibrated_folder_is_loaded_with_small_error(tmp_path, dense, method, name):
    out = quantize_folder(dense, tmp_path / "out", method, name)
    assert sorted(tmp_path.iterdir()) == [out]
    config = read_config(out)
    assert config.quant.removesuffix("-32") == name.removesuffix("-32") or config.quant == name
    samples = random_samples(96, seed=1)
    whole_weights = load_float32(out)
    decoded = replace(read_config(out, "float32"), quant=None)
    quantized_logits = reference_logits(*whole_weights, samples)
    dequantized_logits = reference_logits(load_weights(out, decoded), decoded, samples)
    original = reference_logits(*load_float32(dense), samples)
    spread = original.std()
    # rows are rounded to bfloat16 or int8
    assert np.square(quantized_logits - dequantized_logits).mean() ** 0.5 < 0.05 * spread
    assert (
        np.square(dequantized_logits - original).mean() ** 0.5
        < (0.5 if "int4" in name else 0.05) * spread
    )
    rtn_folder = tmp_path / "rtn"
    quantized.save(dense, rtn_folder, read_config(dense, quantization=name))
    assert {name: tensor.shape for name, tensor in find_tensors(rtn_folder).items()} == {
        name: tensor.shape for name, tensor in find_tensors(out).items()
    }
    assert json.loads((rtn_folder / "config.json").read_text()) == json.loads(
        (out / "config.json").read_text()
    )


def test_engine_logprobs_match_the_calibrated_weights(tmp_path, dense):
    out = quantize_folder(dense, tmp_path / "out", "awq", "int4")
    config = replace(read_config(out, "float32"), quant=None)
    ids = [5, 17, 3]
    weights = load_weights(out, config)
    with LLM(out, skip_tokenizer_init=True, max_num_seqs=1, max_num_batched_tokens=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
        output = llm.generate(ids, params)[0].outputs[0]
    for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
        expected = jax.nn.log_softmax(reference_logits(weights, config, [ids])[-1])
        assert logprobs[token].logprob == pytest.approx(float(expected[token]), abs=0.1)
        ids = [*ids, token]


@pytest.mark.parametrize("method", thinned(["gptq", "awq"], ["gptq"]))
@pytest.mark.slow
def test_calibrated_experts_have_bounded_error(tmp_path, method):
    variant = next(variant for variant in MOE_VARIANTS if variant.name == "qwen3-moe")
    source = variant_source(variant, tmp_path / "dense")
    out = quantize_folder(
        tmp_path / "dense",
        tmp_path / "out",
        method,
        "int8-weights",
        random_samples(source.config.vocab_size),
    )
    samples = random_samples(source.config.vocab_size, (40,), seed=1)
    quantized.save(
        tmp_path / "dense",
        tmp_path / "rtn",
        read_config(tmp_path / "dense", quantization="int8-weights"),
    )
    calibrated, rtn, exact = (
        reference_logits(*load_float32(folder), samples)
        for folder in (out, tmp_path / "rtn", tmp_path / "dense")
    )
    # Rounding may send a token to another expert of almost the same score.
    assert (
        np.square(calibrated - exact).mean()
        < 2 * np.square(rtn - exact).mean()
        < 0.05 * exact.var()
    )
    assert any(".experts." in name and name.endswith("_scale") for name in find_tensors(out))


@pytest.mark.parametrize(
    ("method", "max_ratio"), [("gptq", 0.8), pytest.param("awq", 0.9, marks=pytest.mark.nightly)]
)
@pytest.mark.slow
def test_calibration_lowers_the_error_on_held_out_text(tmp_path, method, max_ratio):
    """On the bundled model; the error is measured against its bfloat16 logits."""
    rng = np.random.default_rng(0)
    folder = hub.resolve("quill")
    tokenizer = Tokenizer(folder)
    words = (
        "the cat sat on a mat and said hello to little dog who was happy Once upon time there "
        "lived red fox"
    ).split()
    texts = [" ".join(rng.choice(words, 40)) for _ in range(60)]
    pieces = [tokenizer.encode(text)[:33] for text in texts]
    assert {*map(len, pieces)} == {33}  # of one shape
    calibration = pieces[:48]
    held_out = pieces[48:]
    expected = reference_logits(*load_float32(folder), held_out)

    def error(out: Path) -> float:
        config = replace(read_config(out, "float32"), quant=None)
        return float(
            np.square(
                reference_logits(load_weights(out, config), config, held_out) - expected
            ).mean()
        )

    rtn_folder = tmp_path / "rtn"
    quantized.save(folder, rtn_folder, read_config(folder, quantization="int4-64"))
    assert error(
        quantize_folder(folder, tmp_path / method, method, "int4-64", calibration)
    ) < max_ratio * error(rtn_folder)


def quantize_command(dense: Path, out: Path, text: Path) -> list[str]:
    arguments = [
        str(dense),
        str(out),
        "--quantization",
        "int4",
        "--method",
        "gptq",
        "--calibration",
        str(text),
    ]
    return [sys.executable, "-m", "quire", "quantize", *arguments, "--calibration-samples", "6"]


@pytest.mark.slow
def test_killed_run_resumes_with_identical_output(tmp_path, dense, monkeypatch):
    """Killed between two layers; the same command quantises only the remaining layers."""
    model_folder = tmp_path / "deep"
    config = LLAMA | {"num_hidden_layers": 6, "vocab_size": 1280}
    tiny.write(model_folder, config, tiny.even(tiny.shapes(config)))
    (model_folder / "tokenizer.json").write_text((dense / "tokenizer.json").read_text())
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a red fox. " * 400)
    running = subprocess.Popen(quantize_command(model_folder, tmp_path / "out", text))
    layers_folder = tmp_path / ".out.layers"
    while not (layers_folder / "layer-00001.safetensors").exists():
        assert running.poll() is None
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "out").exists()
    written = {path: path.stat().st_mtime_ns for path in layers_folder.glob("layer-*.safetensors")}
    assert 2 <= len(written) < 6

    other_settings = CliRunner().invoke(
        app,
        [*quantize_command(model_folder, tmp_path / "out", text)[3:], "--calibration-tokens", "7"],
    )
    assert other_settings.exit_code == 1 and "calibration was another" in str(
        other_settings.exception or other_settings.output
    )
    assert {path: path.stat().st_mtime_ns for path in written} == written
    rounded = []

    def counted(source, index, *arguments):
        rounded.append(index)
        return round_layer(source, index, *arguments)

    monkeypatch.setattr(session, "round_layer", counted)
    resumed = CliRunner().invoke(app, quantize_command(model_folder, tmp_path / "out", text)[3:])
    assert resumed.exit_code == 0, resumed.output
    assert rounded == list(range(len(written), 6))
    assert not layers_folder.exists()
    assert (
        CliRunner()
        .invoke(app, quantize_command(model_folder, tmp_path / "again", text)[3:])
        .exit_code
        == 0
    )
    assert rounded == [*range(len(written), 6), *range(6)]
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_unsupported_methods_and_options_are_rejected(tmp_path, dense):
    def refused(match: str, method: str, name: str, out: Path = tmp_path / "out") -> None:
        with pytest.raises(ModelError, match=match):
            quantize_folder(dense, out, method, name)
        assert not list(tmp_path.glob("*")) and not list(tmp_path.glob(".*"))

    refused("'best'.*rtn, gptq, awq, smoothquant", "best", "int8")
    refused("smoothquant.*int8, fp8; quantization is 'int4-32'", "smoothquant", "int4")
    refused("'fp8'.*no integers", "gptq", "fp8")
    refused("64 inputs", "gptq", "int4-128")
    refused("already", "gptq", "int4", dense)
    for options, match in (
        (["--calibration", "x.txt"], "rtn looks at no"),
        (["--fine-tune-epochs", "1"], "needs a --method other than rtn"),
    ):
        result = CliRunner().invoke(
            app, ["quantize", str(dense), str(tmp_path / "out"), "--quantization", "int4", *options]
        )
        assert result.exit_code and match in str(result.exception)


# Text


def test_samples_of_text_and_jsonl_files(tmp_path):
    tokenizer = Tokenizer(hub.resolve("quill"))
    text = "Once upon a time there was a fox named Tom. " * 50
    (tmp_path / "a.txt").write_text(text)
    ids = tokenizer.encode(text)
    pieces = read_samples(tmp_path / "a.txt", tokenizer, 1000, 64)
    assert sum((piece[1:] for piece in pieces), []) == ids[1:] and {
        len(piece) for piece in pieces[:-1]
    } == {64}
    random_pieces = read_samples(tmp_path / "a.txt", tokenizer, 3, 64)
    assert len(random_pieces) == 3 and all(piece in pieces for piece in random_pieces)
    assert random_pieces == read_samples(tmp_path / "a.txt", tokenizer, 3, 64)
    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "3"},
    ]
    lines = [{"text": "A fox."}, {"prompt": "A dog."}, {"messages": messages}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert read_samples(tmp_path / "b.jsonl", tokenizer, 9, 64) == [
        tokenizer.encode("A fox."),
        tokenizer.encode("A dog."),
        tokenizer.encode(chat, add_special_tokens=False),
    ]


def test_every_sample_of_a_document_begins_with_bos(tmp_path):
    """Models are trained with BOS, whose activations are the largest."""
    tokenizer = Tokenizer(hub.resolve("quill"))
    text = "Once upon a time there was a fox named Tom. " * 20
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for file in ("a.txt", "a.jsonl"):
        pieces = read_samples(tmp_path / file, tokenizer, 1000, 64)
        assert len(pieces) > 2 and all(
            len(piece) <= 64 and piece[0] == tokenizer.bos_token_id for piece in pieces
        )
        assert [token for piece in pieces for token in piece[1:]] == tokens


def test_bundled_calibration_text_works_without_chat_template(tmp_path):
    """Without a template, conversations are encoded as plain text."""
    (tmp_path / "tokenizer.json").write_text((hub.resolve("quill") / "tokenizer.json").read_text())
    documents = len(BUNDLED.read_text().splitlines())
    for folder in (tmp_path, hub.resolve("quill")):
        pieces = read_samples(BUNDLED, Tokenizer(folder), 1000, 1 << 20)
        assert len(pieces) == documents >= 30 and sum(map(len, pieces)) > 8_000


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.txt", "", "a.txt is empty"),
        ("a.txt", " \n", "a.txt is empty"),
        ("a.jsonl", "\n", "a.jsonl is empty"),
        ("a.jsonl", '{"text": "x"}\n{', "line 2 is not JSON"),
        ("a.jsonl", "[1]", "line 1 must be an object with text, prompt or messages"),
        ("a.jsonl", '{"text": 1}', "line 1 must be an object"),
    ],
)
def test_invalid_calibration_files_are_rejected(tmp_path, name, text, match):
    (tmp_path / name).write_text(text)
    tokenizer = Tokenizer(hub.resolve("quill"))
    with pytest.raises(ModelError, match=match):
        read_samples(tmp_path / name, tokenizer, 9, 64)
    with pytest.raises(ModelError, match="cannot be read"):
        read_samples(tmp_path / "missing.txt", tokenizer, 9, 64)
