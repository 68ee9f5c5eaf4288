"""The page at `/`: files of this package; its scripts may connect to this server only."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import http
from ..errors import HttpError, error_response

KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    folder = files(http) / "page"
    found = {
        prefix + entry.name: Response(entry.read_bytes(), media_type=kind, headers=HEADERS)
        for prefix, place in (("", folder), ("vendor/", folder / "vendor"))
        for entry in place.iterdir()
        for ending, kind in KINDS.items()
        if entry.name.endswith(ending)
    }

    async def index(request: Request) -> Response:
        return found["index.html"]

    async def part(request: Request) -> Response:
        return file(request, request.path_params["name"])

    async def library(request: Request) -> Response:
        return file(request, f"vendor/{request.path_params['name']}")

    def file(request: Request, name: str) -> Response:
        path = request.url.path
        return found.get(name) or error_response(path, HttpError(404, f"there is no {path[:200]}"))

    return [Route("/", index), Route("/page/{name}", part), Route("/page/vendor/{name}", library)]
