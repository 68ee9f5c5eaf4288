"""Pagination of lists."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..api.errors import RequestError
from ..api.validation import integer, parse_digits


def parse_limit(query: Mapping[str, str], default: int, maximum: int) -> int:
    """The `limit` of a query."""
    return integer("limit", parse_digits(query.get("limit", str(default))), 1, maximum)


def parse_order(query: Mapping[str, str], default: str) -> str:
    order = query.get("order", default)
    if order not in ("asc", "desc"):
        raise RequestError("order", f"must be asc or desc, got {order[:60]!a}")
    return order


def make_page(
    items: Sequence[dict[str, Any]],
    query: Mapping[str, str],
    limit: int,
    after_param: str = "after",
) -> dict:
    """A page of at most `limit` items: those after `after_param`, or those before `before_id`."""
    ids = [item["id"] for item in items]
    start = item_index(ids, query, after_param) + 1 if after_param in query else 0
    page = list(items[start : start + limit])
    has_more = start + limit < len(items)
    if "before_id" in query:
        stop = item_index(ids, query, "before_id")
        page = list(items[max(stop - limit, 0) : stop])
        has_more = stop > limit
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }


def item_index(ids: Sequence[str], query: Mapping[str, str], param: str) -> int:
    if query[param] not in ids:
        raise RequestError(param, f"must be the id of an item, got {query[param][:60]!a}")
    return ids.index(query[param])
