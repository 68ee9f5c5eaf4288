"""Compares sentence-transformers models with the pooled hidden states of transformers."""

import json
import os

import numpy as np
import pytest

from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.folder import prompts, write_folder

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from quire import LLM  # noqa: E402
from quire.serving.api.errors import RequestError  # noqa: E402
from quire.tests.support import reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_programs")

SEED = int(os.environ.get("QUIRE_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
VARIANT = next(variant for variant in VARIANTS if variant.name.startswith("qwen3"))
CASES = {
    "last": {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False},
    "mean": {"pooling_mode": "mean"},
    "cls": {"pooling_mode_cls_token": True},
}


def modules(*kinds: str) -> str:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return json.dumps(
        [
            {
                "idx": i,
                "name": str(i),
                "path": paths[kind],
                "type": f"sentence_transformers.models.{kind}",
            }
            for i, kind in enumerate(kinds)
        ]
    )


@torch.no_grad()
def last_hidden_states(model, ids: list[int]) -> np.ndarray:
    """Returns the hidden states [T, D] after the final norm."""
    return (
        model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        .hidden_states[-1][0]
        .double()
        .numpy()
    )


@pytest.mark.parametrize("pooling", CASES)
def test_sentence_transformers_embeddings_match_transformers(pooling, tmp_path):
    print(f"{VARIANT.name}: QUIRE_SEED={SEED}")
    folder = write_folder(
        tmp_path / "model", VARIANT.config, reference.tensor_shapes(VARIANT), SEED
    )
    model = reference.load(folder)
    is_normalized = pooling != "mean"
    kinds = ("Transformer", "Pooling", "Normalize") if is_normalized else ("Transformer", "Pooling")
    (folder / "modules.json").write_text(modules(*kinds))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps(CASES[pooling] | {"include_prompt": True})
    )
    # like Qwen3-Embedding: without LM head, and without the prefix "model." of tensor names
    if pooling == "last":
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            headless_tensors = {
                name.removeprefix("model."): x
                for name, x in tensors.items()
                if name != "lm_head.weight"
            }
            save_file(headless_tensors, file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").unlink()
    texts = prompts((*VARIANT.prompts, 1), model.config.vocab_size, SEED)
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=VARIANT.max_len,
        max_num_batched_tokens=32, max_num_seqs=4, kv_cache_memory_bytes=64 << 20,
    )  # fmt: skip
    for dimensions in (None, 8):
        for ids, output in zip(
            texts, llm.embed(texts, use_tqdm=False, dimensions=dimensions), strict=True
        ):
            hidden_states = last_hidden_states(model, ids)
            expected = {
                "last": hidden_states[-1],
                "mean": hidden_states.mean(axis=0),
                "cls": hidden_states[0],
            }[pooling][:dimensions]
            expected = expected / np.linalg.norm(expected) if is_normalized else expected
            np.testing.assert_allclose(
                output.outputs.embedding, expected, atol=1e-4 * max(1, np.abs(expected).max())
            )
    with pytest.raises(
        RequestError, match=r"model: makes embeddings and writes no text; ask LLM\.embed"
    ):
        llm.generate([texts[0]], use_tqdm=False)
