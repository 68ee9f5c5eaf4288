"""GBNF, the grammars of llama.cpp: from text to rules. `lark.py` writes them for the library that serves grammars.

root  ::= ("- " item)+        # what an answer has to be
item  ::= [^\n]{1,80} "\n"
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

LAST = 0x10FFFF
SURROGATES = 0xD800, 0xDFFF  # no characters
DEEPEST = 64  # groups in groups
MOST_TIMES = 2000  # of a repetition, as in llama.cpp
RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.M)
NAME = re.compile(r"[A-Za-z0-9_-]+")
SPACE = re.compile(r"(?:\s|#[^\r\n]*)*")
MAX_BRACES = 64  # characters of a repetition in braces
HEX = {"x": 2, "u": 4, "U": 8}
ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{letter: letter for letter in '\\"[]-'}}


class GrammarError(ValueError):
    """Where a grammar is wrong, and what would be right."""

    def __init__(self, text: str, at: int, why: str):
        line = text.count("\n", 0, at) + 1
        super().__init__(f"line {line}, column {at - text.rfind(chr(10), 0, at)}: {why}")


@dataclass(frozen=True, eq=False)
class Chars:
    """One character of these ranges."""

    ranges: tuple[tuple[int, int], ...]  # sorted, apart from each other


@dataclass(frozen=True, eq=False)
class Seq:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, eq=False)
class Alt:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, eq=False)
class Repeat:
    part: "Node"
    low: int
    high: int | None  # None: without end


@dataclass(frozen=True, eq=False)
class Ref:
    name: str


Node = Chars | Seq | Alt | Repeat | Ref


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF and not Lark, which has no `::=`."""
    return RULE.search(text) is not None


def parts_of(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Seq | Alt):
        return node.parts
    return (node.part,) if isinstance(node, Repeat) else ()


def nodes_of(node: Node) -> Iterator[Node]:
    """A node and all below it, children first; not the rules that it names."""
    for part in parts_of(node):
        yield from nodes_of(part)
    yield node


