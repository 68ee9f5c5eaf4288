"""Every family against transformers itself, on fresh random weights.

`QUIRE_SEED=n` repeats a run.
"""

import json
import os
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.tests.support.cases import thinned
from quire.tests.support.golden.families import KINDS, VARIANTS
from quire.tests.support.golden.folder import prompts, write_folder
from quire.tests.support.published import PUBLISHED
from quire.tests.support.published_moe import PUBLISHED_MOE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from quire import LLM, SamplingParams  # noqa: E402
from quire.model.checkpoint import loader  # noqa: E402
from quire.model.weights import abstract  # noqa: E402
from quire.tests.support import reference, uncached  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_programs")


SEED = int(os.environ.get("QUIRE_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
TOLERANCE = 1e-4  # and twice what a row moves by itself when last bits do
LEAST_LEAD = 1e-3  # rounding decides between tokens that are closer
STEADY = 1e-4  # a model whose own rounding error is larger says nothing about ours
# tests/model/test_golden.py has the others
FEW = [variant for variant in VARIANTS if variant.name in KINDS]
BY_NAME = pytest.mark.parametrize(
    "variant", thinned(VARIANTS, FEW), ids=lambda variant: variant.name
)


class Case:
    """A model of fresh weights that transformers has loaded and saved again in its own form."""

    def __init__(self, variant, folder):
        shapes = reference.tensor_shapes(variant)
        self.seed = SEED
        while True:
            written = write_folder(folder / str(self.seed), variant.config, shapes, self.seed)
            model = reference.load(written)
            vocab_size = model.config.get_text_config().vocab_size
            self.prompts = prompts(
                (*variant.prompts, variant.prompts[0] - 17), vocab_size, self.seed
            )
            answers = [reference.greedy(model, ids, variant.new_tokens) for ids in self.prompts]
            whole = self.prompts[0] + answers[0][0]
            leads = min(lead for _, lead in answers) >= LEAST_LEAD
            if leads and reference.float32_error(model, whole) < STEADY:
                break
            self.seed += 1
        print(f"{variant.name}: QUIRE_SEED={self.seed}")
        self.tokens = [tokens for tokens, _ in answers]
        self.whole, self.logits = whole, reference.logits(model, whole)
        self.tolerance = TOLERANCE + 2 * reference.logit_sensitivity(model, whole)
        self.written = written
        self.saved = folder / "saved"
        if "quantization_config" in variant.config:
            self.saved = written  # what transformers has dequantised it cannot save as it came
        else:
            model.save_pretrained(self.saved)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    by_name = {variant.name: variant for variant in VARIANTS}
    return lru_cache(lambda name: Case(by_name[name], tmp_path_factory.mktemp(name)))


@BY_NAME
def test_logits(variant, case):
    made = case(variant.name)
    for folder in (made.written, made.saved):
        config = loader.read_config(folder, "float32", variant.max_len)
        weights = loader.load_weights(folder, config)
        logits = jax.jit(uncached.forward, static_argnums=2)(
            weights, jnp.array([made.whole]), config
        )[0]
        np.testing.assert_array_less(np.abs(logits - made.logits).max(axis=1), made.tolerance)


@BY_NAME
def test_saved_config_means_the_same(variant, case):
    """transformers 5 writes other keys than the published files have; both are read alike."""
    made = case(variant.name)
    first, second = (
        loader.read_config(folder, "float32", variant.max_len)
        for folder in (made.written, made.saved)
    )
    assert first == second


@pytest.mark.parametrize("block_size", thinned([8, 16], [8]))
@pytest.mark.parametrize(
    "variant", thinned([v for v in VARIANTS if v.new_tokens], FEW), ids=lambda variant: variant.name
)
def test_greedy_tokens(variant, block_size, case):
    """Each alone, then all at once with some that have come a part of the way."""
    made = case(variant.name)
    llm = LLM(
        model=str(made.saved),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=block_size,
        max_model_len=variant.max_len,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )
    cases = [(ids, tokens, 0) for ids, tokens in zip(made.prompts, made.tokens, strict=True)]
    batch = cases + [
        (ids, tokens, n) for (ids, tokens, _), n in zip(cases, (30, 9, 63), strict=True)
    ]
    for asked in ([cases[0]], [cases[1]], [cases[2]], batch):
        outputs = llm.generate(
            [{"prompt_token_ids": ids + tokens[:n]} for ids, tokens, n in asked],
            [
                SamplingParams(temperature=0, max_tokens=len(tokens) - n, ignore_eos=True)
                for _, tokens, n in asked
            ],
            use_tqdm=False,
        )
        assert [list(output.outputs[0].token_ids) for output in outputs] == [
            tokens[n:] for _, tokens, n in asked
        ]


# transformers joins and renames Kimi Linear's tensors when it reads them; the tiny model has the
# names of the files.
@pytest.mark.parametrize(
    "name", sorted((PUBLISHED | PUBLISHED_MOE).keys() - {"Kimi-Linear-48B-A3B"})
)
def test_published_tensors(name, tmp_path):
    """transformers builds a published model of the tensors that the family file asks for, and of no
    others.
    """
    hf = (PUBLISHED | PUBLISHED_MOE)[name].config
    hf = {key: value for key, value in hf.items() if key not in ("auto_map", "quantization_config")}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = loader.read_config(tmp_path)
    family = loader.family_module(config)
    if hf["model_type"] == "kimi_k2":  # by that name transformers knows it inside of another alone
        (tmp_path / "config.json").write_text(json.dumps(hf | {"model_type": "deepseek_v3"}))
    with torch.device("meta"):
        model = reference.built(transformers.AutoConfig.from_pretrained(tmp_path))
    theirs = {
        loader.canonical_name(family, key): tuple(value.shape)
        for key, value in model.state_dict().items()
        if not loader.is_ignored(config, loader.canonical_name(family, key))
    }
    if config.tied:
        del theirs["lm_head.weight"]
    sources = jax.tree.map(lambda spec, source: source, abstract(config), family.sources(config))
    ours = {
        part.name: part.shape
        for source in jax.tree.leaves(sources)
        for part in source.whole or source.parts
    }
    assert ours == theirs
