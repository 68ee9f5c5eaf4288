"""Training of draft heads: losses, acceptance counts, training data and interrupted sessions."""

import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quire
from quire.model import decoder, draft_heads
from quire.model.checkpoint import quantized
from quire.model.checkpoint.loader import load, load_weights, read_config
from quire.model.config import ModelError
from quire.model.mixers import LayerHooks
from quire.ops.attention.backend import AttentionParams
from quire.scripts.train_heads import answers as answer_files
from quire.scripts.train_heads.answers import (
    Rows,
    batches,
    none_yet,
    pack,
    read_prompts,
    split_rows,
)
from quire.scripts.train_heads.attention import attention
from quire.scripts.train_heads.initial_heads import first_weights, new_heads
from quire.scripts.train_heads.loss import mean_loss, passes, score_drafts
from quire.scripts.train_heads.session import Session, split_held_out, with_dense_head
from quire.scripts.train_heads.settings import Settings
from quire.sharding.spec import random_arrays
from quire.tests.support import tiny, uncached
from quire.tests.support.cases import thinned
from quire.tests.support.golden.families import VARIANTS

V = 6
LENGTH = 24
TARGET = tiny.LLAMA | {"num_hidden_layers": 6, "vocab_size": V}
KINDS = ["medusa", "eagle", "eagle3"]
FAMILIES = ["gemma2", "gemma4-shared", "gpt-oss", "deepseek-v3", "qwen3-moe", "phi3"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tensors = tiny.draw(TARGET)
    tiny.write(
        folder,
        TARGET,
        {name: value / 6 if value.ndim > 1 else value for name, value in tensors.items()},
    )
    config = read_config(folder)
    return config, load_weights(folder, config)


@pytest.fixture(scope="module")
def random_answers():
    """Documents of random tokens."""
    rng = np.random.default_rng(0)
    documents = []
    for size in (9, 14, 5, 22, 11, 30, 3, 20, 24):
        tokens = rng.integers(0, V, size).tolist()
        cut = int(rng.integers(1, size))
        documents.append((tokens[:cut], tokens[cut:]))
    return none_yet().joined(documents)


def random_heads(target, kind: str):
    heads, _ = new_heads(kind, target[0], 3, 2, True, 4)
    head_weights = random_arrays(draft_heads.abstract(heads), 5)
    if heads.vocab:
        head_weights = head_weights.replace(tokens_U=jnp.asarray([0, 2, 3, 5], jnp.int32))
    return heads, head_weights


class ReferenceDrafter:
    """Drafts for one document, one token after another, without a look at later tokens."""

    def __init__(self, target, heads, head_weights):
        self.heads = heads
        self.head_weights = head_weights
        config, weights = target
        positions = jnp.arange(LENGTH)

        def target_features(tokens_T):
            hidden_by_layer: dict = {}
            hooks = LayerHooks(
                uncached.attention(config, 1, LENGTH), observe=hidden_by_layer.__setitem__
            )
            x = decoder.embed(weights, tokens_T, positions, config)
            (x_TD, _), _ = decoder.run_layers(weights.layers, 0, x, {}, positions, config, hooks)
            hidden_TD = decoder.final_norm(weights, x_TD, config)
            raw_TF = (
                jnp.concatenate([hidden_by_layer[index] for index in heads.features], -1)
                if heads.features
                else hidden_TD
            )
            return raw_TF, hidden_TD, decoder.logits(weights, hidden_TD, config)

        def draft(tokens_T, features_TD):
            hooks = LayerHooks(uncached.attention(heads.model, 1, LENGTH))
            draft_hidden_TD, x_TD, _ = draft_heads.run(
                heads, head_weights, weights, tokens_T, features_TD, positions, {}, hooks
            )
            return draft_hidden_TD, draft_heads.logits(heads, head_weights, weights, x_TD)

        self.run_target = jax.jit(target_features)
        self.draft = jax.jit(draft)
        self.medusa_logits = jax.jit(
            lambda hidden_RD: draft_heads.medusa_logits(heads, head_weights, weights, hidden_RD)
        )

    def target_features(self, tokens):
        """(input features of the heads, final hidden states, logits), one row per token."""
        padded = jnp.asarray(np.pad(tokens, (0, LENGTH - len(tokens))))
        return tuple(x[: len(tokens)] for x in self.run_target(padded))

    def draft_chain(self, tokens, anchor: int, count: int):
        """Draft logits of `count` places after token `anchor`, all earlier drafts being right."""
        raw, hidden, _ = self.target_features(tokens)
        if self.heads.kind == "medusa":
            return self.medusa_logits(hidden[anchor : anchor + 1])[:count, 0]
        draft_features = draft_heads.take_features(self.heads, self.head_weights, raw)[: anchor + 1]
        features = jnp.zeros((LENGTH, draft_features.shape[1])).at[: anchor + 1].set(draft_features)
        logits_by_place = []
        next_tokens = jnp.asarray(np.pad(tokens[1:], (0, LENGTH - len(tokens) + 1)))
        for place in range(anchor, anchor + count):
            draft_hidden, logits = self.draft(next_tokens, features)
            features = features.at[place + 1].set(draft_hidden[place])
            logits_by_place.append(logits[place])
        return jnp.stack(logits_by_place)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.slow
def test_training_pass_equals_drafting_row_by_row(target, random_answers, kind):
    heads, head_weights = random_heads(target, kind)
    batch = pack(random_answers, range(4), LENGTH)
    row = next(row for row in range(len(batch.tokens)) if batch.documents[row].max() > 1)
    batch = Rows(*(field[row : row + 1] for field in batch))
    start = int(np.argmax(batch.documents[0] == 2))
    tokens = batch.tokens[0][batch.documents[0] == 2]
    reference = ReferenceDrafter(target, heads, head_weights)
    raw = np.zeros((LENGTH, reference.target_features(tokens)[0].shape[1]), np.float32)
    for document in range(1, batch.documents.max() + 1):
        in_document = batch.documents[0] == document
        raw[in_document] = reference.target_features(batch.tokens[0][in_document])[0]
    logits_by_place = [
        draft_heads.logits(heads, head_weights, target[1], x)
        for _, x in passes(heads, head_weights, target[1], batch, 3, raw)
    ]
    for anchor in range(0, len(tokens) - 4, 3):
        expected = reference.draft_chain(tokens, anchor, 3)
        for place in range(3):
            np.testing.assert_allclose(
                logits_by_place[place][start + anchor + place],
                expected[place],
                rtol=1e-4,
                atol=1e-4,
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_judge_counts_accepted_greedy_drafts(target, random_answers, kind):
    heads, head_weights = random_heads(target, kind)
    rows = pack(random_answers, range(len(random_answers)), LENGTH)
    num_accepted = np.zeros(3, int)
    num_drafted = np.zeros(3, int)
    reference = ReferenceDrafter(target, heads, head_weights)
    for number in range(len(random_answers)):
        tokens = random_answers.document(number)[:LENGTH]
        prompt = random_answers.prompts[number]
        # the token after the anchor belongs to the answer
        for anchor in range(max(0, prompt - 1), len(tokens) - 2):
            count = min(3, len(tokens) - 2 - anchor)
            greedy_tokens = np.argmax(reference.draft_chain(tokens, anchor, count), axis=-1)
            is_accepted = np.cumprod(greedy_tokens == tokens[anchor + 2 : anchor + 2 + count])
            num_drafted[:count] += 1
            num_accepted[:count] += is_accepted
    scores = jax.jit(lambda rows: score_drafts(heads, head_weights, target[1], target[0], rows, 3))(
        rows
    )
    assert [int(score.num_drafted) for score in scores] == num_drafted.tolist()
    assert [int(score.num_accepted) for score in scores] == num_accepted.tolist()
    assert num_accepted[1] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_loss_is_the_cross_entropy_with_the_target_distribution(
    target, random_answers, kind, monkeypatch
):
    from quire.scripts.train_heads import loss

    heads, head_weights = random_heads(target, kind)
    rows = pack(random_answers, range(len(random_answers)), LENGTH)
    loss_sums = np.zeros(2)
    num_drafted = np.zeros(2)
    reference = ReferenceDrafter(target, heads, head_weights)
    for number in range(len(random_answers)):
        tokens = random_answers.document(number)[:LENGTH]
        prompt = random_answers.prompts[number]
        target_logits = reference.target_features(tokens)[2]
        for anchor in range(max(0, prompt - 1), len(tokens) - 2):
            for place, logits in enumerate(
                reference.draft_chain(tokens, anchor, min(2, len(tokens) - 2 - anchor))
            ):
                draft_vocab = (
                    np.arange(V)
                    if head_weights.tokens_U is None
                    else np.asarray(head_weights.tokens_U)
                )
                target_probs = jax.nn.softmax(target_logits[anchor + 1 + place][draft_vocab])
                loss_sums[place] -= float(target_probs @ jax.nn.log_softmax(logits[draft_vocab]))
                num_drafted[place] += 1
    expected = loss_sums / num_drafted
    monkeypatch.setattr(loss, "FEATURES", 0.0)
    scores = jax.jit(lambda rows: score_drafts(heads, head_weights, target[1], target[0], rows, 2))(
        rows
    )
    np.testing.assert_allclose([float(score.loss) for score in scores], expected, rtol=1e-4)
    np.testing.assert_allclose(
        float(mean_loss(scores)), (expected[0] + 0.8 * expected[1]) / 1.8, rtol=1e-4
    )
    monkeypatch.setattr(loss, "LOGITS", 5 * V)  # a few rows at a time
    chunked_scores = jax.jit(
        lambda rows: score_drafts(heads, head_weights, target[1], target[0], rows, 2)
    )(rows)
    np.testing.assert_allclose([float(score.loss) for score in chunked_scores], expected, rtol=1e-4)
    assert [int(score.num_accepted) for score in chunked_scores] == [
        int(score.num_accepted) for score in scores
    ]


@pytest.mark.parametrize(
    ("params", "sinks_N"),
    [
        (AttentionParams(0.3), None),
        (AttentionParams(0.3, soft_cap=5.0), None),
        (AttentionParams(0.3, window=3), None),
        (AttentionParams(0.3), jnp.asarray([0.5, -1, 2, 0])),
    ],
)
def test_packed_documents_attend_only_to_themselves(target, params, sinks_N):
    config = target[0]
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((10, n, 8)), jnp.float32) for n in (4, 2, 2))
    documents = jnp.asarray([[1] * 4 + [2] * 6])
    together, _ = attention(config, documents)(0, q, k, v, {}, params, sinks_N)
    for rows in (slice(0, 4), slice(4, 10)):
        alone = uncached.attention(config, 1, rows.stop - rows.start)
        expected, _ = alone(0, q[rows], k[rows], v[rows], {}, params, sinks_N)
        np.testing.assert_allclose(together[rows], expected, atol=1e-5)
    latent, _ = attention(config, documents)(
        0, q, k[:, :1], None, {}, AttentionParams(0.3, value_dim=5)
    )
    expected, _ = uncached.attention(config, 1, 4)(
        0, q[:4], k[:4, :1], None, {}, AttentionParams(0.3, value_dim=5)
    )
    np.testing.assert_allclose(latent[:4], expected, atol=1e-5)


