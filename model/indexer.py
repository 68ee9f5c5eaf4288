"""The indexer of DeepSeek-V3.2's sparse attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Indexer:
    """Queries and keys, smaller than those of attention, that select the `count` best-scoring
    tokens to attend to.

    Its keys are stored behind the layer's own in the same pages. A layer without `heads` reuses the
    selection of the layer before it.
    """

    count: int
    heads: int = 0
    dim: int = 0
    interleaved: bool = False  # rotary pairs are interleaved in the checkpoint
