"""Parser of GBNF, the grammar notation of llama.cpp. `lark.py` translates the rules for llguidance.

root  ::= ("- " item)+        # the whole answer
    item  ::= [^\n]{1,80} "\n"
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF
SURROGATES = 0xD800, 0xDFFF  # code points that are not characters
MAX_DEPTH = 64  # nested groups
MAX_REPEATS = 2000  # bound of a repetition, as in llama.cpp
RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.M)
NAME = re.compile(r"[A-Za-z0-9_-]+")
SPACE = re.compile(r"(?:\s|#[^\r\n]*)*")
MAX_BRACES = 64  # characters of a repetition in braces
HEX = {"x": 2, "u": 4, "U": 8}
ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{letter: letter for letter in '\\"[]-'}}


class GrammarError(ValueError):
    """A grammar is invalid. The message names the line, the column and the expected text."""

    def __init__(self, text: str, offset: int, reason: str):
        line = text.count("\n", 0, offset) + 1
        super().__init__(f"line {line}, column {offset - text.rfind(chr(10), 0, offset)}: {reason}")


@dataclass(frozen=True, eq=False)
class Chars:
    """One character from one of the ranges."""

    ranges: tuple[tuple[int, int], ...]  # sorted and disjoint; both bounds inclusive


@dataclass(frozen=True, eq=False)
class Seq:
    children: "tuple[Node, ...]"


@dataclass(frozen=True, eq=False)
class Alt:
    children: "tuple[Node, ...]"


@dataclass(frozen=True, eq=False)
class Repeat:
    child: "Node"
    low: int
    high: int | None  # None: unbounded


@dataclass(frozen=True, eq=False)
class Ref:
    name: str


Node = Chars | Seq | Alt | Repeat | Ref


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is GBNF. The alternative, Lark, has no `::=`."""
    return RULE.search(text) is not None


def child_nodes(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Seq | Alt):
        return node.children
    return (node.child,) if isinstance(node, Repeat) else ()


def walk_nodes(node: Node) -> Iterator[Node]:
    """Yield all nodes of an expression in post-order. References to rules are not followed."""
    for child in child_nodes(node):
        yield from walk_nodes(child)
    yield node


