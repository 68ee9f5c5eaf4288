"""Training of drafting heads: what they are taught, what is counted, and that a session can be left
and taken up.
"""

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
from quire.scripts.train_heads import answers as kept
from quire.scripts.train_heads.answers import (
    Rows,
    batches,
    none_yet,
    pack,
    read_prompts,
    split_rows,
)
from quire.scripts.train_heads.attention import attention
from quire.scripts.train_heads.beginning import first_weights, new_heads
from quire.scripts.train_heads.lesson import judge, loss_of, passes
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
def written():
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
    own = random_arrays(draft_heads.abstract(heads), 5)
    if heads.vocab:
        own = own.replace(tokens_U=jnp.asarray([0, 2, 3, 5], jnp.int32))
    return heads, own


class Naive:
    """A server that drafts row by row for one document; what stands after a row is not seen by
    it.
    """

    def __init__(self, target, heads, own):
        self.heads = heads
        self.own = own
        config, weights = target
        positions = jnp.arange(LENGTH)

        def features_of(tokens_T):
            seen: dict = {}
            hooks = LayerHooks(uncached.attention(config, 1, LENGTH), observe=seen.__setitem__)
            x = decoder.embed(weights, tokens_T, positions, config)
            (x_TD, _), _ = decoder.run_layers(weights.layers, 0, x, {}, positions, config, hooks)
            hidden_TD = decoder.final_norm(weights, x_TD, config)
            raw_TF = (
                jnp.concatenate([seen[index] for index in heads.features], -1)
                if heads.features
                else hidden_TD
            )
            return raw_TF, hidden_TD, decoder.logits(weights, hidden_TD, config)

        def draft(tokens_T, features_TD):
            hooks = LayerHooks(uncached.attention(heads.model, 1, LENGTH))
            made_TD, x_TD, _ = draft_heads.run(
                heads, own, weights, tokens_T, features_TD, positions, {}, hooks
            )
            return made_TD, draft_heads.logits(heads, own, weights, x_TD)

        self.of_model, self.draft = jax.jit(features_of), jax.jit(draft)
        self.guess = jax.jit(
            lambda hidden_RD: draft_heads.medusa_logits(heads, own, weights, hidden_RD)
        )

    def features_of(self, tokens):
        """(what the heads get of the model, its hidden states, its logits), a row for each
        token.
        """
        padded = jnp.asarray(np.pad(tokens, (0, LENGTH - len(tokens))))
        return tuple(x[: len(tokens)] for x in self.of_model(padded))

    def chain(self, tokens, anchor: int, count: int):
        """The logits of `count` places ahead of row `anchor`, where all drafts are right."""
        raw, hidden, _ = self.features_of(tokens)
        if self.heads.kind == "medusa":
            return self.guess(hidden[anchor : anchor + 1])[:count, 0]
        given = draft_heads.take_features(self.heads, self.own, raw)[: anchor + 1]
        features = jnp.zeros((LENGTH, given.shape[1])).at[: anchor + 1].set(given)
        found = []
        next_tokens = jnp.asarray(np.pad(tokens[1:], (0, LENGTH - len(tokens) + 1)))
        for place in range(anchor, anchor + count):
            made, logits = self.draft(next_tokens, features)
            features = features.at[place + 1].set(made[place])
            found.append(logits[place])
        return jnp.stack(found)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.slow
