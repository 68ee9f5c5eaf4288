"""The process that renders chat templates. It is run by path and reads and writes one JSON object a line.

A template is an untrusted program. Fuel bounds its steps, but doubling a string two dozen times needs few steps and
all memory, and a structure that contains itself overflows minijinja's stack. So the template runs here, where the
operating system bounds memory and time and a crash ends nothing else. Each request says its bound of processor time,
rounded up to the next second; an idle worker uses none. The file imports nothing of Quire, so that it starts in a few
hundredths of a second.
"""

import contextlib
import html
import json
import re
import resource
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import minijinja

FUEL = 30_000_000  # template instructions: about a second
MEMORY = 512 << 20  # bytes of address space
LARGEST_TEXT = 32 << 20  # characters
CONVERSATION = ("messages", "tools", "documents")  # what templates print and do not compute with

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

# Methods of Python's strings (and `index` of its lists) that minijinja's have not.
_METHODS = frozenset(
    "casefold center expandtabs index isdecimal isidentifier isprintable isspace istitle ljust partition removeprefix "
    "removesuffix rindex rjust rpartition rsplit swapcase zfill".split()
)
_REWRITTEN = re.compile(
    rf"\.\s*(?:{'|'.join(sorted(_METHODS))})\s*\(|[\"']\s*%|\|\s*safe\b|\bloop\s*\.\s*(?:last|length|revindex)"
)
_ENDS_OF_LOOPS = re.compile(r"\bloop\s*\.\s*(?:last|length|revindex)")
_TOKEN = re.compile(rf"{_STRING} | \w+ | \s+ | .", re.DOTALL | re.VERBOSE)
_OPENING = {")": "(", "]": "[", "}": "{"}
_OPERATORS = frozenset("-*/%~=<>!")
_KEYWORDS = frozenset("and else elif for if in is not or recursive return set".split())

_IN_NAMELESS = re.compile(r" \(in <string>(:\d+)?\)")  # minijinja adds it for templates without a name


class Refused(Exception):
    """The template refused the conversation, by `raise_exception`."""


class Written:
    """A float that is printed as Python prints it.

    Of a float with an exponent, as 1e-06, minijinja writes all zeros, and of 1.0 it gives filters 1.
    """

    def __init__(self, written: str):
        self.value = float(written)

    def __repr__(self) -> str:
        return repr(self.value)


def number(written: str) -> float | Written:
    return Written(written) if "e" in written.lower() or float(written).is_integer() else float(written)


def computable(value: Any) -> Any:
    """The value with floats that templates can compute with, but those with an exponent."""
    if isinstance(value, Written):
        return value if "e" in repr(value) else value.value
    if isinstance(value, dict):
        return {key: computable(each) for key, each in value.items()}
    return [computable(each) for each in value] if isinstance(value, list) else value


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
    if isinstance(value, Written):
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
    return isinstance(value, int | float | Written)


def is_float(value: Any) -> bool:
    return isinstance(value, float | Written)


def call_method(name: str, value: Any, *arguments: Any, **named: Any) -> Any:
    """A method that minijinja's values have not: the templates' sources are rewritten to call it so."""
    of = str if isinstance(value, str) else list if isinstance(value, list | tuple) and name == "index" else None
    if name not in _METHODS or of is None:
        raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")
    return getattr(of, name)(value, *arguments, **named)


def percent(template: str, values: Any) -> str:
    """Python's formatting by the operator %; a tuple comes as a list."""
    return str(template) % (tuple(values) if isinstance(values, list) else values)


def add(left: Any, right: Any) -> Any:
    """The operator + beside texts that are marked safe: it escapes the others, as in Jinja."""
    if not isinstance(left, minijinja.Markup) and not isinstance(right, minijinja.Markup):
        return left + right
    return minijinja.Markup(escaped(left) + escaped(right))


def escaped(value: Any) -> str:
    if isinstance(value, minijinja.Markup):
        return str(value)
    if not isinstance(value, str):
        raise TypeError(f"unsupported operand type(s) for +: a safe text and {type(value).__name__!r}")
    return html.escape(value).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")


def environment() -> minijinja.Environment:
    return minijinja.Environment(
        fuel=FUEL,
        debug=False,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_escape_callback=lambda name: False,
        filters={"tojson": tojson, "indent": indent, "length": length, "count": length},
        tests={"iterable": is_iterable, "sequence": is_sequence, "number": is_number, "float": is_float},
        globals={
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "_call_method": call_method,
            "_percent": percent,
            "_add": add,
        },
    )


@lru_cache(maxsize=16)
def as_minijinja(source: str) -> str:
    """A template such that minijinja writes what Jinja writes."""
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    source = _RAW.sub(r"\1 +%}", source)
    source = _GENERATION.sub(lambda m: f"{m[1]}{'endif' if m[2] else 'if true'}{m[3]}", source)
    if "iterable" in source:
        source = _TAG.sub(lambda tag: _ITERABLE.sub(_with_default, tag[0]), source)
    if _REWRITTEN.search(source):
        source = _TAG.sub(Rewriter(bool(_ENDS_OF_LOOPS.search(source))), source)
    return source


def _with_default(match: re.Match[str]) -> str:
    return f"|default([]) {match[0]}" if match["test"] else match[0]


