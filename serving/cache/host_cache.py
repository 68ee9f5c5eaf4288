"""Where pages go that the device has no room for: to the host's memory, and from there to disk."""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from .disk_cache import DiskPages
from .prefix_tree import Copy, Node


class Tiers:
    """Copies of pages in host memory, the ones used longest ago first to go, and behind it a folder on disk.

        device page ──evicted──> copy in host memory ──no room──> file
             ^                      │        ^                     │
             └──────wanted again────┘        └────wanted again─────┘  (read in a thread before the request gets a slot)

    A copy stays when its page is back on the device, so that what leaves again need not be copied again.
    """

    def __init__(
        self,
        page_bytes: Seq[int],
        host_bytes: int,
        disk: DiskPages | None = None,
        identity: bytes = b"",
        stamp: bytes = b"",
    ):
        self.page_bytes, self.capacity, self.disk = tuple(page_bytes), host_bytes, disk
        self.identity = identity  # of all that a page's bytes depend on beside its tokens
        self.stamp = stamp  # of the model's files on this machine: on disk pages outlive what was in them
        self.copies: OrderedDict[Copy, None] = OrderedDict()
        self.total = 0
        self.loads: set[Future] = set()
        self.writes: deque[tuple[Future, int]] = deque()  # under way, with their sizes
        self.reader = ThreadPoolExecutor(1, "quire-pages-in") if disk is not None else None
        self.writer = ThreadPoolExecutor(1, "quire-pages-out") if disk is not None else None

    def spill(self, node: Node, group: int) -> Copy | None:
        """A copy that is to be filled with what a page of the device holds; None if there is one, or no room."""
        if group in node.copies:
            self.use(node.copies[group])
        elif self.page_bytes[group] <= self.capacity:
            self.keep(copy := Copy(node, group))
            return copy
        return None

    def keep(self, copy: Copy) -> None:
        if copy.group not in copy.node.copies:
            copy.node.copies[copy.group] = copy
            self.copies[copy] = None
            self.total += self.page_bytes[copy.group]

    def use(self, copy: Copy) -> Copy:
        self.copies.move_to_end(copy)
        return copy

    def trim(self, patiently: bool = False) -> list[Node]:
        """Let the copies used longest ago go, to disk if there is one; the nodes that lost one.

        When the disk lags behind by as much as the host may hold, it is waited for, or the copies are lost.
        """
        losers = []
        while self.total > self.capacity:
            copy = next(iter(self.copies))
            if copy.data is None:
                break  # it could not be saved yet, and those after it are younger
            self.drop(copy)
            losers.append(copy.node)
            if self.disk is not None and not copy.saved:
                self.save_later(copy, patiently)
        return losers

    def drop(self, copy: Copy) -> None:
        del self.copies[copy], copy.node.copies[copy.group]
        self.total -= self.page_bytes[copy.group]

    def lose(self) -> list[Node]:
        """The device has lost its pages: copies that were on their way will not come."""
        lost = [copy for copy in self.copies if copy.data is None]
        for copy in lost:
            self.drop(copy)
        return [copy.node for copy in lost]

    def distrust(self, node: Node) -> None:
        """Remove what is known of the node's tokens, wherever it is."""
        for copy in list(node.copies.values()):
            self.drop(copy)
        if self.disk is not None:
            for group in range(len(self.page_bytes)):  # after what is being written
                self.writer.submit(self.disk.discard, self.name(node, group))

    def clear(self) -> list[Node]:
        """Remove everything; the nodes that had copies."""
        nodes = [copy.node for copy in self.copies]
        for copy in list(self.copies):
            self.drop(copy)
        if self.disk is not None:
            self.writer.submit(self.disk.clear).result()  # after what is being written
        return nodes

    def save_later(self, copy: Copy, patiently: bool) -> None:
        """Write the copy in a thread."""
        size = self.page_bytes[copy.group]
        while self.writes and (self.writes[0][0].done() or patiently and self.behind + size > self.capacity):
            self.writes.popleft()[0].result()
        if self.behind + size <= self.capacity:
            self.writes.append((self.writer.submit(self.save, copy), size))

    @property
    def behind(self) -> int:
        """Bytes that are not written yet."""
        return sum(size for _, size in self.writes)

    def save(self, copy: Copy) -> None:
        node, group = copy.node, copy.group
        copy.saved = self.disk.write(self.name(node, group), self.digest(node), group, token_bytes(node), copy.content)

    def digest(self, node: Node) -> bytes:
        """Of all tokens up to the node's last, of what keeps tenants apart, and of what computed the pages."""
        above = [node]
        while not above[-1].digest and above[-1].parent is not None:
            above.append(above[-1].parent)
        for one in reversed(above):
            if one.digest:
                continue
            if one.parent is None:
                one.digest = digest_of(digest_of(self.identity, self.stamp), repr(one.key).encode())
            else:
                one.digest = digest_of(one.parent.digest, token_bytes(one))
        return node.digest

    def name(self, node: Node, group: int) -> str:
        return f"{self.digest(node)[:16].hex()}.{group}.page"

    def on_disk(self, node: Node, group: int) -> bool:
        return self.disk is not None and self.name(node, group) in self.disk

    def load(self, pages: Iterable[tuple[int, int, Node]]) -> Future:
        """Read files in a thread; the result is a list of (page number, group, bytes) of those that are whole."""
        jobs = [
            (number, group, self.name(node, group), self.digest(node), token_bytes(node))
            for number, group, node in pages
        ]

        def read() -> list[tuple[int, int, Any]]:
            found = [
                (number, group, self.disk.read(name, digest, group, tokens, self.page_bytes[group]))
                for number, group, name, digest, tokens in jobs
            ]
            return [(number, group, data) for number, group, data in found if data is not None]

        future = self.reader.submit(read)
        self.loads.add(future)
        return future

    def wait(self, seconds: float) -> None:
        """Until one of the loads is done."""
        self.loads = {future for future in self.loads if not future.done()}
        if self.loads:
            wait(self.loads, seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Write everything to disk, if there is one."""
        if self.disk is None:
            return
        for threads in (self.reader, self.writer):
            threads.shutdown()
        for copy in self.copies:
            if copy.data is not None and not copy.saved:
                self.save(copy)

    def check(self) -> None:
        """Prove that every copy is where its node says."""
        assert self.total == sum(self.page_bytes[copy.group] for copy in self.copies), "copies are miscounted"
        assert all(copy.node.copies.get(copy.group) is copy for copy in self.copies), "a copy belongs to nobody"


def token_bytes(node: Node) -> bytes:
    return array("i", node.key).tobytes()


def digest_of(before: bytes, what: bytes) -> bytes:
    return hashlib.blake2b(what, digest_size=32, key=before).digest()
