"""Translation of GBNF rules to the Lark notation of llguidance, which has a lexer and a parser.

The lexer takes the longest lexeme that it can and never backtracks: of `[a-z]+ "x"` as two lexemes,
the first would consume every x. In GBNF a rule is about characters, and any derivation of a text
counts. So an expression becomes one lexeme only if no text has two derivations of which one ends
the lexeme at a position and the other continues it; all others are split into their children, down
to single characters if need be. A grammar without recursion is a single lexeme. A string should be
one lexeme, not one for each of its characters, because that makes a token mask quick to compute.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import islice, product

from .gbnf import Alt, Chars, Node, Ref, Repeat, Seq, child_nodes, parse, walk_nodes

MAX_STEPS = 100_000  # about 0.1 s; a grammar that needs more steps is split everywhere


def to_lark(text: str) -> str:
    """Translate a GBNF grammar to Lark. Raises GrammarError if it is invalid."""
    rules = parse(text)
    return Writer(rules, split_nodes(rules)).written()


def split_nodes(rules: dict[str, Node]) -> set[Node]:
    """Return the nodes to be written as parser rules; the others become lexemes or parts of
    them.
    """
    cycles = recursive_rules(rules)
    if not cycles:
        return set()
    # A node's parents: the nodes that contain it, and for a rule's body the references to the rule.
    parents: dict[Node, list[Node]] = defaultdict(list)
    for body in rules.values():
        for node in walk_nodes(body):
            for child in child_nodes(node):
                parents[child].append(node)
            if isinstance(node, Ref):
                parents[rules[node.name]].append(node)
    pairs = find_ambiguous_pairs(rules, parents)
    if pairs is None:
        return {node for body in rules.values() for node in walk_nodes(body)}
    split: set[Node] = set()
    pending = [rules[name] for name in cycles]
    while pending:
        if (node := pending.pop()) not in split:
            split.add(node)
            pending += [*parents[node], *pairs[node]]
    return split


def recursive_rules(rules: dict[str, Node]) -> list[str]:
    """Return the rules that refer to themselves, directly or through other rules, and their
    users.
    """
    references = {
        name: {n.name for n in walk_nodes(body) if isinstance(n, Ref)}
        for name, body in rules.items()
    }
    users: dict[str, list[str]] = defaultdict(list)
    for name, needed in references.items():
        for reference in needed:
            users[reference].append(name)
    ending = [name for name, needed in references.items() if not needed]
    unresolved = {name: len(needed) for name, needed in references.items()}
    for name in ending:
        for user in users[name]:
            unresolved[user] -= 1
            if not unresolved[user]:
                ending.append(user)
    return [name for name, count in unresolved.items() if count]


class BudgetExceeded(Exception):
    """The analysis of a grammar needs more steps than its budget."""


class StepBudget:
    """Bounds the work of an analysis."""

    def __init__(self, count: int):
        self.remaining = count

    def spend(self, count: int) -> None:
        self.remaining -= count + 1
        if self.remaining < 0:
            raise BudgetExceeded


def find_ambiguous_pairs(
    rules: dict[str, Node], parents: dict[Node, list[Node]]
) -> dict[Node, set[Node]] | None:
    """Return, for each node, the nodes that bring the same next character after the same text.

    A node brings a character after another one: a `Seq` between two of its children, a `Repeat`
    between its end and its beginning. All references to a rule are assumed to be followed by the
    same characters, which may find too many pairs but never too few. None if the step budget is
    exceeded.
    """
    steps = StepBudget(MAX_STEPS)
    try:
        edges = Edges(rules, parents, steps)
        return ambiguous_pairs(edges.first[rules["root"]], edges.follow(steps), steps)
    except BudgetExceeded:
        return None


def ambiguous_pairs(
    begin: frozenset[Chars], follow: dict[Chars, set[tuple[Chars, Node]]], steps: StepBudget
) -> dict[Node, set[Node]]:
    """Walk all pairs of characters that two derivations of one text can reach at the same place."""
    meets: dict[tuple, bool] = {}

    def meet(a_char: Chars, b_char: Chars) -> bool:
        key = a_char.ranges, b_char.ranges
        if key not in meets:
            steps.spend(len(a_char.ranges) * len(b_char.ranges))
            meets[key] = any(
                a <= d and c <= b for (a, b), (c, d) in product(a_char.ranges, b_char.ranges)
            )
        return meets[key]

    steps.spend(len(begin) ** 2)
    pending = [(a_char, b_char) for a_char, b_char in product(begin, begin) if meet(a_char, b_char)]
    visited = set(pending)
    pairs = defaultdict(set)
    while pending:
        a_char, b_char = pending.pop()
        steps.spend(len(follow[a_char]) * len(follow[b_char]))
        for (next_a, a_node), (next_b, b_node) in product(follow[a_char], follow[b_char]):
            if meet(next_a, next_b):
                pairs[a_node].add(b_node)
                if (next_a, next_b) not in visited:
                    visited.add((next_a, next_b))
                    pending.append((next_a, next_b))
    return pairs


class Edges:
    """The first and last characters of each node, and the nodes that match the empty text."""

    def __init__(self, rules: dict[str, Node], parents: dict[Node, list[Node]], steps: StepBudget):
        self.nodes = [node for body in rules.values() for node in walk_nodes(body)]
        self.rules = rules
        self.first: dict[Node, frozenset[Chars]] = dict.fromkeys(self.nodes, frozenset())
        self.last = dict(self.first)
        self.nullable: set[Node] = set()
        pending = deque(self.nodes)
        while pending:
            node = pending.popleft()
            edges = self.compute_edges(node)
            steps.spend(len(edges[0]) + len(edges[1]) + len(child_nodes(node)))
            if edges != (self.first[node], self.last[node], node in self.nullable):
                self.first[node], self.last[node], is_nullable = edges
                self.nullable.update((node,) if is_nullable else ())
                pending += parents[node]

    def compute_edges(self, node: Node) -> tuple[frozenset[Chars], frozenset[Chars], bool]:
        """Return a node's first and last characters and whether it is nullable, as far as known."""
        if isinstance(node, Chars):
            return frozenset((node,)), frozenset((node,)), False
        if isinstance(node, Repeat) and node.high == 0:
            return frozenset(), frozenset(), True
        if isinstance(node, Seq):
            is_nullable = all(child in self.nullable for child in node.children)
            return (
                self.edge_characters(node.children, self.first),
                self.edge_characters(node.children[::-1], self.last),
                is_nullable,
            )
        children = (self.rules[node.name],) if isinstance(node, Ref) else child_nodes(node)
        is_nullable = any(child in self.nullable for child in children) or (
            isinstance(node, Repeat) and node.low == 0
        )
        first, last = (
            frozenset().union(*(characters_by_node[child] for child in children))
            for characters_by_node in (self.first, self.last)
        )
        return first, last, is_nullable

    def edge_characters(
        self, nodes: Iterable[Node], characters_by_node: dict[Node, frozenset[Chars]]
    ) -> frozenset[Chars]:
        """Return the characters at the edge of a sequence, which lie behind its nullable nodes
        too.
        """
        character_sets = []
        for node in nodes:
            character_sets.append(characters_by_node[node])
            if node not in self.nullable:
                break
        return frozenset().union(*character_sets)

    def follow(self, steps: StepBudget) -> dict[Chars, set[tuple[Chars, Node]]]:
        """Return, for each character, the next characters and the node that joins the two."""
        followers: dict[Chars, set[tuple[Chars, Node]]] = defaultdict(set)

        def join(preceding: Node, following: Node, node: Node) -> None:
            steps.spend(len(self.last[preceding]) * len(self.first[following]))
            for char in self.last[preceding]:
                followers[char].update((follower, node) for follower in self.first[following])

        for node in self.nodes:
            if isinstance(node, Repeat) and node.high != 1:
                join(node.child, node.child, node)
            for index, child in enumerate(node.children if isinstance(node, Seq) else ()):
                for sibling in islice(child_nodes(node), index + 1, None):
                    join(child, sibling, node)
                    if sibling not in self.nullable:
                        break
        return followers


