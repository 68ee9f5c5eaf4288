"""Analyses a compiled program's HLO text: the bytes that it moves, and its copies of weights and
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
PARTS = {"dynamic-slice", "slice", "gather"}  # operations that read only what they return
LARGE = 1 << 18  # elements; smaller arrays do not count as copies of weights


@dataclass(frozen=True)
class Instruction:
    name: str
    kind: str
    arrays: tuple[tuple[str, int], ...]  # (element type, number of elements) of each result
    operands: tuple[str, ...]
    called: tuple[str, ...]  # names of called computations
    number: int  # index of a parameter or of a tuple's element; else -1
    turns: int | None  # iterations of a loop, if the compiler knows them
    label: str  # for a parameter of the program, the name of the argument
    aliased: Mapping[int, int]  # output -> operand that a kernel updates in place
    is_root: bool

    @property
    def bytes(self) -> float:
        return sum(elements * element_bits(kind) / 8 for kind, elements in self.arrays)

    @property
    def made(self) -> float:
        """Bytes of the results that are not updates in place (which write only some rows)."""
        return sum(
            e * element_bits(kind) / 8
            for n, (kind, e) in enumerate(self.arrays)
            if n not in self.aliased
        )

    @property
    def elements(self) -> int:
        return sum(elements for _, elements in self.arrays)


@dataclass
class Work:
    """The traffic and launches of one run of a program."""

    bytes: float = 0.0  # read and written
    launches: float = 0.0
    # Bytes written by copies or dequantisations of parameters, by parameter.
    copied: dict[str, float] = field(default_factory=dict)

    def add(self, work: "Work", times: float = 1) -> None:
        self.bytes += times * work.bytes
        self.launches += times * work.launches
        for name, count in work.copied.items():
            self.copied[name] = self.copied.get(name, 0) + times * count


def element_bits(kind: str) -> int:
    """The bits of an element of an HLO type such as bf16, s4 or pred."""
    match = re.match(r"[a-z]+(\d+)", kind)
    return int(match[1]) if match else 8 * (kind == "pred")


class Module:
    """The computations in a program's HLO text."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        inside = None
        for line in text.splitlines():
            if not line.startswith(" "):
                match = HEADER.match(line)
                inside = self.computations.setdefault(match[2], {}) if match else None
                self.entry = match[2] if match and match[1] else self.entry
            elif inside is not None and (match := INSTRUCTION.match(line)):
                parsed = parse_instruction(match)
                inside[parsed.name] = parsed

    def work(self, shares: PartOf, turns: TurnsOf) -> Work:
        """The work of one run.

        Args:
            shares: Called with (parameter, in place). Returns the fraction of the parameter that a
                kernel with the whole parameter as operand reads; if the kernel updates it in place,
                the fraction that it reads and writes.
            turns: Called with (parameters, is nested). Returns the iterations of a loop over these
                parameters whose trip count the compiler does not know.
        """
        entry = self.computations[self.entry].values()
        inputs = {
            parameter.number: parameter.label
            for parameter in entry
            if parameter.kind == "parameter"
        }
        return Walk(self, shares, turns).computation(
            self.entry, [inputs[n] for n in range(len(inputs))]
        )


