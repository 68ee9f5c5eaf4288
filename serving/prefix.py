"""Which pages hold which tokens: a tree over full pages, so that a prompt which begins like another skips that part."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Node:
    """A full page of tokens after those of its parents; what leads to it are the tokens themselves, not a hash."""

    key: Hashable  # its tokens; of a root, what keeps one tenant's prompts from another's
    parent: "Node | None"
    pages: list[int]  # the page of each cache group with these positions; 0: none
    children: dict[Hashable, "Node"] = field(default_factory=dict)


class PrefixTree:
    """Pages by content, for every cache group.

        root ── [tokens 0..15] ── [16..31] ─┬─ [32..47]          each with its page in the full group,
                                            └─ [32..47, others]   and in a window group while it is kept

    A page is in the tree at most once. A node stays as long as it or one of its children has a page.
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
        """Cut off what has neither a page nor a child."""
        while node is not None and not node.children and not any(node.pages) and self.attached(node):
            siblings = self.roots if node.parent is None else node.parent.children
            del siblings[node.key]
            node = node.parent

    def check(self) -> None:
        """Prove that tree and map say the same, and that nothing empty is kept."""
        found: list[dict[int, Any]] = [{} for _ in self.where]
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            assert node.children or any(node.pages), "a node is kept that leads nowhere"
            for group, page in enumerate(node.pages):
                if page:
                    assert page not in found[group], f"group {group}: a page is in the tree twice"
                    found[group][page] = node
            stack += node.children.values()
        for group, known in enumerate(self.where):
            assert known == found[group], f"group {group}: the tree and its map differ"