def test_pack_holds_every_document_once(random_answers):
    rows = pack(random_answers, range(len(random_answers)), LENGTH)
    packed = []
    for tokens, documents, positions, is_answer in zip(*rows, strict=True):
        for document in range(1, documents.max() + 1):
            in_document = documents == document
            assert np.array_equal(positions[in_document], np.arange(in_document.sum()))
            packed.append((tokens[in_document].tolist(), is_answer[in_document].tolist()))
        assert (positions[documents == 0] == -1).all() and not is_answer[documents == 0].any()
    expected = []
    for number in range(len(random_answers)):
        tokens = random_answers.document(number)[:LENGTH].tolist()
        expected.append(
            (tokens, [place >= random_answers.prompts[number] for place in range(len(tokens))])
        )
    assert sorted(packed) == sorted(expected)


def test_batches_resume_at_a_given_step(random_answers):
    def token_batches(first: int, count: int):
        batch_iterator = batches(random_answers, range(len(random_answers)), LENGTH, 2, 7, first)
        return [next(batch_iterator).tokens.tolist() for _ in range(count)]

    uninterrupted = token_batches(0, 9)
    assert [token_batches(first, 1)[0] for first in range(9)] == uninterrupted
    epoch = len(list(split_rows(pack(random_answers, range(len(random_answers)), LENGTH), 2)))
    assert uninterrupted[:epoch] != uninterrupted[epoch : 2 * epoch]  # another order


