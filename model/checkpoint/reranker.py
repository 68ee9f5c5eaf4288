"""Models that judge by the tokens that they would say, as Qwen3-Reranker does by yes and no."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ..classes import Classes
from ..config import ModelError
from . import embedder
from .folder import read_json

KEYS = ("classifier_from_token", "is_original_qwen3_reranker")  # vLLM's, in --hf-overrides


def classes_by_tokens(folder: Path, hf: Mapping[str, Any]) -> Classes | None:
    """The classes of a model whose numbers are the logits of tokens; None where it says nothing of the kind."""
    names = hf.get(KEYS[0])
    if names is not None:
        return named(folder, names, hf.get(KEYS[1], False))
    where = embedder.logit_score(folder)
    if where is None:
        return None
    ids = read_json(where)
    yes, no = ids.get("true_token_id"), ids.get("false_token_id")
    if type(yes) is not int or not (no is None or type(no) is int) or min(yes, no or 0) < 0:
        raise ModelError(f"{where}: true_token_id and false_token_id must be numbers of tokens, got {yes!r} and {no!r}")
    return Classes(("LABEL_0",), "sigmoid", ((yes, -1 if no is None else no),))


def named(folder: Path, names: Any, one: Any) -> Classes:
    """By the texts of tokens: a class each, or `one`, whose number is how much likelier the second is."""
    if not isinstance(names, list) or len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: {KEYS[0]} = {names!r:.80}; it must be a list of two tokens or more")
    if not (file := folder / "tokenizer.json").is_file():
        raise ModelError(f"config.json: {KEYS[0]} names tokens, and {folder} has no tokenizer.json that knows them")
    ids = list(map(tokenizers.Tokenizer.from_file(str(file)).token_to_id, names))
    if None in ids:
        lacking = names[ids.index(None)]
        raise ModelError(f"config.json: {KEYS[0]} names {lacking!r:.40}, which is no token of this model")
    if not one:
        return Classes(tuple(names), "softmax", tuple((number, -1) for number in ids))
    if len(ids) != 2:
        raise ModelError(f"config.json: {KEYS[0]} names {len(ids)} tokens; with {KEYS[1]} it must be two, no and yes")
    return Classes(("LABEL_0",), "sigmoid", ((ids[1], ids[0]),))