def test_a_pass_computes_what_drafting_row_by_row_does(target, written, kind):
    heads, own = random_heads(target, kind)
    batch = pack(written, range(4), LENGTH)
    row = next(row for row in range(len(batch.tokens)) if batch.documents[row].max() > 1)
    batch = Rows(*(field[row : row + 1] for field in batch))
    start = int(np.argmax(batch.documents[0] == 2))
    tokens = batch.tokens[0][batch.documents[0] == 2]
    naive = Naive(target, heads, own)
    raw = np.zeros((LENGTH, naive.features_of(tokens)[0].shape[1]), np.float32)
    for document in range(1, batch.documents.max() + 1):
        here = batch.documents[0] == document
        raw[here] = naive.features_of(batch.tokens[0][here])[0]
    made = [
        draft_heads.logits(heads, own, target[1], x)
        for _, x in passes(heads, own, target[1], batch, 3, raw)
    ]
    for anchor in range(0, len(tokens) - 4, 3):
        expected = naive.chain(tokens, anchor, 3)
        for place in range(3):
            np.testing.assert_allclose(
                made[place][start + anchor + place], expected[place], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_what_is_counted_is_what_drafts_by_the_likeliest_token_would_get_accepted(
    target, written, kind
):
    heads, own = random_heads(target, kind)
    rows = pack(written, range(len(written)), LENGTH)
    right = np.zeros(3, int)
    asked = np.zeros(3, int)
    naive = Naive(target, heads, own)
    for number in range(len(written)):
        tokens = written.document(number)[:LENGTH]
        prompt = written.prompts[number]
        # the token after it is the answer's
        for anchor in range(max(0, prompt - 1), len(tokens) - 2):
            count = min(3, len(tokens) - 2 - anchor)
            best = np.argmax(naive.chain(tokens, anchor, count), axis=-1)
            good = np.cumprod(best == tokens[anchor + 2 : anchor + 2 + count])
            asked[:count] += 1
            right[:count] += good
    found = jax.jit(lambda rows: judge(heads, own, target[1], target[0], rows, 3))(rows)
    assert [int(one.num_drafted) for one in found] == asked.tolist()
    assert [int(one.num_accepted) for one in found] == right.tolist() and right[1] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_the_loss_is_the_cross_entropy_with_what_the_model_thinks(
    target, written, kind, monkeypatch
):
    from quire.scripts.train_heads import lesson

    heads, own = random_heads(target, kind)
    rows = pack(written, range(len(written)), LENGTH)
    lost = np.zeros(2)
    asked = np.zeros(2)
    naive = Naive(target, heads, own)
    for number in range(len(written)):
        tokens = written.document(number)[:LENGTH]
        prompt = written.prompts[number]
        thinks = naive.features_of(tokens)[2]
        for anchor in range(max(0, prompt - 1), len(tokens) - 2):
            for place, logits in enumerate(
                naive.chain(tokens, anchor, min(2, len(tokens) - 2 - anchor))
            ):
                those = np.arange(V) if own.tokens_U is None else np.asarray(own.tokens_U)
                share = jax.nn.softmax(thinks[anchor + 1 + place][those])
                lost[place] -= float(share @ jax.nn.log_softmax(logits[those]))
                asked[place] += 1
    expected = lost / asked
    monkeypatch.setattr(lesson, "FEATURES", 0.0)
    found = jax.jit(lambda rows: judge(heads, own, target[1], target[0], rows, 2))(rows)
    np.testing.assert_allclose([float(one.loss) for one in found], expected, rtol=1e-4)
    np.testing.assert_allclose(
        float(loss_of(found)), (expected[0] + 0.8 * expected[1]) / 1.8, rtol=1e-4
    )
    monkeypatch.setattr(lesson, "LOGITS", 5 * V)  # part by part
    again = jax.jit(lambda rows: judge(heads, own, target[1], target[0], rows, 2))(rows)
    np.testing.assert_allclose([float(one.loss) for one in again], expected, rtol=1e-4)
    assert [int(one.num_accepted) for one in again] == [int(one.num_accepted) for one in found]


@pytest.mark.parametrize(
    ("params", "sinks_N"),
    [
        (AttentionParams(0.3), None),
        (AttentionParams(0.3, soft_cap=5.0), None),
        (AttentionParams(0.3, window=3), None),
        (AttentionParams(0.3), jnp.asarray([0.5, -1, 2, 0])),
    ],
)
def test_attention_of_documents_equals_each_by_itself(target, params, sinks_N):
    config = target[0]
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((10, n, 8)), jnp.float32) for n in (4, 2, 2))
    documents = jnp.asarray([[1] * 4 + [2] * 6])
    together, _ = attention(config, documents)(0, q, k, v, {}, params, sinks_N)
    for here in (slice(0, 4), slice(4, 10)):
        alone = uncached.attention(config, 1, here.stop - here.start)
        expected, _ = alone(0, q[here], k[here], v[here], {}, params, sinks_N)
        np.testing.assert_allclose(together[here], expected, atol=1e-5)
    latent, _ = attention(config, documents)(
        0, q, k[:, :1], None, {}, AttentionParams(0.3, value_dim=5)
    )
    expected, _ = uncached.attention(config, 1, 4)(
        0, q[:4], k[:4, :1], None, {}, AttentionParams(0.3, value_dim=5)
    )
    np.testing.assert_allclose(latent[:4], expected, atol=1e-5)