class Walk:
    """Follows a program's parameters through its loops, calls and fusions, and sums up the work."""

    def __init__(self, module: Module, shares: PartOf, turns: TurnsOf):
        self.computations = module.computations
        self.shares = shares
        self.turns = turns

    def computation(self, name: str, inputs: list, inner: bool = False) -> Work:
        work = Work()
        origins = {}
        for op in self.computations[name].values():
            operand_origins = [origins.get(operand) for operand in op.operands]
            origins[op.name] = self.origin(op, operand_origins, inputs)
            if op.kind == "while":
                body = Work()
                for called in op.called:
                    body.add(self.computation(called, operand_origins, True))
                work.add(
                    body,
                    op.turns
                    if op.turns is not None
                    else self.turns(parameter_names(operand_origins), inner),
                )
            elif op.kind == "conditional":  # the branch that moves most
                branches = zip(op.called, operand_origins[1:], strict=True)
                work.add(
                    max(
                        (
                            self.computation(called, [branch_origin], inner)
                            for called, branch_origin in branches
                        ),
                        key=lambda w: w.bytes,
                    )
                )
            elif op.kind in ("call", "async-start"):
                work.add(self.computation(op.called[0], operand_origins, inner))
            elif op.kind not in FREE:
                work.add(self.launch(op, operand_origins, self.computations[name]))
        return work

    def origin(self, op: Instruction, operand_origins: list, inputs: list):
        """The name of the parameter that an instruction's result refers to, a tuple of these for a
        tuple, or None.
        """
        if op.kind == "parameter":
            return inputs[op.number] if op.number is not None and op.number < len(inputs) else None
        if op.kind == "tuple":
            return tuple(operand_origins)
        if op.kind == "get-tuple-element":
            return (
                operand_origins[0][op.number]
                if isinstance(operand_origins[0], tuple) and op.number is not None
                else None
            )
        if op.kind in ("bitcast", "while", "optimization-barrier", "copy"):
            return operand_origins[0]
        if op.kind == "fusion" and (place := self.written_in_place(op)) is not None:
            return operand_origins[place]
        if op.aliased:
            written = [
                operand_origins[op.aliased[n]] if n in op.aliased else None
                for n in range(len(op.arrays))
            ]
            return written[0] if len(written) == 1 else tuple(written)
        return None

    def fused(self, op: Instruction) -> dict[str, Instruction]:
        return self.computations[op.called[0]] if op.kind == "fusion" else {}

    def written_in_place(self, op: Instruction) -> int | None:
        """The index of the operand that a fusion updates in place by a scatter, or None."""
        inside = self.fused(op)
        root = next((inner for inner in inside.values() if inner.is_root), None)
        while root is not None and root.kind == "bitcast":
            root = inside[root.operands[0]]
        if root is None or root.kind not in ("scatter", "dynamic-update-slice"):
            return None
        target = inside[root.operands[0]]
        while target.kind == "bitcast":
            target = inside[target.operands[0]]
        return target.number if target.kind == "parameter" else None

    def launch(
        self, op: Instruction, operand_origins: list, around: Mapping[str, Instruction]
    ) -> Work:
        """The work of one kernel."""
        work = Work(launches=1)
        inside = self.fused(op)
        place = self.written_in_place(op)
        parameters = {
            inner.number: inner.name for inner in inside.values() if inner.kind == "parameter"
        }
        elements_by_origin = Counter()  # elements, by the parameter that they are of
        multiplies = op.kind in PRODUCTS or any(inner.kind in PRODUCTS for inner in inside.values())
        for number, (operand, origin) in enumerate(zip(op.operands, operand_origins, strict=True)):
            operand_op = around[operand]
            origin = origin if isinstance(origin, str) else None
            if number == place:  # updated in place: only the rows written count, below
                continue
            if number in op.aliased.values():
                work.bytes += self.shares(origin, True) * operand_op.bytes if origin else 0
                continue
            if not inside:
                share = self.shares(origin, False) if op.kind == "custom-call" and origin else 1.0
                read = share * operand_op.bytes
                elements = operand_op.elements
                is_slice = True
            else:
                read, elements, is_slice = operand_read(inside, parameters[number], operand_op)
            work.bytes += read
            is_large = LARGE <= elements <= op.elements
            if origin is not None and is_large and is_slice and not multiplies and place is None:
                elements_by_origin[origin] += elements
        for origin, elements in elements_by_origin.items():
            copied = op.bytes * elements / elements_by_origin.total()
            work.copied[origin] = work.copied.get(origin, 0) + copied
        work.bytes += updated_bytes(inside) if place is not None else op.made
        return work


def operand_read(
    inside: Mapping[str, Instruction], parameter: str, operand_op: Instruction
) -> tuple[float, int, bool]:
    """(bytes read, elements read, whether the reads are contiguous) of a fusion's operand."""
    names = [parameter]
    users = []
    for name in names:
        for inner in inside.values():
            if name in inner.operands:
                if inner.kind == "bitcast":
                    names.append(inner.name)
                else:
                    users.append((inner, inner.operands[0] == name))
    if users and all(inner.kind in PARTS and first for inner, first in users):
        read = sum(inner.bytes for inner, _ in users)
        elements = sum(inner.elements for inner, _ in users)
        if read < operand_op.bytes:
            return read, elements, all(inner.kind != "gather" for inner, _ in users)
    return operand_op.bytes, operand_op.elements, True


def updated_bytes(inside: Mapping[str, Instruction]) -> float:
    """Bytes that a fusion writes in place into one of its operands."""
    write_ops = [
        inner for inner in inside.values() if inner.kind in ("scatter", "dynamic-update-slice")
    ]
    return sum(
        inside[inner.operands[-1 if inner.kind == "scatter" else 1]].bytes for inner in write_ops
    )


def parameter_names(origins) -> set[str]:
    """All parameter names in nested tuples of origins."""
    names = set()
    for origin in origins:
        if isinstance(origin, tuple):
            names |= parameter_names(origin)
        elif origin is not None:
            names.add(origin)
    return names


def parse_instruction(match: re.Match) -> Instruction:
    root, name, shape, kind, inputs, attributes = match.groups()
    index = re.search(r"index=(\d+)", attributes) if kind == "get-tuple-element" else None
    number = int(inputs) if kind == "parameter" else int(index[1]) if index else -1
    turns = TURNS.search(attributes) if kind == "while" else None
    branches = BRANCHES.search(attributes)
    label = LABEL.search(attributes) if kind == "parameter" else None
    return Instruction(
        name,
        kind,
        tuple(
            (element_type, math.prod(map(int, dims.split(","))) if dims else 1)
            for element_type, dims in ARRAY.findall(shape)
        ),
        () if kind in ("parameter", "constant") else tuple(NAME.findall(inputs)),
        tuple(NAME.findall(branches[1])) if branches else tuple(CALLED.findall(attributes)),
        number,
        int(turns[1]) if turns else None,
        label[1] if label else name,
        {int(output or 0): int(operand) for output, operand in IN_PLACE.findall(attributes)},
        root is not None,
    )
