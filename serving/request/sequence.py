"""A sequence being generated, as the scheduler and the page table see it."""

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ...model.config import FAR
from ..api.outputs import FinishReason
from ..api.params import SamplingParams
from ..speculative.draft_state import DraftState
from .media import PrefixKeys, PromptMedia

if TYPE_CHECKING:
    from .grammar import Constraint
    from .pooling import Pool


class Score(NamedTuple):
    """The log-probabilities that a step computes for a token."""

    token: int
    logprob: float
    rank: int
    best: Any  # array of token ids
    best_logprobs: Any
    wanted_logprobs: Any  # of `logprob_token_ids`


@dataclass(eq=False, slots=True)
class SequenceCache:
    """The page table's state of a sequence.

    Other modules write only `salt`, `num_cached` and `prefetched`.
    """

    salt: Hashable = None  # only sequences with the same salt share pages
    # one list per cache group, by logical page; 0 = released
    pages: list[list[int]] = field(default_factory=list)
    num_indexed: int = 0  # full pages that are in the prefix tree
    num_cached: int = 0  # prompt tokens that were in the cache when it was first admitted
    trusted: bool = True  # its pages may be shared
    load: Future | None = None  # its prefix is being read from disk
    prefetched: bool = False  # the wanted part of its prefix has been read from disk

    @property
    def num_pages(self) -> int:
        """Pages in each group; 0 for a model without pages."""
        return len(self.pages[0]) if self.pages else 0


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and its output so far.

    tokens         |---- prompt ----|-- output --|?|      ? = drawn on the device, not read back yet
    (`pending`) num_computed   ----------------------------->         tokens whose keys and values
    are written or under way;
                                                          drafts count until they are known to be
                                                          wrong

    The catch-up rule: each step brings `num_computed` closer to `num_tokens`, and a sequence that
    reaches `num_tokens` draws its next token. With draft tokens (`DraftState`) the step samples
    after each of them too. Those that equal the sampled token in their place are accepted, and
    computed already.
    """

    index: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    max_tokens: int
    rank: float  # the lowest is served first
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    scored: bool = False  # the log-probabilities of its tokens are wanted
    needs_host_token: bool = False  # its next step needs its last token on the host
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: tuple[int, int] = (0, 0)
    second: int = FAR  # where its second text begins, of a pair that a model reads together
    request: Any = None  # the `Request` whose answer this is, until the answer ends
    num_computed: int = 0
    pending: int = 0
    slot: int = -1
    replica: int = 0  # the one that serves it: each has slots and pages of its own
    begun: bool = False  # a step has computed some of it since it got its slot
    tenant: Hashable = None  # for whom it is served: tenants get equal shares
    adapter: Any = None  # what is added to the weights for it
    adapter_slot: int = -1  # on the device, while it runs
    cache: SequenceCache = field(default_factory=SequenceCache)
    draft: DraftState = field(default_factory=DraftState)
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    # one entry a prompt token after the first, where they are wanted
    prompt_scores: list | None = None
    constraint: "Constraint | None" = None  # which token may be next
    pool: "Pool | None" = None  # its prompt's hidden states are wanted, and no token
    media: PromptMedia | None = None  # what its prompt shows beside text

    @property
    def keys(self) -> Seq[int]:
        """The tokens as the prefix tree compares them, with the content of media."""
        return self.tokens if self.media is None else PrefixKeys(self.tokens, self.media)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def assumes_all_accepted(self) -> bool:
        """Its next step is scheduled before the draft tokens of the one in flight are known."""
        return self.pending > 0 and self.draft.is_on_device

    @property
    def is_speculating(self) -> bool:
        """Whether its next step verifies or makes draft tokens."""
        return bool(
            self.draft.waits_for_host or self.draft.num_requested or self.assumes_all_accepted
        )

    @property
    def needs_host_sync(self) -> bool:
        """The host must know its last token before it plans its next step."""
        return (
            self.needs_host_token
            or self.draft.waits_for_host
            or (self.draft.num_verifying > 0 and self.num_output < self.params.min_tokens)
        )

    @property
    def sure(self) -> int:
        """Computed tokens that no rejected draft can take back."""
        return min(self.num_computed, len(self.tokens))

    @property
    def shares_prefix(self) -> bool:
        """Whether cached pages may be used, which scores of all prompt tokens rule out."""
        return self.prompt_scores is None

    @property
    def missing(self) -> int:
        """Number of tokens to compute in the next step; 0 while the sequence must wait."""
        num_tokens = len(self.tokens) + self.pending
        if num_tokens - self.num_prompt >= self.max_tokens or (
            self.pending and self.needs_host_sync
        ):
            return 0
        return num_tokens - self.num_computed


def seed_of(request_seed: int, index: int) -> tuple[int, int]:
    """Return the two 32-bit halves of a sequence's seed, derived from the request's seed."""
    mixed = (request_seed + index * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    return mixed >> 32, mixed & 0xFFFFFFFF


def sequences_of(
    tokens: Seq[int],
    params: SamplingParams,
    max_len: int,
    rank: float,
    eos: frozenset[int],
    request_seed: int,
) -> list[Sequence]:
    """Create the sequences of a request from its sampling parameters."""
    budget = max_len - len(tokens)
    stops = frozenset(params.stop_token_ids)
    return [
        Sequence(
            index=index,
            tokens=list(tokens),
            num_prompt=len(tokens),
            params=params,
            max_tokens=budget if params.max_tokens is None else min(params.max_tokens, budget),
            rank=rank,
            stop_ids=stops if params.ignore_eos else stops | eos,
            eos_ids=eos - stops,
            seed=seed_of(request_seed, index),
            scored=params.scored,
        )
        for index in range(params.num_sequences)
    ]
