"""Classification heads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Classes:
    """A head that scores classes instead of tokens."""

    labels: tuple[str, ...]
    activation: str  # of the scores: "softmax", "sigmoid" or "none"
    # (a, b): the class's score is the logit of token a less the logit of token b (-1: none).
    tokens: tuple[tuple[int, int], ...] = ()
    own_head: bool = False  # `tokens` are rows of an lm_head, not of the embedding
    bias: bool = False
    name: str = "score"  # of the head's tensors in the checkpoint
    deep: bool = False  # two dense layers with biases, and a ReLU between
    step: int | None = None  # the token that ends a reasoning step, if each step is scored
