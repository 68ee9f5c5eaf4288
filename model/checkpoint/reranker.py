"""Models that judge: by the tokens that they would say, as Qwen3-Reranker by yes and no, or with Qwen2's heads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ..classes import Classes
from ..config import ModelError
from . import embedder
from .folder import REWARDS, STEP_REWARDS, architecture, read_json

STEP = "<extra_0>"  # ends each step of an answer that a model of process rewards reads
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
    ids = numbers_of(folder, names, KEYS[0])
    if not one:
        return Classes(tuple(names), "softmax", tuple((number, -1) for number in ids))
    if len(ids) != 2:
        raise ModelError(f"config.json: {KEYS[0]} names {len(ids)} tokens; with {KEYS[1]} it must be two, no and yes")
    return Classes(("LABEL_0",), "sigmoid", ((ids[1], ids[0]),))


def numbers_of(folder: Path, names: list[str], key: str) -> list[int]:
    """The numbers of tokens that config.json names by their texts."""
    if not (file := folder / "tokenizer.json").is_file():
        raise ModelError(f"config.json: {key} names tokens, and {folder} has no tokenizer.json that knows them")
    ids = list(map(tokenizers.Tokenizer.from_file(str(file)).token_to_id, names))
    if None in ids:
        raise ModelError(f"config.json: {key} names {names[ids.index(None)]!r:.40}, which is no token of this model")
    return ids


def rewards(folder: Path, hf: Mapping[str, Any]) -> Classes | None:
    """The classes of Qwen2's models of rewards, of a whole answer or of each of its steps; None of others."""
    name = architecture(hf)
    if name == REWARDS:
        return Classes(("LABEL_0",), "none", deep=True)
    if name != STEP_REWARDS:
        return None
    (step,) = numbers_of(folder, [STEP], "architectures")
    return Classes(("LABEL_0", "LABEL_1"), "softmax", deep=True, step=step)
