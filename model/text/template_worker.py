"""The process that renders chat templates. It is run by path and exchanges one JSON object a line.

A template is an untrusted program. Fuel bounds its steps, but doubling a string two dozen times
needs few steps and all memory, and a structure that contains itself overflows minijinja's stack. So
the template runs in this process, where the operating system bounds memory and time, and a crash
does not affect the server. Each request sets its limit of processor time, rounded up to the next
second; an idle worker uses none. The file imports nothing of Quire, so that it starts within
milliseconds.
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
CONVERSATION = ("messages", "tools", "documents")  # variables with which templates do no arithmetic

# {% generation %} marks training masks and is ignored. `if true` keeps its whitespace control.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")

# Jinja keeps a line break after the tag; minijinja needs `+%}` to keep it.
_RAW = re.compile(r"(\{%[-+]?\s*raw)\s*%\}")

# In Jinja, an undefined value is iterable and None is not; minijinja passes None to tests for both.
# Each pattern also ends at the end of the source, so that failing matches do not backtrack.
_STRING = r""" "(?:[^"\\]|\\.)*(?:"|\\?\Z) | '(?:[^'\\]|\\.)*(?:'|\\?\Z) """
_TAG = re.compile(
    rf"""\{{\# .*? (?:\#\}}|\Z) | \{{[{{%] (?:{_STRING}|[^"'])*? (?:[%}}]\}}|\Z)""",
    re.DOTALL | re.VERBOSE,
)
_ITERABLE = re.compile(
    rf"{_STRING} | (?P<test>\bis\s+(?:not\s+)?iterable\b)", re.DOTALL | re.VERBOSE
)

# Methods of Python's strings (and `index` of lists) that minijinja lacks.
_METHODS = frozenset(
    (
        "casefold center expandtabs index isdecimal isidentifier isprintable isspace istitle ljust "
        "partition removeprefix removesuffix rindex rjust rpartition rsplit swapcase zfill"
    ).split()
)
_REWRITTEN = re.compile(
    rf"\.\s*(?:{'|'.join(sorted(_METHODS))})\s*\(|[\"']\s*%|\|\s*safe\b|\bloop\s*\.\s*(?:last|length|revindex)"
)
_ENDS_OF_LOOPS = re.compile(r"\bloop\s*\.\s*(?:last|length|revindex)")
_TOKEN = re.compile(rf"{_STRING} | \w+ | \s+ | .", re.DOTALL | re.VERBOSE)
_OPENING = {")": "(", "]": "[", "}": "{"}
_OPERATORS = frozenset("-*/%~=<>!")
_KEYWORDS = frozenset("and else elif for if in is not or recursive return set".split())

_IN_NAMELESS = re.compile(r" \(in <string>(:\d+)?\)")  # added by minijinja for unnamed templates


class ConversationRejected(Exception):
    """The template rejected the conversation, by `raise_exception`."""


class PythonFloat:
    """A float that is printed as in Python.

    minijinja expands an exponent such as 1e-06 to zeros, and passes 1.0 to filters as 1.
    """

    def __init__(self, written: str):
        self.value = float(written)

    def __repr__(self) -> str:
        return repr(self.value)


def parse_float(written: str) -> float | PythonFloat:
    return (
        PythonFloat(written)
        if "e" in written.lower() or float(written).is_integer()
        else float(written)
    )


def plain_floats(value: Any) -> Any:
    """Replace `PythonFloat`s by plain ones that templates can compute with, except exponents."""
    if isinstance(value, PythonFloat):
        return value if "e" in repr(value) else value.value
    if isinstance(value, dict):
        return {key: plain_floats(item) for key, item in value.items()}
    return [plain_floats(item) for item in value] if isinstance(value, list) else value


def raise_exception(message: object) -> None:
    raise ConversationRejected(str(message))


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as in training data: Python's spacing and key order, without HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_json_default,
    )


def _json_default(value: object) -> float:
    if isinstance(value, PythonFloat):
        return value.value
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def indent(text: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter: minijinja's drops a final newline."""
    pad = width if isinstance(width, str) else " " * width
    head, *other_lines = (str(text) + "\n").splitlines()
    lines = [head, *(pad + line if line or blank else line for line in other_lines)]
    return (pad if first else "") + "\n".join(lines)


def length(value: Any) -> int:
    return 0 if value is None else len(value)  # an undefined value is passed as None


def is_iterable(value: Any) -> bool:
    return hasattr(value, "__iter__")  # not None: templates test `tools is iterable`


def is_sequence(value: Any) -> bool:
    return hasattr(value, "__getitem__")  # as in Python, strings and mappings too


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | PythonFloat)


