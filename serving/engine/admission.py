"""Makes requests, and refuses those that the engine could never serve."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...model.config import ModelConfig
from ...model.text.tokenizer import Tokenizer
from ...ops.sampling import MAX_BANS
from ..api.errors import RequestError, TooLong
from ..api.options import Pooling
from ..api.params import RequestOptions, SamplingParams
from ..api.validation import shown
from ..cache.page_pool import largest
from ..cache.page_table import PageTable
from ..device.step_shape import StepShape
from ..request.grammar import Grammars
from ..request.media import PromptMedia
from ..request.pooling import Pool
from ..request.request import Request
from ..request.sequence import sequences_of
from .scheduler import queue_priority

NO_ADAPTERS = "names an adapter, and this engine serves none: start it with enable_lora"


class Admission:
    """The limits of an engine, and the requests that it makes from prompts and parameters."""

    def __init__(
        self,
        config: ModelConfig,
        shape: StepShape,
        tables: list[PageTable],
        tokenizer: Tokenizer | None,
        max_len: int,
        seed: int = 0,
        needs_host_tokens: bool = False,
    ):
        self.config = config
        self.shape = shape
        self.tables = tables
        self.tokenizer = tokenizer
        self.max_len = max_len
        # the host must know each token before the next step of its sequence
        self.needs_host_tokens = needs_host_tokens
        self.grammars = None if tokenizer is None else Grammars(tokenizer, config.vocab_size)
        self.rng = np.random.default_rng(seed)

    @property
    def max_total_tokens(self) -> int:
        """Maximum number of tokens of prompt and answer."""
        return self.max_len + 1 if self.config.encodes else self.max_len

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum number of prompt tokens."""
        return (
            min(self.max_len, self.shape.max_tokens)
            if self.shape.whole_prompts
            else self.max_len - 1
        )

    def check(self, tokens: Sequence[int], params: SamplingParams, is_pooled: bool = False) -> None:
        """Refuse a request that can never be served; `is_pooled`: it asks for hidden states."""
        if not is_pooled and not self.config.writes:
            message = (
                "makes embeddings and writes no text; ask LLM.embed or /v1/embeddings, or "
                "another model"
            )
            if self.config.classes is not None:
                message = (
                    "classifies texts and writes none; ask LLM.classify or /classify, or "
                    "another model"
                )
            raise RequestError("model", message)
        if self.shape.whole_prompts:
            check_whole(tokens, self.max_len, self.shape.max_tokens)
        if not isinstance(params, SamplingParams):
            raise RequestError("sampling_params", f"must be SamplingParams, got {shown(params)}")
        check_prompt(tokens, self.config.vocab_size, self.max_total_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            check_listed(
                name, getattr(params, name), self.config.vocab_size, self.shape.num_logprobs
            )
        check_token_ids(params, self.config.vocab_size)
        self.check_positions(len(tokens), params.max_tokens)
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name) and self.tokenizer is None:
                raise RequestError(
                    name, "needs a tokenizer, and skip_tokenizer_init is set; use token ids"
                )

    def check_positions(self, num_prompt: int, max_tokens: int | None) -> None:
        """Refuse a request that the cache cannot hold, even alone."""
        max_len = self.max_total_tokens
        total = num_prompt + min(max_tokens or max_len, max_len - num_prompt)
        max_positions = largest(
            lambda num_tokens: self.tables[0].fits(num_tokens, self.shape.max_tokens), total
        )
        if max_positions < total:
            raise RequestError(
                "max_tokens",
                f"with the prompt {total} positions are needed; the KV cache holds {max_positions} at most",
            )

    def make_request(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        prompt: str | None,
        request_options: RequestOptions,
        pooling: Pooling | None,
        second: int,
        now: float,
        media: PromptMedia | None = None,
    ) -> Request:
        """Make a request that `check` has accepted; the arguments are those of `Engine.add`."""
        config = self.config
        grammar: Any = params.structured_outputs  # a mapping, once the parameters are parsed
        num_sequences = params.num_sequences
        bad_words = spelled(params.bad_words, self.tokenizer)
        constraints = [None] * num_sequences
        if grammar is not None and self.grammars is not None:
            constraints = self.grammars.constraints(grammar, num_sequences)
        eos = frozenset() if self.tokenizer is None else self.tokenizer.eos_token_ids
        base = (
            int(self.rng.integers(1 << 63))
            if params.seed is None
            else params.seed & ((1 << 64) - 1)
        )
        rank = queue_priority(request_options.priority, now)
        pooling = "last" if pooling and config.encodes else pooling  # the step itself has pooled
        sequences = sequences_of(tokens, params, self.max_total_tokens, rank, eos, base)
        needs_host_tokens = self.needs_host_tokens or any(len(word) > 1 for word in bad_words)
        for seq, constraint in zip(sequences, constraints, strict=True):
            seq.tenant, seq.cache.salt, seq.adapter = (
                request_options.share_key,
                request_options.cache_salt,
                request_options.adapter,
            )
            # pages that were computed with one adapter are of no use to another
            if seq.adapter is not None:
                seq.cache.salt = seq.adapter.key, request_options.cache_salt
            seq.bad_words = bad_words
            seq.constraint = constraint
            seq.second = second
            seq.media = media
            seq.needs_host_token = needs_host_tokens or constraint is not None
            seq.pool = (
                None
                if pooling is None
                else Pool(pooling, tokens, config.classes and config.classes.step)
            )
        if params.prompt_logprobs is not None or pooling in ("mean", "cls", "steps"):
            sequences[0].prompt_scores = [None] * (len(tokens) - 1)
        return Request(request_id, prompt, params, sequences, self.tokenizer, now)


