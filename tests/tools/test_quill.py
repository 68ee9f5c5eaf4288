"""The bundled model's corpus, tokenizer, training and export."""

import json
import re
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.model import decoder, draft_heads
from quire.model.checkpoint import hub
from quire.model.checkpoint.loader import load_weights, read_config
from quire.model.families.quill import small_cache_config
from quire.model.mixers import LayerHooks
from quire.model.weights import abstract
from quire.ops.linear import einsum
from quire.scripts.train_heads.answers import none_yet, pack
from quire.scripts.train_heads.attention import attention
from quire.scripts.train_heads.loss import score_drafts
from quire.sharding.spec import random_arrays
from quire.tests.support import uncached
from quire.tests.support.cases import thinned
from tools.quill import corpus as corpus
from tools.quill import drafts as drafts
from tools.quill import prompts, quality
from tools.quill import stories as stories
from tools.quill import tasks as tasks
from tools.quill.eval import evaluate
from tools.quill.export import export
from tools.quill.model import Narrow, logits_of, loss_of
from tools.quill.quality import said
from tools.quill.recogniser import recognise

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.train_tokenizer(1280)


@pytest.fixture(scope="module")
def small():
    config = small_cache_config(
        vocab_size=1280,
        dim=32,
        num_layers=4,
        heads=2,
        head_dim=16,
        ffn=48,
        window=24,
        global_every=2,
        dtype="float32",
    )
    return config, random_arrays(abstract(config), seed=1)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_right_answers_score_and_wrong_ones_do_not(task):
    for example in tasks.fresh(task, 30):
        assert tasks.score(example, example.answer)
        assert not tasks.score(example, example.answer + " x")
        assert not tasks.score(example, example.answer[:-1])


def test_task_answers_match_an_independent_computation():
    for task, compute in {
        "add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "multiply": lambda a, b: a * b,
    }.items():  # fmt: skip
        for example in tasks.fresh(task, 50):
            a, b = (
                int(word.strip("?"))
                for word in example.prompt.removeprefix("What is ").split()
                if word.strip("?").isdigit()
            )
            assert example.answer == str(compute(a, b)), example
    for task in ("sort_letters", "sort_words"):
        for example in tasks.fresh(task, 50):
            assert example.answer.split() == sorted(example.prompt.split()[1:])
    for example in tasks.fresh("json", 50):
        assert json.loads(example.answer)
    for example in tasks.fresh("lookup_short", 50):
        name = example.prompt.rsplit("What does ", 1)[1].split()[0]
        assert example.answer.startswith(f"- {name}: ")
        assert f"\n{example.answer}\n" in example.prompt


def test_story_is_judged_by_the_requested_facts():
    story = next(tasks.fresh("story", 1))
    slot, value = next(iter(story.facts.items()))
    other_value = next(v for v in stories.SLOTS[slot] if v != value and v not in story.answer)
    assert recognise(story.answer, {slot: value}) and not recognise(
        story.answer, {slot: other_value}
    )


def test_story_with_a_changed_name_or_pronoun_is_not_recognised():
    rng = Random(3)
    for _ in range(20):
        bound = stories.draw(rng)
        text = stories.write(rng, bound)
        other_name = next(n for n in stories.NAMES if n not in bound.values())
        head, _, tail = text.rpartition(bound["hero"])
        assert recognise(text)
        assert not recognise(head + other_name + tail)
        assert not recognise(text.replace("\n\n", " "))


def test_samples_are_deterministic_by_seed(tokenizer):
    assert list(tasks.fresh("copy", 5)) == list(tasks.fresh("copy", 5))
    assert list(tasks.fresh("copy", 5)) != list(tasks.fresh("copy", 5, seed=1))
    rows, same_seed_rows, other_seed_rows = (
        corpus.training_rows(tokenizer, seed, 4, 256, corpus.MIX) for seed in ("0/1", "0/1", "0/2")
    )
    assert (rows.tokens == same_seed_rows.tokens).all() and not (
        rows.tokens == other_seed_rows.tokens
    ).all()


