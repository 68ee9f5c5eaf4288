"""Rerankers that score by token logits, such as Qwen3-Reranker, and Qwen2's reward models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ..classes import Classes
from ..config import ModelError
from . import embedder
from .folder import REWARDS, STEP_REWARDS, architecture, read_json

STEP = "<extra_0>"  # ends each step of an answer for process reward models
KEYS = ("classifier_from_token", "is_original_qwen3_reranker")  # vLLM's, set in --hf-overrides


def token_score_classes(folder: Path, hf: Mapping[str, Any]) -> Classes | None:
    """The classes of a model that scores by token logits; None for other models."""
    names = hf.get(KEYS[0])
    if names is not None:
        return classes_from_tokens(folder, names, hf.get(KEYS[1], False))
    path = embedder.logit_score_config(folder)
    if path is None:
        return None
    ids = read_json(path)
    yes = ids.get("true_token_id")
    no = ids.get("false_token_id")
    if type(yes) is not int or not (no is None or type(no) is int) or min(yes, no or 0) < 0:
        raise ModelError(
            f"{path}: true_token_id and false_token_id must be numbers of tokens, got {yes!r} "
            f"and {no!r}"
        )
    return Classes(("LABEL_0",), "sigmoid", ((yes, -1 if no is None else no),))


def classes_from_tokens(folder: Path, names: Any, as_single_score: Any) -> Classes:
    """A class for each token, or (`as_single_score`) one: the log-odds of the second token."""
    if (
        not isinstance(names, list)
        or len(names) < 2
        or not all(isinstance(name, str) for name in names)
    ):
        raise ModelError(
            f"config.json: {KEYS[0]} = {names!r:.80}; it must be a list of two tokens or more"
        )
    ids = token_ids_for(folder, names, KEYS[0])
    if not as_single_score:
        return Classes(tuple(names), "softmax", tuple((number, -1) for number in ids))
    if len(ids) != 2:
        raise ModelError(
            f"config.json: {KEYS[0]} names {len(ids)} tokens; with {KEYS[1]} it must be two, "
            "no and yes"
        )
    return Classes(("LABEL_0",), "sigmoid", ((ids[1], ids[0]),))


def token_ids_for(folder: Path, names: list[str], key: str) -> list[int]:
    """The ids of tokens that config.json names by text."""
    if not (file := folder / "tokenizer.json").is_file():
        raise ModelError(
            f"config.json: {key} names tokens, and {folder} has no tokenizer.json that knows them"
        )
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    ids: list[int] = []
    for name in names:
        if (token_id := tokenizer.token_to_id(name)) is None:
            raise ModelError(
                f"config.json: {key} names {name!r:.40}, which is no token of this model"
            )
        ids.append(token_id)
    return ids


def reward_classes(folder: Path, hf: Mapping[str, Any]) -> Classes | None:
    """The classes of Qwen2's reward and process reward models; None for other models."""

    name = architecture(hf)
    if name == REWARDS:
        return Classes(("LABEL_0",), "none", deep=True)
    if name != STEP_REWARDS:
        return None
    (step,) = token_ids_for(folder, [STEP], "architectures")
    return Classes(("LABEL_0", "LABEL_1"), "softmax", deep=True, step=step)
