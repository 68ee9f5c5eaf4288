"""Compares classification heads with transformers' *ForSequenceClassification."""

import json
import os

import numpy as np
import pytest

from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.folder import prompts

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from quire import LLM  # noqa: E402
from quire.serving.api.errors import RequestError  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_programs")

SEED = int(os.environ.get("QUIRE_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
CASES = [  # family, number of classes, problem_type, activation
    ("llama", 1, None, torch.sigmoid),
    ("qwen2", 1, "regression", lambda x: x),
    ("qwen3", 2, None, lambda x: x.softmax(-1)),
    ("gemma3", 5, "multi_label_classification", torch.sigmoid),
    ("mistral", 3, "single_label_classification", lambda x: x.softmax(-1)),
]


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "num_classes", "problem_type", "activation"), CASES, ids=[case[0] for case in CASES]
)
def test_class_probabilities_and_rewards_match_transformers(
    family, num_classes, problem_type, activation, tmp_path
):
    print(f"{family}: QUIRE_SEED={SEED}")
    variant = next(variant for variant in VARIANTS if variant.name.startswith(family))
    (tmp_path / "config.json").write_text(json.dumps(variant.config))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.num_labels = num_classes
    config.problem_type = problem_type
    config.pad_token_id = None
    torch.manual_seed(SEED)
    model = (
        transformers.AutoModelForSequenceClassification.from_config(
            config, attn_implementation="eager"
        )
        .float()
        .eval()
    )
    model.score.weight.mul_(30)  # so that classes differ
    model.save_pretrained(tmp_path)
    texts = prompts((*variant.prompts, 1), config.vocab_size, SEED)
    llm = LLM(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=variant.max_len,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )
    expected = [model(torch.tensor([ids])).logits[0] for ids in texts]
    for logits, output in zip(expected, llm.classify(texts, use_tqdm=False), strict=True):
        np.testing.assert_allclose(output.outputs.probs, activation(logits).numpy(), atol=1e-4)
        assert output.outputs.num_classes == num_classes
    if num_classes == 1:
        for logits, output in zip(expected, llm.reward(texts, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.data, logits.numpy(), atol=2e-4)
    else:
        with pytest.raises(
            RequestError,
            match=f"model: gives {num_classes} numbers and no reward; ask LLM.classify",
        ):
            llm.reward(texts, use_tqdm=False)
    for call in (llm.generate, llm.embed):
        with pytest.raises(RequestError, match="model: classifies texts and"):
            call(texts, use_tqdm=False)