def test_rows_hold_every_document_once(written):
    rows = pack(written, range(len(written)), LENGTH)
    found = []
    for tokens, documents, positions, wrote in zip(*rows, strict=True):
        for document in range(1, documents.max() + 1):
            here = documents == document
            assert np.array_equal(positions[here], np.arange(here.sum()))
            found.append((tokens[here].tolist(), wrote[here].tolist()))
        assert (positions[documents == 0] == -1).all() and not wrote[documents == 0].any()
    expected = []
    for number in range(len(written)):
        tokens = written.document(number)[:LENGTH].tolist()
        expected.append(
            (tokens, [place >= written.prompts[number] for place in range(len(tokens))])
        )
    assert sorted(found) == sorted(expected)


def test_batches_go_on_where_they_were_left(written):
    def some(first: int, count: int):
        made = batches(written, range(len(written)), LENGTH, 2, 7, first)
        return [next(made).tokens.tolist() for _ in range(count)]

    whole = some(0, 9)
    assert [some(first, 1)[0] for first in range(9)] == whole
    epoch = len(list(split_rows(pack(written, range(len(written)), LENGTH), 2)))
    assert whole[:epoch] != whole[epoch : 2 * epoch]  # another order


def test_halves_share_nothing():
    learned, held = split_held_out(100, 0.1)
    assert sorted(learned + held) == list(range(100)) and len(held) == 10
    with pytest.raises(ModelError, match="two are the least"):
        split_held_out(1, 0.1)


def test_heads_begin_as_the_model(target, written):
    """Medusa's heads say at first what the model says of the next token."""
    config, weights = target
    heads, _ = new_heads("medusa", config, 2, 2, True, 0)
    own = first_weights(heads, weights, written, 0)
    hidden = np.random.default_rng(0).random((3, 32), np.float32)
    for logits in draft_heads.medusa_logits(heads, own, weights, jnp.asarray(hidden)):
        np.testing.assert_allclose(
            logits, decoder.logits(weights, jnp.asarray(hidden), config), atol=1e-5
        )


@pytest.mark.parametrize("name", thinned(FAMILIES, ["gemma4-shared", "deepseek-v3"]))
@pytest.mark.slow
def test_heads_are_taught_by_models_of_every_form(tmp_path, name):
    """Latent attention, windows, caps, sinks, experts, shared keys: the loss falls along its
    gradient.
    """
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
    own = first_weights(heads, weights, none_yet().joined(documents), 0)

    @jax.jit
    @jax.value_and_grad
    def lost(own):
        return loss_of(judge(heads, own, weights, config, rows, 2))

    before, slope = lost(own)
    norm = sum((leaf**2).sum() for leaf in jax.tree.leaves(slope)) ** 0.5
    after, _ = lost(jax.tree.map(lambda w, g: w - 0.03 * g / norm, own, slope))
    assert np.isfinite(before) and after < before


