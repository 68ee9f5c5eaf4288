"""/v1/files: the request files of batches and their result files."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...api.errors import RequestError
from ...api.validation import parse_digits, refuse_unknown, shown, unicode_text
from ...protocol.batches import parse_expiry
from ..errors import JsonResponse
from ..files import split_pieces
from ..multipart import FormPart, parse_form
from ..pages import make_page, parse_limit, parse_order
from ..service import Service

EXPIRES = {"expires_after[anchor]": "anchor", "expires_after[seconds]": "seconds"}
MAX_NAME = 255
MAX_LISTED = 10_000


async def create(service: Service, request: Request) -> JsonResponse:
    kind = request.headers.get("content-type", "")
    body = await service.body(request)
    form = await service.run_in_thread(parse_form, kind, body)
    refuse_unknown(form, ("file", "purpose", *EXPIRES))
    purpose = form_text(form, "purpose")
    if purpose != "batch":
        raise RequestError(
            "purpose", f"must be 'batch', files serve nothing else here, got {shown(purpose)}"
        )
    if "file" not in form:
        raise RequestError("file", "must be given")
    name = unicode_text("file", form["file"].filename or "file")[:MAX_NAME]
    expires_after: dict[str, Any] = {
        expiry_field: form_text(form, name)
        for name, expiry_field in EXPIRES.items()
        if name in form
    }
    if "seconds" in expires_after:
        expires_after["seconds"] = parse_digits(expires_after["seconds"])
    lifetime = parse_expiry("expires_after", expires_after or None)
    pieces = split_pieces(form["file"].data)
    file = await service.run_in_thread(
        service.files.put, service.key(request), name, purpose, pieces, lifetime
    )
    return JsonResponse(file.body())


def form_text(form: Mapping[str, FormPart], name: str) -> str:
    return form[name].data.decode(errors="replace") if name in form else ""


async def list_files(service: Service, request: Request) -> JsonResponse:
    query = request.query_params
    stored = await service.run_in_thread(service.files.of, service.key(request))
    files = [file.body() for file in stored if query.get("purpose") in (None, file.purpose)]
    if parse_order(query, "desc") == "desc":
        files.reverse()
    return JsonResponse(make_page(files, query, parse_limit(query, MAX_LISTED, MAX_LISTED)))


async def retrieve(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(service.files.get(service.key(request), request.path_params["id"]).body())


async def delete(service: Service, request: Request) -> JsonResponse:
    name = request.path_params["id"]
    service.files.delete(service.key(request), name)
    return JsonResponse({"id": name, "object": "file", "deleted": True})


async def content(service: Service, request: Request) -> Response:
    key = service.key(request)
    name = request.path_params["id"]
    return await file_response(service, key, name, "application/octet-stream")


async def file_response(service: Service, key: str | None, name: str, kind: str) -> Response:
    """Stream a file, so that only one piece of it is in memory at a time."""
    file = service.files.get(key, name)
    return StreamingResponse(
        service.files.pieces(key, name), headers={"Content-Length": str(file.size)}, media_type=kind
    )


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/files"): create,
    ("GET", "/v1/files"): list_files,
    ("GET", "/v1/files/{id}"): retrieve,
    ("DELETE", "/v1/files/{id}"): delete,
    ("GET", "/v1/files/{id}/content"): content,
}
