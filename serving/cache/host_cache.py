"""Copies of pages that the device has no room for: in host memory, and on disk what has no room there."""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from .disk_cache import DiskCache
from .prefix_tree import HostCopy, Node


class HostCache:
    """Copies of pages in host memory. The least recently used is dropped first, to disk if there is one.

        device page ──offloaded──> copy in host memory ──no room──> file
             ^                       │        ^                      │
             └───────restored────────┘        └──────prefetched──────┘  (in a thread, before the request gets a slot)

    A copy stays when its page is restored, so that a page which is evicted again need not be copied again.
    """

    def __init__(
        self,
        page_bytes: Seq[int],
        host_bytes: int,
        disk: DiskCache | None = None,
        identity: bytes = b"",
        stamp: bytes = b"",
    ):
        self.page_bytes, self.capacity, self.disk = tuple(page_bytes), host_bytes, disk
        self.identity = identity  # of all that a page's bytes depend on beside its tokens
        self.stamp = stamp  # of the model's files on this machine: on disk pages outlive what was in them
        self.copies: OrderedDict[HostCopy, None] = OrderedDict()
        self.total = 0
        self.loads: set[Future] = set()
        self.writes: deque[tuple[Future, int]] = deque()  # under way, with their sizes
        self.reader = ThreadPoolExecutor(1, "quire-pages-in") if disk is not None else None
        self.writer = ThreadPoolExecutor(1, "quire-pages-out") if disk is not None else None

    def offload(self, node: Node, group: int) -> HostCopy | None:
        """A copy that is to be filled with what a page of the device holds; None if there is one, or no room."""
        if group in node.copies:
            self.touch(node.copies[group])
        elif self.page_bytes[group] <= self.capacity:
            self.add(copy := HostCopy(node, group))
            return copy
        return None

    def add(self, copy: HostCopy) -> None:
        """Keep a copy, if there is none yet of its page."""
        if copy.group not in copy.node.copies:
            copy.node.copies[copy.group] = copy
            self.copies[copy] = None
            self.total += self.page_bytes[copy.group]

    def touch(self, copy: HostCopy) -> HostCopy:
        """The copy is the most recently used."""
        self.copies.move_to_end(copy)
        return copy

    def trim(self, patiently: bool = False) -> list[Node]:
        """Drop the least recently used copies beyond the capacity, to disk if there is one; the nodes that lost one.

        When the disk is behind by as much as the host may hold, `patiently` waits for it; else the copies are lost.
        """
        nodes = []
        while self.total > self.capacity:
            copy = next(iter(self.copies))
            if copy.data is None:
                break  # its bytes are under way, and those after it are younger
            self.drop(copy)
            nodes.append(copy.node)
            if self.disk is not None and not copy.saved:
                self.save_later(copy, patiently)
        return nodes

    def drop(self, copy: HostCopy) -> None:
        del self.copies[copy], copy.node.copies[copy.group]
        self.total -= self.page_bytes[copy.group]

    def drop_unfilled(self) -> list[Node]:
        """The device has lost its pages: copies whose bytes were under way will not come. The nodes that had them."""
        unfilled = [copy for copy in self.copies if copy.data is None]
        for copy in unfilled:
            self.drop(copy)
        return [copy.node for copy in unfilled]

    def invalidate(self, node: Node) -> None:
        """Remove the node's copies and files."""
        for copy in list(node.copies.values()):
            self.drop(copy)
        if self.disk is not None:
            for group in range(len(self.page_bytes)):  # after what is being written
                self.writer.submit(self.disk.discard, self.name(node, group))

    def clear(self) -> list[Node]:
        """Remove everything; the nodes that had copies."""
        nodes = self.drop_copies()
        if self.disk is not None:
            self.writer.submit(self.disk.clear).result()  # after what is being written
        return nodes

    def replace_weights(self, identity: bytes, stamp: bytes) -> list[Node]:
        """Forget the copies that other weights computed, and name files after these; the nodes that had copies.

        Files of the other weights stay on disk, where they are found again if those weights come back.
        """
        for write, _ in self.writes:
            write.result()  # a page being written is named after the weights that computed it
        self.identity, self.stamp = identity, stamp
        return self.drop_copies()

    def drop_copies(self) -> list[Node]:
        """Remove every copy from host memory; the nodes that had one."""
        nodes = [copy.node for copy in self.copies]
        for copy in list(self.copies):
            self.drop(copy)
        return nodes

    def save_later(self, copy: HostCopy, patiently: bool) -> None:
        """Write the copy in a thread."""
        size = self.page_bytes[copy.group]
        while self.writes and (self.writes[0][0].done() or patiently and self.unwritten_bytes + size > self.capacity):
            self.writes.popleft()[0].result()
        if self.unwritten_bytes + size <= self.capacity:
            try:
                self.writes.append((self.writer.submit(self.save, copy), size))
            except RuntimeError:  # the process ends, and Python's pools take no more work
                self.save(copy)

    @property
    def unwritten_bytes(self) -> int:
        """Of the copies that are being written, or are about to be."""
        return sum(size for _, size in self.writes)

    def save(self, copy: HostCopy) -> None:
        node, group = copy.node, copy.group
        copy.saved = self.disk.write(self.name(node, group), self.digest(node), group, token_bytes(node), copy.content)

    def digest(self, node: Node) -> bytes:
        """A hash of all tokens up to the node's last, the salt, and what the pages were computed by."""
        path = [node]
        while not path[-1].digest and path[-1].parent is not None:
            path.append(path[-1].parent)
        for one in reversed(path):
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
            pages = [
                (number, group, self.disk.read(name, digest, group, tokens, self.page_bytes[group]))
                for number, group, name, digest, tokens in jobs
            ]
            return [(number, group, data) for number, group, data in pages if data is not None]

        future = self.reader.submit(read)
        self.loads.add(future)
        return future

    def wait(self, seconds: float) -> None:
        """Return when one of the loads is done, or the time is over."""
        self.loads = {future for future in self.loads if not future.done()}
        if self.loads:
            wait(self.loads, seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Write every copy to disk, if there is one."""
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
        assert all(copy.node.copies.get(copy.group) is copy for copy in self.copies), "a copy belongs to no node"


def token_bytes(node: Node) -> bytes:
    return array("i", node.key).tobytes()


def digest_of(before: bytes, what: bytes) -> bytes:
    return hashlib.blake2b(what, digest_size=32, key=before).digest()
