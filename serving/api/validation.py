"""Checks of values from callers, each of which raises a one-line error."""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .errors import RequestError
from .other_engines import suggest_name

MAX_STRINGS = 64  # stop strings, bad words
MAX_STRING_LENGTH = 1024
INT32_MAX = 2**31 - 1  # token ids and counts are int32 on the device
Schema = dict[str, Any]  # JSON Schema


def shown(value: object) -> str:
    """Format a value for an error message: on one line and short, whatever a client sent."""
    try:
        text = ascii(value)
    except ValueError:  # an integer with more digits than Python prints
        text = "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def refuse_unknown(names: Iterable[object], known_names: Sequence[str], prefix: str = "") -> None:
    """Raise for the first of `names` that is unknown, with the most similar known name."""
    for name in names:
        if name not in known_names:
            hint = (
                suggest_name(str(name), known_names)
                or f"the known fields are {', '.join(sorted(known_names))}"
            )
            is_printable = (
                isinstance(name, str) and name.isascii() and name.isprintable() and len(name) <= 64
            )
            raise RequestError(
                prefix + (str(name) if is_printable else shown(name)), f"unknown field; {hint}"
            )


def integer(param: str, value: Any, low: int, high: int, remedy: str = "") -> int:
    """Return `value` as an int from `low` to `high`; a bool is refused."""
    if type(value) is int and low <= value <= high:  # fast path: prompts have many token ids
        return value
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        expected = (
            f"an integer of {low} or more"
            if high >= INT32_MAX
            else f"an integer from {low} to {high}"
        )
        raise RequestError(param, f"must be {expected}{remedy}, got {shown(value)}")
    return int(value)


def parse_digits(text: str) -> int | str:
    """Return the integer that ASCII digits denote; another text unchanged, for `integer` to
    refuse.
    """
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 19 else text


def number(
    param: str, value: Any, low: float, high: float, remedy: str = "", open_low: bool = False
) -> float:
    """Return `value` as a finite float from `low` (exclusive if `open_low`) to `high`."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    # Comparisons with NaN are false.
    if not is_real or not value <= high or value < low or (open_low and value == low):
        allowed = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise RequestError(param, f"must be a number {allowed}{remedy}, got {shown(value)}")
    return float(value)


def boolean(param: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(param, f"must be true or false, got {shown(value)}")
    return value


def items(param: str, value: Any, max_items: int) -> tuple:
    """Return `value` as a tuple of at most `max_items`: any sequence, set or array except a
    string.
    """
    if isinstance(value, str | bytes | bytearray) or not (
        isinstance(value, Sequence | AbstractSet) or hasattr(value, "tolist")
    ):
        raise RequestError(param, f"must be a list, got {shown(value)}")
    elements = tuple(value)
    if len(elements) > max_items:
        raise RequestError(param, f"must hold at most {max_items} items, got {len(elements)}")
    return elements


def unicode_text(param: str, value: object) -> str:
    """Return `value` if UTF-8 can encode it: JSON allows lone surrogates."""
    if not isinstance(value, str):
        raise RequestError(param, f"must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(
            param, f"must be valid Unicode without lone surrogates, got {shown(value)}"
        ) from None
    return value


def strings(param: str, value: object) -> tuple[str, ...]:
    texts = items(param, value, MAX_STRINGS)
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STRING_LENGTH:
            raise RequestError(
                f"{param}[{i}]",
                f"must be a string of 1 to {MAX_STRING_LENGTH} characters, got {shown(text)}",
            )
        unicode_text(f"{param}[{i}]", text)
    return texts


def token_ids(param: str, value: object, max_items: int) -> tuple[int, ...]:
    return tuple(
        integer(f"{param}[{i}]", token, 0, INT32_MAX, " (a token id)")
        for i, token in enumerate(items(param, value, max_items))
    )


@dataclass(frozen=True)
class Rule:
    """The values that a field accepts, as a check and as a JSON schema."""

    # (field name, value, suffix for the error message) -> normalised value
    check: Callable[..., Any]
    schema: Schema


def rule(check: Callable[[str, Any], Any], schema: Schema) -> Rule:
    """Make a rule of a check that takes no suffix for its error message."""
    return Rule(lambda param, value, hint="": check(param, value), schema)


def whole(low: int, high: int = INT32_MAX, remedy: str = "") -> Rule:
    def check(param: str, value: Any, hint: str = "") -> int:
        return integer(param, value, low, high, remedy + hint)

    return Rule(check, {"type": "integer", "minimum": low, "maximum": high})


def real(low: float, high: float, remedy: str = "", open_low: bool = False) -> Rule:
    def check(param: str, value: Any, hint: str = "") -> float:
        return number(param, value, low, high, remedy + hint, open_low)

    return Rule(
        check,
        {"type": "number", "exclusiveMinimum" if open_low else "minimum": low, "maximum": high},
    )


def many(item: Schema, max_items: int, min_items: int = 0) -> Schema:
    return {"type": "array", "items": item, "minItems": min_items, "maxItems": max_items}


def or_null(schema: Schema) -> Schema:
    """Return the schema of a field that may also be null."""
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STRING_LENGTH}
STRINGS = many(STRING, MAX_STRINGS)
FLAG = rule(boolean, {"type": "boolean"})
