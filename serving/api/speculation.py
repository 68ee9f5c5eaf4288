"""How tokens are to be drafted: `speculative_config`, with vLLM's names."""

import ast
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from ...model.config import ModelError
from .validation import shown

METHODS = ("ngram", "suffix", "draft_model", "self", "medusa", "eagle", "eagle3", "mtp")
HEADS = ("medusa", "eagle", "eagle3", "mtp")  # on the model's hidden states
IN_STEP = ("draft_model", "self", *HEADS)  # those that draft on the device
OF_A_FOLDER = ("draft_model", "medusa", "eagle", "eagle3")
CHAIN = 4  # drafts, where nothing is said
LIKELIEST = 32  # tokens of a place that a tree can ask for


@dataclass(frozen=True)
class SpeculativeConfig:
    """Who drafts, and how many tokens at most."""

    method: str
    num_speculative_tokens: int = None  # type: ignore[assignment] - CHAIN, or as many as the tree has nodes
    model: str | None = None  # draft_model and heads: a folder or Hugging Face id
    revision: str | None = None
    quantization: str | None = None  # draft_model, self: what its weights are rounded to
    num_layers: int | None = None  # self: it is the first layers of the model
    prompt_lookup_min: int = 2  # ngram: tokens that must occur again
    prompt_lookup_max: int = 5
    suffix_max_texts: int = 1000  # suffix: answers that are remembered
    speculative_token_tree: Any = None  # heads: the drafts, each by its parents' ranks among their siblings and its own
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
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """From the root of the tree to each of its leaves, by ranks: 0 is the likeliest. The first has only these."""
        tree = self.speculative_token_tree
        if tree is None:
            return ((0,) * self.num_speculative_tokens,)
        parents = {node[:-1] for node in tree}
        return tuple(sorted(node for node in tree if node not in parents))

    @property
    def depth(self) -> int:
        """Drafts one after the other, at most."""
        return max(map(len, self.paths))

    @property
    def num_rows(self) -> int:
        """Of a sequence in a step: the drafts of each path, and the token before them."""
        return sum(1 + len(path) for path in self.paths)

    def __post_init__(self):
        if self.method not in METHODS:
            raise ModelError(
                f"speculative_config.method is {shown(self.method)}; it must be one of {', '.join(METHODS)}"
            )
        if (given := self.speculative_token_tree) is not None:
            if self.method not in HEADS:
                raise ModelError(
                    f"speculative_config.speculative_token_tree is given with the method {self.method}, which has one "
                    f"draft for a place; the methods {', '.join(HEADS)} have trees"
                )
            tree = tree_of(given)
            object.__setattr__(self, "speculative_token_tree", tree)
            if self.num_speculative_tokens not in (None, len(tree)):
                raise ModelError(
                    f"speculative_config.num_speculative_tokens is {shown(self.num_speculative_tokens)}, and "
                    f"speculative_token_tree has {len(tree)} nodes, each of which is a draft; use {len(tree)}, or "
                    "leave it out"
                )
        if self.num_speculative_tokens is None:
            count = CHAIN if given is None else len(self.speculative_token_tree)
            object.__setattr__(self, "num_speculative_tokens", count)
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


def tree_of(given: Any) -> tuple[tuple[int, ...], ...]:
    """The nodes of a `speculative_token_tree`: (i, j) is token j by likelihood after the first token i."""
    name = "speculative_config.speculative_token_tree"
    nodes: list[Any] = []
    with suppress(MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        nodes = [tuple(node) for node in (ast.literal_eval(given) if isinstance(given, str) else given)]
    if not nodes or not all(node and all(type(rank) is int and rank >= 0 for rank in node) for node in nodes):
        raise ModelError(
            f'{name} is {shown(given)}; it must be a list of tuples of ranks such as "[(0,), (1,), (0, 0), (0, 1)]", '
            "in which (0, 1) is the second likeliest token after the likeliest first one"
        )
    known = set(nodes)
    for node in nodes:
        if nodes.count(node) > 1:
            raise ModelError(f"{name} has the node {node} twice")
        if len(node) > 1 and node[:-1] not in known:
            raise ModelError(f"{name} has the node {node} without its parent {node[:-1]}; add that")
        if max(node) >= LIKELIEST:
            raise ModelError(f"{name} has the node {node}; ranks go from 0 to {LIKELIEST - 1}")
        likelier = (*node[:-1], node[-1] - 1)
        if node[-1] and likelier not in known:
            raise ModelError(f"{name} has the node {node} without the likelier {likelier}; add that")
    return tuple(nodes)


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
