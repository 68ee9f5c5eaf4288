"""Heads that draft in the step: what they propose is what they say of the whole text, and answers
stay as they are.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.model import decoder, draft_heads
from quire.model.checkpoint import loader
from quire.model.config import ModelError
from quire.model.mixers import LayerHooks
from quire.serving.engine.snapshot import take_snapshot
from quire.tests.support import tiny, tiny_deepseek, tiny_qwen, uncached
from quire.tests.support.cases import thinned
from quire.tests.support.recorded_drafts import Recorded

DRAFTS = 3
LENGTH = 128
TARGET = tiny.LLAMA | {"num_hidden_layers": 6, "max_position_embeddings": LENGTH}
D = TARGET["hidden_size"]
V = TARGET["vocab_size"]
LAYER = {
    "model_type": "llama",
    "hidden_size": D,
    "vocab_size": V,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
HEADS = {
    "medusa": {"num_heads": DRAFTS, "num_hidden_layers": 1, "hidden_size": D, "vocab_size": V},
    "eagle": LAYER,
    "eagle3": LAYER | {"draft_vocab_size": V - 10},
}


KINDS = ["medusa", "eagle", "eagle3", "mtp", "mtp-qwen"]


@pytest.fixture(scope="module")
def made(request, tmp_path_factory):
    """(kind, the target's folder, what drafts, heads and weights of both)."""
    kind, _, qwen = request.param.partition("-")
    folder = tmp_path_factory.mktemp("target")
    if kind == "mtp":
        other = tiny_qwen if qwen else tiny_deepseek
        other.write(folder, other.CONFIG | {"max_position_embeddings": LENGTH})
        own = folder
    else:
        tiny.write(folder, TARGET)
        own = tmp_path_factory.mktemp("heads")
    config = loader.read_config(folder, "float32", LENGTH)
    if kind != "mtp":
        heads = draft_heads.parse_heads(HEADS[kind], ["fc.bias"], config, kind)
        weights = jax.tree.map(jnp.asarray, loader.random_weights(draft_heads.abstract(heads)))
        if heads.vocab:
            chosen = np.random.default_rng(0).permutation(V)[: heads.vocab]
            weights = weights.replace(tokens_U=jnp.asarray(np.sort(chosen), jnp.int32))
        draft_heads.save(own, heads, weights, HEADS[kind])
    heads = draft_heads.read_heads(own, config, kind)
    loaded = loader.load_weights(folder, config), draft_heads.load(own, heads, skip_packing=True)
    return kind, folder, own, config, heads, loaded


def llm_of(made, **config) -> LLM:
    kind, folder, own, *_ = made
    if config.pop("plain", False):
        chosen = None
    else:
        model = {} if kind == "mtp" else {"model": str(own)}
        chosen = {
            "method": kind,
            "num_speculative_tokens": DRAFTS,
            "adapts": False,
            **model,
            **config,
        }
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=LENGTH,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        speculative_config=chosen,
    )


class Naive:
    """The drafts after a text, whose last token was just drawn, by all of it at once and without a
    cache.
    """

    def __init__(self, made):
        self.kind, _, _, config, self.heads, (weights, own) = made
        heads = self.heads
        places = jnp.arange(LENGTH)
        at = uncached.attention

        @jax.jit
        def known(ids):
            """What the target tells the heads of each position."""
            x = decoder.embed(weights, ids, places, config)
            seen = {}
            recur = uncached.recurrence(config, 1, LENGTH)
            hooks = LayerHooks(at(config, 1, LENGTH), recur=recur, observe=seen.__setitem__)
            (x_TD, _), _ = decoder.run_layers(weights.layers, 0, x, {}, places, config, hooks)
            hidden = decoder.final_norm(weights, x_TD, config)
            if self.kind == "medusa":
                return draft_heads.medusa_logits(heads, own, weights, hidden)
            raw = hidden if heads.normed else x_TD
            if heads.features:
                raw = jnp.concatenate([seen[index] for index in heads.features], axis=1)
            return draft_heads.take_features(heads, own, raw)

        @jax.jit
        def goes_on(ids, features):
            hooks = LayerHooks(at(heads.model, 1, LENGTH))
            feature, hidden, _ = draft_heads.run(
                heads, own, weights, ids, features, places, {}, hooks
            )
            return feature, draft_heads.logits(heads, own, weights, hidden)

        self.known = known
        self.goes_on = goes_on

    def drafts(self, tokens: list[int]) -> list[int]:
        last = len(tokens) - 2  # the position that the target has computed last
        ids = jnp.asarray(tokens + [0] * (LENGTH - len(tokens)))
        found = self.known(ids)
        if self.kind == "medusa":
            return np.asarray(found)[:DRAFTS, last].argmax(1).tolist()
        following = jnp.roll(ids, -1)
        drafts = []
        for place in range(last, last + DRAFTS):
            feature, logits = self.goes_on(following, found)
            drafts.append(int(np.asarray(logits[place]).argmax()))
            following = following.at[place + 1].set(drafts[-1])
            found = found.at[place + 1].set(feature[place])
        return drafts