def is_float(value: Any) -> bool:
    return isinstance(value, float | PythonFloat)


def call_method(name: str, value: Any, *arguments: Any, **named: Any) -> Any:
    """Call a method that minijinja lacks; templates are rewritten to use this function."""
    kind = (
        str
        if isinstance(value, str)
        else list
        if isinstance(value, list | tuple) and name == "index"
        else None
    )
    if name not in _METHODS or kind is None:
        raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")
    return getattr(kind, name)(value, *arguments, **named)


def format_percent(template: str, values: Any) -> str:
    """Python's % formatting; minijinja passes a tuple as a list."""
    return str(template) % (tuple(values) if isinstance(values, list) else values)


def add(left: Any, right: Any) -> Any:
    """The operator + with a safe operand: it escapes the other one, as in Jinja."""
    if not isinstance(left, minijinja.Markup) and not isinstance(right, minijinja.Markup):
        return left + right
    return minijinja.Markup(escape(left) + escape(right))


def escape(value: Any) -> str:
    if isinstance(value, minijinja.Markup):
        return str(value)
    if not isinstance(value, str):
        raise TypeError(
            f"unsupported operand type(s) for +: a safe text and {type(value).__name__!r}"
        )
    return html.escape(value).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")


def make_environment() -> minijinja.Environment:
    return minijinja.Environment(
        fuel=FUEL,
        debug=False,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_escape_callback=lambda name: False,
        filters={"tojson": tojson, "indent": indent, "length": length, "count": length},
        tests={
            "iterable": is_iterable,
            "sequence": is_sequence,
            "number": is_number,
            "float": is_float,
        },
        globals={
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "_call_method": call_method,
            "_percent": format_percent,
            "_add": add,
        },
    )


@lru_cache(maxsize=16)
def as_minijinja(source: str) -> str:
    """Rewrite a Jinja template so that minijinja renders the same text."""
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
    """Rewrites tags for minijinja: string methods, %, and the ends of loops over strings."""

    def __init__(self, lists_strings: bool):
        self.lists_strings = lists_strings
        self.is_raw = False

    def __call__(self, match: re.Match[str]) -> str:
        tag = re.fullmatch(r"(\{[{%][-+]?)(.*?)([-+]?[%}]\})", match[0], re.DOTALL)
        if tag is None:  # a comment, or the source ends within the tag
            return match[0]
        begin, inside, end = tag.groups()
        words = inside.split(None, 1)
        if begin.startswith("{%") and words and words[0] in ("raw", "endraw"):
            self.is_raw = words[0] == "raw"
        if self.is_raw:
            return match[0]
        tokens = _TOKEN.findall(inside)
        tokens = rewrite_formats(rewrite_methods(tokens))
        if begin.startswith("{{") and "safe" in tokens:
            tokens = rewrite_safe_sums(tokens)
        if self.lists_strings and begin.startswith("{%") and words and words[0] == "for":
            tokens = rewrite_string_loop(tokens)
        return begin + "".join(tokens) + end


def rewrite_methods(tokens: list[str]) -> list[str]:
    """Rewrite `x.rsplit(",")` to `_call_method("rsplit", x, ",")`."""
    out: list[str] = []
    at = 0
    while at < len(tokens):
        name = next_token(tokens, at + 1)
        opening = next_token(tokens, name + 1)
        if (
            tokens[at] != "."
            or opening >= len(tokens)
            or tokens[name] not in _METHODS
            or tokens[opening] != "("
        ):
            out.append(tokens[at])
            at += 1
            continue
        start = operand_start(out)
        following = next_token(tokens, opening + 1)
        comma = ", " if following < len(tokens) and tokens[following] != ")" else ""
        out[start:] = ["_call_method", "(", f'"{tokens[name]}"', ", ", *out[start:], comma]
        at = opening + 1
    return out


def rewrite_formats(tokens: list[str]) -> list[str]:
    """Rewrite `"%s" % x` to `_percent("%s", x)`; without a string before it, % is arithmetic."""
    for at in range(len(tokens) - 1, 0, -1):  # from the end: later tokens are already rewritten
        previous = previous_token(tokens, at)
        if tokens[at] == "%" and previous >= 0 and tokens[previous][0] in "\"'":
            end = operand_end(tokens, at + 1)
            tokens[previous:end] = [
                "_percent",
                "(",
                tokens[previous],
                ", ",
                *tokens[at + 1 : end],
                ")",
            ]
    return tokens


