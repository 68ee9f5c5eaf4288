"""The tiny models of the golden tests as GGUF files, from config.json and seeded weights."""

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import jax

from quire.model.checkpoint import loader
from quire.model.config import ModelConfig
from quire.model.families import FAMILIES
from quire.model.families.common import Source
from quire.model.gguf.architectures import hf_config
from quire.tests.support import gguf_written
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.families_states import FALCON_H1
from quire.tests.support.golden.folder import draw
from quire.tests.support.golden.variant import Variant

# RoPE variants that llama.cpp lacks, quantised weights and convolution biases.
LEFT_OUT = {
    "gpt-oss",
    "lfm2-plain",
    "llama-dynamic",
    "llama-dynamic-stretched",
    "llama-longrope",
    "phimoe-longrope",
}
ONES = {key: 1.0 for key in FALCON_H1 if key.endswith("_multiplier")}
# Falcon-H1's multipliers are folded into its weights; Granite's attention layers have no RoPE.
WITHOUT = {
    "model_type": "falcon_h1",
    "mlp_multipliers": [1.0] * 2,
    "ssm_multipliers": [1.0] * 5,
} | ONES
CHANGED = {
    "falcon-h1": WITHOUT,
    "falcon-h1-normed": WITHOUT,
    "granite-hybrid-moe": {"position_embedding_type": "nope"},
}


def written() -> Iterator[Variant]:
    """The tiny models with GGUF files; of multimodal models the text model."""
    for variant in VARIANTS:
        hf = variant.config.get("text_config", variant.config)
        if hf["model_type"] in gguf_written.ARCHITECTURES and variant.name not in LEFT_OUT:
            yield dataclasses.replace(variant, config=hf | CHANGED.get(variant.name, {}))


WRITTEN = {variant.name: variant for variant in written()}


def family(hf: dict[str, Any]) -> Any:
    return importlib.import_module(f"quire.model.families{FAMILIES[hf['model_type']]}")


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors by name."""
    sources = jax.tree.leaves(
        loader.weight_sources(config), is_leaf=lambda node: isinstance(node, Source)
    )
    return {tensor.name: tensor.shape for source in sources for tensor in source.parts}


class File:
    """A tiny model's checkpoint, and the metadata and tensors of its GGUF file."""

    def __init__(self, name: str):
        self.variant = WRITTEN[name]
        hf = self.variant.config
        self.made_from = family(hf).config(hf, self.variant.max_len)
        shapes = shapes_of(self.made_from)
        self.checkpoint = {
            name: draw(name, shape, 3, hf["model_type"]) for name, shape in shapes.items()
        }
        # Nemotron-H's block count includes MLP blocks
        blocks = hf.get("hybrid_override_pattern", self.made_from.layers)
        self.metadata = gguf_written.metadata(hf, len(blocks))
        self.tensors = gguf_written.tensors(hf, self.checkpoint) | gguf_written.factors(hf)
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        self.architecture = self.metadata["general.architecture"]

    def config(self, **changes: Any) -> dict[str, Any]:
        metadata = self.metadata | {
            f"{self.architecture}.{key}": value for key, value in changes.items()
        }
        return hf_config(metadata, self.shapes, self.tensors.__getitem__)
