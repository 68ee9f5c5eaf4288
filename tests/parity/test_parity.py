"""Compares every family with transformers, on new random weights.

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
TOLERANCE = 1e-4  # plus twice the change of logits when last bits of weights change
MIN_LEAD = 1e-3  # between the two likeliest tokens, so that rounding cannot swap them
MAX_UNSTEADINESS = 1e-4  # the reference's own rounding error
# tests/model/test_golden.py covers the other variants
VARIANT_OF_EACH_KIND = [variant for variant in VARIANTS if variant.name in KINDS]
BY_NAME = pytest.mark.parametrize(
    "variant", thinned(VARIANTS, VARIANT_OF_EACH_KIND), ids=lambda variant: variant.name
)


class ReferenceModel:
    """A model with new random weights, in a folder and in one that transformers has saved again."""

    def __init__(self, variant, folder):
        shapes = reference.tensor_shapes(variant)
        self.seed = SEED
        while True:
            written_folder = write_folder(
                folder / str(self.seed), variant.config, shapes, self.seed
            )
            model = reference.load(written_folder)
            vocab_size = model.config.get_text_config().vocab_size
            self.prompts = prompts(
                (*variant.prompts, variant.prompts[0] - 17), vocab_size, self.seed
            )
            answers = [reference.greedy(model, ids, variant.new_tokens) for ids in self.prompts]
            full_ids = self.prompts[0] + answers[0][0]
            has_clear_tokens = min(lead for _, lead in answers) >= MIN_LEAD
            if has_clear_tokens and reference.float32_error(model, full_ids) < MAX_UNSTEADINESS:
                break
            self.seed += 1
        print(f"{variant.name}: QUIRE_SEED={self.seed}")
        self.tokens = [tokens for tokens, _ in answers]
        self.full_ids, self.logits = full_ids, reference.logits(model, full_ids)
        self.tolerance = TOLERANCE + 2 * reference.logit_sensitivity(model, full_ids)
        self.written_folder = written_folder
        self.saved_folder = folder / "saved"
        if "quantization_config" in variant.config:
            self.saved_folder = written_folder  # transformers has dequantised the weights
        else:
            model.save_pretrained(self.saved_folder)


@pytest.fixture(scope="module")
def load_reference(tmp_path_factory):
    by_name = {variant.name: variant for variant in VARIANTS}
    return lru_cache(lambda name: ReferenceModel(by_name[name], tmp_path_factory.mktemp(name)))


@BY_NAME
def test_logits_match_transformers(variant, load_reference):
    reference_model = load_reference(variant.name)
    for folder in (reference_model.written_folder, reference_model.saved_folder):
        config = loader.read_config(folder, "float32", variant.max_len)
        weights = loader.load_weights(folder, config)
        logits = jax.jit(uncached.forward, static_argnums=2)(
            weights, jnp.array([reference_model.full_ids]), config
        )[0]
        np.testing.assert_array_less(
            np.abs(logits - reference_model.logits).max(axis=1), reference_model.tolerance
        )


@BY_NAME
def test_config_saved_by_transformers_is_read_alike(variant, load_reference):
    """transformers 5 writes other keys than published files have."""
    reference_model = load_reference(variant.name)
    written_config, saved_config = (
        loader.read_config(folder, "float32", variant.max_len)
        for folder in (reference_model.written_folder, reference_model.saved_folder)
    )
    assert written_config == saved_config


@pytest.mark.parametrize("block_size", thinned([8, 16], [8]))
@pytest.mark.parametrize(
    "variant",
    thinned([v for v in VARIANTS if v.new_tokens], VARIANT_OF_EACH_KIND),
    ids=lambda variant: variant.name,
)
def test_greedy_tokens_match_transformers(variant, block_size, load_reference):
    """Each prompt alone, then all in a batch, some with a part of their answer."""
    reference_model = load_reference(variant.name)
    llm = LLM(
        model=str(reference_model.saved_folder),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=block_size,
        max_model_len=variant.max_len,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )
    cases = [
        (ids, tokens, 0)
        for ids, tokens in zip(reference_model.prompts, reference_model.tokens, strict=True)
    ]
    batch = cases + [
        (ids, tokens, n) for (ids, tokens, _), n in zip(cases, (30, 9, 63), strict=True)
    ]
    for requests in ([cases[0]], [cases[1]], [cases[2]], batch):
        outputs = llm.generate(
            [{"prompt_token_ids": ids + tokens[:n]} for ids, tokens, n in requests],
            [
                SamplingParams(temperature=0, max_tokens=len(tokens) - n, ignore_eos=True)
                for _, tokens, n in requests
            ],
            use_tqdm=False,
        )
        assert [list(output.outputs[0].token_ids) for output in outputs] == [
            tokens[n:] for _, tokens, n in requests
        ]


# transformers merges and renames tensors of Kimi Linear, unlike the published files
@pytest.mark.parametrize(
    "name", sorted((PUBLISHED | PUBLISHED_MOE).keys() - {"Kimi-Linear-48B-A3B"})
)
def test_tensor_names_of_published_models_match_transformers(name, tmp_path):
    """A published model has exactly those tensors that its family file reads."""
    config_fields = (PUBLISHED | PUBLISHED_MOE)[name].config
    config_fields = {
        key: value
        for key, value in config_fields.items()
        if key not in ("auto_map", "quantization_config")
    }
    (tmp_path / "config.json").write_text(json.dumps(config_fields))
    config = loader.read_config(tmp_path)
    family = loader.family_module(config)
    # transformers knows kimi_k2 only within another model
    if config_fields["model_type"] == "kimi_k2":
        (tmp_path / "config.json").write_text(
            json.dumps(config_fields | {"model_type": "deepseek_v3"})
        )
    with torch.device("meta"):
        model = reference.built(transformers.AutoConfig.from_pretrained(tmp_path))
    transformers_shapes = {
        loader.canonical_name(family, key): tuple(value.shape)
        for key, value in model.state_dict().items()
        if not loader.is_ignored(config, loader.canonical_name(family, key))
    }
    if config.tied:
        del transformers_shapes["lm_head.weight"]
    sources = jax.tree.map(lambda spec, source: source, abstract(config), family.sources(config))
    quire_shapes = {
        tensor.name: tensor.shape
        for source in jax.tree.leaves(sources)
        for tensor in source.whole or source.parts
    }
    assert quire_shapes == transformers_shapes
