"""Draft heads on the device: proposals equal those of an uncached reference, and answers are those
of plain decoding.
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
MAX_LEN = 128
TARGET = tiny.LLAMA | {"num_hidden_layers": 6, "max_position_embeddings": MAX_LEN}
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
def draft_setup(request, tmp_path_factory):
    """(kind, folder of the target, folder of the heads, config, heads, (weights, head weights))."""
    kind, _, qwen = request.param.partition("-")
    folder = tmp_path_factory.mktemp("target")
    if kind == "mtp":
        tiny_family = tiny_qwen if qwen else tiny_deepseek
        tiny_family.write(folder, tiny_family.CONFIG | {"max_position_embeddings": MAX_LEN})
        draft_folder = folder
    else:
        tiny.write(folder, TARGET)
        draft_folder = tmp_path_factory.mktemp("heads")
    config = loader.read_config(folder, "float32", MAX_LEN)
    if kind != "mtp":
        heads = draft_heads.parse_heads(HEADS[kind], ["fc.bias"], config, kind)
        weights = jax.tree.map(jnp.asarray, loader.random_weights(draft_heads.abstract(heads)))
        if heads.vocab:
            token_ids = np.random.default_rng(0).permutation(V)[: heads.vocab]
            weights = weights.replace(tokens_U=jnp.asarray(np.sort(token_ids), jnp.int32))
        draft_heads.save(draft_folder, heads, weights, HEADS[kind])
    heads = draft_heads.read_heads(draft_folder, config, kind)
    loaded = (
        loader.load_weights(folder, config),
        draft_heads.load(draft_folder, heads, skip_packing=True),
    )
    return kind, folder, draft_folder, config, heads, loaded


def make_llm(draft_setup, **config) -> LLM:
    kind, folder, draft_folder, *_ = draft_setup
    if config.pop("plain", False):
        speculative_config = None
    else:
        model = {} if kind == "mtp" else {"model": str(draft_folder)}
        speculative_config = {
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
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        speculative_config=speculative_config,
    )


class ReferenceDrafter:
    """Computes the drafts after a text, whose last token was just sampled, without a KV cache."""

    def __init__(self, draft_setup):
        self.kind, _, _, config, self.heads, (weights, draft_weights) = draft_setup
        heads = self.heads
        positions = jnp.arange(MAX_LEN)
        attention = uncached.attention

        @jax.jit
        def target_features(ids):
            """Returns the target's features, the heads' input, for all positions."""
            x = decoder.embed(weights, ids, positions, config)
            states_by_layer = {}
            recur = uncached.recurrence(config, 1, MAX_LEN)
            hooks = LayerHooks(
                attention(config, 1, MAX_LEN), recur=recur, observe=states_by_layer.__setitem__
            )
            (x_TD, _), _ = decoder.run_layers(weights.layers, 0, x, {}, positions, config, hooks)
            hidden = decoder.final_norm(weights, x_TD, config)
            if self.kind == "medusa":
                return draft_heads.medusa_logits(heads, draft_weights, weights, hidden)
            features_TD = hidden if heads.normed else x_TD
            if heads.features:
                features_TD = jnp.concatenate(
                    [states_by_layer[index] for index in heads.features], axis=1
                )
            return draft_heads.take_features(heads, draft_weights, features_TD)

        @jax.jit
        def draft_step(ids, features):
            hooks = LayerHooks(attention(heads.model, 1, MAX_LEN))
            feature, hidden, _ = draft_heads.run(
                heads, draft_weights, weights, ids, features, positions, {}, hooks
            )
            return feature, draft_heads.logits(heads, draft_weights, weights, hidden)

        self.target_features = target_features
        self.draft_step = draft_step

    def drafts(self, tokens: list[int]) -> list[int]:
        last = len(tokens) - 2  # the last position that the target has computed
        ids = jnp.asarray(tokens + [0] * (MAX_LEN - len(tokens)))
        features = self.target_features(ids)
        if self.kind == "medusa":
            return np.asarray(features)[:DRAFTS, last].argmax(1).tolist()
        next_ids = jnp.roll(ids, -1)
        drafts = []
        for position in range(last, last + DRAFTS):
            feature, logits = self.draft_step(next_ids, features)
            drafts.append(int(np.asarray(logits[position]).argmax()))
            next_ids = next_ids.at[position + 1].set(drafts[-1])
            features = features.at[position + 1].set(feature[position])
        return drafts


FEW = "eagle", "mtp"


FEW = "eagle", "mtp"


@pytest.mark.parametrize("draft_setup", thinned(KINDS, FEW), indirect=True)
@pytest.mark.slow
def test_proposals_match_the_uncached_reference(draft_setup):
    """Prompts are chunked and batched."""
    rng = np.random.default_rng(1)
    llm = make_llm(draft_setup)
    recorded = Recorded.of(llm.engine)
    prompts = [rng.integers(3, V, size).tolist() for size in (1, 5, 40, 60, 17)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    plain_outputs = make_llm(draft_setup, plain=True).generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params
    )
    assert [o.outputs[0].token_ids for o in outputs] == [
        o.outputs[0].token_ids for o in plain_outputs
    ]
    naive = ReferenceDrafter(draft_setup)
    assert len(recorded.proposed) >= 20
    for text, proposed in recorded.proposed.items():
        assert proposed == naive.drafts(list(text)), f"after {len(text)} tokens"


@pytest.mark.parametrize("draft_setup", thinned(KINDS, ["medusa", "eagle3"]), indirect=True)
@pytest.mark.slow
def test_sampled_answers_with_draft_heads_equal_plain_decoding(draft_setup):
    """Batched requests with sampling, logprobs and penalties get the same answers as without
    drafts.
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
    drafting_llm = make_llm(draft_setup)
    plain_llm = make_llm(draft_setup, plain=True)
    recompiles = take_snapshot(drafting_llm.engine).recompiles
    for _ in range(2):  # the second time with cached prefixes
        drafted_outputs = drafting_llm.generate(prompts, params)
        plain_outputs = plain_llm.generate(prompts, params)
        for drafted_output, plain_output in zip(drafted_outputs, plain_outputs, strict=True):
            for a, b in zip(drafted_output.outputs, plain_output.outputs, strict=True):
                assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
    assert take_snapshot(drafting_llm.engine).recompiles == recompiles
    drafting_llm.close()
    plain_llm.close()


def test_mismatching_draft_heads_are_refused(tmp_path):
    tiny.write(tmp_path / "target", TARGET)
    target = loader.read_config(tmp_path / "target", "float32", MAX_LEN)

    def error_of(kind, hf, **config):
        draft_heads_config = draft_heads.parse_heads(HEADS[kind], ["fc.bias"], target, kind)
        draft_heads.save(
            tmp_path / "heads",
            draft_heads_config,
            loader.random_weights(draft_heads.abstract(draft_heads_config)),
            hf,
        )
        with pytest.raises(ModelError) as error_info:
            LLM(
                tmp_path / "target", skip_tokenizer_init=True, dtype="float32",
                speculative_config={"method": kind, "model": str(tmp_path / "heads"), **config},
            )  # fmt: skip
        return str(error_info.value)

    message = error_of("medusa", HEADS["medusa"], num_speculative_tokens=4)
    assert "num_speculative_tokens is 4, and speculative_config.model has 3 heads" in message
    assert "hidden_size = 64; the target is 32" in error_of("eagle", LAYER | {"hidden_size": 64})
    assert "quantization is 'int8'; it goes with the methods draft_model and self" in error_of(
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
