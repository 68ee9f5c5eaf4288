"""/v1/conversations: items that are kept, and to which responses add what was asked and answered."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from ...api.validation import shown
from ...protocol import conversations as protocol
from ..errors import HttpError, JsonResponse
from ..pages import count_of, order_of, page_of
from ..service import Service
from ..storage import StorageFailed
from ..stored import NO_CONVERSATION, StoredResponse

log = logging.getLogger("quire")

MAX_LISTED = 100


async def create(service: Service, request: Request) -> JsonResponse:
    asked, _ = await service.read(request, protocol.parse)
    name = f"conv_{secrets.token_hex(16)}"
    body = {"id": name, "object": "conversation", "created_at": int(time.time()), "metadata": asked.metadata}
    keep(service, service.key(request), name, body, named(asked.items))
    return JsonResponse(body)


def keep(service: Service, key: str | None, name: str, body: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
    if not service.stored.put(key, name, StoredResponse(body, list(items), None)):
        why = "the conversation is too large, or as much is kept as may be (--max-stored-responses, --max-stored-bytes)"
        raise HttpError(429, why, code="store_full", headers={"Retry-After": "1"})


def named(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items with ids of their own."""
    return [{"id": f"item_{secrets.token_hex(12)}", "status": "completed", **item} for item in items]


def add_turn(service: Service, key: str | None, name: str, items: Sequence[Mapping[str, Any]]) -> None:
    """What was asked and answered; a conversation that has no place for it is kept no longer, nor is one half of it."""
    try:
        found = service.stored.get(key, name, NO_CONVERSATION)
        keep(service, key, name, found.body, [*found.items, *named(items)])
    except HttpError as error:
        if error.status == 429:
            service.stored.delete(key, name, NO_CONVERSATION)
    except StorageFailed:
        log.exception("conversation %s has no place for a turn", name)


def found(service: Service, request: Request) -> StoredResponse:
    """The conversation that the path names."""
    return service.stored.get(service.key(request), request.path_params["id"], NO_CONVERSATION)


async def read(service: Service, request: Request) -> StoredResponse:
    """The same where nothing is changed: a large one takes long to read."""
    return await service.beside(found, service, request)


async def retrieve(service: Service, request: Request) -> JsonResponse:
    return JsonResponse((await read(service, request)).body)


async def update(service: Service, request: Request) -> JsonResponse:
    asked, _ = await service.read(request, protocol.parse_update)
    stored = found(service, request)
    body = stored.body | {"metadata": asked.metadata}
    keep(service, service.key(request), body["id"], body, stored.items)
    return JsonResponse(body)


async def delete(service: Service, request: Request) -> JsonResponse:
    name = found(service, request).body["id"]
    service.stored.delete(service.key(request), name, NO_CONVERSATION)
    return JsonResponse({"id": name, "object": "conversation.deleted", "deleted": True})


async def add_items(service: Service, request: Request) -> JsonResponse:
    asked, _ = await service.read(request, protocol.parse_items)
    stored, more = found(service, request), named(asked.items)
    keep(service, service.key(request), stored.body["id"], stored.body, [*stored.items, *more])
    return JsonResponse(page_of(more, {}, len(more)))


async def items(service: Service, request: Request) -> JsonResponse:
    stored, given = await read(service, request), request.query_params
    listed = stored.items if order_of(given, "desc") == "asc" else stored.items[::-1]
    return JsonResponse(page_of(listed, given, count_of(given, 20, MAX_LISTED)))


def item_of(stored: StoredResponse, name: str) -> dict[str, Any]:
    for item in stored.items:
        if item["id"] == name:
            return item
    raise HttpError(404, f"item_id: there is no item {shown(name)}", "item_id", "item_not_found")


async def item(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(item_of(await read(service, request), request.path_params["item_id"]))


async def delete_item(service: Service, request: Request) -> JsonResponse:
    stored = found(service, request)
    one = item_of(stored, request.path_params["item_id"])
    left = [item for item in stored.items if item is not one]
    keep(service, service.key(request), stored.body["id"], stored.body, left)
    return JsonResponse(stored.body)


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/conversations"): create,
    ("GET", "/v1/conversations/{id}"): retrieve,
    ("POST", "/v1/conversations/{id}"): update,
    ("DELETE", "/v1/conversations/{id}"): delete,
    ("POST", "/v1/conversations/{id}/items"): add_items,
    ("GET", "/v1/conversations/{id}/items"): items,
    ("GET", "/v1/conversations/{id}/items/{item_id}"): item,
    ("DELETE", "/v1/conversations/{id}/items/{item_id}"): delete_item,
}
