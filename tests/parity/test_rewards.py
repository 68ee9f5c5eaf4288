"""Qwen2's models of rewards and of process rewards: transformers' body, and the makers' head on
it.
"""

import json
import os

import numpy as np
import pytest

from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.tokenizer_zoo import ZOO, save

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402

from quire import LLM, SamplingParams, SearchParams  # noqa: E402
from quire.model.config import ModelError  # noqa: E402
from quire.serving.api.errors import RequestError  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_programs")

SEED = int(os.environ.get("QUIRE_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
STEP = "<extra_0>"


def made(folder, architecture: str, count: int, step: bool = True):
    """(a tiny folder, what computes its head's numbers at each token, transformers' tokenizer)."""
    save(folder, ZOO["byte_level"]())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if step:
        tokenizer.add_special_tokens({"additional_special_tokens": [STEP]})
        tokenizer.save_pretrained(folder)
    variant = next(variant for variant in VARIANTS if variant.name == "qwen2")
    own = {
        "architectures": [architecture],
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(variant.config | own))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(SEED)
    body = transformers.Qwen2Model._from_config(config, attn_implementation="eager").float().eval()
    D = config.hidden_size
    score = torch.nn.Sequential(
        torch.nn.Linear(D, D), torch.nn.ReLU(), torch.nn.Linear(D, count)
    ).float()
    with torch.no_grad():
        score[0].weight.mul_(20)
    tensors = {f"model.{name}": value for name, value in body.state_dict().items()}
    tensors |= {f"score.{name}": value for name, value in score.state_dict().items()}
    save_file(
        {name: value.contiguous().clone() for name, value in tensors.items()},
        folder / "model.safetensors",
    )
    return folder, lambda ids: score(body(torch.tensor([ids])).last_hidden_state[0]), tokenizer


def llm_of(folder):
    return LLM(
        str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=64 << 20,
    )


@torch.no_grad()
def test_a_reward_of_each_step(tmp_path):
    folder, numbers, tokenizer = made(tmp_path, "Qwen2ForProcessRewardModel", 2)
    llm = llm_of(folder)
    texts = [
        f"the quick fox: jumps{STEP}over the dog{STEP}",
        f"one{STEP}",
        "a lazy dog, " * 9 + f"x{STEP}y{STEP}z{STEP}!",
    ]
    for text, output in zip(texts, llm.reward(texts, use_tqdm=False), strict=True):
        ids = tokenizer(text)["input_ids"]
        assert list(output.prompt_token_ids) == ids
        ends = [
            place
            for place, token in enumerate(ids)
            if token == tokenizer.convert_tokens_to_ids(STEP)
        ]
        expected = numbers(ids).softmax(-1)[ends, 1]
        assert len(output.outputs.data) == text.count(STEP)
        np.testing.assert_allclose(output.outputs.data, expected.numpy(), atol=1e-4)
    with pytest.raises(RequestError, match="prompt: has no step: each must end with the token"):
        llm.reward("none", use_tqdm=False)
    with pytest.raises(RequestError, match="has 2 classes and scores no pairs"):
        llm.score("a", "b", use_tqdm=False)
    writer = LLM(dtype="float32", max_num_seqs=4, max_model_len=128)
    sampling = SamplingParams(temperature=1.5, max_tokens=12, seed=1)
    (found,) = writer.search(
        "Once upon", SearchParams("beam", 4, 2, step=" ", sampling=sampling), reward=llm
    )
    steps = "".join(part + STEP for part in found.text.split())
    (output,) = llm.reward("Once upon" + steps, use_tqdm=False)
    assert (
        found.best.reward == pytest.approx(output.outputs.data[-1], abs=1e-6)
        and found.num_scored_tokens > 0
    )


@torch.no_grad()
def test_a_reward_of_the_whole(tmp_path):
    folder, numbers, tokenizer = made(tmp_path, "Qwen2ForRewardModel", 1, step=False)
    for text, output in zip(
        texts := ["the fox", "dog " * 12], llm_of(folder).reward(texts, use_tqdm=False), strict=True
    ):
        np.testing.assert_allclose(
            output.outputs.data, numbers(tokenizer(text)["input_ids"])[-1].numpy(), atol=2e-4
        )


def test_without_the_token_of_steps(tmp_path):
    folder, *_ = made(tmp_path, "Qwen2ForProcessRewardModel", 2, step=False)
    with pytest.raises(ModelError, match="names '<extra_0>', which is no token of this model"):
        llm_of(folder)
