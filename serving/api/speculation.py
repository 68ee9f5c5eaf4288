"""The `speculative_config` of an engine, with vLLM's names."""

import ast
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from ...model.config import ModelError
from .validation import shown

METHODS = ("ngram", "suffix", "draft_model", "self", "medusa", "eagle", "eagle3", "mtp")
HEADS = ("medusa", "eagle", "eagle3", "mtp")  # draft from the model's hidden states
IN_STEP = ("draft_model", "self", *HEADS)  # methods that draft on the device, within the step
FOLDER_METHODS = ("draft_model", "medusa", "eagle", "eagle3")  # need a folder of their own
DEFAULT_DRAFT_TOKENS = 4
MAX_RANK = 32  # ranks of a position that a tree can ask for


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted, and how many at most."""

    method: str
    num_speculative_tokens: int = None  # type: ignore[assignment] - or as many as the tree has nodes
    model: str | None = None  # draft_model and heads: a folder or Hugging Face id
    revision: str | None = None
    # draft_model, self: the format to which its weights are rounded.
    quantization: str | None = None
    num_layers: int | None = None  # self: the number of the model's first layers that draft
    prompt_lookup_min: int = 2  # ngram: minimum number of tokens that must occur again
    prompt_lookup_max: int = 5
    suffix_max_texts: int = 1000  # suffix: number of remembered answers
    speculative_token_tree: Any = None  # heads: each draft as a path of ranks from the root
    adapts: bool = True  # draft fewer tokens, or none, where drafting does not pay

    @property
    def in_step(self) -> bool:
        """Whether the step itself drafts."""
        return self.method in IN_STEP

    @property
    def follows(self) -> bool:
        """Whether drafts come from a model with its own KV cache, which must compute the text
        first.
        """
        return self.method == "draft_model"

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The branches of the tree as ranks from the root to a leaf; 0 is the likeliest token.

        The first branch consists of likeliest tokens only.
        """
        tree = self.speculative_token_tree
        if tree is None:
            return ((0,) * self.num_speculative_tokens,)
        parents = {node[:-1] for node in tree}
        return tuple(sorted(node for node in tree if node not in parents))

    @property
    def depth(self) -> int:
        """Maximum number of consecutive draft tokens."""
        return max(map(len, self.paths))

    @property
    def num_rows(self) -> int:
        """Tokens of a sequence in a step: the drafts of each branch, each with the token before
        them.
        """
        return sum(1 + len(path) for path in self.paths)

    def __post_init__(self):
        if self.method not in METHODS:
            raise ModelError(
                f"speculative_config.method is {shown(self.method)}; it must be one of "
                f"{', '.join(METHODS)}"
            )
        if (requested_tree := self.speculative_token_tree) is not None:
            if self.method not in HEADS:
                raise ModelError(
                    "speculative_config.speculative_token_tree is given with the method "
                    f"{self.method}, which has one draft for a place; the methods "
                    f"{', '.join(HEADS)} have trees"
                )
            tree = parse_token_tree(requested_tree)
            object.__setattr__(self, "speculative_token_tree", tree)
            if self.num_speculative_tokens not in (None, len(tree)):
                raise ModelError(
                    "speculative_config.num_speculative_tokens is "
                    f"{shown(self.num_speculative_tokens)}, and speculative_token_tree has "
                    f"{len(tree)} nodes, each of which is a draft; use {len(tree)}, or leave it out"
                )
        if self.num_speculative_tokens is None:
            count = (
                DEFAULT_DRAFT_TOKENS if requested_tree is None else len(self.speculative_token_tree)
            )
            object.__setattr__(self, "num_speculative_tokens", count)
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
        if (self.model is None) == (self.method in FOLDER_METHODS):
            fault = "is missing" if self.model is None else f"is {shown(self.model)}"
            raise ModelError(
                f"speculative_config.model {fault}; it goes with the methods "
                f"{', '.join(FOLDER_METHODS)}, and only with them"
            )
        if self.quantization is not None and self.method not in ("draft_model", "self"):
            raise ModelError(
                f"speculative_config.quantization is {shown(self.quantization)}; it goes with the "
                "methods draft_model and self, and only with them"
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


def parse_token_tree(tree: Any) -> tuple[tuple[int, ...], ...]:
    """Parse a `speculative_token_tree`, whose node (i, j) is the token of rank j after the one of
    rank i.
    """
    name = "speculative_config.speculative_token_tree"
    nodes: list[Any] = []
    with suppress(MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        nodes = [
            tuple(node) for node in (ast.literal_eval(tree) if isinstance(tree, str) else tree)
        ]
    if not nodes or not all(
        node and all(type(rank) is int and rank >= 0 for rank in node) for node in nodes
    ):
        raise ModelError(
            f'{name} is {shown(tree)}; it must be a list of tuples of ranks such as "[(0,), (1,), (0, 0), (0, 1)]", '
            "in which (0, 1) is the second likeliest token after the likeliest first one"
        )
    node_set = set(nodes)
    for node in nodes:
        if nodes.count(node) > 1:
            raise ModelError(f"{name} has the node {node} twice")
        if len(node) > 1 and node[:-1] not in node_set:
            raise ModelError(f"{name} has the node {node} without its parent {node[:-1]}; add that")
        if max(node) >= MAX_RANK:
            raise ModelError(f"{name} has the node {node}; ranks go from 0 to {MAX_RANK - 1}")
        likelier = (*node[:-1], node[-1] - 1)
        if node[-1] and likelier not in node_set:
            raise ModelError(
                f"{name} has the node {node} without the likelier {likelier}; add that"
            )
    return tuple(nodes)


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
    for name in config:
        if name not in known_names:
            raise ModelError(
                f"speculative_config.{name} is not known; the fields are {', '.join(known_names)}"
            )
    if "method" not in config:
        raise ModelError(
            f"speculative_config.method is missing; it must be one of {', '.join(METHODS)}"
        )
    return SpeculativeConfig(**config)
