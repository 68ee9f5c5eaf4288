"""The initial sampling state of a slot."""

import numpy as np

from ...ops.sampling import MAX_WANTED, SlotState
from ..request.sequence import Sequence


def first_row(seq: Sequence, computed: int, vocab: int, bias_V: np.ndarray | None) -> SlotState:
    """The state of a slot whose first `computed` tokens come from the prefix cache."""
    stop = np.zeros(vocab, bool)
    prompt = np.zeros(vocab, bool)
    stop[[token for token in seq.stop_ids if token < vocab]] = True
    prompt[seq.tokens[: min(computed, seq.num_prompt)]] = True
    counts = np.bincount(seq.tokens[seq.num_prompt : computed], minlength=vocab).astype(np.int32)
    logprob_ids = np.zeros(MAX_WANTED, np.int32)
    ids = seq.params.logprob_token_ids or ()
    logprob_ids[: len(ids)] = ids
    return SlotState(
        np.zeros(vocab, np.float32) if bias_V is None else bias_V, stop, counts, prompt, logprob_ids
    )


def bias_of(seq: Sequence, vocab: int) -> np.ndarray | None:
    """The bias of every token's logit, or None without any."""
    p = seq.params
    single = [word[0] for word in seq.bad_words if len(word) == 1]
    if not p.logit_bias and p.allowed_token_ids is None and not single:
        return None
    bias = np.zeros(vocab, np.float32)
    if p.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(p.allowed_token_ids)] = 0
    for token, value in (p.logit_bias or {}).items():
        bias[token] += value
    bias[single] = -np.inf
    return bias
