"""Compares encoders with transformers on new random weights, in float32: embeddings, classes and
scores of text pairs.
"""

import json
import os

import numpy as np
import pytest
import tokenizers

from quire.tests.support.golden.families import VARIANTS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402

from quire import LLM, RequestError  # noqa: E402
from quire.model.config import ModelError  # noqa: E402
from quire.serving.engine.snapshot import take_snapshot  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_programs")

SEED = int(os.environ.get("QUIRE_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTHS = 5, 1, 40, 100, 23
MODERN = {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2}


def make_config(kind: str):
    if kind == "embeddinggemma":
        variant = next(variant for variant in VARIANTS if variant.name == "gemma3-text")
        gemma_fields = {
            key: value
            for key, value in variant.config.items()
            if key not in ("architectures", "model_type")
        }
        encoder_fields = {
            "use_bidirectional_attention": True,
            "sliding_window": 24,
            "vocab_size": 160,
        }
        return transformers.Gemma3TextConfig(**gemma_fields | encoder_fields)
    if kind == "modernbert":
        return transformers.ModernBertConfig(**SIZES | MODERN)
    class_name = {
        "bert": "BertConfig",
        "roberta": "RobertaConfig",
        "xlm-roberta": "XLMRobertaConfig",
    }[kind]
    return getattr(transformers, class_name)(**SIZES)


def random_model(kind: str, auto_class, **changes):
    """Makes a transformers model with random weights, including norms and biases."""
    config = make_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(SEED)
    model = (
        getattr(transformers, auto_class)
        .from_config(config, attn_implementation="eager")
        .float()
        .eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn_like(parameter) * 0.1
            ) if parameter.ndim == 1 else parameter.mul_(3)
    return model


def write_modules(folder, width: int, pooling: str, dense=()) -> None:
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir()
    pooling_config = {"word_embedding_dimension": width, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling_config))
    for path, weight in zip(paths[2:], dense, strict=False):
        dense_config = {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": False,
        }
        dense_config["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / path / "config.json").write_text(json.dumps(dense_config))
        save_file({"linear.weight": weight.contiguous()}, folder / path / "model.safetensors")


def make_llm(folder, **options) -> LLM:
    defaults = {
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "max_model_len": 128,
    }
    return LLM(str(folder), **defaults | options)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["embeddinggemma", "bert", "roberta", "xlm-roberta", "modernbert"])
@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_embeddings_match_transformers(kind, pooling, tmp_path):
    """Batched embeddings are bit-identical to those of each text alone."""
    print(f"{kind}: QUIRE_SEED={SEED}")
    model = random_model(kind, "AutoModel")
    model.save_pretrained(tmp_path)
    D = model.config.hidden_size
    dense = (
        [torch.randn(2 * D, D) / 8, torch.randn(48, 2 * D) / 8] if kind == "embeddinggemma" else []
    )
    write_modules(tmp_path, D, pooling, dense)
    llm = make_llm(tmp_path, skip_tokenizer_init=True)
    rng = np.random.default_rng(SEED)
    texts = [rng.integers(3, 150, length).tolist() for length in LENGTHS]
    embeddings = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    for ids, vector in zip(texts, embeddings, strict=True):
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
        expected = hidden.mean(0) if pooling == "mean_tokens" else hidden[0]
        for weight in dense:
            expected = weight @ expected
        np.testing.assert_allclose(vector, (expected / expected.norm()).numpy(), atol=2e-5)
    assert [llm.embed([ids], use_tqdm=False)[0].outputs.embedding for ids in texts] == embeddings
    assert take_snapshot(llm.engine).recompiles == 0 and not llm.engine.busy
    with pytest.raises(RequestError, match="model: makes embeddings and writes no text"):
        llm.generate([texts[0]], use_tqdm=False)
    with pytest.raises(RequestError, match="prompt: has 129 tokens"):
        llm.embed([[5] * 129], use_tqdm=False)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "modernbert"])
def test_class_probabilities_match_transformers(kind, tmp_path):
    model = random_model(kind, "AutoModelForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, skip_tokenizer_init=True)
    rng = np.random.default_rng(SEED)
    texts = [rng.integers(3, 150, length).tolist() for length in LENGTHS]
    for ids, output in zip(texts, llm.classify(texts, use_tqdm=False), strict=True):
        expected = model(torch.tensor([ids])).logits[0].softmax(-1).numpy()
        np.testing.assert_allclose(output.outputs.probs, expected, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_cross_encoder_scores_match_transformers(kind, tmp_path):
    """A cross-encoder reads both texts at once; BERT also gets token types."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"the a fox dog lazy quick jumps over".split()]
    core = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            {word: number for number, word in enumerate(words)}, unk_token="[UNK]"
        )
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    core.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    model = random_model(kind, "AutoModelForSequenceClassification", num_labels=1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    llm = make_llm(tmp_path)
    queries = ["the quick fox", "dog", "a a a"]
    documents = ["jumps over the lazy dog " * 4, "fox", "the dog jumps"]
    for query, document, output in zip(
        queries, documents, llm.score(queries, documents, use_tqdm=False), strict=True
    ):
        encoded = tokenizer(query, document, return_token_type_ids=True, return_tensors="pt")
        token_types = {} if kind == "xlm-roberta" else {"token_type_ids": encoded["token_type_ids"]}
        assert list(output.prompt_token_ids) == encoded["input_ids"][0].tolist()
        expected = torch.sigmoid(
            model(input_ids=encoded["input_ids"], **token_types).logits[0, 0]
        ).item()
        assert output.outputs.score == pytest.approx(expected, abs=2e-5)


def test_encoder_refuses_drafts_and_long_prompts(tmp_path):
    model = random_model("bert", "AutoModel")
    model.save_pretrained(tmp_path)
    for options, message in (
        ({"speculative_config": {"method": "ngram"}}, "drafts"),
        ({"max_num_batched_tokens": 64}, "prompt: has 100 tokens"),
    ):
        with pytest.raises((ModelError, RequestError), match=message):
            make_llm(tmp_path, skip_tokenizer_init=True, **options).embed(
                [[5] * 100], use_tqdm=False
            )
