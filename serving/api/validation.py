"""What a value from a caller may be, and the one line that refuses another."""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .errors import RequestError
from .other_engines import meant

MAX_STRINGS = 64  # stop strings, bad words
MAX_STRING_LENGTH = 1024
INT32_MAX = 2**31 - 1  # token ids and counts travel to the device as int32
Schema = dict[str, Any]  # JSON Schema


def shown(value: object) -> str:
    """A value as an error quotes it: on one line, and short, whatever the client sent."""
    try:
        text = ascii(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def refuse_unknown(given: Iterable[object], known: Sequence[str], prefix: str = "") -> None:
    """Raise for the first name in `given` that is not one of `known`, with the nearest known one."""
    for name in given:
        if name not in known:
            hint = meant(str(name), known) or f"the known fields are {', '.join(sorted(known))}"
            plain = isinstance(name, str) and name.isascii() and name.isprintable() and len(name) <= 64
            raise RequestError(prefix + (str(name) if plain else shown(name)), f"unknown field; {hint}")


def integer(param: str, value: Any, low: int, high: int, remedy: str = "") -> int:
    """`value` as an int from `low` to `high`; a bool is not a number here."""
    if type(value) is int and low <= value <= high:  # most are, and prompts have many
        return value
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        wanted = f"an integer of {low} or more" if high >= INT32_MAX else f"an integer from {low} to {high}"
        raise RequestError(param, f"must be {wanted}{remedy}, got {shown(value)}")
    return int(value)


def parse_digits(text: str) -> int | str:
    """The integer that a text writes in ASCII digits; any other text as it is, for `integer` to refuse."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 19 else text


def number(param: str, value: Any, low: float, high: float, remedy: str = "", open_low: bool = False) -> float:
    """`value` as a finite float from `low` (exclusive if `open_low`) to `high`."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not value <= high or value < low or (open_low and value == low):  # NaN is not <= anything
        above = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise RequestError(param, f"must be a number {above}{remedy}, got {shown(value)}")
    return float(value)


def boolean(param: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(param, f"must be true or false, got {shown(value)}")
    return value


def items(param: str, value: Any, most: int) -> tuple:
    """`value` as a tuple of at most `most` items: any sequence, set or array, but no string."""
    if isinstance(value, str | bytes | bytearray) or not (
        isinstance(value, Sequence | AbstractSet) or hasattr(value, "tolist")
    ):
        raise RequestError(param, f"must be a list, got {shown(value)}")
    found = tuple(value)
    if len(found) > most:
        raise RequestError(param, f"must hold at most {most} items, got {len(found)}")
    return found


def unicode_text(param: str, value: object) -> str:
    """`value` as text that UTF-8 can carry: JSON lets a lone surrogate through."""
    if not isinstance(value, str):
        raise RequestError(param, f"must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(param, f"must be valid Unicode without lone surrogates, got {shown(value)}") from None
    return value


def strings(param: str, value: object) -> tuple[str, ...]:
    found = items(param, value, MAX_STRINGS)
    for i, text in enumerate(found):
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STRING_LENGTH:
            raise RequestError(
                f"{param}[{i}]", f"must be a string of 1 to {MAX_STRING_LENGTH} characters, got {shown(text)}"
            )
        unicode_text(f"{param}[{i}]", text)
    return found


def token_ids(param: str, value: object, most: int) -> tuple[int, ...]:
    return tuple(
        integer(f"{param}[{i}]", token, 0, INT32_MAX, " (a token id)")
        for i, token in enumerate(items(param, value, most))
    )


@dataclass(frozen=True)
class Rule:
    """What a value may be, as a check and as a JSON schema."""

    # (name of the field, value, what a refusal says more) -> the value as it is kept
    check: Callable[..., Any]
    schema: Schema


def rule(check: Callable[[str, Any], Any], schema: Schema) -> Rule:
    """Of a check whose refusals say all there is to say."""
    return Rule(lambda param, value, more="": check(param, value), schema)


def whole(low: int, high: int = INT32_MAX, remedy: str = "") -> Rule:
    def check(param: str, value: Any, more: str = "") -> int:
        return integer(param, value, low, high, remedy + more)

    return Rule(check, {"type": "integer", "minimum": low, "maximum": high})


def real(low: float, high: float, remedy: str = "", open_low: bool = False) -> Rule:
    def check(param: str, value: Any, more: str = "") -> float:
        return number(param, value, low, high, remedy + more, open_low)

    return Rule(check, {"type": "number", "exclusiveMinimum" if open_low else "minimum": low, "maximum": high})


def many(item: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def or_null(schema: Schema) -> Schema:
    """What a field may be that may also be null."""
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STRING_LENGTH}
STRINGS = many(STRING, MAX_STRINGS)
FLAG = rule(boolean, {"type": "boolean"})
