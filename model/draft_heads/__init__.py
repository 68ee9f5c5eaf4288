"""Heads that draft from a model's hidden states: Medusa's, EAGLE's, and layers of checkpoints for further tokens.

Each of Medusa's heads guesses the token at one place ahead (`guess`). The others are decoder layers, which guess token
by token (`run`, then `logits`). Their row of a position holds the token after it and the position's feature, which is
the model's at first, and the layers' own for tokens that are drafted.
"""

from .checkpoint import load, save
from .draft_layers import logits, run, take_features
from .heads import KINDS, DraftHeads, heads_of, read_heads
from .medusa import guess
from .weights import DraftHeadsWeights, abstract

__all__ = [
    "KINDS",
    "DraftHeads",
    "DraftHeadsWeights",
    "abstract",
    "guess",
    "heads_of",
    "load",
    "logits",
    "read_heads",
    "run",
    "save",
    "take_features",
]
