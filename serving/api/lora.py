"""Which adapter a request is served with, in vLLM's words."""

from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .validation import INT32_MAX, integer, shown


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, a number of its own, and the folder that PEFT has written."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self):
        integer("lora_int_id", self.lora_int_id, 1, INT32_MAX)
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise RequestError(name, f"must be a string that is not empty, got {shown(value)}")


def adapters_list(given: Any, count: int) -> list[LoRARequest | None]:
    """The adapter of each prompt: one for all, one each, or none."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if not isinstance(given, list | tuple) or not all(one is None or isinstance(one, LoRARequest) for one in given):
        raise RequestError("lora_request", f"must be a LoRARequest, or a list of one a prompt, got {shown(given)}")
    if len(given) != count:
        raise RequestError("lora_request", f"has {len(given)} entries for {count} prompts")
    return list(given)
