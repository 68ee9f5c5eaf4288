"""Quire: LLM inference in JAX."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Public name -> module. Modules are imported on first use, so that `import quire` is fast.
EXPORTS = {
    "AsyncLLM": ".serving.async_llm",
    "BeamSearchOutput": ".serving.engine.beam_search",
    "BeamSearchParams": ".serving.engine.beam_search",
    "BeamSearchSequence": ".serving.engine.beam_search",
    "CompletionOutput": ".serving.api.outputs",
    "EmbeddingOutput": ".serving.api.outputs",
    "EmbeddingRequestOutput": ".serving.api.outputs",
    "FlatLogprobs": ".serving.api.outputs",
    "LLM": ".serving.llm",
    "LoRARequest": ".serving.api.lora",
    "Logprob": ".serving.api.outputs",
    "ModelError": ".model.config",
    "RequestError": ".serving.api.errors",
    "RequestOutput": ".serving.api.outputs",
    "RequestOutputKind": ".serving.api.params",
    "SamplingParams": ".serving.api.params",
    "ScoringOutput": ".serving.api.outputs",
    "ScoringRequestOutput": ".serving.api.outputs",
    "SearchOutput": ".serving.search",
    "SearchParams": ".serving.search",
    "StructuredOutputsParams": ".serving.api.structured",
    "TextPrompt": ".serving.api.prompts",
    "TokensPrompt": ".serving.api.prompts",
    "follow": ".serving.follow",
}

if TYPE_CHECKING:
    from .model.config import ModelError as ModelError
    from .serving.api.errors import RequestError as RequestError
    from .serving.api.lora import LoRARequest as LoRARequest
    from .serving.api.outputs import CompletionOutput as CompletionOutput
    from .serving.api.outputs import EmbeddingOutput as EmbeddingOutput
    from .serving.api.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from .serving.api.outputs import FlatLogprobs as FlatLogprobs
    from .serving.api.outputs import Logprob as Logprob
    from .serving.api.outputs import RequestOutput as RequestOutput
    from .serving.api.outputs import ScoringOutput as ScoringOutput
    from .serving.api.outputs import ScoringRequestOutput as ScoringRequestOutput
    from .serving.api.params import RequestOutputKind as RequestOutputKind
    from .serving.api.params import SamplingParams as SamplingParams
    from .serving.api.prompts import TextPrompt as TextPrompt
    from .serving.api.prompts import TokensPrompt as TokensPrompt
    from .serving.api.structured import StructuredOutputsParams as StructuredOutputsParams
    from .serving.async_llm import AsyncLLM as AsyncLLM
    from .serving.engine.beam_search import BeamSearchOutput as BeamSearchOutput
    from .serving.engine.beam_search import BeamSearchParams as BeamSearchParams
    from .serving.engine.beam_search import BeamSearchSequence as BeamSearchSequence
    from .serving.follow import follow as follow
    from .serving.llm import LLM as LLM
    from .serving.search import SearchOutput as SearchOutput
    from .serving.search import SearchParams as SearchParams


def __getattr__(name: str):
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(EXPORTS[name], __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *EXPORTS})