def union(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    gaps = []
    start = 0
    for low, high in (*union([*ranges, SURROGATES]), (MAX_CODE_POINT + 1, MAX_CODE_POINT + 1)):
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    return tuple(gaps)


def parse(text: str) -> dict[str, Node]:
    """Parse a grammar into its rules by name; rules that `root` does not need are left out."""
    return GbnfParser(text).rules()


class GbnfParser:
    """Recursive-descent parser; `at` is the offset of the next character."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0
        # Name of a referenced rule -> offset of its first reference.
        self.first_references: dict[str, int] = {}

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self.skip_space()
        while self.at < len(self.text):
            begin = self.at
            name = self.name("the name of a rule")
            if name in rules:
                raise GrammarError(
                    self.text, begin, f"there is a rule {name} already: join the two with |"
                )
            self.skip_space()
            if not self.text.startswith("::=", self.at):
                raise self.error("expected ::= after the name of a rule")
            self.at += 3
            rules[name] = self.alternatives(0)
            if self.at < len(self.text) and not self.is_at_rule():
                raise self.error("expected | or a rule, name ::= ...")
        if "root" not in rules:
            raise GrammarError(
                self.text, 0, "there is no rule root, which says what the whole answer is"
            )
        for name, offset in self.first_references.items():
            if name not in rules:
                raise GrammarError(self.text, offset, f"there is no rule {name}")
        return reachable(rules)

    def error(self, reason: str) -> GrammarError:
        return GrammarError(
            self.text,
            self.at,
            reason if self.at < len(self.text) else f"the grammar ends here; {reason}",
        )

    def skip_space(self) -> None:
        """Skip white space and comments."""
        match = SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def name(self, expected: str) -> str:
        if (match := NAME.match(self.text, self.at)) is None:
            raise self.error(f"expected {expected}")
        self.at = match.end()
        return match[0]

    def is_at_rule(self) -> bool:
        match = NAME.match(self.text, self.at)
        return match is not None and re.compile(r"\s*::=").match(self.text, match.end()) is not None

    def alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self.error(f"more than {MAX_DEPTH} groups in each other")
        alternatives = [self.sequence(depth)]
        while self.text.startswith("|", self.at):
            self.at += 1
            alternatives.append(self.sequence(depth))
        return alternatives[0] if len(alternatives) == 1 else Alt(tuple(alternatives))

    def sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while True:
            self.skip_space()
            letter = self.text[self.at : self.at + 1]
            if letter in ("", "|", ")") or self.is_at_rule():
                return items[0] if len(items) == 1 else Seq(tuple(items))
            items.append(self.repeated(self.item(letter, depth)))

    def item(self, letter: str, depth: int) -> Node:
        if letter == '"':
            return self.literal()
        if letter == "[":
            return self.char_class()
        if letter == "(":
            self.at += 1
            group = self.alternatives(depth + 1)
            if not self.text.startswith(")", self.at):
                raise self.error("expected ) or |")
            self.at += 1
            return group
        if letter == ".":
            self.at += 1
            return Chars(complement([]))
        if letter in "*+?{":
            raise self.error(f"{letter} repeats what stands before it, and nothing does")
        if letter in "<!":
            raise self.error(
                "tokens such as <think> or <[7]> cannot be asked for: write their text"
            )
        if letter in ":=":
            raise self.error("a rule is written name ::= ...")
        offset = self.at
        name = self.name('a text "...", a class [...], a group (...) or the name of a rule')
        self.first_references.setdefault(name, offset)
        return Ref(name)

    def repeated(self, node: Node) -> Node:
        """Wrap a node in the repetition operator that follows it, if one does."""
        self.skip_space()
        letter = self.text[self.at : self.at + 1]
        if letter == "" or letter not in "*+?{":
            return node
        begin = self.at
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(letter, (0, 0))
        self.at += 1
        if letter == "{":
            end = self.text.find("}", begin, begin + MAX_BRACES)
            low_text, comma, high_text = map(str.strip, self.text[begin + 1 : end].partition(","))
            numbers = low_text + high_text
            if end == -1 or not numbers or not (numbers.isascii() and numbers.isdigit()):
                raise GrammarError(self.text, begin, "a repetition is {m}, {m,} or {m,n}")
            low = int(low_text or 0)
            high = int(high_text) if high_text else None if comma else low
            self.at = end + 1
            if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
                written = self.text[begin : self.at]
                raise GrammarError(
                    self.text,
                    begin,
                    f"{written} must go from low to high, to {MAX_REPEATS} at most",
                )
        self.skip_space()
        if self.text[self.at : self.at + 1] in ("*", "+", "?", "{"):
            raise self.error("a repetition of a repetition needs a group: (...)")
        return Repeat(node, low, high)

    def literal(self) -> Node:
        begin = self.at
        characters = []
        self.at += 1
        while not self.text.startswith('"', self.at):
            characters.append(Chars(((code := self.char(begin, "text"), code),)))
        self.at += 1
        return characters[0] if len(characters) == 1 else Seq(tuple(characters))

    def char_class(self) -> Node:
        begin = self.at
        negated = self.text.startswith("^", begin + 1)
        self.at += 1 + negated
        ranges: list[tuple[int, int]] = []
        while not self.text.startswith("]", self.at):
            offset = self.at
            low = self.char(begin, "class")
            high = low
            if self.text.startswith("-", self.at) and not self.text.startswith("]", self.at + 1):
                self.at += 1
                high = self.char(begin, "class")
            if high < low:
                raise GrammarError(
                    self.text, offset, f"the range {self.text[offset : self.at]} runs backwards"
                )
            ranges.append((low, high))
        self.at += 1
        if not ranges:
            raise GrammarError(self.text, begin, "a class must have at least one character")
        return Chars(complement(ranges) if negated else union(ranges))

    def char(self, begin: int, kind: str) -> int:
        """Read the next character of the `kind` (text or class) that starts at offset `begin`."""
        text = self.text
        at = self.at
        letter = text[at : at + 1]
        if letter == "" or (letter == "\\" and at + 1 == len(text)):
            raise GrammarError(text, begin, f"this {kind} has no end")
        self.at += 1
        if letter != "\\":
            return ord(letter)
        letter = text[at + 1]
        self.at += 1
        if letter in ESCAPES:
            return ord(ESCAPES[letter])
        if letter not in HEX:
            raise GrammarError(
                text, at, f"there is no escape \\{letter}; write \\\\ for a backslash"
            )
        digits = text[self.at : self.at + HEX[letter]]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{HEX[letter]}}}", digits):
            raise GrammarError(text, at, f"\\{letter} needs {HEX[letter]} hexadecimal digits")
        code = int(digits, 16)
        if code > MAX_CODE_POINT or SURROGATES[0] <= code <= SURROGATES[1]:
            raise GrammarError(text, at, f"\\{letter}{digits} is no character")
        self.at += len(digits)
        return code


def reachable(rules: dict[str, Node]) -> dict[str, Node]:
    """Return the rules that `root` needs, in breadth-first order of their references."""
    needed = {"root": rules["root"]}
    waiting = ["root"]
    while waiting:
        for node in walk_nodes(needed[waiting.pop()]):
            if isinstance(node, Ref) and node.name not in needed:
                needed[node.name] = rules[node.name]
                waiting.append(node.name)
    return needed
