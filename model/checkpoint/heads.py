"""Heads other than the language-model head: classes, and Dense modules after the pooling."""

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


def read_classes(hf: dict) -> Classes | None:
    """The classes in config.json of a sequence classifier; None for other models."""
    if not architecture(hf).endswith("ForSequenceClassification"):
        return None
    number = hf.get("num_labels")
    labels = hf.get("id2label")
    problem = hf.get("problem_type")
    if labels is None:
        count = 2 if number is None else number  # transformers does not write its default
        if type(count) is not int or not 1 <= count <= MAX_CLASSES:
            raise ModelError(
                f"config.json: num_labels = {count!r:.80}; it must be from 1 to {MAX_CLASSES}"
            )
        labels = {str(i): f"LABEL_{i}" for i in range(count)}
    if (
        not isinstance(labels, Mapping)
        or {*labels} != {str(i) for i in range(len(labels))}
        or not labels
    ):
        raise ModelError(
            f"config.json: id2label = {labels!r:.80}; it must name the classes 0, 1 and so on"
        )
    activations = {
        "regression": "none",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    default = read_activation(hf) or ("sigmoid" if len(labels) == 1 else "softmax")
    if problem is not None and problem not in list(activations):
        raise ModelError(
            f"config.json: problem_type = {problem!r:.80}; it can be null, {', '.join(activations)}"
        )
    ordered = tuple(str(labels[str(i)]) for i in range(len(labels)))
    return Classes(ordered, default if problem is None else activations[problem])


def read_activation(hf: dict) -> str | None:
    """The activation that a CrossEncoder applies to its scores; None if not set."""
    table = hf.get("sentence_transformers")
    function_name = (
        table.get("activation_fn")
        if isinstance(table, Mapping)
        else hf.get("sbert_ce_default_activation_function")
    )
    if function_name is None:
        return None
    activations = {"Identity": "none", "Sigmoid": "sigmoid"}
    if (name := str(function_name).rpartition(".")[2]) not in activations:
        raise ModelError(
            f"config.json: an activation of scores is {function_name!r:.80}; supported is "
            f"{' or '.join(activations)}"
        )
    return activations[name]


def check_class_tokens(config: ModelConfig, classes: Classes) -> None:
    """Reject class tokens outside of the vocabulary, and models that change their logits."""
    if (largest_id := max(map(max, classes.tokens))) >= config.vocab_size:
        raise ModelError(
            f"this model judges by the token {largest_id}, and has tokens up to "
            f"{config.vocab_size - 1}"
        )
    if config.logit_scale != 1 or config.final_soft_cap is not None or config.head_bias:
        raise ModelError(
            f"models of the family {config.family} change their logits, and cannot judge by "
            "two of them"
        )


def dense_source(config: ModelConfig, dense: Dense) -> DenseWeights:
    """The sources of a Dense module after an encoder's pooling."""

    def vector(name: str) -> Source:
        return tensor(name, (dense.dim,), lambda x: x.astype(np.float32))

    normed = None
    if dense.norm is not None:
        bias = vector(f"{dense.norm}.bias") if config.norm == "layer_bias" else None
        normed = LayerNorm(vector(f"{dense.norm}.weight"), bias)
    return DenseWeights(
        matrix_DF=tensor(
            f"{dense.name}.weight", (dense.dim, dense.into), lambda x: x.astype(np.float32).T
        ),
        bias_F=vector(f"{dense.name}.bias") if dense.bias else None,
        norm_F=normed,
    )


def class_row_differences(family: Any, sources: ModelWeights, config: ModelConfig) -> Source:
    """The source of a token classifier's matrix: row of the positive minus the negative token."""
    assert config.classes is not None
    source_tree = (
        family.sources(replace(config, tied=False)) if config.classes.own_head else sources
    )
    (table,) = (source_tree.head_VD if config.classes.own_head else source_tree.embed_VD).parts
    ids_C2 = np.array(config.classes.tokens)
    signs_C21 = np.where(ids_C2 < 0, 0, [1, -1])[..., None]

    def turned(x: np.ndarray) -> np.ndarray:
        return (table.transform(x)[ids_C2].astype(np.float32) * signs_C21).sum(1).T

    return Source((replace(table, transform=turned),))


def weight_sources(family: Any, config: ModelConfig) -> ModelWeights:
    """The sources of a family's weights, and of any classification or Dense heads."""
    sources = family.sources(config)
    sources = sources.replace(head=tuple(dense_source(config, dense) for dense in config.head))
    if config.classes is None:
        return sources
    if config.classes.tokens:
        return sources.replace(classes_DC=class_row_differences(family, sources, config))
    C = len(config.classes.labels)
    D = config.width
    prefix = config.classes.name

    def class_tensor(name: str, *shape: int) -> Source:
        return tensor(f"{prefix}.{name}", shape, lambda x: x.astype(np.float32).T)

    if not config.classes.deep:
        bias = class_tensor("bias", C) if config.classes.bias else None
        return sources.replace(classes_DC=class_tensor("weight", C, D), classes_bias_C=bias)
    return sources.replace(
        classes_up_DF=class_tensor("0.weight", D, D), classes_up_bias_F=class_tensor("0.bias", D),
        classes_DC=class_tensor("2.weight", C, D), classes_bias_C=class_tensor("2.bias", C),
    )  # fmt: skip