class Writer:
    """Writes a grammar in Lark: split nodes as rules, the others as terminals."""

    def __init__(self, rules: dict[str, Node], split: set[Node]):
        self.rules = rules
        self.split = split
        self.numbers = {name: number for number, name in enumerate(rules)}
        self.lexemes: dict[str, str] = {}  # pattern -> name of the terminal
        self.terminals: list[str] = []  # names of the rules that are parts of terminals
        self.written_terminals: set[str] = set()

    def written(self) -> str:
        bodies = [f"start: {self.rule(Ref('root'))}"]
        bodies += [
            f"r{self.numbers[name]}: {self.rule(body)}"
            for name, body in self.rules.items()
            if body in self.split
        ]
        bodies += [f"{name}: {text}" for text, name in self.lexemes.items()]
        for name in self.terminals:  # the list grows in this loop
            bodies.append(f"R{self.numbers[name]}: {self.lexeme(self.rules[name])}")
        return "\n".join(bodies)

    def rule(self, node: Node) -> str:
        """Write a node as a part of a rule."""
        if isinstance(node, Ref) and self.rules[node.name] in self.split:
            return f"r{self.numbers[node.name]}"
        if node in self.split:
            return self.composed(node, self.rule)
        return self.lexemes.setdefault(self.lexeme(node), f"L{len(self.lexemes)}")

    def lexeme(self, node: Node) -> str:
        """Write a node as a part of a terminal."""
        if isinstance(node, Ref):
            if node.name not in self.written_terminals:
                self.written_terminals.add(node.name)
                self.terminals.append(node.name)
            return f"R{self.numbers[node.name]}"
        return self.composed(node, self.lexeme)

    def composed(self, node: Node, write) -> str:
        if isinstance(node, Chars):
            return characters(node)
        if isinstance(node, Repeat):
            high = "" if node.high is None else f"{node.high}"
            return f"({write(node.child)}){{{node.low},{high}}}"
        if isinstance(node, Alt):
            return f"({' | '.join(map(write, node.children))})"
        return f"({' '.join(map(write, child_nodes(node)))})" if child_nodes(node) else '""'


def characters(node: Chars) -> str:
    if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return json.dumps(chr(node.ranges[0][0]), ensure_ascii=False)
    return "/[" + "".join(rf"\x{{{low:X}}}-\x{{{high:X}}}" for low, high in node.ranges) + "]/"