class Rewriter:
    """Writes in minijinja's words what it does not know: methods of strings, %, and the end of loops over strings."""

    def __init__(self, lists_strings: bool):
        self.lists_strings = lists_strings
        self.is_raw = False

    def __call__(self, match: re.Match[str]) -> str:
        parts = re.fullmatch(r"(\{[{%][-+]?)(.*?)([-+]?[%}]\})", match[0], re.DOTALL)
        if parts is None:  # a comment, or the source ends within the tag
            return match[0]
        begin, inside, end = parts.groups()
        words = inside.split(None, 1)
        if begin.startswith("{%") and words and words[0] in ("raw", "endraw"):
            self.is_raw = words[0] == "raw"
        if self.is_raw:
            return match[0]
        tokens = _TOKEN.findall(inside)
        tokens = with_formats(with_methods(tokens))
        if begin.startswith("{{") and "safe" in tokens:
            tokens = with_safe_sums(tokens)
        if self.lists_strings and begin.startswith("{%") and words and words[0] == "for":
            tokens = with_listed_string(tokens)
        return begin + "".join(tokens) + end


def with_methods(tokens: list[str]) -> list[str]:
    """`x.rsplit(",")` as `_call_method("rsplit", x, ",")`."""
    out: list[str] = []
    at = 0
    while at < len(tokens):
        name = after(tokens, at + 1)
        opening = after(tokens, name + 1)
        if tokens[at] != "." or opening >= len(tokens) or tokens[name] not in _METHODS or tokens[opening] != "(":
            out.append(tokens[at])
            at += 1
            continue
        start = operand_start(out)
        following = after(tokens, opening + 1)
        comma = ", " if following < len(tokens) and tokens[following] != ")" else ""
        out[start:] = ["_call_method", "(", f'"{tokens[name]}"', ", ", *out[start:], comma]
        at = opening + 1
    return out


def with_formats(tokens: list[str]) -> list[str]:
    """`"%s" % x` as `_percent("%s", x)`; where no text stands before it, % is arithmetic."""
    for at in range(len(tokens) - 1, 0, -1):  # the last first: what stands behind is rewritten already
        left = before(tokens, at)
        if tokens[at] == "%" and left >= 0 and tokens[left][0] in "\"'":
            end = operand_end(tokens, at + 1)
            tokens[left:end] = ["_percent", "(", tokens[left], ", ", *tokens[at + 1 : end], ")"]
    return tokens


def with_safe_sums(tokens: list[str]) -> list[str]:
    """`"<"|safe + x` as `_add("<"|safe, x)`: a safe text escapes what is added to it."""
    terms: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in _OPENING.values()) - (token in _OPENING)
        if not depth and (token in _OPERATORS or token in _KEYWORDS):
            return tokens
        if token == "+" and not depth:
            terms.append([])
        else:
            terms[-1].append(token)
    out = terms[0]
    for term in terms[1:]:
        out = ["_add", "(", *out, ", ", *term, ")"]
    return out


def with_listed_string(tokens: list[str]) -> list[str]:
    """`for x in y` such that a string is a list: of its characters minijinja does not know the last."""
    depths = [0]
    for token in tokens:
        depths.append(depths[-1] + (token in _OPENING.values()) - (token in _OPENING))
    start = next((at + 1 for at, token in enumerate(tokens) if token == "in" and not depths[at]), len(tokens))
    ends = (at for at in range(start, len(tokens)) if tokens[at] in ("if", "recursive") and not depths[at])
    end = next(ends, len(tokens))
    each = "".join(tokens[start:end])
    if not each.strip():
        return tokens
    return [*tokens[:start], f" (({each})|list if ({each}) is string else ({each})) ", *tokens[end:]]


def after(tokens: list[str], at: int) -> int:
    """The place of the first token from `at` on that is not white space."""
    while at < len(tokens) and tokens[at].isspace():
        at += 1
    return at


def before(tokens: list[str], at: int) -> int:
    """The place of the last token before `at` that is not white space."""
    at -= 1
    while at >= 0 and tokens[at].isspace():
        at -= 1
    return at


def operand_start(tokens: list[str]) -> int:
    """Where the operand begins that ends these tokens: a name, a text or brackets, with what follows it directly."""
    at = before(tokens, len(tokens))
    while at >= 0:
        if tokens[at] in _OPENING:
            depth = 0
            while at >= 0:
                depth += (tokens[at] in _OPENING) - (tokens[at] in _OPENING.values())
                if not depth:
                    break
                at -= 1
            left = before(tokens, at)
            is_trailer = left >= 0 and (tokens[left] in _OPENING or tokens[left][0] in "\"'" or is_name(tokens[left]))
        else:
            left = before(tokens, at)
            is_trailer = left >= 0 and tokens[left] == "."
            left = before(tokens, left) if is_trailer else left
        if not is_trailer:
            break
        at = left
    return max(at, 0)


def operand_end(tokens: list[str], at: int) -> int:
    """Where the operand ends that begins at `at`, with its filters."""
    at = after(tokens, at)
    if at < len(tokens) and tokens[at] in "+-":
        at = after(tokens, at + 1)
    at = value_end(tokens, at)
    while (following := after(tokens, at)) < len(tokens) and tokens[following] in ".[(|":
        if tokens[following] in ".|":
            following = after(tokens, following + 1)
        at = value_end(tokens, following)
    return at


def value_end(tokens: list[str], at: int) -> int:
    """Behind the token at `at`, or behind the brackets that it opens."""
    depth = 0
    while at < len(tokens):
        depth += (tokens[at] in _OPENING.values()) - (tokens[at] in _OPENING)
        at += 1
        if depth <= 0:
            break
    return min(at, len(tokens))


def is_name(token: str) -> bool:
    return (token[0].isalpha() or token[0] == "_") and token not in _KEYWORDS


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
        context |= {name: computable(value) for name, value in context.items() if name not in CONVERSATION}
        usage = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + seconds, most))
        answer = render(source, context)
        if "plain object" in answer.get("error", ""):  # the template computes with a float of the conversation
            answer = render(source, computable(context))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
