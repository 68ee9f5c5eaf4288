"""One token stream under generation: what the scheduler and the page table know of it."""

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..api.params import SamplingParams

if TYPE_CHECKING:
    from .grammar import Constraint
    from .pooling import Pool


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and its output so far.

    tokens         |---- prompt ----|-- output --|?|      ? = drawn on the device, not read back yet (`pending`)
    num_computed   ----------------------------->         rows whose keys and values are written or on their way

    The catch-up rule: each step brings `num_computed` closer to `num_tokens`, and a sequence whose rows reach
    `num_tokens` draws its next token.
    """

    index: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    max_tokens: int
    rank: float  # its place in the queue, the lowest first
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    scored: bool = False  # the log-probabilities of its tokens are wanted
    lockstep: bool = False  # its next step needs its last token on the host
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: tuple[int, int] = (0, 0)
    request: Any = None  # the `Request` whose answer this is, until the answer ends
    num_computed: int = 0
    pending: int = 0
    slot: int = -1
    replica: int = 0  # of those that have slots and pages of their own, the one that serves it
    begun: bool = False  # since it got its slot
    pages: list[list[int]] = field(default_factory=list)  # one list a cache group, by logical page; 0 = given back
    party: Hashable = None  # for whom it is: those who are served share alike
    salt: Hashable = None  # only sequences with the same one share pages
    num_cached: int = 0  # tokens of the prompt that were found computed when it was admitted first
    node: Any = None  # where its last entered page is in the tree of prefixes
    num_entered: int = 0  # full pages that are in that tree
    trusted: bool = True  # what it has computed may be shared
    fetch: Any = None  # the reading of its beginning from disk: not asked for, under way, or over (True)
    num_preemptions: int = 0
    finish_reason: str | None = None
    prompt_scores: list | None = None  # one entry a prompt token after the first, when they were asked for
    constraint: "Constraint | None" = None  # what its tokens may be, by those before them
    pool: "Pool | None" = None  # its prompt's hidden states are wanted, and no token

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def shares_prefix(self) -> bool:
        """Whether rows that others computed will do: not where each prompt token's score is wanted."""
        return self.prompt_scores is None

    @property
    def missing(self) -> int:
        """Rows that the next step should compute; 0 when there is nothing to do but wait."""
        if self.num_output + self.pending >= self.max_tokens or (self.lockstep and self.pending):
            return 0
        return self.num_tokens - self.num_computed


def seed_of(base: int, index: int) -> tuple[int, int]:
    """The two words of a sequence's seed: those of the request, spread by the index when n > 1."""
    mixed = (base + index * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    return mixed >> 32, mixed & 0xFFFFFFFF


def sequences_of(
    tokens: Seq[int], params: SamplingParams, max_len: int, rank: float, eos: frozenset[int], base: int
) -> list[Sequence]:
    """The sequences of a request, as far as its sampling parameters tell."""
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
            seed=seed_of(base, index),
            scored=params.scored,
        )
        for index in range(params.num_sequences)
    ]
