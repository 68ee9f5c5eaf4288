"""`quire quantize` over calibration text: what matrices meet, scales that change nothing, runs that
are stopped.
"""

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


def sparse(config) -> bool:
    return any(
        isinstance(layer.attention, LatentAttention) and layer.attention.indexer
        for layer in config.layers
    )


EVERY = [variant for variant in VARIANTS if "quantization_config" not in variant.config]


def some(*names: str) -> list:
    """Every variant; `make test` has those that are named."""
    assert {*names} <= {variant.name for variant in EVERY}
    return thinned(EVERY, [variant for variant in EVERY if variant.name in names])


def source_of(folder: Path, name: str = "int8") -> CheckpointSource:
    config = read_config(folder, "float32", quantization=name)
    return CheckpointSource.open(folder, config, stored_format(quantization_config(name, [])))


def variant_source(variant, folder: Path, name: str = "int8") -> CheckpointSource:
    with np.load(HERE / f"{variant.name}.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    return source_of(write_folder(folder, variant.config, meta["tensors"], meta["seed"]), name)


def texts(vocab: int, lengths=RAGGED, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def read(folder: Path, **options):
    """(weights in float32, their configuration)."""
    config = read_config(folder, "float32", **options)
    return load_weights(folder, config), config


def logits(weights, config, samples) -> np.ndarray:
    """Of all samples, one by one, by the reference."""
    longest = max(map(len, samples))
    found = [
        RUN(weights, jnp.array([ids + [0] * (longest - len(ids))]), config)[0, : len(ids)]
        for ids in samples
    ]
    return np.concatenate(found)


@pytest.mark.parametrize(
    "variant",
    some("llama", "gemma4-shared", "deepseek-v3", "deepseek-v32", "llama4-text", "qwen3-next"),
    ids=lambda variant: variant.name,
)
@pytest.mark.slow
def test_a_layer_at_a_time_is_the_model(tmp_path, variant, monkeypatch):
    """Sequences of all lengths beside each other, against the reference with one alone."""
    monkeypatch.setattr(whole, "QUERIES", 24)
    source = variant_source(variant, tmp_path)
    config = source.dense
    if sparse(config):
        with pytest.raises(ModelError, match="sparse attention"):
            whole.check(config)
        return
    whole.check(config)
    samples = texts(config.vocab_size)
    weights = load_weights(tmp_path, replace(config, stored=None))
    expected = np.split(logits(weights, config, samples), np.cumsum(RAGGED)[:-1])
    expected = dict(zip(RAGGED, expected, strict=True))

    @jax.jit
    def run(weights):
        batches = whole.embed_samples(weights, samples, config)
        for index, layer in enumerate(weights.layers):
            batches = [batch.run_layer(index, layer, config) for batch in batches]
        hidden = [decoder.final_norm(weights, batch.x[0], config) for batch in batches]
        found = [decoder.logits(weights, x, config) for x in hidden]
        return [x.reshape(*batch.shape, -1) for x, batch in zip(found, batches, strict=True)]

    seen = 0
    for found, (_, positions_BT) in zip(run(weights), whole.pad_batches(samples), strict=True):
        for row, positions in zip(found, positions_BT, strict=True):
            if count := int((positions >= 0).sum()):
                np.testing.assert_allclose(row[:count], expected[count], rtol=0, atol=2e-3)
                seen += count
    assert seen == sum(RAGGED)


def test_what_the_first_layer_meets(tmp_path):
    """Against numpy on the tensors as they lie in the file."""
    tensors = tiny.write(tmp_path, LLAMA, tiny.even(tiny.shapes(LLAMA)))
    source = source_of(tmp_path)
    samples = texts(96)
    inputs = source.inputs(0, whole.embed_samples(source.embedding(), samples, source.dense))
    x = tensors["model.embed_tokens.weight"][np.concatenate(samples)].astype(np.float64)
    x = (
        x
        / np.sqrt(np.square(x).mean(1, keepdims=True) + 1e-5)
        * tensors["model.layers.0.input_layernorm.weight"]
    )
    met = inputs["attention.qkv_DGH", None]
    np.testing.assert_allclose(met.H, x.T @ x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(met.total, np.abs(x).sum(0), rtol=1e-5)
    np.testing.assert_allclose(met.top, np.abs(x).max(0), rtol=1e-5)
    assert {name: met.H.shape for (name, _), met in inputs.items()} == {
        "attention.qkv_DGH": (64, 64),
        "attention.out_NHD": (64, 64),
        "mlp.up_DGF": (64, 64),
        "mlp.down_FD": (96, 96),
    }


@pytest.mark.slow
def test_what_experts_meet(tmp_path):
    """Each row goes to two experts, so that what all of them meet is twice what one matrix for all
    would.
    """
    variant = next(variant for variant in MOE_VARIANTS if variant.name == "qwen3-moe")
    source = variant_source(variant, tmp_path)
    config = source.dense
    index = source.dense.expert_layers[0]
    samples = texts(config.vocab_size)
    moe = source.dense.layers[index].moe
    weights = load_weights(tmp_path, config)
    batches = whole.embed_samples(source.embedding(), samples, config)
    for before in range(index):
        batches = [batch.run_layer(before, source.layer(before), config) for batch in batches]
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
    some(
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
def test_folded_scales_change_nothing(tmp_path, variant, monkeypatch):
    """Random scales, wherever a layer of the family can take them."""
    source = variant_source(variant, tmp_path / "dense")
    rng = np.random.default_rng(0)
    how = Method("smoothquant", source.stored)
    count = 0

    def draw(self, W, inputs, fold):
        return fold.reduce_heads(np.exp(rng.standard_normal(W.shape[1])).astype(np.float32), np.max)

    monkeypatch.setattr(Method, "scales", draw)
    changed = {}
    for index in range(len(source.config.layers)):
        leaves = source.leaves(index)
        rounded = [part for leaf in leaves.values() if leaf.rounded for part in leaf.sources]
        W = {part.name: source.tensors[part.name].read() for part in rounded}
        inputs = {
            leaf.key(part): ones(leaf.size)
            for leaf in leaves.values()
            for part in leaf.sources
            if leaf.rounded
        }
        for fold in find_folds(source.config, index, leaves):
            W, inputs, more = apply_fold(source, leaves, fold, W, inputs, how)
            changed |= more
            count += 1
        changed |= W
    own = {source.tensors[name].name: value for name, value in changed.items()}
    (tmp_path / "folded").mkdir()
    kept = {tensor.name: tensor.read() for tensor in source.tensors.values()}
    save_file(
        {name: np.ascontiguousarray(x) for name, x in (kept | own).items()},
        tmp_path / "folded/a.safetensors",
    )
    (tmp_path / "folded" / "config.json").write_text(json.dumps(variant.config))
    samples = texts(source.config.vocab_size, (40,))
    expected = logits(*read(tmp_path / "dense"), samples)
    np.testing.assert_allclose(
        logits(*read(tmp_path / "folded"), samples), expected, rtol=0, atol=5e-3
    )
    if count:
        moved = [name for name, value in own.items() if not np.array_equal(value, kept[name])]
        assert len(moved) >= 2 * min(count, 2)
    if variant.config["model_type"] in ("llama", "qwen3", "gemma3_text"):
        assert count >= 3 * len(source.config.layers)


def ones(size: int) -> Inputs:
    return Inputs(
        np.eye(size, dtype=np.float32), np.ones(size, np.float32), np.ones(size, np.float32)
    )


def test_a_norm_that_is_kept_in_bfloat16(tmp_path):
    """Its scale cannot be divided exactly: the weights are multiplied by what it was divided by in
    truth.
    """
    import ml_dtypes

    shapes = tiny.shapes(LLAMA)
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tiny.even(shapes).items()}
    tiny.write(tmp_path, LLAMA | {"torch_dtype": "bfloat16"}, tensors)
    source = source_of(tmp_path)
    leaves = source.leaves(0)
    how = Method("smoothquant", source.stored)
    fold = find_folds(source.config, 0, source.leaves(0))[0]
    W = {
        part.name: source.tensors[part.name].read().astype(np.float32)
        for leaf in leaves.values() if leaf.rounded for part in leaf.sources
    }  # fmt: skip
    rng = np.random.default_rng(0)
    inputs = {(name, None): ones(leaf.size) for name, leaf in leaves.items()}
    inputs["attention.qkv_DGH", None] = replace(
        ones(64), top=np.exp(rng.standard_normal(64)).astype(np.float32)
    )
    after, _, others = apply_fold(source, leaves, fold, W, inputs, how)
    ((norm, scale),) = others.items()
    assert scale.dtype == ml_dtypes.bfloat16
    before = tensors[norm].astype(np.float32)
    assert not np.array_equal(scale, tensors[norm])
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_allclose(after[name] * scale.astype(np.float32), W[name] * before, rtol=1e-6)


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


def make(folder: Path, out: Path, method: str, name: str, samples=None, **options) -> Path:
    session.save(
        folder, out, read_config(folder, quantization=name), method, samples or texts(96), **options
    )
    return out


@pytest.mark.parametrize(("method", "name"), METHODS)
@pytest.mark.slow
def test_a_written_folder_is_read(tmp_path, dense, method, name):
    out = make(dense, tmp_path / "out", method, name)
    assert sorted(tmp_path.iterdir()) == [out]
    config = read_config(out)
    assert config.quant.removesuffix("-32") == name.removesuffix("-32") or config.quant == name
    samples = texts(96, seed=1)
    whole_weights = read(out)
    decoded = replace(read_config(out, "float32"), quant=None)
    as_codes = logits(*whole_weights, samples)
    as_numbers = logits(load_weights(out, decoded), decoded, samples)
    original = logits(*read(dense), samples)
    spread = original.std()
    # rows in bfloat16, or in bytes
    assert np.square(as_codes - as_numbers).mean() ** 0.5 < 0.05 * spread
    assert (
        np.square(as_numbers - original).mean() ** 0.5 < (0.5 if "int4" in name else 0.05) * spread
    )
    plain = tmp_path / "rtn"
    quantized.save(dense, plain, read_config(dense, quantization=name))
    assert {name: tensor.shape for name, tensor in find_tensors(plain).items()} == {
        name: tensor.shape for name, tensor in find_tensors(out).items()
    }
    assert json.loads((plain / "config.json").read_text()) == json.loads(
        (out / "config.json").read_text()
    )


def test_through_the_engine(tmp_path, dense):
    out = make(dense, tmp_path / "out", "awq", "int4")
    config = replace(read_config(out, "float32"), quant=None)
    ids = [5, 17, 3]
    weights = load_weights(out, config)
    with LLM(out, skip_tokenizer_init=True, max_num_seqs=1, max_num_batched_tokens=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
        found = llm.generate(ids, params)[0].outputs[0]
    for token, chosen in zip(found.token_ids, found.logprobs, strict=True):
        expected = jax.nn.log_softmax(logits(weights, config, [ids])[-1])
        assert chosen[token].logprob == pytest.approx(float(expected[token]), abs=0.1)
        ids = [*ids, token]


@pytest.mark.parametrize("method", thinned(["gptq", "awq"], ["gptq"]))
@pytest.mark.slow
def test_experts(tmp_path, method):
    variant = next(variant for variant in MOE_VARIANTS if variant.name == "qwen3-moe")
    source = variant_source(variant, tmp_path / "dense")
    out = make(
        tmp_path / "dense",
        tmp_path / "out",
        method,
        "int8-weights",
        texts(source.config.vocab_size),
    )
    samples = texts(source.config.vocab_size, (40,), seed=1)
    quantized.save(
        tmp_path / "dense",
        tmp_path / "rtn",
        read_config(tmp_path / "dense", quantization="int8-weights"),
    )
    found, plain, exact = (
        logits(*read(folder), samples) for folder in (out, tmp_path / "rtn", tmp_path / "dense")
    )
    # A row that is near to another expert may go there.
    assert (
        np.square(found - exact).mean() < 2 * np.square(plain - exact).mean() < 0.05 * exact.var()
    )
    assert any(".experts." in name and name.endswith("_scale") for name in find_tensors(out))


@pytest.mark.parametrize(
    ("method", "most"), [("gptq", 0.8), pytest.param("awq", 0.9, marks=pytest.mark.nightly)]
)
@pytest.mark.slow
def test_the_calibrated_codes_serve_better(tmp_path, method, most):
    """The bundled model on text that calibration has not seen: nearer to what it computes in
    bfloat16.
    """
    rng = np.random.default_rng(0)
    folder = hub.resolve("quill")
    tokenizer = Tokenizer(folder)
    words = (
        "the cat sat on a mat and said hello to little dog who was happy Once upon time there "
        "lived red fox"
    ).split()
    said = [" ".join(rng.choice(words, 40)) for _ in range(60)]
    pieces = [tokenizer.encode(text)[:33] for text in said]
    assert {*map(len, pieces)} == {33}  # of one shape
    learned = pieces[:48]
    held = pieces[48:]
    expected = logits(*read(folder), held)

    def error(out: Path) -> float:
        config = replace(read_config(out, "float32"), quant=None)
        return float(np.square(logits(load_weights(out, config), config, held) - expected).mean())

    plain = tmp_path / "rtn"
    quantized.save(folder, plain, read_config(folder, quantization="int4-64"))
    assert error(make(folder, tmp_path / method, method, "int4-64", learned)) < most * error(plain)


def start(dense: Path, out: Path, text: Path) -> list[str]:
    asked = [
        str(dense),
        str(out),
        "--quantization",
        "int4",
        "--method",
        "gptq",
        "--calibration",
        str(text),
    ]
    return [sys.executable, "-m", "quire", "quantize", *asked, "--calibration-samples", "6"]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(tmp_path, dense, monkeypatch):
    """Killed between two layers; the same command does the others alone, and makes the same
    bytes.
    """
    deep = tmp_path / "deep"
    config = LLAMA | {"num_hidden_layers": 6, "vocab_size": 1280}
    tiny.write(deep, config, tiny.even(tiny.shapes(config)))
    (deep / "tokenizer.json").write_text((dense / "tokenizer.json").read_text())
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a red fox. " * 400)
    running = subprocess.Popen(start(deep, tmp_path / "out", text))
    done = tmp_path / ".out.layers"
    while not (done / "layer-00001.safetensors").exists():
        assert running.poll() is None
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "out").exists()
    there = {path: path.stat().st_mtime_ns for path in done.glob("layer-*.safetensors")}
    assert 2 <= len(there) < 6

    other = CliRunner().invoke(
        app, [*start(deep, tmp_path / "out", text)[3:], "--calibration-tokens", "7"]
    )
    assert other.exit_code == 1 and "calibration was another" in str(
        other.exception or other.output
    )
    assert {path: path.stat().st_mtime_ns for path in there} == there
    rounded = []

    def counted(source, index, *rest):
        rounded.append(index)
        return round_layer(source, index, *rest)

    monkeypatch.setattr(session, "round_layer", counted)
    went = CliRunner().invoke(app, start(deep, tmp_path / "out", text)[3:])
    assert went.exit_code == 0, went.output
    assert rounded == list(range(len(there), 6))
    assert not done.exists()
    assert CliRunner().invoke(app, start(deep, tmp_path / "again", text)[3:]).exit_code == 0
    assert rounded == [*range(len(there), 6), *range(6)]
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_what_is_refused(tmp_path, dense):
    def refused(match: str, method: str, name: str, out: Path = tmp_path / "out") -> None:
        with pytest.raises(ModelError, match=match):
            make(dense, out, method, name)
        assert not list(tmp_path.glob("*")) and not list(tmp_path.glob(".*"))

    refused("'best'.*rtn, gptq, awq, smoothquant", "best", "int8")
    refused("smoothquant.*int8, fp8; quantization is 'int4-32'", "smoothquant", "int4")
    refused("'fp8'.*no integers", "gptq", "fp8")
    refused("64 inputs", "gptq", "int4-128")
    refused("already", "gptq", "int4", dense)
    for words, match in (
        (["--calibration", "x.txt"], "rtn looks at no"),
        (["--fine-tune-epochs", "1"], "needs a --method other than rtn"),
    ):
        done = CliRunner().invoke(
            app, ["quantize", str(dense), str(tmp_path / "out"), "--quantization", "int4", *words]
        )
        assert done.exit_code and match in str(done.exception)


# Text


def test_samples(tmp_path):
    tokenizer = Tokenizer(hub.resolve("quill"))
    text = "Once upon a time there was a fox named Tom. " * 50
    (tmp_path / "a.txt").write_text(text)
    ids = tokenizer.encode(text)
    pieces = read_samples(tmp_path / "a.txt", tokenizer, 1000, 64)
    assert sum((piece[1:] for piece in pieces), []) == ids[1:] and {
        len(piece) for piece in pieces[:-1]
    } == {64}
    drawn = read_samples(tmp_path / "a.txt", tokenizer, 3, 64)
    assert len(drawn) == 3 and all(piece in pieces for piece in drawn)
    assert drawn == read_samples(tmp_path / "a.txt", tokenizer, 3, 64)
    talk = [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "3"}]
    lines = [{"text": "A fox."}, {"prompt": "A dog."}, {"messages": talk}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    chat = tokenizer.apply_chat_template(talk, add_generation_prompt=False)
    assert read_samples(tmp_path / "b.jsonl", tokenizer, 9, 64) == [
        tokenizer.encode("A fox."),
        tokenizer.encode("A dog."),
        tokenizer.encode(chat, add_special_tokens=False),
    ]


def test_every_piece_of_a_document_begins_with_bos(tmp_path):
    """A model never sees a text without it, and keeps its largest activations there."""
    tokenizer = Tokenizer(hub.resolve("quill"))
    text = "Once upon a time there was a fox named Tom. " * 20
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    plain = tokenizer.encode(text, add_special_tokens=False)
    for file in ("a.txt", "a.jsonl"):
        pieces = read_samples(tmp_path / file, tokenizer, 1000, 64)
        assert len(pieces) > 2 and all(
            len(piece) <= 64 and piece[0] == tokenizer.bos_token_id for piece in pieces
        )
        assert [token for piece in pieces for token in piece[1:]] == plain


def test_the_bundled_text_needs_no_chat_template(tmp_path):
    """Without a template its conversations are plain text."""
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
def test_text_that_is_none(tmp_path, name, text, match):
    (tmp_path / name).write_text(text)
    tokenizer = Tokenizer(hub.resolve("quill"))
    with pytest.raises(ModelError, match=match):
        read_samples(tmp_path / name, tokenizer, 9, 64)
    with pytest.raises(ModelError, match="cannot be read"):
        read_samples(tmp_path / "missing.txt", tokenizer, 9, 64)
