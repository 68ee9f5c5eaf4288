"""Compares rerankers with transformers on new random weights: heads with one class, and the yes
and no tokens of Qwen3-Reranker.
"""

import json
import os

import numpy as np
import pytest

from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.tokenizer_zoo import ZOO, save

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from quire import LLM  # noqa: E402
from quire.model.config import ModelError  # noqa: E402
from quire.serving.api.errors import RequestError  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_programs")

SEED = int(os.environ.get("QUIRE_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
QUERIES = ["the quick fox", "a lazy dog", "ünïcode ?"]
DOCUMENTS = ["The fox jumps over the dog. " * 3, "dog", "once upon a time"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{# of 'query' and 'document' #}{% if add_generation_prompt %}answer:{% endif %}"
)
CONFIG_CHANGES = {"max_position_embeddings": 1024, "tie_word_embeddings": False}


def write_reranker(folder, auto_class: str, **changes):
    """Writes a tiny Qwen3; returns (folder, transformers' model, transformers' tokenizer)."""
    save(folder, ZOO["byte_level"]())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    variant = next(variant for variant in VARIANTS if variant.name == "qwen3")
    (folder / "config.json").write_text(
        json.dumps(variant.config | CONFIG_CHANGES | {"vocab_size": len(tokenizer)} | changes)
    )
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_labels = 1
    config.pad_token_id = None
    torch.manual_seed(SEED)
    model = (
        getattr(transformers, auto_class)
        .from_config(config, attn_implementation="eager")
        .float()
        .eval()
    )
    output_layer = (
        model.get_output_embeddings() if auto_class == "AutoModelForCausalLM" else model.score
    )
    with torch.no_grad():
        output_layer.weight.mul_(8)
    model.save_pretrained(folder)
    return folder, model, tokenizer


def make_llm(folder, **options):
    return LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=64 << 20,
        **options,
    )


@torch.no_grad()
def test_cross_encoder_scores_match_transformers(tmp_path):
    """As in sentence-transformers' CrossEncoder, the tokenizer pairs the texts, and the score is
    the sigmoid of the output.
    """
    folder, model, tokenizer = write_reranker(tmp_path, "AutoModelForSequenceClassification")
    llm = make_llm(folder)
    outputs = llm.score(QUERIES, DOCUMENTS, use_tqdm=False)
    for query, document, output in zip(QUERIES, DOCUMENTS, outputs, strict=True):
        ids = tokenizer(query, document)["input_ids"]
        assert list(output.prompt_token_ids) == ids
        expected = torch.sigmoid(model(torch.tensor([ids])).logits[0, 0]).item()
        assert output.outputs.score == pytest.approx(expected, abs=1e-5)
    assert len({round(output.outputs.score, 6) for output in outputs}) == 3
    broadcast_outputs = llm.score(QUERIES[0], DOCUMENTS, use_tqdm=False)
    assert (
        broadcast_outputs[0].outputs.score == outputs[0].outputs.score
        and len(broadcast_outputs) == 3
    )


def answer_tokens(tokenizer) -> list[str]:
    return [
        token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])[40:42]
    ]


@torch.no_grad()
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("config_form", ["overrides", "written out", "modules", "template"])
def test_qwen3_reranker_scores_match_transformers(tmp_path, is_tied, config_form):
    """The score is the softmax over the logits of two tokens at the end of the published prompt."""
    folder, model, tokenizer = write_reranker(
        tmp_path, "AutoModelForCausalLM", tie_word_embeddings=is_tied
    )
    no, yes = answer_tokens(tokenizer)
    ids = tokenizer.convert_tokens_to_ids([no, yes])
    options = {
        "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": [no, yes],
        "is_original_qwen3_reranker": True,
    }  # fmt: skip
    options = {"hf_overrides": options}
    task = "Given a web search query, retrieve relevant passages that answer the query"
    prompt_head = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    prompt_tail = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    if config_form in ("modules", "template"):
        options = {}
        kinds = ("base.modules.Transformer", "cross_encoder.modules.logit_score.LogitScore")
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
            for i, (path, kind) in enumerate(zip(("", "1_LogitScore"), kinds, strict=True))
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_LogitScore").mkdir()
        scores = {
            "true_token_id": ids[1],
            "false_token_id": ids[0],
            "module_input_name": "causal_logits",
        }
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps(scores))
        prompts = {"prompts": {"own": "Find it"}, "default_prompt_name": "own"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        task = "Find it"
    if config_form == "template":
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    llm = make_llm(folder, **options)
    for query, document in zip(QUERIES, DOCUMENTS, strict=True):
        text = f"{prompt_head}<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}{prompt_tail}"
        texts = query, document
        if config_form == "written out":
            texts = (
                f"{prompt_head}<Instruct>: {task}\n<Query>: {query}\n",
                f"<Document>: {document}{prompt_tail}",
            )
        if config_form == "template":
            text = f"<system>Find it\n<query>{query}\n<document>{document}\nanswer:"
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        (output,) = llm.score(*texts, use_tqdm=False)
        assert list(output.prompt_token_ids) == tokens
        expected = model(torch.tensor([tokens])).logits[0, -1, ids].softmax(0)[1].item()
        assert output.outputs.score == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RequestError, match="classifies texts"):
        llm.generate("a", use_tqdm=False)


@torch.no_grad()
def test_classifier_from_token_matches_transformers(tmp_path):
    """With vLLM's classifier_from_token alone, the classes are the logits of these tokens."""
    folder, model, tokenizer = write_reranker(tmp_path, "AutoModelForCausalLM")
    token_names = answer_tokens(tokenizer)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": token_names,
    }
    llm = make_llm(folder, hf_overrides=overrides)
    tokens = tokenizer("the fox")["input_ids"]
    expected = (
        model(torch.tensor([tokens]))
        .logits[0, -1, tokenizer.convert_tokens_to_ids(token_names)]
        .softmax(0)
    )
    (output,) = llm.classify([tokens], use_tqdm=False)
    np.testing.assert_allclose(output.outputs.probs, expected.numpy(), atol=1e-5)
    with pytest.raises(RequestError, match="has 2 classes and scores no pairs"):
        llm.score("a", "b", use_tqdm=False)
    for invalid_tokens, message in (
        (["nothing-of-the-kind", token_names[0]], "which is no token of this model"),
        ([token_names[0]], "a list of two tokens or more"),
        ("yes", "a list of two tokens or more"),
    ):
        with pytest.raises(ModelError, match=message):
            make_llm(folder, hf_overrides=overrides | {"classifier_from_token": invalid_tokens})
    with pytest.raises(ModelError, match="it must be two, no and yes"):
        make_llm(
            folder,
            hf_overrides=overrides
            | {"classifier_from_token": [*token_names, "a"], "is_original_qwen3_reranker": True},
        )
