"""/v1/conversations: stored items, to which responses append their input and output."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from ...api.validation import shown
from ...protocol import conversations as protocol
from ..errors import HttpError, JsonResponse
from ..pages import make_page, parse_limit, parse_order
from ..service import Service
from ..storage import StorageFailed
from ..stored import NO_CONVERSATION, StoredResponse

log = logging.getLogger("quire")

MAX_LISTED = 100


async def create(service: Service, request: Request) -> JsonResponse:
    parsed, _ = await service.read(request, protocol.parse)
    name = f"conv_{secrets.token_hex(16)}"
    body = {
        "id": name,
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": parsed.metadata,
    }
    store(service, service.key(request), name, body, with_ids(parsed.items))
    return JsonResponse(body)


def store(
    service: Service,
    key: str | None,
    name: str,
    body: dict[str, Any],
    items: Sequence[dict[str, Any]],
) -> None:
    if not service.stored.put(key, name, StoredResponse(body, list(items), None)):
        reason = (
            "the conversation is too large, or as much is kept as may be (--max-stored-responses, "
            "--max-stored-bytes)"
        )
        raise HttpError(429, reason, code="store_full", headers={"Retry-After": "1"})


def with_ids(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give new items ids and a status."""
    return [
        {"id": f"item_{secrets.token_hex(12)}", "status": "completed", **item} for item in items
    ]


def add_turn(
    service: Service, key: str | None, name: str, items: Sequence[Mapping[str, Any]]
) -> None:
    """Append the items of a response; delete a conversation that becomes too large to store."""
    try:
        conversation = service.stored.get(key, name, NO_CONVERSATION)
        store(service, key, name, conversation.body, [*conversation.items, *with_ids(items)])
    except HttpError as error:
        if error.status == 429:
            service.stored.delete(key, name, NO_CONVERSATION)
    except StorageFailed:
        log.exception("conversation %s has no place for a turn", name)


def requested_conversation(service: Service, request: Request) -> StoredResponse:
    """The conversation that the path names."""
    return service.stored.get(service.key(request), request.path_params["id"], NO_CONVERSATION)


async def read_conversation(service: Service, request: Request) -> StoredResponse:
    """The conversation that the path names, read in a thread since it may be large.

    Not for changing it.
    """
    return await service.run_in_thread(requested_conversation, service, request)


async def retrieve(service: Service, request: Request) -> JsonResponse:
    return JsonResponse((await read_conversation(service, request)).body)


async def update(service: Service, request: Request) -> JsonResponse:
    parsed, _ = await service.read(request, protocol.parse_update)
    stored = requested_conversation(service, request)
    body = stored.body | {"metadata": parsed.metadata}
    store(service, service.key(request), body["id"], body, stored.items)
    return JsonResponse(body)


async def delete(service: Service, request: Request) -> JsonResponse:
    name = requested_conversation(service, request).body["id"]
    service.stored.delete(service.key(request), name, NO_CONVERSATION)
    return JsonResponse({"id": name, "object": "conversation.deleted", "deleted": True})


async def add_items(service: Service, request: Request) -> JsonResponse:
    parsed, _ = await service.read(request, protocol.parse_items)
    stored = requested_conversation(service, request)
    new_items = with_ids(parsed.items)
    store(
        service, service.key(request), stored.body["id"], stored.body, [*stored.items, *new_items]
    )
    return JsonResponse(make_page(new_items, {}, len(new_items)))


async def items(service: Service, request: Request) -> JsonResponse:
    stored = await read_conversation(service, request)
    query = request.query_params
    ordered = stored.items if parse_order(query, "desc") == "asc" else stored.items[::-1]
    return JsonResponse(make_page(ordered, query, parse_limit(query, 20, MAX_LISTED)))


def find_item(stored: StoredResponse, name: str) -> dict[str, Any]:
    for item in stored.items:
        if item["id"] == name:
            return item
    raise HttpError(404, f"item_id: there is no item {shown(name)}", "item_id", "item_not_found")


async def item(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(
        find_item(await read_conversation(service, request), request.path_params["item_id"])
    )


async def delete_item(service: Service, request: Request) -> JsonResponse:
    stored = requested_conversation(service, request)
    deleted_item = find_item(stored, request.path_params["item_id"])
    remaining = [item for item in stored.items if item is not deleted_item]
    store(service, service.key(request), stored.body["id"], stored.body, remaining)
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
