"""What stands in place of a table of tokens: classes, as config.json describes them, and products behind a pooling."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...ops.norm import LayerNorm
from ..classes import Classes
from ..config import Dense, ModelConfig, ModelError
from ..families.common import Source, tensor
from ..weights import DenseWeights, ModelWeights
from .folder import architecture

MAX_CLASSES = 1 << 16


def classes_of(hf: dict) -> Classes | None:
    """The classes of a checkpoint that has them in place of tokens."""
    if not architecture(hf).endswith("ForSequenceClassification"):
        return None
    number, labels, problem = hf.get("num_labels"), hf.get("id2label"), hf.get("problem_type")
    if labels is None:
        count = 2 if number is None else number  # transformers does not write its default
        if type(count) is not int or not 1 <= count <= MAX_CLASSES:
            raise ModelError(f"config.json: num_labels = {count!r:.80}; it must be from 1 to {MAX_CLASSES}")
        labels = {str(i): f"LABEL_{i}" for i in range(count)}
    if not isinstance(labels, Mapping) or {*labels} != {str(i) for i in range(len(labels))} or not labels:
        raise ModelError(f"config.json: id2label = {labels!r:.80}; it must name the classes 0, 1 and so on")
    known = {"regression": "none", "single_label_classification": "softmax", "multi_label_classification": "sigmoid"}
    usual = activation_of(hf) or ("sigmoid" if len(labels) == 1 else "softmax")
    if problem is not None and problem not in list(known):
        raise ModelError(f"config.json: problem_type = {problem!r:.80}; it can be null, {', '.join(known)}")
    ordered = tuple(str(labels[str(i)]) for i in range(len(labels)))
    return Classes(ordered, usual if problem is None else known[problem])


def activation_of(hf: dict) -> str | None:
    """What sentence-transformers' CrossEncoder is told to make of its numbers, in either place; None: nothing."""
    table = hf.get("sentence_transformers")
    said = table.get("activation_fn") if isinstance(table, Mapping) else hf.get("sbert_ce_default_activation_function")
    if said is None:
        return None
    known = {"Identity": "none", "Sigmoid": "sigmoid"}
    if (name := str(said).rpartition(".")[2]) not in known:
        raise ModelError(f"config.json: an activation of scores is {said!r:.80}; supported is {' or '.join(known)}")
    return known[name]


def check_tokens(config: ModelConfig, found: Classes) -> None:
    """Refuse to judge by tokens that the model has not, or whose logits are not the head's numbers."""
    if (most := max(map(max, found.tokens))) >= config.vocab_size:
        raise ModelError(f"this model judges by the token {most}, and has tokens up to {config.vocab_size - 1}")
    if config.logit_scale != 1 or config.final_soft_cap is not None or config.head_bias:
        raise ModelError(f"models of the family {config.family} change their logits, and cannot judge by two of them")


def dense_source(config: ModelConfig, dense: Dense) -> DenseWeights:
    """Of a product behind an encoder's pooling."""

    def vector(name: str) -> Source:
        return tensor(name, (dense.dim,), lambda x: x.astype(np.float32))

    normed = None
    if dense.norm is not None:
        bias = vector(f"{dense.norm}.bias") if config.norm == "layer_bias" else None
        normed = LayerNorm(vector(f"{dense.norm}.weight"), bias)
    return DenseWeights(
        matrix_DF=tensor(f"{dense.name}.weight", (dense.dim, dense.into), lambda x: x.astype(np.float32).T),
        bias_F=vector(f"{dense.name}.bias") if dense.bias else None,
        norm_F=normed,
    )


def difference_of_rows(family: Any, sources: ModelWeights, config: ModelConfig) -> Source:
    """The rows of the table of logits by which a model judges, less those that speak against each."""
    assert config.classes is not None
    whole = family.sources(replace(config, tied=False)) if config.classes.own_head else sources
    (table,) = (whole.head_VD if config.classes.own_head else whole.embed_VD).parts
    ids_C2 = np.array(config.classes.tokens)
    signs_C21 = np.where(ids_C2 < 0, 0, [1, -1])[..., None]

    def turned(x: np.ndarray) -> np.ndarray:
        return (table.turn(x)[ids_C2].astype(np.float32) * signs_C21).sum(1).T

    return Source((replace(table, turn=turned),))


def sources_of(family: Any, config: ModelConfig) -> ModelWeights:
    """The sources of a family's weights, and of the heads that any of them may have."""
    sources = family.sources(config)
    sources = sources.replace(head=tuple(dense_source(config, dense) for dense in config.head))
    if config.classes is None:
        return sources
    if config.classes.tokens:
        return sources.replace(classes_DC=difference_of_rows(family, sources, config))
    C, D, called = len(config.classes.labels), config.width, config.classes.name

    def wide(name: str, *shape: int) -> Source:
        return tensor(f"{called}.{name}", shape, lambda x: x.astype(np.float32).T)

    if not config.classes.deep:
        bias = wide("bias", C) if config.classes.bias else None
        return sources.replace(classes_DC=wide("weight", C, D), classes_bias_C=bias)
    return sources.replace(
        classes_up_DF=wide("0.weight", D, D), classes_up_bias_F=wide("0.bias", D),
        classes_DC=wide("2.weight", C, D), classes_bias_C=wide("2.bias", C),
    )  # fmt: skip
