"""Models with classes in place of tokens."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Classes:
    """A head that gives each class a number, in place of one for each token."""

    labels: tuple[str, ...]
    activation: str  # what makes probabilities of them: "softmax", "sigmoid" or "none"
    tokens: tuple[tuple[int, int], ...] = ()  # they are these tokens' logits, less those of the others (-1: of none)
    own_head: bool = False  # by the rows of a head of the model's own, not of its embedding
    bias: bool = False
    name: str = "score"  # of the head's tensors
    deep: bool = False  # the head is two products with biases, and a ReLU between them
    step: int | None = None  # it judges each step of an answer, and this token ends one
