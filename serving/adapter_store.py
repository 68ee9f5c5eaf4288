"""LRU cache of LoRA adapters in host memory."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..model.checkpoint.adapter_targets import AdapterTarget
from ..model.checkpoint.adapters import FILE, Adapter, read_adapter
from ..model.checkpoint.folder import ADAPTER
from ..model.config import ModelConfig, ModelError
from .api.errors import RequestError
from .api.lora import LoRARequest
from .api.params import RequestOptions
from .engine.admission import NO_ADAPTERS


class AdapterStore:
    """Holds at most `max_adapters` adapters.

    An adapter whose files have changed is read again and counts as another one, so it shares no
    pages with the old one.
    """

    def __init__(
        self,
        model: Path,
        config: ModelConfig,
        targets: tuple[AdapterTarget, ...],
        max_rank: int,
        max_adapters: int,
    ):
        self.model = model
        self.config = config
        self.targets = targets
        self.max_rank = max_rank
        self.max_adapters = max_adapters
        self.adapters: dict[Any, Adapter] = {}  # by path and file stamp, least recently used first
        self.lock = threading.Lock()  # callers are in many threads

    def get(self, request: LoRARequest) -> Adapter:
        """Return the adapter that a request names."""
        folder = Path(request.lora_path).expanduser()
        with self.lock:
            key = str(folder), file_stamp(folder)
            adapter = self.adapters.pop(key, None)
            if adapter is None:
                adapter = read_adapter(folder, self.config, self.targets, self.max_rank, self.model)
                self.adapters = {
                    other_key: other_adapter
                    for other_key, other_adapter in self.adapters.items()
                    if other_key[0] != key[0]
                }
            self.adapters[key] = adapter
            while len(self.adapters) > self.max_adapters:
                del self.adapters[next(iter(self.adapters))]
            return adapter


def file_stamp(folder: Path) -> tuple[Any, ...]:
    """Return a value that changes with an adapter's files."""
    try:
        stats = [(folder / name).stat() for name in (ADAPTER, FILE)]
    except OSError as error:
        raise ModelError(
            f"{folder} is no adapter that can be read: {error.strerror}: {error.filename}"
        ) from None
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def with_adapter(
    request_options: RequestOptions, store: AdapterStore | None, request: LoRARequest | None
) -> RequestOptions:
    """Return the options of a request with its adapter."""
    if request is None:
        return request_options
    if store is None:
        raise RequestError("lora_request", NO_ADAPTERS)
    try:
        return replace(request_options, adapter=store.get(request))
    except ModelError as error:
        raise RequestError("lora_request", f"names {request.lora_name!r}: {error}") from None