@pytest.mark.parametrize("tied", [False, True])
def test_heads_learn_through_the_output_matrix_of_a_rounded_model(tmp_path, written, tied):
    hf = tiny.LLAMA | {"tie_word_embeddings": tied, "hidden_size": 32, "num_hidden_layers": 6}
    tiny.write(tmp_path / "dense", hf)
    quantized.save(
        tmp_path / "dense", tmp_path / "int8", read_config(tmp_path / "dense", quantization="int8")
    )
    config = read_config(tmp_path / "int8")
    weights = load(tmp_path / "int8", config, skip_packing=True)
    rows = pack(written, range(len(written)), LENGTH)
    heads, _ = new_heads("eagle", config, 1, 1, True, 0)
    own = random_arrays(draft_heads.abstract(heads), 0)

    def slope(weights):
        def lost(own):
            return judge(heads, own, weights, config, rows, 1)[0].loss

        return float(jnp.abs(jax.jit(jax.grad(lost))(own).layers[0].mlp.down_FD).sum())

    assert slope(with_dense_head(weights)) > 1e-3
    opened = with_dense_head(weights)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32)), jnp.float32)
    near = decoder.logits(opened, hidden, config) - decoder.logits(weights, hidden, config)
    assert float(jnp.abs(near).max()) < 0.3  # its rows are not rounded any more


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
def bundled():
    return str(Path(quire.__file__).parent / "model" / "quill_draft")


@pytest.fixture(scope="module")
def said(tmp_path_factory, bundled):
    """Answers of quill-draft, written once."""
    folder = tmp_path_factory.mktemp("said")
    return Session(bundled, folder, Settings(**QUICK)).answers(), folder


def session(bundled, folder, said, **settings) -> Session:
    folder.mkdir(exist_ok=True)
    said[0].save(folder / "answers.npz")
    return Session(bundled, folder, Settings(**QUICK | settings))


def same(a: Path, b: Path) -> bool:
    names = ("config.json", "model.safetensors")
    return all(
        (a / "heads" / name).read_bytes() == (b / "heads" / name).read_bytes() for name in names
    )


@pytest.mark.parametrize("kind", thinned(KINDS, ["eagle"]))
@pytest.mark.slow
def test_heads_that_were_trained_can_be_read(tmp_path, bundled, said, kind, capsys):
    settings = {"medusa": {"shared_head": True}, "eagle": {}, "eagle3": {"draft_vocab": 300}}[kind]
    session(bundled, tmp_path, said, kind=kind, places=2, heads=2, **settings).run()
    shown = capsys.readouterr().out
    assert "step 0 of 6" in shown and "place ahead" in shown
    config = read_config(Path(bundled))
    heads = draft_heads.read_heads(tmp_path / "heads", config, kind)
    own = draft_heads.load(tmp_path / "heads", heads, skip_packing=True)
    assert heads.model.dtype == "bfloat16" and heads.own_head == (kind == "eagle3")
    begun = first_weights(heads, load_weights(Path(bundled), config), said[0], 0)
    changed = [
        not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (own, begun)), strict=True)
    ]
    assert sum(changed) > len(changed) / 2


