"""Admission: refuses, before anything is computed, what this engine could never serve."""

from collections.abc import Callable, Sequence

import numpy as np

from ...model.text.tokenizer import Tokenizer
from ...ops.sampling import MAX_BANS
from ..api.errors import RequestError, TooLong
from ..api.params import SamplingParams
from ..api.validation import shown
from ..cache.page_pool import largest

NO_ADAPTERS = "names an adapter, and this engine serves none: start it with enable_lora"


def check(
    tokens: Sequence[int],
    params: SamplingParams,
    vocab: int,
    max_len: int,
    fits: Callable[[int], bool],
    has_text: bool,
    listed: int,
) -> None:
    """`fits` says whether the cache holds so many positions. JAX would clamp a wrong token id in silence."""
    if not isinstance(params, SamplingParams):
        raise RequestError("sampling_params", f"must be SamplingParams, got {shown(params)}")
    if not tokens:
        raise RequestError("prompt", "is empty; it must have at least one token")
    plain = set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab
    for token in () if plain else tokens:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocab:
            raise RequestError(
                "prompt", f"has the token id {shown(token)}, which is out of vocabulary: ids are from 0 to {vocab - 1}"
            )
    if len(tokens) >= max_len:
        raise TooLong(
            "prompt",
            f"has {len(tokens)} tokens; at most {max_len - 1} fit, with one to generate: this model's maximum context "
            f"length is {max_len} (max_model_len)",
        )
    for name in ("logprobs", "prompt_logprobs"):
        check_listed(name, getattr(params, name), vocab, listed)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
        for token in getattr(params, name) or ():
            if not 0 <= token < vocab:
                raise RequestError(
                    name, f"has the token id {token}, which is out of vocabulary: ids are from 0 to {vocab - 1}"
                )
    total = len(tokens) + min(params.max_tokens or max_len, max_len - len(tokens))
    most = largest(fits, total)
    if most < total:
        raise RequestError(
            "max_tokens", f"with the prompt {total} positions are needed; the KV cache holds {most} at most"
        )
    for name in ("stop", "bad_words", "structured_outputs"):
        if getattr(params, name) and not has_text:
            raise RequestError(name, "needs a tokenizer, and skip_tokenizer_init is set; use token ids")


def check_listed(name: str, wanted: int | None, vocab: int, listed: int) -> None:
    """Refuse more log-probabilities of a position than a step lists."""
    if wanted is not None and (vocab if wanted == -1 else wanted) > listed:
        all_of_them = f" (-1: the {vocab} of the vocabulary)" if wanted == -1 else ""
        raise RequestError(name, f"must be at most the engine's max_logprobs, {listed}, got {wanted}{all_of_them}")


def check_whole(tokens: Sequence[int], max_len: int, max_rows: int) -> None:
    """Refuse what an encoder cannot read at once: each token sees those after it."""
    if len(tokens) > max_len:
        raise TooLong("prompt", f"has {len(tokens)} tokens; this model reads at most {max_len} (max_model_len)")
    if len(tokens) > max_rows:
        raise TooLong(
            "prompt",
            f"has {len(tokens)} tokens, and this model reads all of them in one step, which holds {max_rows}; raise "
            "--max-num-batched-tokens",
        )


def spelled(bad_words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The token ids of each bad word, at the start of a text and after a space."""
    words: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        assert tokenizer is not None, "words were let in without a tokenizer"
        for text in (word, " " + word.lstrip()):
            if ids := tuple(tokenizer.encode(text, add_special_tokens=False)):
                words[ids] = None
    if sum(len(ids) > 1 for ids in words) > MAX_BANS:
        raise RequestError("bad_words", f"make more than {MAX_BANS} runs of several tokens; give fewer or shorter ones")
    return tuple(words)
