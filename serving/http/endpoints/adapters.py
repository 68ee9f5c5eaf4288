"""Loading and unloading of LoRA adapters at run time, with --admin, by vLLM's two paths."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from ....model.config import ModelError
from ...api.errors import RequestError
from ...api.lora import LoRARequest
from ...api.options import MAX_ADAPTERS
from ...api.validation import refuse_unknown, shown
from ..errors import HttpError
from ..models import Model
from ..service import Service

MAX_NAME = 256
MAX_PATH = 4096


def parse_load(body: Any) -> tuple[str, str, bool]:
    """(name, path, whether it may replace an adapter of that name)."""
    fields = checked_fields(body, ("lora_name", "lora_path", "load_inplace"))
    replaces = fields.get("load_inplace", False)
    if not isinstance(replaces, bool):
        raise RequestError("load_inplace", f"must be true or false, got {shown(replaces)}")
    return string_field(fields, "lora_name"), string_field(fields, "lora_path", MAX_PATH), replaces


def parse_unload(body: Any) -> str:
    return string_field(checked_fields(body, ("lora_name", "lora_int_id")), "lora_name")


def checked_fields(body: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be an object, got {shown(body)}")
    refuse_unknown(body, list(names))
    return body


def string_field(fields: Mapping[str, Any], name: str, max_length: int = MAX_NAME) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= max_length or not value.isprintable():
        raise RequestError(
            name, f"must be a string of 1 to {max_length} printable characters, got {shown(value)}"
        )
    return value


def resolve_adapter_folder(service: Service, path: str) -> Path:
    """The folder that a client names; it must lie below --lora-dir."""
    if service.settings.lora_dir is None:
        raise HttpError(
            403,
            "no adapter is loaded at run time: --lora-dir names the folder that they are "
            "taken from",
        )
    root = Path(service.settings.lora_dir).expanduser().resolve()
    try:
        folder = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):
        folder = root
    if root not in folder.parents or not folder.is_dir():
        raise RequestError("lora_path", "must be a folder below --lora-dir")
    return folder


async def load(service: Service, request: Request) -> PlainTextResponse:
    """Load an adapter, and serve it as a model of its name."""
    (name, path, replaces), _ = await service.read(request, parse_load)
    async with service.models.use(request.query_params.get("model")) as model:
        check_name(service, model, name, replaces)
        store = model.llm.engine.adapters
        numbers = [adapter_in_use.lora_int_id for adapter_in_use in model.adapters.values()]
        if store is None:
            raise HttpError(403, "this server serves no adapters; --enable-lora makes it")
        folder = await service.run_in_thread(resolve_adapter_folder, service, path)
        adapter = LoRARequest(name, max(numbers, default=0) + 1, str(folder))
        try:
            await service.run_in_thread(store.get, adapter)
        except ModelError as error:
            raise RequestError(
                "lora_path", f"cannot be served: {str(error).replace(str(folder), path)}"
            ) from None
        check_name(service, model, name, replaces)  # a concurrent request may have taken the name
        model.adapters[name] = adapter
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def check_name(service: Service, model: Model, name: str, replaces: bool) -> None:
    """Refuse a name that is served already, and more than MAX_ADAPTERS adapters."""
    if name in model.adapters and replaces:
        return
    if any(
        name in served_model.names or name in served_model.adapters
        for served_model in service.models.models
    ):
        raise RequestError(
            "lora_name",
            f"{name!r} is served already; load_inplace replaces an adapter of that name",
        )
    if len(model.adapters) >= MAX_ADAPTERS:
        raise RequestError(
            "lora_name", f"would be one of more than {MAX_ADAPTERS} adapters; unload others first"
        )


async def unload(service: Service, request: Request) -> PlainTextResponse:
    """Unload an adapter for new requests; running ones continue."""
    name, _ = await service.read(request, parse_unload)
    for model in service.models.models:
        if model.adapters.pop(name, None) is not None:
            return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
    raise HttpError(
        404, f"lora_name: there is no adapter {shown(name)}", "lora_name", "model_not_found"
    )


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/load_lora_adapter"): load,
    ("POST", "/v1/unload_lora_adapter"): unload,
}
