"""Quire: LLM inference in JAX."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Public name -> module, imported on first use: `import quire` alone costs nothing.
EXPORTS = {
    "AsyncLLM": ".serving.async_llm",
    "BeamSearchParams": ".serving.engine.beam_search",
    "CompletionOutput": ".serving.api.outputs",
    "LLM": ".serving.llm",
    "ModelError": ".model.config",
    "RequestError": ".serving.api.errors",
    "RequestOutput": ".serving.api.outputs",
    "SamplingParams": ".serving.api.params",
    "follow": ".serving.follow",
}

if TYPE_CHECKING:
    from .model.config import ModelError as ModelError
    from .serving.api.errors import RequestError as RequestError
    from .serving.api.outputs import CompletionOutput as CompletionOutput
    from .serving.api.outputs import RequestOutput as RequestOutput
    from .serving.api.params import SamplingParams as SamplingParams
    from .serving.async_llm import AsyncLLM as AsyncLLM
    from .serving.engine.beam_search import BeamSearchParams as BeamSearchParams
    from .serving.follow import follow as follow
    from .serving.llm import LLM as LLM


def __getattr__(name: str):
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(EXPORTS[name], __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *EXPORTS})