def test_tokenizer_round_trips_anything_and_splits_digits(tokenizer):
    for text in ("Sort: 42 7 19", "héllo  wörld\n\n\t日本 🙂", "", "{'a': 1}"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("1234", add_special_tokens=False).tokens == list("1234")
    assert tokenizer.encode("x").ids[0] == tokenizer.token_to_id(tasks.BOS)


@pytest.mark.parametrize("length", corpus.LONG)
def test_training_rows_are_full_and_weight_only_answers(tokenizer, length):
    rows = corpus.training_rows(tokenizer, "0/0", 4, length, corpus.MIX)
    assert (rows.documents > 0).mean() > 0.85
    taught = rows.weights > 0
    assert taught.any()
    assert (rows.targets[:, :-1][taught[:, :-1]] == rows.tokens[:, 1:][taught[:, :-1]]).all()
    end = tokenizer.token_to_id(tasks.END)
    bos = tokenizer.token_to_id(tasks.BOS)
    assert end in rows.targets[taught] and bos not in rows.targets[taught]


@pytest.mark.parametrize("length", thinned([100, 256, 300], [300]))
def test_training_attention_equals_dense_attention(small, length):
    config, weights = small
    tokens = np.random.default_rng(0).integers(0, 1280, (2, length))
    attend = attention(config, jnp.ones_like(tokens))
    positions = jnp.tile(jnp.arange(length), 2)

    @jax.jit  # one compilation for all layers; eagerly every operation is compiled by itself
    def actual_and_expected(weights):
        hidden, _ = decoder.forward(
            weights, {}, tokens.reshape(-1), positions, config, LayerHooks(attend)
        )
        return hidden, uncached.hidden_states(weights, tokens, config)

    hidden, expected = actual_and_expected(weights)
    np.testing.assert_allclose(hidden.reshape(2, length, -1), expected, atol=1e-4)


def test_bfloat16_products_and_gradients_are_close_to_float32():
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((9, 4, 8), (4, 8, 6))
    )

    def squared_sum(node):
        return lambda x, w: (einsum("TNH,NHD->TD", x, node(w)) ** 2).sum()

    float32_results, bfloat16_results = (
        jax.value_and_grad(squared_sum(node), argnums=(0, 1))(x, w)
        for node in (lambda w: w, Narrow)
    )
    for a, b in zip(
        jax.tree.leaves(float32_results), jax.tree.leaves(bfloat16_results), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * float(jnp.abs(a).max()))


def test_training_lowers_the_loss(small, tokenizer):
    config, weights = small
    rows = corpus.training_rows(tokenizer, "0/0", 4, 256, corpus.MIX)
    batch = (rows.tokens, rows.targets, rows.weights, rows.documents)
    loss_and_gradient = jax.jit(jax.value_and_grad(lambda w: loss_of(w, batch, config)))
    loss_before, weight_gradient = loss_and_gradient(weights)
    loss_after, _ = loss_and_gradient(
        jax.tree.map(lambda w, g: w - 0.02 * g, weights, weight_gradient)
    )
    assert loss_after < loss_before


def test_packed_documents_do_not_attend_to_each_other(small):
    config, weights = small
    a = [[5, 6, 7, 8], [0, 1, 1, 1]]
    b = [[9, 10, 11], [0, 1, 1]]
    packed, alone = (corpus.pack([members], 128) for members in ([a, b], [b]))
    logits = jax.jit(lambda rows, documents: logits_of(weights, rows, documents, config))
    x, y = (logits(rows.tokens, rows.documents) for rows in (packed, alone))
    np.testing.assert_allclose(x[4:7], y[:3], atol=0.02)


def test_exported_model_loads_with_the_same_weights(small, tokenizer, tmp_path):
    config, weights = small
    export(tmp_path, weights, config, tokenizer)
    loaded_config = read_config(tmp_path)
    loaded = load_weights(tmp_path, loaded_config)
    assert loaded_config.layers == config.layers and loaded_config.dtype == "bfloat16"
    for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_allclose(a, np.asarray(b, np.float32), rtol=0.005)


@pytest.fixture(scope="module")
def llm():
    return LLM(max_num_seqs=16, max_num_batched_tokens=256)


