"""Lists that clients read page by page."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..api.errors import RequestError
from ..api.validation import integer, parse_digits


def count_of(given: Mapping[str, str], usual: int, most: int) -> int:
    """How many are asked for in a query."""
    return integer("limit", parse_digits(given.get("limit", str(usual))), 1, most)


def order_of(given: Mapping[str, str], usual: str) -> str:
    order = given.get("order", usual)
    if order not in ("asc", "desc"):
        raise RequestError("order", f"must be asc or desc, got {order[:60]!a}")
    return order


def page_of(items: Sequence[dict[str, Any]], given: Mapping[str, str], most: int, after: str = "after") -> dict:
    """At most so many of the items, those that come after the one that the query names."""
    names = [item["id"] for item in items]
    start = place(names, given, after) + 1 if after in given else 0
    found, more = list(items[start : start + most]), start + most < len(items)
    if "before_id" in given:
        stop = place(names, given, "before_id")
        found, more = list(items[max(stop - most, 0) : stop]), stop > most
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": more,
    }


def place(names: Sequence[str], given: Mapping[str, str], name: str) -> int:
    if given[name] not in names:
        raise RequestError(name, f"must be the id of an item, got {given[name][:60]!a}")
    return names.index(given[name])
