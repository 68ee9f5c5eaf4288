"""Compares Qwen2 (process) reward models with transformers and a head in torch."""

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
STEP_TOKEN = "<extra_0>"


def write_reward_model(folder, architecture: str, num_outputs: int, adds_step_token: bool = True):
    """Writes a tiny model; returns (folder, function from ids to head outputs, tokenizer)."""
    save(folder, ZOO["byte_level"]())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if adds_step_token:
        tokenizer.add_special_tokens({"additional_special_tokens": [STEP_TOKEN]})
        tokenizer.save_pretrained(folder)
    variant = next(variant for variant in VARIANTS if variant.name == "qwen2")
    config_fields = {
        "architectures": [architecture],
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(variant.config | config_fields))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(SEED)
    body = transformers.Qwen2Model._from_config(config, attn_implementation="eager").float().eval()
    D = config.hidden_size
    head = torch.nn.Sequential(
        torch.nn.Linear(D, D), torch.nn.ReLU(), torch.nn.Linear(D, num_outputs)
    ).float()
    with torch.no_grad():
        head[0].weight.mul_(20)
    tensors = {f"model.{name}": value for name, value in body.state_dict().items()}
    tensors |= {f"score.{name}": value for name, value in head.state_dict().items()}
    save_file(
        {name: value.contiguous().clone() for name, value in tensors.items()},
        folder / "model.safetensors",
    )
    return folder, lambda ids: head(body(torch.tensor([ids])).last_hidden_state[0]), tokenizer


def make_llm(folder):
    return LLM(
        str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=64 << 20,
    )


@torch.no_grad()
def test_process_rewards_match_the_reference(tmp_path):
    folder, head_outputs, tokenizer = write_reward_model(tmp_path, "Qwen2ForProcessRewardModel", 2)
    llm = make_llm(folder)
    texts = [
        f"the quick fox: jumps{STEP_TOKEN}over the dog{STEP_TOKEN}",
        f"one{STEP_TOKEN}",
        "a lazy dog, " * 9 + f"x{STEP_TOKEN}y{STEP_TOKEN}z{STEP_TOKEN}!",
    ]
    for text, output in zip(texts, llm.reward(texts, use_tqdm=False), strict=True):
        ids = tokenizer(text)["input_ids"]
        assert list(output.prompt_token_ids) == ids
        step_positions = [
            position
            for position, token in enumerate(ids)
            if token == tokenizer.convert_tokens_to_ids(STEP_TOKEN)
        ]
        expected = head_outputs(ids).softmax(-1)[step_positions, 1]
        assert len(output.outputs.data) == text.count(STEP_TOKEN)
        np.testing.assert_allclose(output.outputs.data, expected.numpy(), atol=1e-4)
    with pytest.raises(RequestError, match="prompt: has no step: each must end with the token"):
        llm.reward("none", use_tqdm=False)
    with pytest.raises(RequestError, match="has 2 classes and scores no pairs"):
        llm.score("a", "b", use_tqdm=False)
    generating_llm = LLM(dtype="float32", max_num_seqs=4, max_model_len=128)
    sampling = SamplingParams(temperature=1.5, max_tokens=12, seed=1)
    (result,) = generating_llm.search(
        "Once upon", SearchParams("beam", 4, 2, step=" ", sampling=sampling), reward=llm
    )
    steps = "".join(word + STEP_TOKEN for word in result.text.split())
    (output,) = llm.reward("Once upon" + steps, use_tqdm=False)
    assert (
        result.best.reward == pytest.approx(output.outputs.data[-1], abs=1e-6)
        and result.num_scored_tokens > 0
    )


@torch.no_grad()
def test_outcome_reward_matches_the_reference(tmp_path):
    folder, head_outputs, tokenizer = write_reward_model(
        tmp_path, "Qwen2ForRewardModel", 1, adds_step_token=False
    )
    for text, output in zip(
        texts := ["the fox", "dog " * 12],
        make_llm(folder).reward(texts, use_tqdm=False),
        strict=True,
    ):
        np.testing.assert_allclose(
            output.outputs.data, head_outputs(tokenizer(text)["input_ids"])[-1].numpy(), atol=2e-4
        )


def test_process_reward_model_without_step_token_is_refused(tmp_path):
    folder, *_ = write_reward_model(
        tmp_path, "Qwen2ForProcessRewardModel", 2, adds_step_token=False
    )
    with pytest.raises(ModelError, match="names '<extra_0>', which is no token of this model"):
        make_llm(folder)
