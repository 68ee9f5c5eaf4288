"""Rules as a Lark grammar of llguidance, which has a lexer before its parser.

The lexer takes the longest lexeme that it can, and never goes back: from `[a-z]+ "x"` as two lexemes the first would
take every x. In GBNF a rule is about characters, and any way to read a text counts. So an expression becomes one
lexeme only where no text can be read in two ways of which one ends the lexeme at a place and the other does not; the
others are split into their parts, to single characters if need be. A grammar without recursion is one lexeme as a
whole. One lexeme for a string, and not one for each of its characters, is what makes a mask quick to compute.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import islice, product

from .gbnf import Alt, Chars, Node, Ref, Repeat, Seq, nodes_of, parse, parts_of

MOST_STEPS = 100_000  # a tenth of a second; a grammar that needs more is split as a whole


def to_lark(text: str) -> str:
    """A GBNF grammar in Lark's notation; GrammarError where it is wrong."""
    rules = parse(text)
    return Writer(rules, split_nodes(rules)).written()


def split_nodes(rules: dict[str, Node]) -> set[Node]:
    """The nodes that are written as rules; the others are lexemes, or parts of them."""
    cycles = recursive(rules)
    if not cycles:
        return set()
    above: dict[Node, list[Node]] = defaultdict(list)  # who contains a node; of a rule's body those who name the rule
    for body in rules.values():
        for node in nodes_of(body):
            for part in parts_of(node):
                above[part].append(node)
            if isinstance(node, Ref):
                above[rules[node.name]].append(node)
    pairs = ambiguous(rules, above)
    if pairs is None:
        return {node for body in rules.values() for node in nodes_of(body)}
    split: set[Node] = set()
    waiting = [rules[name] for name in cycles]
    while waiting:
        if (node := waiting.pop()) not in split:
            split.add(node)
            waiting += [*above[node], *pairs[node]]
    return split


def recursive(rules: dict[str, Node]) -> list[str]:
    """The rules that name themselves, directly or through others, and those that name one of these."""
    needs = {name: {n.name for n in nodes_of(body) if isinstance(n, Ref)} for name, body in rules.items()}
    users: dict[str, list[str]] = defaultdict(list)
    for name, needed in needs.items():
        for other in needed:
            users[other].append(name)
    ending = [name for name, needed in needs.items() if not needed]
    left = {name: len(needed) for name, needed in needs.items()}
    for name in ending:
        for user in users[name]:
            left[user] -= 1
            if not left[user]:
                ending.append(user)
    return [name for name, count in left.items() if count]


class TooMuch(Exception):
    """A grammar takes too many steps to look through."""


class Steps:
    """Counts them."""

    def __init__(self, most: int):
        self.left = most

    def take(self, count: int) -> None:
        self.left -= count + 1
        if self.left < 0:
            raise TooMuch


def ambiguous(rules: dict[str, Node], above: dict[Node, list[Node]]) -> dict[Node, set[Node]] | None:
    """The nodes that bring the same next character after the same text; None where it takes too long to find them.

    A node brings a character after another: a `Seq` between two of its parts, a `Repeat` from its end to its
    beginning. What a rule is followed by is taken for the same wherever it is named: that finds more pairs, never less.
    """
    steps = Steps(MOST_STEPS)
    try:
        edges = Edges(rules, above, steps)
        return meetings(edges.first[rules["root"]], edges.follow(steps), steps)
    except TooMuch:
        return None


def meetings(
    begin: frozenset[Chars], follow: dict[Chars, set[tuple[Chars, Node]]], steps: Steps
) -> dict[Node, set[Node]]:
    """From all pairs of characters at which two readings of one text may be, to those after them."""
    meets: dict[tuple, bool] = {}

    def meet(one: Chars, other: Chars) -> bool:
        key = one.ranges, other.ranges
        if key not in meets:
            steps.take(len(one.ranges) * len(other.ranges))
            meets[key] = any(a <= d and c <= b for (a, b), (c, d) in product(one.ranges, other.ranges))
        return meets[key]

    steps.take(len(begin) ** 2)
    waiting = [(one, other) for one, other in product(begin, begin) if meet(one, other)]
    seen, found = set(waiting), defaultdict(set)
    while waiting:
        one, other = waiting.pop()
        steps.take(len(follow[one]) * len(follow[other]))
        for (next_one, by), (next_other, by_other) in product(follow[one], follow[other]):
            if meet(next_one, next_other):
                found[by].add(by_other)
                if (next_one, next_other) not in seen:
                    seen.add((next_one, next_other))
                    waiting.append((next_one, next_other))
    return found


