"""The web page at `/`; its scripts may connect to this server only."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import http
from ..errors import HttpError, error_response

KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    folder = files(http) / "page"
    responses_by_name = {
        prefix + entry.name: Response(entry.read_bytes(), media_type=kind, headers=HEADERS)
        for prefix, directory in (("", folder), ("vendor/", folder / "vendor"))
        for entry in directory.iterdir()
        for ending, kind in KINDS.items()
        if entry.name.endswith(ending)
    }

    async def index(request: Request) -> Response:
        return responses_by_name["index.html"]

    async def page_file(request: Request) -> Response:
        return serve_file(request, request.path_params["name"])

    async def vendor_file(request: Request) -> Response:
        return serve_file(request, f"vendor/{request.path_params['name']}")

    def serve_file(request: Request, name: str) -> Response:
        path = request.url.path
        return responses_by_name.get(name) or error_response(
            path, HttpError(404, f"there is no {path[:200]}")
        )

    return [
        Route("/", index),
        Route("/page/{name}", page_file),
        Route("/page/vendor/{name}", vendor_file),
    ]
