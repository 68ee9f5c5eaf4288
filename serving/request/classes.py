"""A prompt's classes: a head's numbers, and the probabilities that they stand for."""

import numpy as np

from ...model.config import ModelConfig
from ..api.errors import RequestError
from ..api.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)


def check(config: ModelConfig, reward: bool = False) -> None:
    """Refuse a model without classes; `reward`: one that gives a text another number of them than 1."""
    if config.classes is None:
        raise RequestError("model", "has no classes; ask a model whose architecture is ...ForSequenceClassification")
    if reward and config.classes.step is None and (count := len(config.classes.labels)) != 1:
        raise RequestError("model", f"gives {count} numbers and no reward; ask LLM.classify, or a model with one label")


def numbers(output: RequestOutput) -> np.ndarray:
    """What the head says of a finished request's prompt."""
    if output.pooled is None:
        raise RuntimeError(f"the request {output.request_id} has no classes: it ended before its prompt did")
    return np.asarray(output.pooled, np.float64)


def probabilities(output: RequestOutput, config: ModelConfig) -> list[float]:
    """The probability of each class; of a regression its value."""
    assert config.classes is not None
    found, activation = numbers(output), config.classes.activation
    if activation == "softmax":
        powers = np.exp(found - found.max())
        found = powers / powers.sum()
    elif activation == "sigmoid":
        found = np.exp(-np.logaddexp(0, -found))
    return found.astype(np.float32).tolist()


def classified(output: RequestOutput, config: ModelConfig) -> ClassificationRequestOutput:
    """The classes of a finished request."""
    outputs = ClassificationOutput(probabilities(output, config))
    return ClassificationRequestOutput(output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens)


def rewarded(output: RequestOutput, config: ModelConfig) -> PoolingRequestOutput:
    """The reward of a finished request; of a model that judges steps the probability that each is right."""
    assert config.classes is not None
    if config.classes.step is None:
        found = numbers(output)
    elif config.classes.step not in output.prompt_token_ids:
        raise RequestError("prompt", f"has no step: each must end with the token {config.classes.step}")
    else:
        logits_SC = numbers(output)
        powers_SC = np.exp(logits_SC - logits_SC.max(axis=1, keepdims=True))
        found = powers_SC[:, 1] / powers_SC.sum(axis=1)
    outputs = PoolingOutput(found.astype(np.float32).tolist())
    return PoolingRequestOutput(output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens)
