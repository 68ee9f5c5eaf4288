"""The prefix tree over full pages of tokens, by which prompts reuse computed pages."""

from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from ..request.sequence import Sequence

Tokens = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class SentPage:
    """The bytes of a page sent by another engine from device to device: a row of an array on this
    device.
    """

    block_NX: Any  # a jax.Array; this package does not import JAX
    row: int


@dataclass(eq=False, slots=True)
class HostCopy:
    """A copy of a device page in host memory."""

    node: "Node"
    group: int
    # Bytes (or an array with the buffer protocol) or a `SentPage`; None while in flight.
    data: Any = None
    is_on_disk: bool = False

    @property
    def content(self) -> Any:
        """The page's bytes on the host."""
        return (
            self.data.block_NX.__array__()[self.data.row]
            if isinstance(self.data, SentPage)
            else self.data
        )


@dataclass(eq=False, slots=True)
class Node:
    """A page of tokens after those of its parents. The path of tokens itself is the key, not a
    hash.

    Only full pages have children; a partial page is where a sequence ended.
    """

    key: Any  # its tokens, a tuple; for a root, the salt that separates tenants
    parent: "Node | None"
    pages: list[int]  # the page of each cache group; 0: none
    children: dict[Hashable, "Node"] = field(default_factory=dict)
    copies: dict[int, HostCopy] = field(default_factory=dict)  # by cache group
    digest: bytes = b""  # hash of all tokens up to here, computed when a file is named after it
    has_draft_kv: bool = False  # a drafter with its own KV cache has computed it too

    def is_available(self, group: int) -> bool:
        """Return whether the page's content is available now, on the device or on the host."""
        return bool(self.pages[group]) or (
            group in self.copies and self.copies[group].data is not None
        )

    @property
    def is_empty(self) -> bool:
        return not (self.children or any(self.pages) or self.copies)


class PrefixMatch(NamedTuple):
    """The computed prefix of a sequence: full pages, and a page whose first tokens also match."""

    path: list[Node]
    source: Node | None = None
    num_partial: int = 0  # matching tokens of `source`


NO_MATCH = PrefixMatch([])


class PrefixTree:
    """Pages by content, for all cache groups.

        root ── [tokens 0..15] ── [16..31] ─┬─ [32..47]          each with its page in the full
        group,
                                            └─ [32..47, others]   and in a window group while cached

    A page is in the tree at most once. A node exists while it or a descendant has a page or a copy.
    """

    def __init__(self, num_groups: int, page_size: int):
        self.page_size = page_size
        self.roots: dict[Hashable, Node] = {}
        # By cache group, by page.
        self.node_by_page: list[dict[int, Node]] = [{} for _ in range(num_groups)]

    def key(self, tokens: Seq[int], page: int) -> Tokens:
        """Return the key of a page of these tokens."""
        return tuple(tokens[page * self.page_size : (page + 1) * self.page_size])

    def keys(self, tokens: Seq[int], num_tokens: int) -> Iterator[Tokens]:
        """Yield the keys of the full pages among the first tokens."""
        return (self.key(tokens, page) for page in range(num_tokens // self.page_size))

    def root(self, salt: Hashable) -> Node:
        if salt not in self.roots:
            self.roots[salt] = self.new_node(salt, None)
        return self.roots[salt]

    def new_node(self, key: Hashable, parent: Node | None) -> Node:
        return Node(key, parent, [0] * len(self.node_by_page))

    def walk(self, salt: Hashable, tokens: Seq[int], num_tokens: int) -> Iterator[Node]:
        """Yield the existing nodes of the full pages among the first tokens."""
        node = self.roots.get(salt)
        for key in self.keys(tokens, num_tokens):
            node = node and node.children.get(key)
            if node is None:
                return
            yield node

    def ancestors(self, node: Node) -> Iterator[Node]:
        """Yield a node and its ancestors, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def child(self, node: Node, key: Hashable) -> Node:
        """Return the node of the next page, created if necessary."""
        if key not in node.children:
            node.children[key] = self.new_node(key, node)
        return node.children[key]

    def path(self, seq: Sequence) -> Node:
        """Return the node of a sequence's last indexed page, created with its ancestors if
        necessary.
        """
        keys = self.keys(seq.keys, seq.cache.num_indexed * self.page_size)
        return reduce(self.child, keys, self.root(seq.cache.salt))

    def is_attached(self, node: Node) -> bool:
        """Return whether the node is part of the tree; empty nodes are removed."""
        siblings = self.roots if node.parent is None else node.parent.children
        return siblings.get(node.key) is node

    def place(self, group: int, node: Node, page: int) -> None:
        """Record a page for a node, unless the node has one already."""
        if not node.pages[group]:
            node.pages[group] = page
            self.node_by_page[group][page] = node

    def forget(self, group: int, page: int) -> None:
        """Remove a page whose content is about to change."""
        node = self.node_by_page[group].pop(page, None)
        if node is not None:
            node.pages[group] = 0
            self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Remove a node if it is empty, and then its empty ancestors."""
        while node is not None and node.is_empty and self.is_attached(node):
            siblings = self.roots if node.parent is None else node.parent.children
            del siblings[node.key]
            node = node.parent

    def prune_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.prune(node)

    def check(self) -> None:
        """Assert that the tree and its map agree and that no node is empty."""
        visited: list[dict[int, Node]] = [{} for _ in self.node_by_page]
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            assert not node.is_empty, "an empty node is kept"
            for group, page in enumerate(node.pages):
                if page:
                    assert page not in visited[group], f"group {group}: a page is in the tree twice"
                    visited[group][page] = node
            stack += node.children.values()
        for group, nodes in enumerate(self.node_by_page):
            assert nodes == visited[group], f"group {group}: the tree and its map differ"


def common_prefix_length(a: Tokens, b: Seq[int]) -> int:
    """Return the length of the common prefix."""
    return next(
        (
            index
            for index, (a_token, b_token) in enumerate(zip(a, b, strict=False))
            if a_token != b_token
        ),
        min(len(a), len(b)),
    )