@pytest.mark.parametrize("kind", thinned(["medusa", "eagle"], ["medusa"]))
def test_training_that_was_left_ends_with_the_same_weights(
    tmp_path, bundled, said, kind, monkeypatch
):
    whole = tmp_path / "whole"
    parted = tmp_path / "parted"
    session(bundled, whole, said, kind=kind, heads=2).run()
    left = session(bundled, parted, said, kind=kind, heads=2)
    from quire.scripts.train_heads import session as module

    def stops(*arguments, **options):
        for number, batch in enumerate(batches(*arguments, **options)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(module, "batches", stops)
        left.run()
    assert left.stop and not (parted / "heads").exists()
    assert sorted(int(path.name) for path in (parted / "checkpoints").iterdir()) == [2, 3]
    again = session(bundled, parted, said, kind=kind, heads=2)
    again.run()
    assert same(whole, parted) and not again.stop


def test_heads_go_on_from_others(tmp_path, bundled, said):
    """Where nothing is learned they are those that it was begun with; of another kind they are
    refused.
    """
    session(bundled, tmp_path / "a", said, kind="medusa", heads=2, shared_head=True).run()
    start = tmp_path / "a" / "heads"
    session(bundled, tmp_path / "b", said, kind="medusa", start=start, rate=1e-12, steps=2).run()
    assert same(tmp_path / "a", tmp_path / "b")
    for kind in ("eagle", "mtp"):
        with pytest.raises(ModelError):
            session(bundled, tmp_path / "c", said, kind=kind, start=start)


def test_a_folder_goes_on_as_it_was_begun(tmp_path, bundled, said):
    Settings(**QUICK).begin(tmp_path)
    Settings(**QUICK).begin(tmp_path)
    with pytest.raises(ModelError, match="begun with rate = 0.001, and now it is 0.01"):
        session(bundled, tmp_path, said, rate=0.01).run()


def test_answers_are_the_models_own(said, bundled):
    answers, folder = said
    from quire import LLM

    assert len(answers) == 12 and (answers.prompts == 1).all()
    with LLM(bundled) as llm:
        end = llm.get_tokenizer().eos_token_ids
    for number in range(12):
        document = answers.document(number)
        assert len(document) == 9 or document[-1] in end
    # each is drawn by itself
    assert len({tuple(answers.document(number).tolist()) for number in range(12)}) > 6
    again = kept.load(folder / "answers.npz")
    assert all(
        np.array_equal(a, b)
        for a, b in zip(vars(answers).values(), vars(again).values(), strict=True)
    )


def test_greedy_answers_and_those_that_are_drawn(tmp_path, bundled):
    """A file of prompts: texts and conversations; answers that were written before are kept."""
    from quire import LLM, SamplingParams

    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "Once upon a time"},
        {"messages": [{"role": "user", "content": "Copy: red"}]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    prompts = read_prompts(path)
    with LLM(bundled) as llm:
        params = SamplingParams(max_tokens=6, temperature=1.0)
        likeliest = kept.write(llm, prompts, tmp_path / "a.npz", params, 1.0, 0, lambda count: True)
        expected = [
            llm.generate("Once upon a time", SamplingParams(max_tokens=6, temperature=0), False),
            llm.chat(lines[1]["messages"], SamplingParams(max_tokens=6, temperature=0), False),
        ]
        for number, (out,) in enumerate(expected):
            found = likeliest.document(number).tolist()
            assert found == [*out.prompt_token_ids, *out.outputs[0].token_ids]
            assert likeliest.prompts[number] == len(out.prompt_token_ids)
        none_yet().joined([([1], [2])]).save(tmp_path / "b.npz")
        gone_on = kept.write(llm, prompts, tmp_path / "b.npz", params, 0.0, 0, lambda count: True)
        assert gone_on.document(0).tolist() == [1, 2] and len(gone_on) == 2
        none = kept.write(llm, prompts, tmp_path / "c.npz", params, 0.0, 0, lambda count: False)
    assert len(none) == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "{}", "line 1 must be an object with messages"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ("a.txt", "\n\n", "holds no prompts"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_prompts_that_cannot_be_used(tmp_path, name, text, message):
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
def test_settings_that_cannot_be(tmp_path, bundled, settings, message):
    with pytest.raises(ModelError) as refused:
        Session(bundled, tmp_path, Settings(**QUICK | settings))
    assert message in str(refused.value)


def test_quill_has_prompts_of_all_its_tasks(tmp_path):
    from tools.quill.prompts import main
    from tools.quill.tasks import TASKS, fresh

    main(tmp_path / "prompts.jsonl", 400)
    found = read_prompts(tmp_path / "prompts.jsonl")
    assert (
        len(found) == 400
        and any("prompt" in one for one in found)
        and any("messages" in one for one in found)
    )
    asked = {one["messages"][0]["content"] for one in found if "messages" in one}
    held_out = {example.prompt for task in TASKS for example in fresh(task, 30)}
    long = {text for text in asked if len(text) > 60}
    assert long and not long & held_out  # short sums come again by chance