class Edges:
    """The characters with which each node may begin and end, and the nodes that may be empty."""

    def __init__(self, rules: dict[str, Node], above: dict[Node, list[Node]], steps: Steps):
        self.nodes = [node for body in rules.values() for node in nodes_of(body)]
        self.rules = rules
        self.first: dict[Node, frozenset[Chars]] = dict.fromkeys(self.nodes, frozenset())
        self.last, self.empty = dict(self.first), set()
        waiting = deque(self.nodes)
        while waiting:
            node = waiting.popleft()
            now = self.of(node)
            steps.take(len(now[0]) + len(now[1]) + len(parts_of(node)))
            if now != (self.first[node], self.last[node], node in self.empty):
                self.first[node], self.last[node], may = now
                self.empty.update((node,) if may else ())
                waiting += above[node]

    def of(self, node: Node) -> tuple[frozenset[Chars], frozenset[Chars], bool]:
        """First, last and whether it may be empty, as far as is known."""
        if isinstance(node, Chars):
            return frozenset((node,)), frozenset((node,)), False
        if isinstance(node, Repeat) and node.high == 0:
            return frozenset(), frozenset(), True
        if isinstance(node, Seq):
            may = all(part in self.empty for part in node.parts)
            return self.outer(node.parts, self.first), self.outer(node.parts[::-1], self.last), may
        parts = (self.rules[node.name],) if isinstance(node, Ref) else parts_of(node)
        may = any(part in self.empty for part in parts) or (isinstance(node, Repeat) and node.low == 0)
        first, last = (frozenset().union(*(which[part] for part in parts)) for which in (self.first, self.last))
        return first, last, may

    def outer(self, parts: Iterable[Node], which: dict[Node, frozenset[Chars]]) -> frozenset[Chars]:
        """What stands at the edge of a sequence: past parts that may be empty, too."""
        found = []
        for part in parts:
            found.append(which[part])
            if part not in self.empty:
                break
        return frozenset().union(*found)

    def follow(self, steps: Steps) -> dict[Chars, set[tuple[Chars, Node]]]:
        """The characters that may come after each, and the node that brings them."""
        found: dict[Chars, set[tuple[Chars, Node]]] = defaultdict(set)

        def join(before: Node, after: Node, by: Node) -> None:
            steps.take(len(self.last[before]) * len(self.first[after]))
            for char in self.last[before]:
                found[char].update((other, by) for other in self.first[after])

        for node in self.nodes:
            if isinstance(node, Repeat) and node.high != 1:
                join(node.part, node.part, node)
            for index, part in enumerate(node.parts if isinstance(node, Seq) else ()):
                for after in islice(parts_of(node), index + 1, None):
                    join(part, after, node)
                    if after not in self.empty:
                        break
        return found


class Writer:
    """Writes rules as Lark: split nodes as rules, the others as terminals."""

    def __init__(self, rules: dict[str, Node], split: set[Node]):
        self.rules, self.split = rules, split
        self.numbers = {name: number for number, name in enumerate(rules)}
        self.lexemes: dict[str, str] = {}  # what they match -> their names
        self.terminals: list[str] = []  # rules that stand in lexemes
        self.known: set[str] = set()

    def written(self) -> str:
        bodies = [f"start: {self.rule(Ref('root'))}"]
        bodies += [
            f"r{self.numbers[name]}: {self.rule(body)}" for name, body in self.rules.items() if body in self.split
        ]
        bodies += [f"{name}: {text}" for text, name in self.lexemes.items()]
        for name in self.terminals:  # which grow meanwhile
            bodies.append(f"R{self.numbers[name]}: {self.lexeme(self.rules[name])}")
        return "\n".join(bodies)

    def rule(self, node: Node) -> str:
        """A node as a part of a rule."""
        if isinstance(node, Ref) and self.rules[node.name] in self.split:
            return f"r{self.numbers[node.name]}"
        if node in self.split:
            return self.composed(node, self.rule)
        return self.lexemes.setdefault(self.lexeme(node), f"L{len(self.lexemes)}")

    def lexeme(self, node: Node) -> str:
        """A node as a part of a terminal."""
        if isinstance(node, Ref):
            if node.name not in self.known:
                self.known.add(node.name)
                self.terminals.append(node.name)
            return f"R{self.numbers[node.name]}"
        return self.composed(node, self.lexeme)

    def composed(self, node: Node, write) -> str:
        if isinstance(node, Chars):
            return characters(node)
        if isinstance(node, Repeat):
            high = "" if node.high is None else f"{node.high}"
            return f"({write(node.part)}){{{node.low},{high}}}"
        if isinstance(node, Alt):
            return f"({' | '.join(map(write, node.parts))})"
        return f"({' '.join(map(write, parts_of(node)))})" if parts_of(node) else '""'


def characters(node: Chars) -> str:
    if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return json.dumps(chr(node.ranges[0][0]), ensure_ascii=False)
    return "/[" + "".join(rf"\x{{{low:X}}}-\x{{{high:X}}}" for low, high in node.ranges) + "]/"
