"""How tokens are to be drafted: `speculative_config`, with vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...model.config import ModelError
from .validation import shown

METHODS = ("ngram", "suffix", "draft_model", "self", "medusa", "eagle", "eagle3", "mtp")
HEADS = ("medusa", "eagle", "eagle3", "mtp")  # on the model's hidden states
IN_STEP = ("draft_model", "self", *HEADS)  # those that draft on the device
OF_A_FOLDER = ("draft_model", "medusa", "eagle", "eagle3")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Who drafts, and how many tokens at most."""

    method: str
    num_speculative_tokens: int = 4
    model: str | None = None  # draft_model and heads: a folder or Hugging Face id
    revision: str | None = None
    quantization: str | None = None  # draft_model, self: what its weights are rounded to
    num_layers: int | None = None  # self: it is the first layers of the model
    prompt_lookup_min: int = 2  # ngram: tokens that must occur again
    prompt_lookup_max: int = 5
    suffix_max_texts: int = 1000  # suffix: answers that are remembered
    adapts: bool = True  # fewer drafts, or none, where they do not pay

    @property
    def in_step(self) -> bool:
        """The step itself drafts."""
        return self.method in IN_STEP

    @property
    def follows(self) -> bool:
        """It has keys and values of its own, and must compute the text before it can go on with it."""
        return self.method == "draft_model"

    @property
    def num_rows(self) -> int:
        """Of a sequence in a step: the drafts, and the token before them."""
        return 1 + self.num_speculative_tokens

    def __post_init__(self):
        if self.method not in METHODS:
            raise ModelError(
                f"speculative_config.method is {shown(self.method)}; it must be one of {', '.join(METHODS)}"
            )
        for name, low in {"num_speculative_tokens": 1, "prompt_lookup_min": 1, "suffix_max_texts": 0}.items():
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ModelError(
                    f"speculative_config.{name} is {shown(value)}; it must be an integer of at least {low}"
                )
        longest = self.prompt_lookup_max
        if type(longest) is not int or longest < self.prompt_lookup_min:
            raise ModelError(
                f"speculative_config.prompt_lookup_max is {shown(longest)}; it must be an integer of at least "
                f"prompt_lookup_min, {self.prompt_lookup_min}"
            )
        for name in ("model", "revision", "quantization"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ModelError(f"speculative_config.{name} is {shown(value)}; it must be a string")
        if (self.model is None) == (self.method in OF_A_FOLDER):
            why = "is missing" if self.model is None else f"is {shown(self.model)}"
            raise ModelError(
                f"speculative_config.model {why}; it goes with the methods {', '.join(OF_A_FOLDER)}, and only with them"
            )
        if self.quantization is not None and self.method not in ("draft_model", "self"):
            raise ModelError(
                f"speculative_config.quantization is {shown(self.quantization)}; it goes with the methods draft_model "
                "and self, and only with them"
            )
        layers = self.num_layers
        if layers is not None and (self.method != "self" or type(layers) is not int or layers < 1):
            raise ModelError(
                f"speculative_config.num_layers is {shown(layers)}; it must be an integer of at least 1, with the "
                "method self"
            )
        if self.method == "self" and layers is None and self.quantization is None:
            raise ModelError(
                "speculative_config.num_layers and quantization are missing; the method self drafts with the model's "
                "first layers, or with its weights in fewer bits"
            )
        if not isinstance(self.adapts, bool):
            raise ModelError(f"speculative_config.adapts is {shown(self.adapts)}; it must be true or false")


def speculation_of(given: Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """A checked `speculative_config`; None where there is none."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ModelError(
            f"speculative_config is {shown(given)}; it must be an object such as "
            '{"method": "ngram", "num_speculative_tokens": 4}'
        )
    known = [field.name for field in fields(SpeculativeConfig)]
    for name in given:
        if name not in known:
            raise ModelError(f"speculative_config.{name} is not known; the fields are {', '.join(known)}")
    if "method" not in given:
        raise ModelError(f"speculative_config.method is missing; it must be one of {', '.join(METHODS)}")
    return SpeculativeConfig(**given)
