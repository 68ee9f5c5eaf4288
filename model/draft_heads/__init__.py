"""Draft heads that use a model's hidden states: Medusa, EAGLE, EAGLE-3 and multi-token prediction.

Each Medusa head predicts the token at one position ahead (`medusa_logits`). The others are decoder
layers that draft autoregressively (`run`, then `logits`). Their input at a position is the token
after it and the position's feature: at first the target's, then the layers' own.
"""

from .checkpoint import load, save
from .draft_layers import logits, run, take_features
from .heads import KINDS, DraftHeads, parse_heads, read_heads
from .medusa import medusa_logits
from .weights import DraftHeadsWeights, abstract

__all__ = [
    "KINDS",
    "DraftHeads",
    "DraftHeadsWeights",
    "abstract",
    "medusa_logits",
    "parse_heads",
    "load",
    "logits",
    "read_heads",
    "run",
    "save",
    "take_features",
]
