"""What a caller gets back: the texts, tokens and log-probabilities of one request, and its times."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
# The `stop_reason` of an answer that ends with "error" because the request itself bans every token that may come next.
NO_TOKEN_ALLOWED = "no token is allowed next"
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "timeout", "error")


@dataclass(frozen=True)
class Logprob:
    """One candidate at one position; `rank` 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class FlatLogprobs(Sequence[Mapping[int, Logprob]]):
    """Log-probabilities by position, as in a list of dicts, and held in a few long lists.

    The candidates at position i are those from `start_indices[i]` to `end_indices[i]` of the other lists.
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
        """One more position; None where nothing precedes it."""
        self.append_candidates(
            (token, entry.logprob, entry.rank, entry.decoded_token) for token, entry in (candidates or {}).items()
        )

    def append_candidates(self, candidates: Iterable[tuple[int, float, int | None, str | None]]) -> None:
        """One more position, of which each candidate is (token, log-probability, rank, text)."""
        self.start_indices.append(len(self.token_ids))
        for token, logprob, rank, text in candidates:
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.decoded_tokens.append(text)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, at) -> Any:  # a dict, or the same for a slice
        if isinstance(at, slice):
            return FlatLogprobs(self[index] for index in range(*at.indices(len(self))))
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[at], self.end_indices[at])
        }

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, FlatLogprobs) else NotImplemented


@dataclass(frozen=True)
class CompletionOutput:
    """One of the `n` answers to a request; `finish_reason` is None while it is still being written."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Mapping[int, Logprob]] | None = None  # by position: the chosen token and the likeliest
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it; None for the model's own end
    lora_request = None  # no field: vLLM's name for what there is not

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)  # hundreds are made a step, and a frozen one takes four times as long
class Fresh:
    """What one answer got since the last look at it."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    drafted: Sequence[int] = ()  # places in `token_ids` of those that were drafted


class Delta(NamedTuple):
    """What a request got since the last look at it: the answers that got something."""

    parts: Sequence[Fresh]
    finished: bool


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic()`, and how many there were."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    num_draft_tokens: int = 0  # that were verified
    num_accepted_tokens: int = 0  # of these, tokens of the answer

    @property
    def first_token_latency(self) -> float | None:
        """vLLM's name of `time_to_first_token`."""
        return self.time_to_first_token

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt and its answers so far; the last one of a stream has `finished` set."""

    request_id: str
    prompt: str | None  # None where the prompt came as token ids
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool = True
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None  # the first is None: nothing precedes it
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    pooled: Sequence[float] | None = None  # of an embedding request: the hidden state, not normalised
    # No fields: vLLM's names for what there is not.
    encoder_prompt = encoder_prompt_token_ids = lora_request = kv_transfer_params = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """A text as a point: a vector of length 1."""

    embedding: Sequence[float]

    @property
    def data(self) -> Sequence[float]:
        """What `encode` is asked for, under its own name."""
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
    """The probability of each class."""

    probs: Sequence[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    """The classes of one prompt."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True)
class PoolingOutput:
    """What a model's head says of a text, as it is: a reward is its one number."""

    data: Sequence[float]


@dataclass(frozen=True)
class PoolingRequestOutput:
    """What the head says of one prompt."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """What a model says of two texts: a mean log-probability, a probability or a cosine, see `LLM.score`."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of one pair of texts; `prompt_token_ids` are those of both."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int = 0
    finished: bool = True
