"""Embeddings of prompts: the last or first hidden state or the mean of all, usually normalised."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...model.checkpoint.embedder import Embedder
from ...model.config import ModelConfig
from ...model.text.chat_template import PromptError
from ...model.text.tokenizer import Tokenizer
from ..api.errors import RequestError
from ..api.options import Pooling
from ..api.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from ..api.params import SamplingParams
from ..api.validation import integer, shown

# No token is sampled.
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


class Pool:
    """Pools a prompt's hidden states, which arrive in chunks and are summed in order of position.

    With `kind` "steps", the hidden states at each token `step` are kept one by one.
    """

    def __init__(self, kind: Pooling, tokens: Sequence[int], step: int | None = None):
        self.kind = kind
        self.length = len(tokens)
        self.position = {"last": self.length - 1, "cls": 0}.get(kind)
        self.step_positions = (
            [position for position, token in enumerate(tokens) if token == step]
            if kind == "steps"
            else None
        )
        self.hidden_by_position: dict[int, np.ndarray] = {}  # of the steps
        self.sum: np.ndarray | None = None
        self.count = 0  # hidden states in `sum`

    def add(self, position: int, hidden_H) -> None:
        """Add the hidden state at a position. All earlier ones have been added; repeats are
        ignored.
        """
        if self.step_positions is not None:
            self.hidden_by_position[position] = np.asarray(hidden_H, np.float32)
        elif self.position is not None:
            if position == self.position:
                self.sum = np.asarray(hidden_H, np.float64)
                self.count = 1
        elif position == self.count:
            hidden_H = np.asarray(hidden_H, np.float64)
            self.sum = hidden_H if self.sum is None else self.sum + hidden_H
            self.count = self.count + 1

    def vector(self) -> np.ndarray | None:
        """Return the pooled hidden state (one row per step for "steps"), or None if incomplete."""
        if self.step_positions is not None:
            rows = [
                self.hidden_by_position[position]
                for position in self.step_positions
                if position in self.hidden_by_position
            ]
            return np.stack(rows) if rows and len(rows) == len(self.step_positions) else None
        if self.sum is None or self.count < (self.length if self.position is None else 1):
            return None
        return (self.sum / self.count).astype(np.float32)


def check_dimensions(dimensions: int | None, config: ModelConfig, name: str = "dimensions") -> None:
    """Refuse a number of dimensions that the model cannot give, and models without embeddings."""
    if config.classes is not None:
        raise RequestError(
            "model",
            "classifies texts and gives no embeddings; ask LLM.classify or /classify, or "
            "another model",
        )
    check_width(dimensions, config.width, name)


def check_width(dimensions: int | None, dim: int, name: str = "dimensions") -> None:
    """Refuse more than `dim` dimensions."""
    if dimensions is not None:
        integer(name, dimensions, 1, dim, " (the model's width) or null")


def prompt_prefix(embedder: Embedder, name: str | None, field: str = "prompt_name") -> str:
    """Return the embedder's prompt for the purpose `name`, or its default prompt.

    Args:
        field: Name of the request field for error messages.
    """
    if name is None:
        name = embedder.default_prompt
    elif name not in embedder.prompts:
        valid_names = (
            " or ".join(map(repr, sorted(embedder.prompts))) or "left out: the model has none"
        )
        raise RequestError(field, f"must be {valid_names}, got {shown(name)}")
    return "" if name is None else embedder.prompts[name]


def prepare_prompt(
    prompt: Any, prefix: str, embedder: Embedder, tokenizer: Tokenizer | None
) -> Any:
    """Return a prompt with `prefix` before its text, tokenized if the embedder truncates texts.

    A prompt of token ids and an empty prompt are returned unchanged.
    """
    parsed = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
    text = parsed.get("prompt")
    if parsed.get("prompt_token_ids") is not None or not isinstance(text, str) or not text:
        return prompt
    prepared = {**parsed, "prompt": prefix + text}
    if embedder.max_tokens is not None and tokenizer is not None:
        try:
            prepared["prompt_token_ids"] = encode(embedder, tokenizer, prepared["prompt"])
        except PromptError as error:
            raise RequestError("prompt", str(error)) from None
    return prepared


def encode(embedder: Embedder, tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize a text, truncated to the embedder's maximum length if it has one."""
    if embedder.max_tokens is None:
        return tokenizer.encode(text)
    return tokenizer.encode_truncated(text, embedder.max_tokens)


def embedding(
    output: RequestOutput, dimensions: int | None = None, normalize: bool = True
) -> EmbeddingRequestOutput:
    """Return a finished request's embedding: its first `dimensions` values, normalised if asked
    for.
    """
    if output.pooled is None:
        raise RuntimeError(
            f"the request {output.request_id} has no embedding: it ended before its prompt did"
        )
    check_width(dimensions, len(output.pooled))
    vector = np.asarray(output.pooled, np.float64)[:dimensions]
    length = float(np.sqrt(np.dot(vector, vector))) if normalize else 0.0
    numbers = (vector / length if length else vector).astype(np.float32).tolist()
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        outputs=EmbeddingOutput(numbers),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