def test_training_and_held_out_documents_are_disjoint():
    training, held_out = split_held_out(100, 0.1)
    assert sorted(training + held_out) == list(range(100)) and len(held_out) == 10
    with pytest.raises(ModelError, match="two are the least"):
        split_held_out(1, 0.1)


def test_initial_medusa_heads_predict_the_models_next_token(target, random_answers):
    config, weights = target
    heads, _ = new_heads("medusa", config, 2, 2, True, 0)
    head_weights = first_weights(heads, weights, random_answers, 0)
    hidden = np.random.default_rng(0).random((3, 32), np.float32)
    for logits in draft_heads.medusa_logits(heads, head_weights, weights, jnp.asarray(hidden)):
        np.testing.assert_allclose(
            logits, decoder.logits(weights, jnp.asarray(hidden), config), atol=1e-5
        )


@pytest.mark.parametrize("name", thinned(FAMILIES, ["gemma4-shared", "deepseek-v3"]))
@pytest.mark.slow
def test_loss_falls_along_the_gradient_for_every_attention_form(tmp_path, name):
    """Latent attention, windows, soft caps, sinks, experts and shared KV."""
    variant = next(variant for variant in VARIANTS if variant.name == name)
    (tmp_path / "config.json").write_text(json.dumps(variant.config))
    config = read_config(tmp_path, "float32")
    weights = load(tmp_path, config, skip_packing=True, load_format="dummy")
    rng = np.random.default_rng(0)
    documents = [
        (
            rng.integers(0, config.vocab_size, 5).tolist(),
            rng.integers(0, config.vocab_size, 20).tolist(),
        )
    ]
    rows = pack(none_yet().joined(documents), [0], 32)
    heads, _ = new_heads("eagle3", config, 1, 1, True, 0)
    head_weights = first_weights(heads, weights, none_yet().joined(documents), 0)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(head_weights):
        return mean_loss(score_drafts(heads, head_weights, weights, config, rows, 2))

    loss_before, gradient = loss_and_gradient(head_weights)
    norm = sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)) ** 0.5
    loss_after, _ = loss_and_gradient(
        jax.tree.map(lambda w, g: w - 0.03 * g / norm, head_weights, gradient)
    )
    assert np.isfinite(loss_before) and loss_after < loss_before


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_pass_through_the_output_matrix_of_an_int8_model(tmp_path, random_answers, tied):
    hf = tiny.LLAMA | {"tie_word_embeddings": tied, "hidden_size": 32, "num_hidden_layers": 6}
    tiny.write(tmp_path / "dense", hf)
    quantized.save(
        tmp_path / "dense", tmp_path / "int8", read_config(tmp_path / "dense", quantization="int8")
    )
    config = read_config(tmp_path / "int8")
    weights = load(tmp_path / "int8", config, skip_packing=True)
    rows = pack(random_answers, range(len(random_answers)), LENGTH)
    heads, _ = new_heads("eagle", config, 1, 1, True, 0)
    head_weights = random_arrays(draft_heads.abstract(heads), 0)

    def gradient_sum(weights):
        def loss(head_weights):
            return score_drafts(heads, head_weights, weights, config, rows, 1)[0].loss

        return float(jnp.abs(jax.jit(jax.grad(loss))(head_weights).layers[0].mlp.down_FD).sum())

    assert gradient_sum(with_dense_head(weights)) > 1e-3
    dense_head_weights = with_dense_head(weights)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32)), jnp.float32)
    logit_differences = decoder.logits(dense_head_weights, hidden, config) - decoder.logits(
        weights, hidden, config
    )
    assert (
        float(jnp.abs(logit_differences).max()) < 0.3
    )  # activations are no longer rounded to int8


