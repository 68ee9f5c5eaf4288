"""A prompt's embedding: its last hidden state, its first or the mean of all; most are scaled to length 1."""

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

PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)  # no token is drawn


class Pool:
    """Pools a prompt's hidden states, in whatever chunks they come; they are summed in the order of their positions.

    Of the kind "steps" those where the token `step` stands are kept one by one.
    """

    def __init__(self, kind: Pooling, tokens: Sequence[int], step: int | None = None):
        self.kind, self.length = kind, len(tokens)
        self.place = {"last": self.length - 1, "cls": 0}.get(kind)
        self.steps = [place for place, token in enumerate(tokens) if token == step] if kind == "steps" else None
        self.rows: dict[int, np.ndarray] = {}  # of the steps
        self.sum: np.ndarray | None = None
        self.count = 0  # rows that are in it

    def add(self, position: int, row) -> None:
        """Take in the hidden state at a position; those before it have come, and it may come again."""
        if self.steps is not None:
            self.rows[position] = np.asarray(row, np.float32)
        elif self.place is not None:
            if position == self.place:
                self.sum, self.count = np.asarray(row, np.float64), 1
        elif position == self.count:
            row = np.asarray(row, np.float64)
            self.sum, self.count = row if self.sum is None else self.sum + row, self.count + 1

    def vector(self) -> np.ndarray | None:
        """The pooled hidden state, or None as long as rows are missing; of steps a row each."""
        if self.steps is not None:
            found = [self.rows[place] for place in self.steps if place in self.rows]
            return np.stack(found) if found and len(found) == len(self.steps) else None
        if self.sum is None or self.count < (self.length if self.place is None else 1):
            return None
        return (self.sum / self.count).astype(np.float32)


def check_dimensions(dimensions: int | None, config: ModelConfig, name: str = "dimensions") -> None:
    """Refuse what the model cannot give."""
    if config.classes is not None:
        raise RequestError(
            "model", "classifies texts and gives no embeddings; ask LLM.classify or /classify, or another model"
        )
    check_width(dimensions, config.width, name)


def check_width(dimensions: int | None, dim: int, name: str = "dimensions") -> None:
    """Refuse more numbers than the width `dim`."""
    if dimensions is not None:
        integer(name, dimensions, 1, dim, " (the model's width) or null")


def before(embedder: Embedder, name: str | None, where: str = "prompt_name") -> str:
    """The text that comes before those that are embedded for the purpose `name`, or for none that is said."""
    if name is None:
        name = embedder.default_prompt
    elif name not in embedder.prompts:
        known = " or ".join(map(repr, sorted(embedder.prompts))) or "left out: the model has none"
        raise RequestError(where, f"must be {known}, got {shown(name)}")
    return "" if name is None else embedder.prompts[name]


def prepare(prompt: Any, first: str, embedder: Embedder, tokenizer: Tokenizer | None) -> Any:
    """A prompt with `first` before its text, and with its tokens where the embedder truncates texts.

    A prompt that is token ids, or empty, is as it was.
    """
    given = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
    text = given.get("prompt")
    if given.get("prompt_token_ids") is not None or not isinstance(text, str) or not text:
        return prompt
    found = {**given, "prompt": first + text}
    if embedder.max_tokens is not None and tokenizer is not None:
        try:
            found["prompt_token_ids"] = encode(embedder, tokenizer, found["prompt"])
        except PromptError as error:
            raise RequestError("prompt", str(error)) from None
    return found


def encode(embedder: Embedder, tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text with its prompt, truncated where the model's folder says so."""
    if embedder.max_tokens is None:
        return tokenizer.encode(text)
    return tokenizer.encode_truncated(text, embedder.max_tokens)


def embedding(output: RequestOutput, dimensions: int | None = None, normalize: bool = True) -> EmbeddingRequestOutput:
    """The embedding that a finished request has: its first `dimensions` numbers, scaled to length 1 or as they are."""
    if output.pooled is None:
        raise RuntimeError(f"the request {output.request_id} has no embedding: it ended before its prompt did")
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
