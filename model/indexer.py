"""Which of a long context's tokens latent attention reads, as DeepSeek-V3.2 chooses them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Indexer:
    """Keys and queries of its own, smaller than those of attention: a row reads the `count` tokens that score best.

    Its keys lie behind the layer's own in the same pages. A layer without `heads` reads what the one before it chose.
    """

    count: int
    heads: int = 0
    dim: int = 0
    interleaved: bool = False  # the checkpoint keeps its rotary pairs side by side