QUICK = {
    "steps": 6,
    "rows": 2,
    "length": 32,
    "check": 2,
    "samples": 12,
    "max_tokens": 8,
    "held_out": 0.25,
    "warmup": 2,
}


@pytest.fixture(scope="module")
def quill_draft_folder():
    return str(Path(quire.__file__).parent / "model" / "quill_draft")


@pytest.fixture(scope="module")
def quill_answers(tmp_path_factory, quill_draft_folder):
    """Answers that quill-draft generated, and the folder that holds their file."""
    folder = tmp_path_factory.mktemp("quill_answers")
    return Session(quill_draft_folder, folder, Settings(**QUICK)).answers(), folder


def make_session(quill_draft_folder, folder, quill_answers, **settings) -> Session:
    folder.mkdir(exist_ok=True)
    quill_answers[0].save(folder / "answers.npz")
    return Session(quill_draft_folder, folder, Settings(**QUICK | settings))


def same_heads(a: Path, b: Path) -> bool:
    names = ("config.json", "model.safetensors")
    return all(
        (a / "heads" / name).read_bytes() == (b / "heads" / name).read_bytes() for name in names
    )


@pytest.mark.parametrize("kind", thinned(KINDS, ["eagle"]))
@pytest.mark.slow
def test_trained_heads_can_be_loaded(tmp_path, quill_draft_folder, quill_answers, kind, capsys):
    settings = {"medusa": {"shared_head": True}, "eagle": {}, "eagle3": {"draft_vocab": 300}}[kind]
    make_session(
        quill_draft_folder, tmp_path, quill_answers, kind=kind, places=2, heads=2, **settings
    ).run()
    out = capsys.readouterr().out
    assert "step 0 of 6" in out and "place ahead" in out
    config = read_config(Path(quill_draft_folder))
    heads = draft_heads.read_heads(tmp_path / "heads", config, kind)
    head_weights = draft_heads.load(tmp_path / "heads", heads, skip_packing=True)
    assert heads.model.dtype == "bfloat16" and heads.own_head == (kind == "eagle3")
    initial_weights = first_weights(
        heads, load_weights(Path(quill_draft_folder), config), quill_answers[0], 0
    )
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (head_weights, initial_weights)), strict=True)
    ]
    assert sum(changed) > len(changed) / 2


