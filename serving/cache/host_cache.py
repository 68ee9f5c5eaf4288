"""Host cache of evicted KV pages, and its overflow to disk."""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from ..request.media import ROW_BITS
from .disk_cache import DiskCache
from .prefix_tree import HostCopy, Node


class HostCache:
    """Copies of pages in host memory. The least recently used is evicted first, to disk if there is
    one.

        device page ──offload──> copy in host memory ──evict──> file
             ^                      │        ^                   │
             └───────restore────────┘        └─────prefetch──────┘  (in a thread, before the request
                                                                     gets a slot)

    A restored copy stays, so that a page that is evicted again need not be copied again.
    """

    def __init__(
        self,
        page_bytes: Seq[int],
        host_bytes: int,
        disk: DiskCache | None = None,
        identity: bytes = b"",
        stamp: bytes = b"",
    ):
        self.page_bytes = tuple(page_bytes)
        self.capacity = host_bytes
        self.disk = disk
        self.identity = identity  # hash of everything except tokens that determines a page's bytes
        # State of the model's files on this machine: pages on disk outlive changes of the files.
        self.stamp = stamp
        self.copies: OrderedDict[HostCopy, None] = OrderedDict()
        self.total = 0
        self.loads: set[Future] = set()
        self.writes: deque[tuple[Future, int]] = deque()  # pending writes and their sizes
        # Without a disk these start no thread.
        self.reader = ThreadPoolExecutor(1, "quire-pages-in")
        self.writer = ThreadPoolExecutor(1, "quire-pages-out")

    def offload(self, node: Node, group: int) -> HostCopy | None:
        """Return a new copy to be filled with a device page; None if there is one, or no space."""
        if group in node.copies:
            self.touch(node.copies[group])
        elif self.page_bytes[group] <= self.capacity:
            self.add(copy := HostCopy(node, group))
            return copy
        return None

    def add(self, copy: HostCopy) -> None:
        """Add a copy, unless its page has one."""
        if copy.group not in copy.node.copies:
            copy.node.copies[copy.group] = copy
            self.copies[copy] = None
            self.total += self.page_bytes[copy.group]

    def touch(self, copy: HostCopy) -> HostCopy:
        """Mark a copy as the most recently used."""
        self.copies.move_to_end(copy)
        return copy

    def trim(self, patiently: bool = False) -> list[Node]:
        """Evict the least recently used copies beyond the capacity, to disk if there is one.

        Pending writes may hold as many bytes as the host cache. If they do, `patiently` waits for
        them; otherwise the evicted copies are lost.

        Returns:
            The nodes that lost a copy.
        """
        nodes = []
        while self.total > self.capacity:
            copy = next(iter(self.copies))
            if copy.data is None:
                break  # its bytes are in flight, as are those of all younger copies
            self.drop(copy)
            nodes.append(copy.node)
            if self.disk is not None and not copy.is_on_disk:
                self.submit_write(copy, patiently)
        return nodes

    def drop(self, copy: HostCopy) -> None:
        del self.copies[copy], copy.node.copies[copy.group]
        self.total -= self.page_bytes[copy.group]

    def drop_unfilled(self) -> list[Node]:
        """Drop copies that were still in flight when the device lost its pages; return their
        nodes.
        """
        unfilled = [copy for copy in self.copies if copy.data is None]
        for copy in unfilled:
            self.drop(copy)
        return [copy.node for copy in unfilled]

    def invalidate(self, node: Node) -> None:
        """Remove a node's copies and files."""
        for copy in list(node.copies.values()):
            self.drop(copy)
        if self.disk is not None:
            for group in range(len(self.page_bytes)):  # after pending writes
                self.writer.submit(self.disk.discard, self.name(node, group))

    def clear(self) -> list[Node]:
        """Remove everything; return the nodes that had copies."""
        nodes = self.drop_copies()
        if self.disk is not None:
            self.writer.submit(self.disk.clear).result()  # after pending writes
        return nodes

    def replace_weights(self, identity: bytes, stamp: bytes) -> list[Node]:
        """Drop the copies of the old weights and name files after the new ones; return their nodes.

        Files of the old weights stay on disk and are found again if those weights come back.
        """
        for write, _ in self.writes:
            write.result()  # a pending page is named after the weights that computed it
        self.identity = identity
        self.stamp = stamp
        return self.drop_copies()

    def drop_copies(self) -> list[Node]:
        """Remove every copy from host memory; return the nodes that had one."""
        nodes = [copy.node for copy in self.copies]
        for copy in list(self.copies):
            self.drop(copy)
        return nodes

    def submit_write(self, copy: HostCopy, patiently: bool) -> None:
        """Write a page in host memory to the disk, in a thread."""
        size = self.page_bytes[copy.group]
        while self.writes and (
            self.writes[0][0].done() or patiently and self.pending_bytes + size > self.capacity
        ):
            self.writes.popleft()[0].result()
        if self.pending_bytes + size <= self.capacity:
            try:
                self.writes.append((self.writer.submit(self.save, copy), size))
            except RuntimeError:  # at interpreter exit, pools accept no more work
                self.save(copy)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the copies whose writes are pending."""
        return sum(size for _, size in self.writes)

    def save(self, copy: HostCopy) -> None:
        assert self.disk is not None
        node = copy.node
        group = copy.group
        copy.is_on_disk = self.disk.write(
            self.name(node, group), self.digest(node), group, token_bytes(node), copy.content
        )

    def digest(self, node: Node) -> bytes:
        """Return a hash of all tokens up to the node's last, the salt, and the model's identity."""
        path = [node]
        while not path[-1].digest and path[-1].parent is not None:
            path.append(path[-1].parent)
        for ancestor in reversed(path):
            if ancestor.digest:
                continue
            if ancestor.parent is None:
                ancestor.digest = chain_digest(
                    chain_digest(self.identity, self.stamp), repr(ancestor.key).encode()
                )
            else:
                ancestor.digest = chain_digest(ancestor.parent.digest, token_bytes(ancestor))
        return node.digest

    def name(self, node: Node, group: int) -> str:
        return f"{self.digest(node)[:16].hex()}.{group}.page"

    def is_on_disk(self, node: Node, group: int) -> bool:
        return self.disk is not None and self.name(node, group) in self.disk

    def load(self, pages: Iterable[tuple[int, int, Node]]) -> Future:
        """Read files in a thread.

        Returns:
            A future of (page number, group, bytes) tuples of the valid files.
        """
        disk = self.disk
        assert disk is not None
        jobs = [
            (number, group, self.name(node, group), self.digest(node), token_bytes(node))
            for number, group, node in pages
        ]

        def read() -> list[tuple[int, int, Any]]:
            pages = [
                (number, group, disk.read(name, digest, group, tokens, self.page_bytes[group]))
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
            if copy.data is not None and not copy.is_on_disk:
                self.save(copy)

    def check(self) -> None:
        """Prove that every copy is where its node says."""
        assert self.total == sum(self.page_bytes[copy.group] for copy in self.copies), (
            "copies are miscounted"
        )
        assert all(copy.node.copies.get(copy.group) is copy for copy in self.copies), (
            "a copy belongs to no node"
        )


def token_bytes(node: Node) -> bytes:
    """A page's keys in words of 32 bits: tokens as they are, media by their row, below zero. The
    digests of the media follow.
    """
    if min(node.key, default=0) >= 0:
        return array("i", node.key).tobytes()
    words = array("i")
    digests = []
    for index, key in enumerate(node.key):
        if key >= 0:
            words.append(key)
            continue
        digest, row = divmod(-1 - key, 1 << ROW_BITS)
        if index == 0 or row == 0:  # an item begins with its row 0, or in an earlier page
            digests.append(digest)
        words.append(-1 - row)
    return words.tobytes() + b"".join(digest.to_bytes(32, "little") for digest in digests)


def chain_digest(parent_digest: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32, key=parent_digest).digest()
