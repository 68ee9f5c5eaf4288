"""The `speculative_config` of an engine, with vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...model.config import ModelError
from ..api.validation import shown
from .methods import METHODS, Method

FOLDER_METHODS = tuple(name for name, method in METHODS.items() if method.needs_folder)
MODEL_METHODS = tuple(name for name, method in METHODS.items() if method.is_model)


@dataclass(frozen=True)
class SpeculativeConfig:
    """The method of drafting and the maximum number of draft tokens."""

    method: str
    num_speculative_tokens: int = 4  # consecutive draft tokens of a sequence in a step, at most
    model: str | None = None  # draft_model and heads: a folder or Hugging Face id
    revision: str | None = None
    # draft_model, self: the format to which its weights are rounded.
    quantization: str | None = None
    num_layers: int | None = None  # self: the number of the model's first layers that draft
    prompt_lookup_min: int = 2  # ngram: minimum number of tokens that must occur again
    prompt_lookup_max: int = 5
    suffix_max_texts: int = 1000  # suffix: number of remembered answers
    adapts: bool = True  # draft fewer tokens, or none, where drafting does not pay

    @property
    def traits(self) -> Method:
        """The method's row in the table."""
        return METHODS[self.method]

    def __post_init__(self):
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise ModelError(
                f"speculative_config.method is {shown(self.method)}; it must be one of "
                f"{', '.join(METHODS)}"
            )
        for name, minimum in {
            "num_speculative_tokens": 1,
            "prompt_lookup_min": 1,
            "suffix_max_texts": 0,
        }.items():
            value = getattr(self, name)
            if type(value) is not int or value < minimum:
                raise ModelError(
                    f"speculative_config.{name} is {shown(value)}; it must be an integer of at "
                    f"least {minimum}"
                )
        longest = self.prompt_lookup_max
        if type(longest) is not int or longest < self.prompt_lookup_min:
            raise ModelError(
                f"speculative_config.prompt_lookup_max is {shown(longest)}; it must be an integer "
                f"of at least prompt_lookup_min, {self.prompt_lookup_min}"
            )
        for name in ("model", "revision", "quantization"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ModelError(
                    f"speculative_config.{name} is {shown(value)}; it must be a string"
                )
        if (self.model is None) == self.traits.needs_folder:
            fault = "is missing" if self.model is None else f"is {shown(self.model)}"
            raise ModelError(
                f"speculative_config.model {fault}; it goes with the methods "
                f"{', '.join(FOLDER_METHODS)}, and only with them"
            )
        if self.quantization is not None and not self.traits.is_model:
            raise ModelError(
                f"speculative_config.quantization is {shown(self.quantization)}; it goes with the "
                f"methods {' and '.join(MODEL_METHODS)}, and only with them"
            )
        layers = self.num_layers
        if layers is not None and (self.method != "self" or type(layers) is not int or layers < 1):
            raise ModelError(
                f"speculative_config.num_layers is {shown(layers)}; it must be an integer of at "
                "least 1, with the method self"
            )
        if self.method == "self" and layers is None and self.quantization is None:
            raise ModelError(
                "speculative_config.num_layers and quantization are missing; the method self "
                "drafts with the model's first layers, or with its weights in fewer bits"
            )
        if not isinstance(self.adapts, bool):
            raise ModelError(
                f"speculative_config.adapts is {shown(self.adapts)}; it must be true or false"
            )


def parse_speculative_config(config: Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """Parse and check a `speculative_config`; None if there is none."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ModelError(
            f"speculative_config is {shown(config)}; it must be an object such as "
            '{"method": "ngram", "num_speculative_tokens": 4}'
        )
    known_names = [field.name for field in fields(SpeculativeConfig)]
    if config.get("speculative_token_tree") is not None:
        raise ModelError(
            "speculative_config.speculative_token_tree is not supported: draft tokens are a chain; "
            "use num_speculative_tokens"
        )
    for name in config:
        if name not in (*known_names, "speculative_token_tree"):
            raise ModelError(
                f"speculative_config.{name} is not known; the fields are {', '.join(known_names)}"
            )
    if "method" not in config:
        raise ModelError(
            f"speculative_config.method is missing; it must be one of {', '.join(METHODS)}"
        )
    values = {name: config[name] for name in known_names if config.get(name) is not None}
    return SpeculativeConfig(**values)