@pytest.mark.parametrize("kind", thinned(["medusa", "eagle"], ["medusa"]))
def test_interrupted_training_resumes_to_the_same_weights(
    tmp_path, quill_draft_folder, quill_answers, kind, monkeypatch
):
    uninterrupted = tmp_path / "whole"
    interrupted = tmp_path / "parted"
    make_session(quill_draft_folder, uninterrupted, quill_answers, kind=kind, heads=2).run()
    interrupted_session = make_session(
        quill_draft_folder, interrupted, quill_answers, kind=kind, heads=2
    )
    from quire.scripts.train_heads import session as module

    def interrupting_batches(*arguments, **options):
        for number, batch in enumerate(batches(*arguments, **options)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(module, "batches", interrupting_batches)
        interrupted_session.run()
    assert interrupted_session.stop and not (interrupted / "heads").exists()
    assert sorted(int(path.name) for path in (interrupted / "checkpoints").iterdir()) == [2, 3]
    resumed_session = make_session(
        quill_draft_folder, interrupted, quill_answers, kind=kind, heads=2
    )
    resumed_session.run()
    assert same_heads(uninterrupted, interrupted) and not resumed_session.stop


def test_training_starts_from_existing_heads_of_the_same_kind(
    tmp_path, quill_draft_folder, quill_answers
):
    """A learning rate near 0 leaves the heads unchanged; heads of another kind are rejected."""
    make_session(
        quill_draft_folder, tmp_path / "a", quill_answers, kind="medusa", heads=2, shared_head=True
    ).run()
    start = tmp_path / "a" / "heads"
    make_session(
        quill_draft_folder,
        tmp_path / "b",
        quill_answers,
        kind="medusa",
        start=start,
        rate=1e-12,
        steps=2,
    ).run()
    assert same_heads(tmp_path / "a", tmp_path / "b")
    for kind in ("eagle", "mtp"):
        with pytest.raises(ModelError):
            make_session(quill_draft_folder, tmp_path / "c", quill_answers, kind=kind, start=start)


def test_a_folder_cannot_resume_with_other_settings(tmp_path, quill_draft_folder, quill_answers):
    Settings(**QUICK).begin(tmp_path)
    Settings(**QUICK).begin(tmp_path)
    with pytest.raises(ModelError, match="begun with rate = 0.001, and now it is 0.01"):
        make_session(quill_draft_folder, tmp_path, quill_answers, rate=0.01).run()


def test_training_answers_are_sampled_from_the_model(quill_answers, quill_draft_folder):
    answers, folder = quill_answers
    from quire import LLM

    assert len(answers) == 12 and (answers.prompts == 1).all()
    with LLM(quill_draft_folder) as llm:
        end = llm.get_tokenizer().eos_token_ids
    for number in range(12):
        document = answers.document(number)
        assert len(document) == 9 or document[-1] in end
    # every answer is sampled independently
    assert len({tuple(answers.document(number).tolist()) for number in range(12)}) > 6
    loaded = answer_files.load(folder / "answers.npz")
    assert all(
        np.array_equal(a, b)
        for a, b in zip(vars(answers).values(), vars(loaded).values(), strict=True)
    )


def test_greedy_and_sampled_answers_to_a_prompt_file(tmp_path, quill_draft_folder):
    """Prompts are texts or conversations; answers already in the file are kept."""
    from quire import LLM, SamplingParams

    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "Once upon a time"},
        {"messages": [{"role": "user", "content": "Copy: red"}]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    prompts = read_prompts(path)
    with LLM(quill_draft_folder) as llm:
        params = SamplingParams(max_tokens=6, temperature=1.0)
        greedy_answers = answer_files.write(
            llm, prompts, tmp_path / "a.npz", params, 1.0, 0, lambda count: True
        )
        expected = [
            llm.generate("Once upon a time", SamplingParams(max_tokens=6, temperature=0), False),
            llm.chat(lines[1]["messages"], SamplingParams(max_tokens=6, temperature=0), False),
        ]
        for number, (out,) in enumerate(expected):
            token_ids = greedy_answers.document(number).tolist()
            assert token_ids == [*out.prompt_token_ids, *out.outputs[0].token_ids]
            assert greedy_answers.prompts[number] == len(out.prompt_token_ids)
        none_yet().joined([([1], [2])]).save(tmp_path / "b.npz")
        resumed_answers = answer_files.write(
            llm, prompts, tmp_path / "b.npz", params, 0.0, 0, lambda count: True
        )
        assert resumed_answers.document(0).tolist() == [1, 2] and len(resumed_answers) == 2
        stopped_answers = answer_files.write(
            llm, prompts, tmp_path / "c.npz", params, 0.0, 0, lambda count: False
        )
    assert len(stopped_answers) == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "{}", "line 1 must be an object with messages"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ("a.txt", "\n\n", "holds no prompts"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_unusable_prompt_files_are_rejected(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kind": "mtp"},
            "heads of kind 'mtp' cannot be trained; those of kind medusa, eagle, eagle3 can",
        ),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"greedy": 1.5}, "greedy is 1.5; it is a share"),
        ({"held_out": 0.0}, "some must be held out"),
        ({"length": 4096}, "length is 4096; the model reads at most 1024 tokens"),
    ],
)
def test_invalid_training_settings_are_rejected(tmp_path, quill_draft_folder, settings, message):
    with pytest.raises(ModelError) as error:
        Session(quill_draft_folder, tmp_path, Settings(**QUICK | settings))
    assert message in str(error.value)


def test_quill_prompt_file_covers_all_tasks(tmp_path):
    from tools.quill.prompts import main
    from tools.quill.tasks import TASKS, fresh

    main(tmp_path / "prompts.jsonl", 400)
    prompts = read_prompts(tmp_path / "prompts.jsonl")
    assert (
        len(prompts) == 400
        and any("prompt" in prompt for prompt in prompts)
        and any("messages" in prompt for prompt in prompts)
    )
    messages = {prompt["messages"][0]["content"] for prompt in prompts if "messages" in prompt}
    held_out = {example.prompt for task in TASKS for example in fresh(task, 30)}
    long_messages = {text for text in messages if len(text) > 60}
    assert long_messages and not long_messages & held_out  # short sums repeat by chance
