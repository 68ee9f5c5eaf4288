"""Which rows of the device's media store hold the embeddings of which item."""

from collections import OrderedDict
from collections.abc import Hashable

from ..request.media import MediaItem

BLOCK = 64  # rows


class MediaStore:
    """Rows of the device's store by content and salt; the least recently used items are evicted.

    A sequence asks for an item when it reaches its placeholders, and waits until the item is
    encoded. Steps run on the device in the order in which they are planned, so rows may be given
    to another item as soon as the step that reads them is planned, and nothing else holds them.

    No sequence waits forever: the first in the order of planning gets its item, since only items
    that are being encoded keep it waiting, and it reads the item in the next plan.

    Args:
        num_rows: Rows of the store.
        max_pending_rows: Rows of the items that wait for the encoder, or of a single item that has
            more.
    """

    def __init__(self, num_rows: int, max_pending_rows: int):
        self.num_rows = num_rows // BLOCK * BLOCK
        self.max_pending_rows = max_pending_rows
        # by (salt, digest): blocks, the least recently used first
        self.blocks: OrderedDict[tuple[Hashable, int], list[int]] = OrderedDict()
        self.free_blocks: list[int] = []
        self.in_step: set[tuple[Hashable, int]] = set()  # items that the planned step reads
        # items that have blocks and are not encoded yet, in the order in which they will be
        self.pending: dict[tuple[Hashable, int], MediaItem] = {}
        self.num_encoded = 0
        self.forget()

    def forget(self) -> None:
        """Forget all rows, since the device state is new."""
        self.blocks.clear()
        self.free_blocks = list(range(self.num_rows // BLOCK))
        self.in_step.clear()
        self.pending.clear()

    def begin_step(self) -> None:
        """Begin to plan a step."""
        self.in_step.clear()

    def request(self, salt: Hashable, item: MediaItem) -> bool:
        """Whether the planned step can read the item's rows. If not, they are encoded, as soon as
        there is room for them.
        """
        key = salt, item.digest
        if key in self.pending:
            return False
        if key in self.blocks:
            self.blocks.move_to_end(key)
            self.in_step.add(key)
            return True
        pending_rows = sum(pending.num_rows for pending in self.pending.values())
        if pending_rows and pending_rows + item.num_rows > self.max_pending_rows:
            return False
        count = -(-item.num_rows // BLOCK)
        evictable_keys = [
            stored
            for stored in self.blocks
            if stored not in self.in_step and stored not in self.pending
        ]
        num_evictable = sum(len(self.blocks[stored]) for stored in evictable_keys)
        if count > len(self.free_blocks) + num_evictable:
            return False
        for stored in evictable_keys:
            if len(self.free_blocks) >= count:
                break
            self.free_blocks += self.blocks.pop(stored)
        self.blocks[key] = [self.free_blocks.pop() for _ in range(count)]
        self.pending[key] = item
        return False

    def rows(self, salt: Hashable, item: MediaItem, first: int, stop: int) -> list[int]:
        """The store's rows of some of the item's rows."""
        blocks = self.blocks[salt, item.digest]
        return [blocks[row // BLOCK] * BLOCK + row % BLOCK for row in range(first, stop)]

    def first_pending(self) -> tuple[Hashable, MediaItem] | None:
        """The salt and the item that is encoded next."""
        return next(((salt, item) for (salt, _), item in self.pending.items()), None)

    def finish(self, salt: Hashable, item: MediaItem) -> None:
        """Let steps read an item, whose rows are encoded now."""
        del self.pending[salt, item.digest]
        self.num_encoded += 1

    def drop(self, salt: Hashable, item: MediaItem) -> None:
        """Give up an item that cannot be encoded."""
        del self.pending[salt, item.digest]
        self.free_blocks += self.blocks.pop((salt, item.digest))
