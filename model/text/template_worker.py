"""The process that renders chat templates. It is run by path and reads and writes one JSON object a line.

A template is an untrusted program. Fuel bounds its steps, but doubling a string two dozen times needs few steps and
all memory, and a structure that contains itself overflows minijinja's stack. So the template runs here, where the
operating system bounds memory and time and a crash ends nothing else. Each request says its bound of processor time,
rounded up to the next second; an idle worker uses none. The file imports nothing of Quire, so that it starts in a few
hundredths of a second.
"""

import contextlib
import json
import re
import resource
import sys
from datetime import datetime
from typing import Any

import minijinja

FUEL = 30_000_000  # template instructions: about a second
MEMORY = 512 << 20  # bytes of address space
LARGEST_TEXT = 32 << 20  # characters

# {% generation %} marks what training masks and has no effect here. `if true` keeps its whitespace control.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")

_RAW = re.compile(r"(\{%[-+]?\s*raw)\s*%\}")  # Jinja keeps a line break after it; minijinja does so for `+%}`

# In Jinja, an undefined value is iterable and None is not; minijinja gives tests None for both. Each pattern also ends
# where the source ends: what cannot fail is not tried again from every place.
_STRING = r""" "(?:[^"\\]|\\.)*(?:"|\\?\Z) | '(?:[^'\\]|\\.)*(?:'|\\?\Z) """
_TAG = re.compile(
    rf"""\{{\# .*? (?:\#\}}|\Z) | \{{[{{%] (?:{_STRING}|[^"'])*? (?:[%}}]\}}|\Z)""", re.DOTALL | re.VERBOSE
)
_ITERABLE = re.compile(rf"{_STRING} | (?P<test>\bis\s+(?:not\s+)?iterable\b)", re.DOTALL | re.VERBOSE)

_IN_NAMELESS = re.compile(r" \(in <string>(:\d+)?\)")  # minijinja adds it for templates without a name


class Refused(Exception):
    """The template refused the conversation, by `raise_exception`."""


class Exponential:
    """A number with an exponent, as in 1e-06: of a float, minijinja writes all zeros."""

    def __init__(self, written: str):
        self.value = float(written)

    def __repr__(self) -> str:
        return repr(self.value)


def number(written: str) -> float | Exponential:
    """A float of the conversation, which prints as in Python."""
    return Exponential(written) if "e" in written else float(written)


def raise_exception(message: object) -> None:
    raise Refused(str(message))


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat models were trained on: Python's spacing and order, and nothing escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_plain
    )


def _plain(value: object) -> float:
    if isinstance(value, Exponential):
        return value.value
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def indent(text: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """As in Jinja: minijinja's drops a final newline."""
    pad = width if isinstance(width, str) else " " * width
    head, *rest = (str(text) + "\n").splitlines()
    lines = [head, *(pad + line if line or blank else line for line in rest)]
    return (pad if first else "") + "\n".join(lines)


def length(value: Any) -> int:
    return 0 if value is None else len(value)  # an undefined value comes as None, and its length is 0


def is_iterable(value: Any) -> bool:
    return hasattr(value, "__iter__")  # None is not: `tools is iterable` guards many a loop


def is_sequence(value: Any) -> bool:
    return hasattr(value, "__getitem__")  # of Python's types: a string and a mapping too


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | Exponential)


def is_float(value: Any) -> bool:
    return isinstance(value, float | Exponential)


def environment() -> minijinja.Environment:
    return minijinja.Environment(
        fuel=FUEL,
        debug=False,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_escape_callback=lambda name: False,
        filters={"tojson": tojson, "indent": indent, "length": length, "count": length},
        tests={"iterable": is_iterable, "sequence": is_sequence, "number": is_number, "float": is_float},
        globals={"raise_exception": raise_exception, "strftime_now": strftime_now},
    )


def as_minijinja(source: str) -> str:
    """A template such that minijinja writes what Jinja writes."""
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    source = _RAW.sub(r"\1 +%}", source)
    source = _GENERATION.sub(lambda m: f"{m[1]}{'endif' if m[2] else 'if true'}{m[3]}", source)
    if "iterable" in source:
        source = _TAG.sub(lambda tag: _ITERABLE.sub(_with_default, tag[0]), source)
    return source


def _with_default(match: re.Match[str]) -> str:
    return f"|default([]) {match[0]}" if match["test"] else match[0]


def render(source: str, context: dict[str, Any]) -> dict[str, str]:
    """{"text": ...} or {"error": ...}, which is one line."""
    source = as_minijinja(source)
    try:
        text = environment().render_str(source, **context)
    except Refused as error:
        return {"error": _one_line(str(error))}
    except minijinja.TemplateError as error:
        if error.kind == "OutOfFuel":
            return {"error": f"the template ran for more than {FUEL} steps"}
        where = f" (line {error.line} of the template)" if error.line else ""
        return {"error": _one_line(_IN_NAMELESS.sub("", error.detail or error.message)) + where}
    except Exception as error:  # what a filter or a method raised
        return {"error": _one_line(f"{type(error).__name__}: {error}")}
    if len(text) > LARGEST_TEXT:
        return {"error": f"the template wrote {len(text)} characters, more than {LARGEST_TEXT}"}
    return {"text": text}


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit; the limit on processor time still ends it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin.buffer:
        source, context, seconds = json.loads(line, parse_float=number)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + seconds, most))
        answer = render(source, context)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
