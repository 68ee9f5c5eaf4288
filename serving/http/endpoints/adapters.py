"""Adapters that come and go while a server runs, with --admin: vLLM's two paths."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from ....model.config import ModelError
from ...api.errors import RequestError
from ...api.lora import LoRARequest
from ...api.options import MOST_ADAPTERS
from ...api.validation import refuse_unknown, shown
from ..errors import HttpError
from ..models import Model
from ..service import Service

MAX_NAME, MAX_PATH = 256, 4096


def parse_load(body: Any) -> tuple[str, str, bool]:
    """(name, path, whether it may replace one of that name)."""
    given = fields_of(body, ("lora_name", "lora_path", "load_inplace"))
    inplace = given.get("load_inplace", False)
    if not isinstance(inplace, bool):
        raise RequestError("load_inplace", f"must be true or false, got {shown(inplace)}")
    return text_of(given, "lora_name"), text_of(given, "lora_path", MAX_PATH), inplace


def parse_unload(body: Any) -> str:
    return text_of(fields_of(body, ("lora_name", "lora_int_id")), "lora_name")


def fields_of(body: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be an object, got {shown(body)}")
    refuse_unknown(body, list(known))
    return body


def text_of(given: Mapping[str, Any], name: str, most: int = MAX_NAME) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise RequestError(name, f"must be a string of 1 to {most} printable characters, got {shown(value)}")
    return value


def folder_of(service: Service, path: str) -> Path:
    """The folder that a client names, if it lies below the one that the server was given."""
    if service.settings.lora_dir is None:
        raise HttpError(403, "no adapter is loaded at run time: --lora-dir names the folder that they are taken from")
    root = Path(service.settings.lora_dir).expanduser().resolve()
    try:
        found = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):
        found = root
    if root not in found.parents or not found.is_dir():
        raise RequestError("lora_path", "must be a folder below --lora-dir")
    return found


async def load(service: Service, request: Request) -> PlainTextResponse:
    """Read an adapter, and let requests name it."""
    (name, path, inplace), _ = await service.read(request, parse_load)
    async with service.models.use(request.query_params.get("model")) as model:
        check_name(service, model, name, inplace)
        store, numbers = model.llm.engine.adapters, [one.lora_int_id for one in model.adapters.values()]
        if store is None:
            raise HttpError(403, "this server serves no adapters; --enable-lora makes it")
        folder = await service.beside(folder_of, service, path)
        wanted = LoRARequest(name, max(numbers, default=0) + 1, str(folder))
        try:
            await service.beside(store.get, wanted)
        except ModelError as error:
            raise RequestError("lora_path", f"cannot be served: {str(error).replace(str(folder), path)}") from None
        check_name(service, model, name, inplace)  # another may have come first
        model.adapters[name] = wanted
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def check_name(service: Service, model: Model, name: str, inplace: bool) -> None:
    """Refuse a name that something else has, and more names than there may be."""
    if name in model.adapters and inplace:
        return
    if any(name in other.names or name in other.adapters for other in service.models.models):
        raise RequestError("lora_name", f"{name!r} is served already; load_inplace replaces an adapter of that name")
    if len(model.adapters) >= MOST_ADAPTERS:
        raise RequestError("lora_name", f"would be one of more than {MOST_ADAPTERS} adapters; unload others first")


async def unload(service: Service, request: Request) -> PlainTextResponse:
    """Requests that run go on; new ones find no such model."""
    name, _ = await service.read(request, parse_unload)
    for model in service.models.models:
        if model.adapters.pop(name, None) is not None:
            return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
    raise HttpError(404, f"lora_name: there is no adapter {shown(name)}", "lora_name", "model_not_found")


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/load_lora_adapter"): load,
    ("POST", "/v1/unload_lora_adapter"): unload,
}
