"""The adapters in host memory: read when they are asked for, the least recently used dropped."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..model.checkpoint.adapter_targets import Target
from ..model.checkpoint.adapters import FILE, Adapter, read_adapter
from ..model.checkpoint.folder import ADAPTER
from ..model.config import ModelConfig, ModelError
from .api.errors import RequestError
from .api.lora import LoRARequest
from .api.params import Terms
from .engine.admission import NO_ADAPTERS


class AdapterStore:
    """At most `most` adapters. One whose files have changed is read again, and is another: it shares no pages."""

    def __init__(self, model: Path, config: ModelConfig, targets: tuple[Target, ...], max_rank: int, most: int):
        self.model, self.config, self.targets, self.max_rank, self.most = model, config, targets, max_rank, most
        self.held: dict[Any, Adapter] = {}  # by path and stamp, the least recently used first
        self.lock = threading.Lock()  # callers are in many threads

    def get(self, request: LoRARequest) -> Adapter:
        """The adapter that a request names."""
        folder = Path(request.lora_path).expanduser()
        with self.lock:
            key = str(folder), stamp_of(folder)
            found = self.held.pop(key, None)
            if found is None:
                found = read_adapter(folder, self.config, self.targets, self.max_rank, self.model)
                self.held = {other: held for other, held in self.held.items() if other[0] != key[0]}
            self.held[key] = found
            while len(self.held) > self.most:
                del self.held[next(iter(self.held))]
            return found


def stamp_of(folder: Path) -> tuple[Any, ...]:
    """What changes when an adapter's files do."""
    try:
        found = [(folder / name).stat() for name in (ADAPTER, FILE)]
    except OSError as error:
        raise ModelError(f"{folder} is no adapter that can be read: {error.strerror}: {error.filename}") from None
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found)


def with_adapter(terms: Terms, store: AdapterStore | None, request: LoRARequest | None) -> Terms:
    """The terms of a request that names an adapter."""
    if request is None:
        return terms
    if store is None:
        raise RequestError("lora_request", NO_ADAPTERS)
    try:
        return replace(terms, adapter=store.get(request))
    except ModelError as error:
        raise RequestError("lora_request", f"names {request.lora_name!r}: {error}") from None
