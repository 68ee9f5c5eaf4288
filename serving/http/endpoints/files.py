"""/v1/files: the files of batches and of their results."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...api.errors import RequestError
from ...api.validation import parse_digits, refuse_unknown, shown, unicode_text
from ...protocol.batches import expiry
from ..errors import JsonResponse
from ..files import pieces_of
from ..multipart import Part, parse_form
from ..pages import count_of, order_of, page_of
from ..service import Service

EXPIRES = {"expires_after[anchor]": "anchor", "expires_after[seconds]": "seconds"}
MAX_NAME = 255
MAX_LISTED = 10_000


async def create(service: Service, request: Request) -> JsonResponse:
    kind, body = request.headers.get("content-type", ""), await service.body(request)
    parts = await service.beside(parse_form, kind, body)
    refuse_unknown(parts, ("file", "purpose", *EXPIRES))
    purpose = text_of(parts, "purpose")
    if purpose != "batch":
        raise RequestError("purpose", f"must be 'batch', files serve nothing else here, got {shown(purpose)}")
    if "file" not in parts:
        raise RequestError("file", "must be given")
    name = unicode_text("file", parts["file"].filename or "file")[:MAX_NAME]
    given: dict[str, Any] = {short: text_of(parts, name) for name, short in EXPIRES.items() if name in parts}
    if "seconds" in given:
        given["seconds"] = parse_digits(given["seconds"])
    lasts = expiry("expires_after", given or None)
    pieces = pieces_of(parts["file"].data)
    file = await service.beside(service.files.put, service.key(request), name, purpose, pieces, lasts)
    return JsonResponse(file.body())


def text_of(parts: Mapping[str, Part], name: str) -> str:
    return parts[name].data.decode(errors="replace") if name in parts else ""


async def listed(service: Service, request: Request) -> JsonResponse:
    given = request.query_params
    stored = await service.beside(service.files.of, service.key(request))
    found = [file.body() for file in stored if given.get("purpose") in (None, file.purpose)]
    if order_of(given, "desc") == "desc":
        found.reverse()
    return JsonResponse(page_of(found, given, count_of(given, MAX_LISTED, MAX_LISTED)))


async def retrieve(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(service.files.get(service.key(request), request.path_params["id"]).body())


async def delete(service: Service, request: Request) -> JsonResponse:
    name = request.path_params["id"]
    service.files.delete(service.key(request), name)
    return JsonResponse({"id": name, "object": "file", "deleted": True})


async def content(service: Service, request: Request) -> Response:
    key, name = service.key(request), request.path_params["id"]
    return await file_response(service, key, name, "application/octet-stream")


async def file_response(service: Service, key: str | None, name: str, kind: str) -> Response:
    """A file as it is read, so that no more than a piece of it is in memory."""
    file = service.files.get(key, name)
    return StreamingResponse(
        service.files.pieces(key, name), headers={"Content-Length": str(file.size)}, media_type=kind
    )


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/files"): create,
    ("GET", "/v1/files"): listed,
    ("GET", "/v1/files/{id}"): retrieve,
    ("DELETE", "/v1/files/{id}"): delete,
    ("GET", "/v1/files/{id}/content"): content,
}