def union(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def all_but(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found, start = [], 0
    for low, high in (*union([*ranges, SURROGATES]), (LAST + 1, LAST + 1)):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return tuple(found)


def parse(text: str) -> dict[str, Node]:
    """The rules that `root` needs, by name."""
    return Reader(text).rules()


class Reader:
    """Reads a grammar from its beginning to its end."""

    def __init__(self, text: str):
        self.text, self.at = text, 0
        self.named: dict[str, int] = {}  # rules that are asked for, and where first

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self.space()
        while self.at < len(self.text):
            begin, name = self.at, self.name("the name of a rule")
            if name in found:
                raise GrammarError(self.text, begin, f"there is a rule {name} already: join the two with |")
            self.space()
            if not self.text.startswith("::=", self.at):
                raise self.error("expected ::= after the name of a rule")
            self.at += 3
            found[name] = self.alternatives(0)
            if self.at < len(self.text) and not self.begins_rule():
                raise self.error("expected | or a rule, name ::= ...")
        if "root" not in found:
            raise GrammarError(self.text, 0, "there is no rule root, which says what the whole answer is")
        for name, where in self.named.items():
            if name not in found:
                raise GrammarError(self.text, where, f"there is no rule {name}")
        return reachable(found)

    def error(self, why: str) -> GrammarError:
        return GrammarError(self.text, self.at, why if self.at < len(self.text) else f"the grammar ends here; {why}")

    def space(self) -> None:
        """Pass over spaces, line ends and comments."""
        found = SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def name(self, what: str) -> str:
        if (found := NAME.match(self.text, self.at)) is None:
            raise self.error(f"expected {what}")
        self.at = found.end()
        return found[0]

    def begins_rule(self) -> bool:
        found = NAME.match(self.text, self.at)
        return found is not None and re.compile(r"\s*::=").match(self.text, found.end()) is not None

    def alternatives(self, depth: int) -> Node:
        if depth > DEEPEST:
            raise self.error(f"more than {DEEPEST} groups in each other")
        parts = [self.sequence(depth)]
        while self.text.startswith("|", self.at):
            self.at += 1
            parts.append(self.sequence(depth))
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))

    def sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while True:
            self.space()
            letter = self.text[self.at : self.at + 1]
            if letter in ("", "|", ")") or self.begins_rule():
                return parts[0] if len(parts) == 1 else Seq(tuple(parts))
            parts.append(self.repeated(self.item(letter, depth)))

    def item(self, letter: str, depth: int) -> Node:
        if letter == '"':
            return self.literal()
        if letter == "[":
            return self.char_class()
        if letter == "(":
            self.at += 1
            found = self.alternatives(depth + 1)
            if not self.text.startswith(")", self.at):
                raise self.error("expected ) or |")
            self.at += 1
            return found
        if letter == ".":
            self.at += 1
            return Chars(all_but([]))
        if letter in "*+?{":
            raise self.error(f"{letter} repeats what stands before it, and nothing does")
        if letter in "<!":
            raise self.error("tokens such as <think> or <[7]> cannot be asked for: write their text")
        if letter in ":=":
            raise self.error("a rule is written name ::= ...")
        where, name = self.at, self.name('a text "...", a class [...], a group (...) or the name of a rule')
        self.named.setdefault(name, where)
        return Ref(name)

    def repeated(self, node: Node) -> Node:
        """The node with the repetition that follows it."""
        self.space()
        letter = self.text[self.at : self.at + 1]
        if letter == "" or letter not in "*+?{":
            return node
        begin, (low, high) = self.at, {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(letter, (0, 0))
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
            if max(low, high or 0) > MOST_TIMES or (high is not None and high < low):
                written = self.text[begin : self.at]
                raise GrammarError(self.text, begin, f"{written} must go from low to high, to {MOST_TIMES} at most")
        self.space()
        if self.text[self.at : self.at + 1] in ("*", "+", "?", "{"):
            raise self.error("a repetition of a repetition needs a group: (...)")
        return Repeat(node, low, high)

    def literal(self) -> Node:
        begin, parts = self.at, []
        self.at += 1
        while not self.text.startswith('"', self.at):
            parts.append(Chars(((code := self.char(begin, "text"), code),)))
        self.at += 1
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def char_class(self) -> Node:
        begin = self.at
        negated = self.text.startswith("^", begin + 1)
        self.at += 1 + negated
        ranges: list[tuple[int, int]] = []
        while not self.text.startswith("]", self.at):
            where, low = self.at, self.char(begin, "class")
            high = low
            if self.text.startswith("-", self.at) and not self.text.startswith("]", self.at + 1):
                self.at += 1
                high = self.char(begin, "class")
            if high < low:
                raise GrammarError(self.text, where, f"the range {self.text[where : self.at]} runs backwards")
            ranges.append((low, high))
        self.at += 1
        if not ranges:
            raise GrammarError(self.text, begin, "a class must have at least one character")
        return Chars(all_but(ranges) if negated else union(ranges))

    def char(self, begin: int, what: str) -> int:
        """The next character of a text or a class that began there."""
        text, at = self.text, self.at
        letter = text[at : at + 1]
        if letter == "" or (letter == "\\" and at + 1 == len(text)):
            raise GrammarError(text, begin, f"this {what} has no end")
        self.at += 1
        if letter != "\\":
            return ord(letter)
        letter = text[at + 1]
        self.at += 1
        if letter in ESCAPES:
            return ord(ESCAPES[letter])
        if letter not in HEX:
            raise GrammarError(text, at, f"there is no escape \\{letter}; write \\\\ for a backslash")
        digits = text[self.at : self.at + HEX[letter]]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{HEX[letter]}}}", digits):
            raise GrammarError(text, at, f"\\{letter} needs {HEX[letter]} hexadecimal digits")
        code = int(digits, 16)
        if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            raise GrammarError(text, at, f"\\{letter}{digits} is no character")
        self.at += len(digits)
        return code


def reachable(rules: dict[str, Node]) -> dict[str, Node]:
    """Those that `root` needs, in the order in which it asks for them."""
    found = {"root": rules["root"]}
    waiting = ["root"]
    while waiting:
        for node in nodes_of(found[waiting.pop()]):
            if isinstance(node, Ref) and node.name not in found:
                found[node.name] = rules[node.name]
                waiting.append(node.name)
    return found
