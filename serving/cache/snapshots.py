"""Snapshots of recurrent states, from which sequences with the same prefix continue."""

from ..request.sequence import Sequence
from .page_moves import PageMoves
from .page_pool import PagePool
from .prefix_tree import Node, PrefixTree


class Snapshots:
    """The cache group of snapshots: a page holds the recurrent states after the tokens of its node.

        positions     0 .......... 511 512 ....... 1023 1024 .... 1060
        snapshots                    x                x       x      every `distance` tokens, and at
                                                                     the end of a prompt's last full
                                                                     page

    Pages are referenced only while a step is planned: they are written, or copied into a slot,
    before the planned step, and are merely cached afterwards.
    """

    def __init__(self, pool: PagePool, group: int, distance: int):
        self.pool = pool
        self.group = group
        self.distance = -(-distance // pool.page_size) * pool.page_size
        self.saves: list[tuple[int, int, int]] = []  # (replica, slot, page), before the next step
        # (sequence, page, tokens), after the saves.
        self.loads: list[tuple[Sequence, int, int]] = []

    def last_full_page_end(self, seq: Sequence) -> int:
        """Return the end of a prompt's last full page, the furthest point at which the prompt is
        reused.
        """
        return (seq.num_prompt - 1) // self.pool.page_size * self.pool.page_size

    def tokens_to_snapshot(self, seq: Sequence, start: int, count: int) -> int:
        """Return how many of `count` tokens to compute at once, so that the states can be saved
        there.
        """
        snapshot_positions = (
            self.last_full_page_end(seq),
            (start // self.distance + 1) * self.distance,
        )
        return (
            min(
                (end for end in snapshot_positions if start < end < start + count),
                default=start + count,
            )
            - start
        )

    def should_save(self, seq: Sequence) -> bool:
        """Return whether to save the states at a sequence's current position."""
        start = seq.num_computed
        if not start or (start % self.distance and start != self.last_full_page_end(seq)):
            return False
        if seq.cache.num_indexed * self.pool.page_size != start:
            return False
        # After drafts the states may lag behind.
        return seq.begun and not seq.draft.num_verified and self.pool.num_free > 0

    def has_room(self, node: Node) -> bool:
        """Return whether the node's snapshot is on the device or can be restored for the planned
        step.
        """
        return node.pages[self.group] > 0 or self.pool.num_free > 0

    def flush(self, moves: PageMoves) -> None:
        """Add the copies to be made before the next step. Sequences without a slot are skipped."""
        moves.saves += self.saves
        # A sequence that was preempted and restarted continues from its latest snapshot.
        latest = {
            seq.slot: (seq.replica, page, seq.slot, tokens)
            for seq, page, tokens in self.loads
            if seq.slot >= 0
        }
        moves.loads += latest.values()

    def free(self, tree: PrefixTree) -> int:
        """Release the pages, so that they can be evicted; return how many became unreferenced."""
        pages = self.held_pages
        self.saves = []
        self.loads = []
        return sum(
            self.pool.release(page, cache=page in tree.node_by_page[self.group]) for page in pages
        )

    @property
    def held_pages(self) -> list[int]:
        """Pages that must not be evicted, once per pending copy."""
        return [*(page for *_, page in self.saves), *(page for _, page, _ in self.loads)]
