"""Reads a compiled program's text: the bytes that it moves, and what it copies of weights and
pages.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\(([^)]*)\)(.*)$")
ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
NAME = re.compile(r"%([\w.-]+)")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.-]+)"
)
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
IN_PLACE = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")
LABEL = re.compile(r'op_name="([^"]*)"')
FREE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
    "replica-id",
    "optimization-barrier",
    "async-done",
    "all-reduce-done",
    "all-gather-done",
    "copy-done",
}
PartOf = Callable[[str, bool], float]
TurnsOf = Callable[[set[str], bool], float]
PRODUCTS = {"dot", "convolution", "custom-call"}
PARTS = {"dynamic-slice", "slice", "gather"}  # read no more than they return
LARGE = 1 << 18  # elements: fewer are no copy of a weight


@dataclass(frozen=True)
class Instruction:
    name: str
    kind: str
    arrays: tuple[tuple[str, int], ...]  # (type, elements) of what it returns
    operands: tuple[str, ...]
    called: tuple[str, ...]
    number: int  # of a parameter, or of a tuple's element; -1 where it is neither
    turns: int | None  # of a loop, where the compiler knows
    label: str  # of a parameter of the program: the argument's name
    aliased: Mapping[int, int]  # outputs of a kernel that are operands, written in place
    is_root: bool

    @property
    def bytes(self) -> float:
        return sum(elements * bits(kind) / 8 for kind, elements in self.arrays)

    @property
    def made(self) -> float:
        """Bytes of what is not written in place: of that only rows are, of which another operand
        has the numbers.
        """
        return sum(
            e * bits(kind) / 8 for n, (kind, e) in enumerate(self.arrays) if n not in self.aliased
        )

    @property
    def elements(self) -> int:
        return sum(elements for _, elements in self.arrays)


@dataclass
class Work:
    """What a program does when it runs once."""

    bytes: float = 0.0  # read and written
    launches: float = 0.0
    # bytes written, by the parameter that was copied or decoded
    copied: Counter = field(default_factory=Counter)

    def add(self, other: "Work", times: float = 1) -> None:
        self.bytes += times * other.bytes
        self.launches += times * other.launches
        for name, count in other.copied.items():
            self.copied[name] += times * count


def bits(kind: str) -> int:
    """Of an element of a type such as bf16, s4 or pred."""
    found = re.match(r"[a-z]+(\d+)", kind)
    return int(found[1]) if found else 8 * (kind == "pred")


class Module:
    """The computations of a program's text."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        inside = None
        for line in text.splitlines():
            if not line.startswith(" "):
                found = HEADER.match(line)
                inside = self.computations.setdefault(found[2], {}) if found else None
                self.entry = found[2] if found and found[1] else self.entry
            elif inside is not None and (found := INSTRUCTION.match(line)):
                one = instruction(found)
                inside[one.name] = one

    def work(self, shares: PartOf, turns: TurnsOf) -> Work:
        """What a run does. `shares`: which part of a parameter a kernel reads that gets the whole
        of it, or reads and writes where it changes the parameter in place. `turns`: those of a loop
        that the compiler does not count, by the parameters that it gets, and whether another is
        around it.
        """
        entry = self.computations[self.entry].values()
        inputs = {one.number: one.label for one in entry if one.kind == "parameter"}
        return Walk(self, shares, turns).computation(
            self.entry, [inputs[n] for n in range(len(inputs))]
        )