def rewrite_safe_sums(tokens: list[str]) -> list[str]:
    """Rewrite `"<"|safe + x` to `_add("<"|safe, x)`: a safe operand escapes the other one."""
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


def rewrite_string_loop(tokens: list[str]) -> list[str]:
    """Make `for x in y` list a string: minijinja has no loop.last for its characters."""
    depths = [0]
    for token in tokens:
        depths.append(depths[-1] + (token in _OPENING.values()) - (token in _OPENING))
    start = next(
        (at + 1 for at, token in enumerate(tokens) if token == "in" and not depths[at]), len(tokens)
    )
    clause_starts = (
        at
        for at in range(start, len(tokens))
        if tokens[at] in ("if", "recursive") and not depths[at]
    )
    end = next(clause_starts, len(tokens))
    iterable = "".join(tokens[start:end])
    if not iterable.strip():
        return tokens
    return [
        *tokens[:start],
        f" (({iterable})|list if ({iterable}) is string else ({iterable})) ",
        *tokens[end:],
    ]


def next_token(tokens: list[str], at: int) -> int:
    """The index of the first token from `at` on that is not white space."""
    while at < len(tokens) and tokens[at].isspace():
        at += 1
    return at


def previous_token(tokens: list[str], at: int) -> int:
    """The index of the last token before `at` that is not white space."""
    at -= 1
    while at >= 0 and tokens[at].isspace():
        at -= 1
    return at


def operand_start(tokens: list[str]) -> int:
    """The start of the last operand: a name, string or brackets with its trailers."""
    at = previous_token(tokens, len(tokens))
    while at >= 0:
        if tokens[at] in _OPENING:
            depth = 0
            while at >= 0:
                depth += (tokens[at] in _OPENING) - (tokens[at] in _OPENING.values())
                if not depth:
                    break
                at -= 1
            previous = previous_token(tokens, at)
            is_trailer = previous >= 0 and (
                tokens[previous] in _OPENING
                or tokens[previous][0] in "\"'"
                or is_name(tokens[previous])
            )
        else:
            previous = previous_token(tokens, at)
            is_trailer = previous >= 0 and tokens[previous] == "."
            previous = previous_token(tokens, previous) if is_trailer else previous
        if not is_trailer:
            break
        at = previous
    return max(at, 0)


def operand_end(tokens: list[str], at: int) -> int:
    """The end of the operand that starts at `at`, with its filters."""
    at = next_token(tokens, at)
    if at < len(tokens) and tokens[at] in "+-":
        at = next_token(tokens, at + 1)
    at = value_end(tokens, at)
    while (following := next_token(tokens, at)) < len(tokens) and tokens[following] in ".[(|":
        if tokens[following] in ".|":
            following = next_token(tokens, following + 1)
        at = value_end(tokens, following)
    return at


def value_end(tokens: list[str], at: int) -> int:
    """The index after the token at `at`, or after the brackets that it opens."""
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
    """{"text": prompt} or {"error": one line}."""
    source = as_minijinja(source)
    try:
        text = make_environment().render_str(source, **context)
    except ConversationRejected as error:
        return {"error": _one_line(str(error))}
    except minijinja.TemplateError as error:
        if error.kind == "OutOfFuel":
            return {"error": f"the template ran for more than {FUEL} steps"}
        location = f" (line {error.line} of the template)" if error.line else ""
        return {"error": _one_line(_IN_NAMELESS.sub("", error.detail or error.message)) + location}
    except Exception as error:  # raised by a filter or method
        return {"error": _one_line(f"{type(error).__name__}: {error}")}
    if len(text) > LARGEST_TEXT:
        return {"error": f"the template wrote {len(text)} characters, more than {LARGEST_TEXT}"}
    return {"text": text}


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # macOS does not support this limit; the limit of processor time remains.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin.buffer:
        source, context, seconds = json.loads(line, parse_float=parse_float)
        context |= {
            name: plain_floats(value) for name, value in context.items() if name not in CONVERSATION
        }
        usage = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(
            resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + seconds, hard_limit)
        )
        answer = render(source, context)
        if "plain object" in answer.get("error", ""):  # arithmetic with a float of the conversation
            answer = render(source, plain_floats(context))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
