"""Outputs of classifiers: class probabilities and rewards from the values of the model's head."""

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


def check_classifier(config: ModelConfig, reward: bool = False) -> None:
    """Refuse a model without classes.

    With `reward`, also refuse a classifier that gives a text more than one value.
    """
    if config.classes is None:
        raise RequestError(
            "model",
            "has no classes; ask a model whose architecture is ...ForSequenceClassification",
        )
    if reward and config.classes.step is None and (count := len(config.classes.labels)) != 1:
        raise RequestError(
            "model",
            f"gives {count} numbers and no reward; ask LLM.classify, or a model with one label",
        )


def head_outputs(output: RequestOutput) -> np.ndarray:
    """Return the values that the model's head computed for a finished request's prompt."""
    if output.pooled is None:
        raise RuntimeError(
            f"the request {output.request_id} has no classes: it ended before its prompt did"
        )
    return np.asarray(output.pooled, np.float64)


def probabilities(output: RequestOutput, config: ModelConfig) -> list[float]:
    """Return the probability of each class, or the value of a regression."""
    assert config.classes is not None
    values = head_outputs(output)
    activation = config.classes.activation
    if activation == "softmax":
        powers = np.exp(values - values.max())
        values = powers / powers.sum()
    elif activation == "sigmoid":
        values = np.exp(-np.logaddexp(0, -values))
    return values.astype(np.float32).tolist()


def classification_output(
    output: RequestOutput, config: ModelConfig
) -> ClassificationRequestOutput:
    outputs = ClassificationOutput(probabilities(output, config))
    return ClassificationRequestOutput(
        output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens
    )


def reward_output(output: RequestOutput, config: ModelConfig) -> PoolingRequestOutput:
    """Return a finished request's reward; for a process reward model, one per step."""
    assert config.classes is not None
    if config.classes.step is None:
        rewards = head_outputs(output)
    elif config.classes.step not in output.prompt_token_ids:
        raise RequestError(
            "prompt", f"has no step: each must end with the token {config.classes.step}"
        )
    else:
        logits_SC = head_outputs(output)
        powers_SC = np.exp(logits_SC - logits_SC.max(axis=1, keepdims=True))
        rewards = powers_SC[:, 1] / powers_SC.sum(axis=1)
    outputs = PoolingOutput(rewards.astype(np.float32).tolist())
    return PoolingRequestOutput(
        output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens
    )