class Walk:
    """Follows the parameters of a program through its loops and fusions."""

    def __init__(self, module: Module, shares: PartOf, turns: TurnsOf):
        self.computations = module.computations
        self.shares = shares
        self.turns = turns

    def computation(self, name: str, inputs: list, inner: bool = False) -> Work:
        done = Work()
        origins = {}
        for one in self.computations[name].values():
            given = [origins.get(operand) for operand in one.operands]
            origins[one.name] = self.origin(one, given, inputs)
            if one.kind == "while":
                body = Work()
                for called in one.called:
                    body.add(self.computation(called, given, True))
                done.add(
                    body, one.turns if one.turns is not None else self.turns(flat(given), inner)
                )
            elif one.kind == "conditional":  # the branch that moves most
                branches = zip(one.called, given[1:], strict=True)
                done.add(
                    max(
                        (self.computation(called, [each], inner) for called, each in branches),
                        key=lambda w: w.bytes,
                    )
                )
            elif one.kind in ("call", "async-start"):
                done.add(self.computation(one.called[0], given, inner))
            elif one.kind not in FREE:
                done.add(self.launch(one, given, self.computations[name]))
        return done

    def origin(self, one: Instruction, given: list, inputs: list):
        """The name of the parameter that an instruction's result is, those of a tuple's elements,
        or None.
        """
        if one.kind == "parameter":
            return (
                inputs[one.number] if one.number is not None and one.number < len(inputs) else None
            )
        if one.kind == "tuple":
            return tuple(given)
        if one.kind == "get-tuple-element":
            return (
                given[0][one.number]
                if isinstance(given[0], tuple) and one.number is not None
                else None
            )
        if one.kind in ("bitcast", "while", "optimization-barrier", "copy"):
            return given[0]
        if one.kind == "fusion" and (place := self.written_in_place(one)) is not None:
            return given[place]
        if one.aliased:
            written = [
                given[one.aliased[n]] if n in one.aliased else None for n in range(len(one.arrays))
            ]
            return written[0] if len(written) == 1 else tuple(written)
        return None

    def fused(self, one: Instruction) -> dict[str, Instruction]:
        return self.computations[one.called[0]] if one.kind == "fusion" else {}

    def written_in_place(self, one: Instruction) -> int | None:
        """The operand into which a fusion scatters."""
        inside = self.fused(one)
        root = next((each for each in inside.values() if each.is_root), None)
        while root is not None and root.kind == "bitcast":
            root = inside[root.operands[0]]
        if root is None or root.kind not in ("scatter", "dynamic-update-slice"):
            return None
        target = inside[root.operands[0]]
        while target.kind == "bitcast":
            target = inside[target.operands[0]]
        return target.number if target.kind == "parameter" else None

    def launch(self, one: Instruction, given: list, around: Mapping[str, Instruction]) -> Work:
        """What one kernel moves."""
        done = Work(launches=1)
        inside = self.fused(one)
        place = self.written_in_place(one)
        parameters = {
            each.number: each.name for each in inside.values() if each.kind == "parameter"
        }
        taken = Counter()  # elements, by the parameter that they are of
        multiplies = one.kind in PRODUCTS or any(each.kind in PRODUCTS for each in inside.values())
        for number, (operand, origin) in enumerate(zip(one.operands, given, strict=True)):
            whole = around[operand]
            origin = origin if isinstance(origin, str) else None
            if number == place:  # only the rows that are written
                continue
            if number in one.aliased.values():
                done.bytes += self.shares(origin, True) * whole.bytes if origin else 0
                continue
            if not inside:
                share = self.shares(origin, False) if one.kind == "custom-call" and origin else 1.0
                read = share * whole.bytes
                elements = whole.elements
                is_slice = True
            else:
                read, elements, is_slice = part(inside, parameters[number], whole)
            done.bytes += read
            large = LARGE <= elements <= one.elements
            if origin is not None and large and is_slice and not multiplies and place is None:
                taken[origin] += elements
        for origin, elements in taken.items():
            done.copied[origin] += one.bytes * elements / taken.total()
        done.bytes += updated(inside) if place is not None else one.made
        return done


def part(
    inside: Mapping[str, Instruction], parameter: str, whole: Instruction
) -> tuple[float, int, bool]:
    """(bytes, elements) that a fusion reads of an operand, and whether it takes it whole or by
    slices.
    """
    names = [parameter]
    users = []
    for name in names:
        for each in inside.values():
            if name in each.operands:
                if each.kind == "bitcast":
                    names.append(each.name)
                else:
                    users.append((each, each.operands[0] == name))
    if users and all(each.kind in PARTS and first for each, first in users):
        read = sum(each.bytes for each, _ in users)
        elements = sum(each.elements for each, _ in users)
        if read < whole.bytes:
            return read, elements, all(each.kind != "gather" for each, _ in users)
    return whole.bytes, whole.elements, True


def updated(inside: Mapping[str, Instruction]) -> float:
    """Bytes that a fusion writes into one of its operands."""
    found = [each for each in inside.values() if each.kind in ("scatter", "dynamic-update-slice")]
    return sum(inside[each.operands[-1 if each.kind == "scatter" else 1]].bytes for each in found)


def flat(origins) -> set[str]:
    """The names among origins."""
    found = set()
    for one in origins:
        if isinstance(one, tuple):
            found |= flat(one)
        elif one is not None:
            found.add(one)
    return found


def instruction(found: re.Match) -> Instruction:
    root, name, shape, kind, inputs, rest = found.groups()
    index = re.search(r"index=(\d+)", rest) if kind == "get-tuple-element" else None
    number = int(inputs) if kind == "parameter" else int(index[1]) if index else -1
    turns = TURNS.search(rest) if kind == "while" else None
    branches = BRANCHES.search(rest)
    label = LABEL.search(rest) if kind == "parameter" else None
    return Instruction(
        name,
        kind,
        tuple(
            (each, math.prod(map(int, dims.split(","))) if dims else 1)
            for each, dims in ARRAY.findall(shape)
        ),
        () if kind in ("parameter", "constant") else tuple(NAME.findall(inputs)),
        tuple(NAME.findall(branches[1])) if branches else tuple(CALLED.findall(rest)),
        number,
        int(turns[1]) if turns else None,
        label[1] if label else name,
        {int(output or 0): int(operand) for output, operand in IN_PLACE.findall(rest)},
        root is not None,
    )