FEW = "eagle", "mtp"


@pytest.mark.parametrize("made", thinned(KINDS, FEW), indirect=True)
@pytest.mark.slow
def test_they_propose_what_they_say_of_the_whole_text(made):
    """Prompts in chunks, several at once: each proposal beside the naive one."""
    rng = np.random.default_rng(1)
    llm = llm_of(made)
    recorded = Recorded.of(llm.engine)
    prompts = [rng.integers(3, V, size).tolist() for size in (1, 5, 40, 60, 17)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    plain = llm_of(made, plain=True).generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params
    )
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    naive = Naive(made)
    assert len(recorded.proposed) >= 20
    for text, proposed in recorded.proposed.items():
        assert proposed == naive.drafts(list(text)), f"after {len(text)} tokens"


@pytest.mark.parametrize("made", thinned(KINDS, ["medusa", "eagle3"]), indirect=True)
@pytest.mark.slow
def test_drafts_are_drawn_with_the_noise_of_the_answer(made):
    """Sampled, in company, with log-probabilities: the same answers; and the heads agree with
    themselves.
    """
    rng = np.random.default_rng(2)
    prompts = [
        {"prompt_token_ids": rng.integers(3, V, size).tolist()} for size in (2, 18, 31, 50, 9)
    ]
    params = [
        SamplingParams(
            temperature=t,
            seed=s,
            max_tokens=20,
            logprobs=2,
            n=n,
            ignore_eos=True,
            presence_penalty=p,
        )
        for s, (t, n, p) in enumerate(
            [(0.8, 1, 0), (1.0, 2, 0), (0, 1, 0.5), (1.2, 1, 0.5), (0.9, 1, 0)]
        )
    ]
    drafted = llm_of(made)
    plain = llm_of(made, plain=True)
    compiles = take_snapshot(drafted.engine).recompiles
    for _ in range(2):  # the second time from the cache
        mine = drafted.generate(prompts, params)
        theirs = plain.generate(prompts, params)
        for one, other in zip(mine, theirs, strict=True):
            for a, b in zip(one.outputs, other.outputs, strict=True):
                assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
    assert take_snapshot(drafted.engine).recompiles == compiles
    drafted.close()
    plain.close()


def test_what_does_not_fit_is_refused(tmp_path):
    tiny.write(tmp_path / "target", TARGET)
    target = loader.read_config(tmp_path / "target", "float32", LENGTH)

    def refused(kind, hf, **config):
        own = draft_heads.parse_heads(HEADS[kind], ["fc.bias"], target, kind)
        draft_heads.save(
            tmp_path / "heads", own, loader.random_weights(draft_heads.abstract(own)), hf
        )
        with pytest.raises(ModelError) as caught:
            LLM(
                tmp_path / "target", skip_tokenizer_init=True, dtype="float32",
                speculative_config={"method": kind, "model": str(tmp_path / "heads"), **config},
            )  # fmt: skip
        return str(caught.value)

    wrong = refused("medusa", HEADS["medusa"], num_speculative_tokens=4)
    assert "num_speculative_tokens is 4, and speculative_config.model has 3 heads" in wrong
    assert "hidden_size = 64; the target is 32" in refused("eagle", LAYER | {"hidden_size": 64})
    assert "quantization is 'int8'; it goes with the methods draft_model and self" in refused(
        "eagle", LAYER, quantization="int8"
    )
    assert "this llama model brings no layer" in str(
        pytest.raises(
            ModelError,
            LLM,
            tmp_path / "target",
            skip_tokenizer_init=True,
            speculative_config={"method": "mtp"},
        ).value
    )
    assert json.loads((tmp_path / "heads" / "config.json").read_text()) == LAYER
