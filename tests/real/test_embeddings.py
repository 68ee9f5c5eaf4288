"""Compares embeddings of a published sentence-transformers model with transformers, with pooling
and normalisation done in the test.
"""

import numpy as np
import pytest

from quire import LLM
from quire.tests.support.real_prompts import PROMPTS, TEXT

torch = pytest.importorskip("torch", reason="torch is not installed: make parity")
MAX_TOKENS = 256  # max_seq_length in sentence_bert_config.json


def test_embeddings_of_short_and_long_texts_match_transformers(model):
    """Texts longer than 256 tokens are truncated, as in sentence-transformers."""
    import transformers

    folder = model("minilm")
    texts = [*PROMPTS, TEXT[:400], TEXT[:1000], TEXT, TEXT * 3]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    lengths = []
    with torch.no_grad():
        for text in texts:
            encoded = tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
            mean_D = reference(**encoded).last_hidden_state[0].mean(0)
            expected.append((mean_D / mean_D.norm()).numpy())
            lengths.append(encoded["input_ids"].shape[1])
    assert max(lengths) == MAX_TOKENS and min(lengths) < 10
    outputs = LLM(folder, dtype="float32").embed(texts, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == lengths
    np.testing.assert_allclose(
        [output.outputs.embedding for output in outputs], expected, atol=2e-6
    )
