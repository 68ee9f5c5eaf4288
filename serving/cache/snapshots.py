"""Snapshots: what layers with a state keep of a sequence after some of its tokens, for others that begin alike."""

from ..request.sequence import Sequence
from .page_moves import PageMoves
from .page_pool import PagePool
from .prefix_tree import Node, PrefixTree


class Snapshots:
    """The pages of a cache group more than windows: one holds the states after the tokens of its node.

        positions     0 .......... 511 512 ....... 1023 1024 .... 1060
        snapshots                    x                x       x         every `distance` tokens, and at the end of the
                                                                        last full page of a prompt

    No sequence owns one for longer than a plan: it is written, or copied into a slot, before the step that is planned,
    and then only cached.
    """

    def __init__(self, pool: PagePool, group: int, distance: int):
        self.pool, self.group = pool, group
        self.distance = -(-distance // pool.page_size) * pool.page_size
        self.saves: list[tuple[int, int, int]] = []  # (replica, slot, page), before the next step
        self.loads: list[tuple[Sequence, int, int]] = []  # (sequence, page, tokens), after these

    def last_full(self, seq: Sequence) -> int:
        """The end of a prompt's last full page: who asks for the prompt again needs no more than that."""
        return (seq.num_prompt - 1) // self.pool.page_size * self.pool.page_size

    def stops(self, seq: Sequence, start: int, count: int) -> int:
        """How many of so many rows a sequence computes at once, so that its states can be kept where it stops."""
        ends = self.last_full(seq), (start // self.distance + 1) * self.distance
        return min((end for end in ends if start < end < start + count), default=start + count) - start

    def wanted(self, seq: Sequence) -> bool:
        """Whether there is to be one of where a sequence stands."""
        start = seq.num_computed
        if not start or (start % self.distance and start != self.last_full(seq)):
            return False
        if seq.cache.num_indexed * self.pool.page_size != start:
            return False
        return seq.begun and not seq.num_drafts and self.pool.free > 0  # after drafts the states may be behind

    def has_room(self, node: Node) -> bool:
        """Whether the node's is on the device, or could be brought there for the step that is planned."""
        return node.pages[self.group] > 0 or self.pool.free > 0

    def flush(self, moves: PageMoves) -> None:
        """What is to be copied before the next step. A sequence that has lost its slot since needs nothing."""
        moves.saves += self.saves
        # One that gave way and began again goes on from what it began with last.
        latest = {seq.slot: (seq.replica, page, seq.slot, tokens) for seq, page, tokens in self.loads if seq.slot >= 0}
        moves.loads += latest.values()

    def free(self, tree: PrefixTree) -> int:
        """From now on they may be evicted again; how many of them."""
        held, self.saves, self.loads = self.held, [], []
        return sum(self.pool.release(page, cache=page in tree.node_of[self.group]) for page in held)

    @property
    def held(self) -> list[int]:
        """Those that must not be evicted, as often as they are to be copied."""
        return [*(page for *_, page in self.saves), *(page for _, page, _ in self.loads)]
