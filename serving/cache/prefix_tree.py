"""The prefix index: a tree over full pages of tokens, so that a prompt skips the part that is computed already."""

from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from ..request.sequence import Sequence

Tokens = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class SentPage:
    """The bytes of a page that another engine sent from device to device: a row of an array on this one's device."""

    block_NX: Any  # a jax.Array, and this room imports no JAX
    row: int


@dataclass(eq=False, slots=True)
class HostCopy:
    """What a page of the device held, in the host's memory."""

    node: "Node"
    group: int
    data: Any = None  # its bytes (or an array that shows its own), or a `SentPage`; None while they are under way
    saved: bool = False  # on disk, too

    @property
    def content(self) -> Any:
        """The bytes, on the host."""
        return self.data.block_NX.__array__()[self.data.row] if isinstance(self.data, SentPage) else self.data


@dataclass(eq=False, slots=True)
class Node:
    """A page of tokens after those of its parents; what leads to it are the tokens themselves, not a hash.

    Only full pages have children: one with fewer tokens is where a sequence ended.
    """

    key: Hashable  # its tokens; of a root, the salt that keeps one tenant's prompts from another's
    parent: "Node | None"
    pages: list[int]  # the page of each cache group with these positions; 0: none
    children: dict[Hashable, "Node"] = field(default_factory=dict)
    copies: dict[int, HostCopy] = field(default_factory=dict)  # by cache group
    digest: bytes = b""  # of its tokens and all before them, once a file was named after it
    followed: bool = False  # a drafter with keys and values of its own has computed it, too

    def holds(self, group: int) -> bool:
        """Whether the page's content can be had now, from the device or from the host."""
        return bool(self.pages[group]) or (group in self.copies and self.copies[group].data is not None)

    @property
    def empty(self) -> bool:
        return not (self.children or any(self.pages) or self.copies)


class PrefixMatch(NamedTuple):
    """The computed prefix of a sequence: full pages, and the first tokens of a page that may continue differently."""

    path: list[Node]
    source: Node | None = None
    num_partial: int = 0  # tokens of the source that are the sequence's, too


NO_MATCH = PrefixMatch([])


class PrefixTree:
    """Pages by content, for every cache group.

        root ── [tokens 0..15] ── [16..31] ─┬─ [32..47]          each with its page in the full group,
                                            └─ [32..47, others]   and in a window group while it is cached

    A page is in the tree at most once. A node stays as long as it or one of its children has a page, or a copy of one.
    """

    def __init__(self, num_groups: int, page_size: int):
        self.page_size = page_size
        self.roots: dict[Hashable, Node] = {}
        self.node_of: list[dict[int, Node]] = [{} for _ in range(num_groups)]  # by cache group, by page

    def key(self, tokens: Seq[int], page: int) -> Tokens:
        """What a page of these tokens is found by."""
        return tuple(tokens[page * self.page_size : (page + 1) * self.page_size])

    def keys(self, tokens: Seq[int], num_tokens: int) -> Iterator[Tokens]:
        """Those of the full pages among the first tokens."""
        return (self.key(tokens, page) for page in range(num_tokens // self.page_size))

    def root(self, salt: Hashable) -> Node:
        if salt not in self.roots:
            self.roots[salt] = self.new_node(salt, None)
        return self.roots[salt]

    def new_node(self, key: Hashable, parent: Node | None) -> Node:
        return Node(key, parent, [0] * len(self.node_of))

    def walk(self, salt: Hashable, tokens: Seq[int], num_tokens: int) -> Iterator[Node]:
        """The nodes of the full pages among the first tokens, as far as there are any."""
        node = self.roots.get(salt)
        for key in self.keys(tokens, num_tokens):
            node = node and node.children.get(key)
            if node is None:
                return
            yield node

    def upwards(self, node: Node) -> Iterator[Node]:
        """A page's node and those before it."""
        while node.parent is not None:
            yield node
            node = node.parent

    def child(self, node: Node, key: Hashable) -> Node:
        """The node of the page that follows, made if it is not there."""
        if key not in node.children:
            node.children[key] = self.new_node(key, node)
        return node.children[key]

    def path(self, seq: Sequence) -> Node:
        """The node of a sequence's last full page that is known here, made with those before it."""
        keys = self.keys(seq.tokens, seq.cache.num_indexed * self.page_size)
        return reduce(self.child, keys, self.root(seq.cache.salt))

    def attached(self, node: Node) -> bool:
        """Whether the node can still be found: one without pages is cut off."""
        siblings = self.roots if node.parent is None else node.parent.children
        return siblings.get(node.key) is node

    def place(self, group: int, node: Node, page: int) -> None:
        """From now on the node's tokens are found in this page, unless they are found in one already."""
        if not node.pages[group]:
            node.pages[group] = page
            self.node_of[group][page] = node

    def forget(self, group: int, page: int) -> None:
        """The page will hold something else."""
        node = self.node_of[group].pop(page, None)
        if node is not None:
            node.pages[group] = 0
            self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Remove an empty node, and its parents as far as that makes them empty."""
        while node is not None and node.empty and self.attached(node):
            siblings = self.roots if node.parent is None else node.parent.children
            del siblings[node.key]
            node = node.parent

    def prune_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.prune(node)

    def check(self) -> None:
        """Prove that the tree and its map agree, and that no empty node is kept."""
        seen: list[dict[int, Node]] = [{} for _ in self.node_of]
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            assert not node.empty, "a node is kept that leads nowhere"
            for group, page in enumerate(node.pages):
                if page:
                    assert page not in seen[group], f"group {group}: a page is in the tree twice"
                    seen[group][page] = node
            stack += node.children.values()
        for group, nodes in enumerate(self.node_of):
            assert nodes == seen[group], f"group {group}: the tree and its map differ"


def common(a: Tokens, b: Seq[int]) -> int:
    """How many of the first tokens are the same."""
    return next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
