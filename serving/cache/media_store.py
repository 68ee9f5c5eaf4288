"""Which rows of the device's media store hold the embeddings of which item."""

from collections import OrderedDict
from collections.abc import Hashable

from ..request.media import MediaItem

BLOCK = 64  # rows


class MediaStore:
    """Rows of the device's store by content and salt; the least recently used items are evicted.

    An item's rows are computed before the first step that reads them, and steps run on the device
    in the order in which they are planned. So rows may be given to another item as soon as the
    step that reads them is planned, and nothing else holds them.

    Args:
        num_rows: Rows of the store.
        max_step_rows: Rows to encode before one step, or those of a single item that has more.
    """

    def __init__(self, num_rows: int, max_step_rows: int):
        self.num_rows = num_rows // BLOCK * BLOCK
        self.max_step_rows = max_step_rows
        # by (salt, digest): blocks, the least recently used first
        self.blocks: OrderedDict[tuple[Hashable, int], list[int]] = OrderedDict()
        self.free_blocks: list[int] = []
        self.in_step: set[tuple[Hashable, int]] = set()  # items that the planned step reads
        self.unencoded: dict[tuple[Hashable, int], MediaItem] = {}  # reserved for the next step
        self.num_encoded = 0
        self.forget()

    def forget(self) -> None:
        """Forget all rows, since the device state is new."""
        self.blocks.clear()
        self.free_blocks = list(range(self.num_rows // BLOCK))
        self.in_step.clear()
        self.unencoded.clear()

    def begin_step(self) -> None:
        """Begin to plan a step; what a plan that was not launched has reserved is free again."""
        for key in self.unencoded:
            self.free_blocks += self.blocks.pop(key)
        self.unencoded.clear()
        self.in_step.clear()

    def reserve(self, salt: Hashable, item: MediaItem) -> bool:
        """Have the item's rows in the store when the planned step runs; False if the other items
        of this step leave too little room, or take as long to encode as other sequences may wait.
        """
        key = salt, item.digest
        if key in self.blocks:
            self.blocks.move_to_end(key)
            self.in_step.add(key)
            return True
        rows_to_encode = sum(reserved.num_rows for reserved in self.unencoded.values())
        if rows_to_encode and rows_to_encode + item.num_rows > self.max_step_rows:
            return False
        count = -(-item.num_rows // BLOCK)
        evictable_keys = [stored for stored in self.blocks if stored not in self.in_step]
        num_evictable = sum(len(self.blocks[stored]) for stored in evictable_keys)
        if count > len(self.free_blocks) + num_evictable:
            return False
        for stored in evictable_keys:
            if len(self.free_blocks) >= count:
                break
            self.free_blocks += self.blocks.pop(stored)
        self.blocks[key] = [self.free_blocks.pop() for _ in range(count)]
        self.in_step.add(key)
        self.num_encoded += 1
        self.unencoded[key] = item
        return True

    def rows(self, salt: Hashable, item: MediaItem, first: int, stop: int) -> list[int]:
        """The store's rows of some of the item's rows."""
        blocks = self.blocks[salt, item.digest]
        return [blocks[row // BLOCK] * BLOCK + row % BLOCK for row in range(first, stop)]

    def take_unencoded(self) -> list[tuple[MediaItem, list[int]]]:
        """Take the items to encode before the next step, each with its rows of the store."""
        items = [
            (item, self.rows(salt, item, 0, item.num_rows))
            for (salt, _), item in self.unencoded.items()
        ]
        self.unencoded.clear()
        return items