def check_prompt(tokens: Sequence[int], vocab: int, max_len: int) -> None:
    """Refuse prompts that are empty or too long, and invalid token ids, which JAX would clamp."""
    if not tokens:
        raise RequestError("prompt", "is empty; it must have at least one token")
    are_valid = set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab
    for token in () if are_valid else tokens:
        if (
            isinstance(token, bool)
            or not isinstance(token, (int, np.integer))
            or not 0 <= token < vocab
        ):
            raise RequestError(
                "prompt",
                f"has the token id {shown(token)}, which is out of vocabulary: ids are "
                f"from 0 to {vocab - 1}",
            )
    if len(tokens) >= max_len:
        raise TooLong(
            "prompt",
            f"has {len(tokens)} tokens; at most {max_len - 1} fit, with one to generate: this "
            f"model's maximum context length is {max_len} (max_model_len)",
        )


def check_token_ids(params: SamplingParams, vocab: int) -> None:
    """Refuse parameters with invalid token ids."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
        for token in getattr(params, name) or ():
            if not 0 <= token < vocab:
                raise RequestError(
                    name,
                    f"has the token id {token}, which is out of vocabulary: ids are from 0 "
                    f"to {vocab - 1}",
                )


def check_listed(name: str, num_logprobs: int | None, vocab: int, listed: int) -> None:
    """Refuse more log-probabilities per position than a step returns."""
    if num_logprobs is not None and (vocab if num_logprobs == -1 else num_logprobs) > listed:
        all_of_them = f" (-1: the {vocab} of the vocabulary)" if num_logprobs == -1 else ""
        raise RequestError(
            name,
            f"must be at most the engine's max_logprobs, {listed}, got {num_logprobs}{all_of_them}",
        )


def check_whole(tokens: Sequence[int], max_len: int, max_rows: int) -> None:
    """Refuse inputs that an encoder cannot compute in one step, as bidirectional attention
    requires.
    """
    if len(tokens) > max_len:
        raise TooLong(
            "prompt",
            f"has {len(tokens)} tokens; this model reads at most {max_len} (max_model_len)",
        )
    if len(tokens) > max_rows:
        raise TooLong(
            "prompt",
            f"has {len(tokens)} tokens, and this model reads all of them in one step, which holds "
            f"{max_rows}; raise --max-num-batched-tokens",
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
        raise RequestError(
            "bad_words",
            f"make more than {MAX_BANS} runs of several tokens; give fewer or shorter ones",
        )
    return tuple(words)
