"""Every family against transformers: the golden files hold what it computed from the same tiny models."""

import json
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.families import VARIANTS, Variant
from golden.folder import HERE, POSITIONS, write_folder

from quire import LLM, SamplingParams
from quire.model import uncached
from quire.model.checkpoint import loader
from quire.model.families import FAMILIES
from quire.ops import native

pytestmark = pytest.mark.usefixtures("few_programs")


TOLERANCE = 2e-4
BY_NAME = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


class Golden:
    """One golden file, and a folder with the model that it was made of."""

    def __init__(self, variant: Variant, folder):
        with np.load(HERE / f"{variant.name}.npz") as arrays:
            self.prompts = [arrays[f"prompt{i}"].tolist() for i in range(len(variant.prompts))]
            self.tokens = [arrays[f"tokens{i}"].tolist() for i in range(len(variant.prompts))]
            self.logits = arrays["logits"]
            meta = json.loads(arrays["meta"].tobytes())
        self.folder = write_folder(folder / variant.name, variant.config, meta["tensors"], meta["seed"])


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(next(v for v in VARIANTS if v.name == name), tmp_path_factory.mktemp("g")))


def test_every_family_has_a_variant():
    covered = {FAMILIES[variant.config["model_type"]] for variant in VARIANTS}
    assert set(FAMILIES.values()) - covered == {".quill"}  # which transformers does not know


@BY_NAME
def test_logits(variant, golden):
    made = golden(variant.name)
    config = loader.read_config(made.folder, "float32", variant.max_len)
    weights = loader.load_weights(made.folder, config)
    whole = made.prompts[0] + made.tokens[0]
    logits = jax.jit(uncached.forward, static_argnums=2)(weights, jnp.array([whole]), config)[0]
    rows = [position for position in POSITIONS if position < len(whole)]
    np.testing.assert_allclose(logits[np.array(rows)], made.logits, rtol=0, atol=TOLERANCE)
    start = len(made.prompts[0]) - 1
    assert np.argmax(logits[start:-1], axis=-1).tolist() == made.tokens[0]


@pytest.mark.parametrize(
    ("variant", "block_size"),
    [(variant, (8, 16)[i % 2]) for i, variant in enumerate(VARIANTS) if variant.new_tokens],
    ids=lambda value: getattr(value, "name", value),
)
def test_greedy_tokens(variant, block_size, golden):
    """Alone and in a batch of unequal lengths, in chunks, through pages of 8 and 16."""
    made = golden(variant.name)
    llm = LLM(
        model=str(made.folder), skip_tokenizer_init=True, dtype="float32", block_size=block_size,
        max_model_len=variant.max_len, max_num_batched_tokens=32, max_num_seqs=4, kv_cache_memory_bytes=64 << 20,
    )  # fmt: skip
    check_answers(llm, made, near=0 if native.serves() else 2e-5)  # XLA sums in an order that rows may change


def check_answers(llm: LLM, made: Golden, near: float) -> None:
    """It answers as transformers did; a token's score is the same, to the bit or so near, alone and in company."""
    scores = {}
    for prompts, expected in asked(made.prompts, made.tokens):
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            [SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True, logprobs=0) for tokens in expected],
            use_tqdm=False,
        )
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        for ids, tokens, output in zip(prompts, expected, outputs, strict=True):
            for at, (token, found) in enumerate(zip(tokens, output.outputs[0].logprobs or (), strict=True)):
                score = found[token].logprob
                assert abs(scores.setdefault((*ids, *tokens[: at + 1]), score) - score) <= near


def asked(prompts: list[list[int]], tokens: list[list[int]]):
    """The first prompt alone; then both and three that have already come a part of the way, all at once."""
    (long, short), (after_long, after_short) = prompts, tokens
    yield [long], [after_long]
    batch = [(short, after_short, 0), (long, after_long, 0), (short, after_short, 9), (long, after_long, 30)]
    batch.append((long, after_long, len(after_long) - 1))
    yield [ids + after[:n] for ids, after, n in batch], [after[n:] for _, after, n in batch]
