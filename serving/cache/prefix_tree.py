"""Which pages hold which tokens: a tree over full pages, so that a prompt which begins like another skips that part."""

from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """The bytes of a page that another engine has sent from device to device: a row of an array that is there."""

    block_NX: Any
    at: int


@dataclass(eq=False, slots=True)
class Copy:
    """What a page of the device held, in the host's memory."""

    node: "Node"
    group: int
    data: Any = None  # its bytes, or a `Row`; None as long as they are on their way
    saved: bool = False  # on disk, too

    @property
    def content(self) -> Any:
        """The bytes, on the host."""
        return self.data.block_NX.__array__()[self.data.at] if isinstance(self.data, Row) else self.data


@dataclass(eq=False, slots=True)
class Node:
    """A page of tokens after those of its parents; what leads to it are the tokens themselves, not a hash.

    Only full pages have children: one with fewer tokens is where a sequence ended.
    """

    key: Hashable  # its tokens; of a root, what keeps one tenant's prompts from another's
    parent: "Node | None"
    pages: list[int]  # the page of each cache group with these positions; 0: none
    children: dict[Hashable, "Node"] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)  # by cache group
    digest: bytes = b""  # of its tokens and all before them, once a file was named after it

    def holds(self, group: int) -> bool:
        """Whether the page's content can be had now, from the device or from the host."""
        return bool(self.pages[group]) or (group in self.copies and self.copies[group].data is not None)

    @property
    def empty(self) -> bool:
        return not (self.children or any(self.pages) or self.copies)


class Found(NamedTuple):
    """What is computed of a sequence's beginning: full pages, and the first rows of a page that may go on otherwise."""

    path: list[Node]
    source: Node | None = None
    rows: int = 0


NOTHING = Found([])


class PrefixTree:
    """Pages by content, for every cache group.

        root ── [tokens 0..15] ── [16..31] ─┬─ [32..47]          each with its page in the full group,
                                            └─ [32..47, others]   and in a window group while it is kept

    A page is in the tree at most once. A node stays as long as it or one of its children has a page, or a copy of one.
    """

    def __init__(self, num_groups: int):
        self.roots: dict[Hashable, Node] = {}
        self.where: list[dict[int, Node]] = [{} for _ in range(num_groups)]

    def root(self, salt: Hashable) -> Node:
        if salt not in self.roots:
            self.roots[salt] = self.node(salt, None)
        return self.roots[salt]

    def node(self, key: Hashable, parent: Node | None) -> Node:
        return Node(key, parent, [0] * len(self.where))

    def walk(self, salt: Hashable, keys: Iterable[Hashable]) -> Iterator[Node]:
        """The nodes along these pages of tokens, as far as there are any."""
        node = self.roots.get(salt)
        for key in keys:
            node = node and node.children.get(key)
            if node is None:
                return
            yield node

    def child(self, node: Node, key: Hashable) -> Node:
        """The node of the page that follows, made if it is not there."""
        if key not in node.children:
            node.children[key] = self.node(key, node)
        return node.children[key]

    def attached(self, node: Node) -> bool:
        """Whether the node can still be found: one without pages is cut off."""
        siblings = self.roots if node.parent is None else node.parent.children
        return siblings.get(node.key) is node

    def place(self, group: int, node: Node, page: int) -> None:
        """From now on this page is where the node's tokens are found, unless one is known already."""
        if not node.pages[group]:
            node.pages[group] = page
            self.where[group][page] = node

    def forget(self, group: int, page: int) -> None:
        """The page will hold something else."""
        node = self.where[group].pop(page, None)
        if node is not None:
            node.pages[group] = 0
            self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Cut off what holds nothing and leads nowhere."""
        while node is not None and node.empty and self.attached(node):
            siblings = self.roots if node.parent is None else node.parent.children
            del siblings[node.key]
            node = node.parent

    def prune_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.prune(node)

    def check(self) -> None:
        """Prove that tree and map say the same, and that nothing empty is kept."""
        found: list[dict[int, Any]] = [{} for _ in self.where]
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            assert not node.empty, "a node is kept that leads nowhere"
            for group, page in enumerate(node.pages):
                if page:
                    assert page not in found[group], f"group {group}: a page is in the tree twice"
                    found[group][page] = node
            stack += node.children.values()
        for group, known in enumerate(self.where):
            assert known == found[group], f"group {group}: the tree and its map differ"


def common(a: tuple[int, ...], b: Seq[int]) -> int:
    """How many of the first tokens are the same."""
    return next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