def test_bundled_model_gives_the_documented_answers(llm):
    """Requests of docs/quill.md and of the chat page get the answers that are shown with them."""
    table = ROOT.joinpath("docs", "quill.md").read_text().split("| ask it |")[1].split("\n\n")[0]
    expected_answers: list[tuple[str, str]] = []
    for row in table.splitlines()[2:]:
        prompts_of_row, answers_of_row = (
            re.findall(r"`([^`]+)`", cell) for cell in row.strip("| ").split(" | ")
        )
        expected_answers += (
            zip(prompts_of_row, answers_of_row, strict=True)
            if answers_of_row
            else ((text, "") for text in prompts_of_row)
        )
    page = ROOT.joinpath("serving/http/page/chat.js").read_text()
    starters = json.loads(re.search(r"TAUGHT = (\[.*\]);", page)[1])  # type: ignore[index]
    expected_answers += [(starters[1], "17 31 52 68 90"), (starters[2], "56"), (starters[0], "")]
    params = SamplingParams(temperature=0, max_tokens=300)
    for text, answer in expected_answers:
        is_completion = text == "Once upon a time"
        actual = (
            (
                llm.generate(text, params, False)
                if is_completion
                else llm.chat([user_message(text)], params)
            )[0]
            .outputs[0]
            .text
        )
        assert actual == answer or (not answer and len(actual.split()) > 60), (text, actual)
    assert len(expected_answers) > 12


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.slow
def test_bundled_model_solves_its_tasks(llm):
    result = evaluate(llm, 12, only=[task for task in tasks.TASKS if not task.startswith("story")])
    assert sum(row["right"] for row in result.values()) >= 0.97 * 12 * len(result), result


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "min_acceptance"), [("eagle", 0.7), ("medusa", 0.5)])
def test_bundled_draft_heads_predict_quills_answers(llm, kind, min_acceptance):
    """Over greedy answers: the acceptance of the first draft position, falling with the position."""
    documents = none_yet()
    params = SamplingParams(temperature=0, max_tokens=200)
    for example in [
        example
        for task in ("story", "json", "sort_numbers", "copy")
        for example in tasks.fresh(task, 6)
    ]:
        (out,) = llm.chat(example.messages, params, use_tqdm=False)
        documents = documents.joined([(out.prompt_token_ids, out.outputs[0].token_ids)])
    folder = ROOT / "model" / f"quill_{kind}"
    config = read_config(ROOT / "model" / "quill", "float32")
    heads = draft_heads.read_heads(folder, config, kind)
    head_weights = draft_heads.load(folder, heads, skip_packing=True)
    weights = load_weights(ROOT / "model" / "quill", config)
    rows = pack(documents, range(len(documents)), 256)
    scores = jax.jit(lambda rows: score_drafts(heads, head_weights, weights, config, rows, 4))(rows)
    shares = [int(score.num_accepted) / int(score.num_drafted) for score in scores]
    assert (
        shares[0] >= min_acceptance and shares == sorted(shares, reverse=True) and shares[3] > 0.1
    ), shares


@pytest.mark.nightly
def test_drafts_benchmark_compares_with_plain_decoding(capsys, monkeypatch):
    configs = {"plain": None, "suffix": {"method": "suffix"}}
    monkeypatch.setattr(drafts, "CONFIGS", configs)
    drafts.main(samples=1, rounds=2, batch=[3])
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [row[0].strip() for row in rows] == list(configs)
    assert rows[0][4].split() == ["1.00"] and len(rows[1][4].split()) == 2
    assert not rows[0][5].strip() and "%" in rows[1][5]


@pytest.mark.slow
def test_answer_log_probabilities_match_the_uncached_decoder():
    """Tokens of answers, with every document read by itself."""
    folder = hub.resolve("quill")
    config = read_config(folder, "float32")
    weights = load_weights(folder, config)
    expected = []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    run = jax.jit(uncached.forward, static_argnums=2)
    for token_segments in corpus.documents("held-out/7", 5):
        ids, learned = corpus.encode(tokenizer, token_segments)
        padded = jnp.array([ids + [0] * (512 - len(ids))])
        scores = np.asarray(jax.nn.log_softmax(run(weights, padded, config)[0], axis=-1))
        expected += [float(scores[at - 1, ids[at]]) for at in range(1, len(ids)) if learned[at]]
    with LLM("quill") as llm:
        log_probs = said(llm, 5, 7)
    assert len(log_probs) == len(expected) > 50
    assert np.abs(log_probs - expected).mean() < 0.01 < np.abs(log_probs).mean()


@pytest.mark.nightly
def test_quality_table_has_every_quantization(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "WAYS", {"int4-64": ("rtn", "gptq")})
    quality.main(tmp_path / "table.md", samples=1, held_out=3, calibration=6, seed=0)
    head, *_, dense_row, rtn_row, gptq_row = (tmp_path / "table.md").read_text().splitlines()
    assert (
        f"exact answers to {len(tasks.TASKS)} questions" in head
        and "calibration on 6 documents" in head
    )
    assert dense_row.startswith("| bfloat16 |") and "| rtn |" in rtn_row and "| gptq |" in gptq_row
    values = [float(line.split("|")[4]) for line in (dense_row, rtn_row, gptq_row)]
    assert len(set(values)) == 3 and all(1 < value < 2 for value in values)


def test_prompts_tool_writes_calibration_documents(tmp_path):
    prompts.main(tmp_path / "a.jsonl", count=20, seed=0, write_documents=True, task=None)
    texts = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(set(texts)) == 20
    assert all(text.endswith(tasks.END) and tasks.BOS not in text for text in texts)
