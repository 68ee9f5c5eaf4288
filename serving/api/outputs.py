"""Results of a request: texts, tokens, log-probabilities and timestamps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
# `stop_reason` of an answer that ends with "error" because the request bans every possible next
# token.
NO_TOKEN_ALLOWED = "no token is allowed next"
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "timeout", "error")


@dataclass(frozen=True)
class Logprob:
    """A candidate at a position; `rank` 1 is the likeliest token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class FlatLogprobs(Sequence[Mapping[int, Logprob]]):
    """Log-probabilities by position, like a list of dicts but stored in a few long lists.

    The candidates at position i are those from `start_indices[i]` to `end_indices[i]` of the other
    lists.
    """

    def __init__(self, positions: Iterable[Mapping[int, Logprob] | None] = ()):
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        for position in positions:
            self.append(position)

    def append(self, candidates: Mapping[int, Logprob] | None) -> None:
        """Append a position; None if nothing precedes it."""
        self.append_candidates(
            (token, entry.logprob, entry.rank, entry.decoded_token)
            for token, entry in (candidates or {}).items()
        )

    def append_candidates(
        self, candidates: Iterable[tuple[int, float, int | None, str | None]]
    ) -> None:
        """Append a position, each candidate of which is (token, log-probability, rank, text)."""
        self.start_indices.append(len(self.token_ids))
        for token, logprob, rank, text in candidates:
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.decoded_tokens.append(text)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index) -> Any:  # a dict, or a FlatLogprobs for a slice
        if isinstance(index, slice):
            return FlatLogprobs(self[i] for i in range(*index.indices(len(self))))
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, FlatLogprobs) else NotImplemented


@dataclass(frozen=True)
class CompletionOutput:
    """One of the `n` completions of a request; `finish_reason` is None until it ends."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Mapping[int, Logprob]] | None = None  # by position: chosen, then likeliest
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # stop token or stop string that ended it; None for EOS
    lora_request = None  # class attribute: vLLM's name for a feature that does not exist here

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)  # hundreds are created per step, and a frozen one takes four times as long
class CompletionDelta:
    """The update of one completion since the last read."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    drafted: Sequence[int] = ()  # indices in `token_ids` of accepted draft tokens


class RequestDelta(NamedTuple):
    """The update of a request since the last read: the completions that changed."""

    completions: Sequence[CompletionDelta]
    finished: bool


@dataclass(frozen=True)
class RequestMetrics:
    """Timestamps of a request in seconds of `time.monotonic()`, and counts."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    num_draft_tokens: int = 0  # verified draft tokens
    num_accepted_tokens: int = 0  # draft tokens that became part of the answer

    @property
    def first_token_latency(self) -> float | None:
        """vLLM's name for `time_to_first_token`."""
        return self.time_to_first_token

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_in_queue(self) -> float | None:
        return (
            None
            if self.first_scheduled_time is None
            else self.first_scheduled_time - self.arrival_time
        )


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt and its completions so far; a stream's last one has `finished` set."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool = True
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None  # the first is None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    pooled: Any = None  # hidden state of an embedding request, not normalised
    # Class attributes: vLLM's names for features that do not exist here.
    encoder_prompt = encoder_prompt_token_ids = lora_request = kv_transfer_params = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a text; its length is 1 unless the model's is not normalised."""

    embedding: Sequence[float]

    @property
    def data(self) -> Sequence[float]:
        """The embedding, under the name that `LLM.encode` has for it."""
        return self.embedding

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True)
class ClassificationOutput:
    """Probabilities of the classes."""

    probs: Sequence[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    """Class probabilities of one prompt."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True)
class PoolingOutput:
    """Raw values of a model's head for a text; a reward is a single value."""

    data: Sequence[float]


@dataclass(frozen=True)
class PoolingRequestOutput:
    """Values of the head for one prompt."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """Score of two texts: a mean log-probability, a probability or a cosine; see `LLM.score`."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of one pair of texts; `prompt_token_ids` are those of both."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int = 0
    finished: bool = True
