"""The LoRA adapter of a request, with vLLM's names."""

from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .validation import INT32_MAX, integer, shown


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter: its name, its unique number, and a folder written by PEFT."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self):
        integer("lora_int_id", self.lora_int_id, 1, INT32_MAX)
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise RequestError(name, f"must be a string that is not empty, got {shown(value)}")


def adapter_per_prompt(adapters: Any, count: int) -> list[LoRARequest | None]:
    """Return the adapter of each prompt, given one for all, one each, or None."""
    if adapters is None or isinstance(adapters, LoRARequest):
        return [adapters] * count
    if not isinstance(adapters, list | tuple) or not all(
        adapter is None or isinstance(adapter, LoRARequest) for adapter in adapters
    ):
        raise RequestError(
            "lora_request",
            f"must be a LoRARequest, or a list of one a prompt, got {shown(adapters)}",
        )
    if len(adapters) != count:
        raise RequestError("lora_request", f"has {len(adapters)} entries for {count} prompts")
    return list(adapters)
