"""Compares embeddings with the hidden states of transformers, on new random weights.

`QUIRE_SEED=n` repeats a run.
"""

import os

import numpy as np
import pytest

from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.folder import prompts, write_folder

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quire import LLM  # noqa: E402
from quire.tests.support import reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_programs")


SEED = int(os.environ.get("QUIRE_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
TOLERANCE = 1e-4
FAMILIES = ("llama", "qwen3", "gemma3")
CHOSEN_VARIANTS = [
    next(variant for variant in VARIANTS if variant.name.startswith(name)) for name in FAMILIES
]


@torch.no_grad()
def last_hidden_states(model, ids: list[int]) -> np.ndarray:
    """Returns the hidden states [T, D] after the final norm."""
    return (
        model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        .hidden_states[-1][0]
        .double()
        .numpy()
    )


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("variant", CHOSEN_VARIANTS, ids=lambda variant: variant.name)
def test_embeddings_match_transformers(variant, pooling, tmp_path):
    print(f"{variant.name}: QUIRE_SEED={SEED}")
    folder = write_folder(
        tmp_path / "model", variant.config, reference.tensor_shapes(variant), SEED
    )
    model = reference.load(folder)
    texts = prompts(
        (*variant.prompts, variant.prompts[0] - 17), model.config.get_text_config().vocab_size, SEED
    )
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        pooling=pooling,
        max_model_len=variant.max_len,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )
    for ids, output in zip(texts, llm.embed(texts, use_tqdm=False), strict=True):
        states = last_hidden_states(model, ids)
        expected = states[-1] if pooling == "last" else states.mean(axis=0)
        np.testing.assert_allclose(
            output.outputs.embedding, expected / np.linalg.norm(expected), atol=TOLERANCE
        )
