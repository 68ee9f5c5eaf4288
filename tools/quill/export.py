"""A trained weight tree as a Hugging Face folder: config, safetensors, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from quire.model.checkpoint.dense_leaf import leaf_to_tensors
from quire.model.config import ModelConfig
from quire.model.families.common import Source
from quire.model.families.quill import hf_config, sources

from . import tasks as tasks


def tensors(weights, config: ModelConfig, dtype) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by name; inverts the transforms that loading applies."""
    named: dict[str, np.ndarray] = {}

    def put(source: Source, leaf):
        arrays = leaf_to_tensors(source.parts, np.asarray(leaf, np.float32))
        named.update({name: value.astype(dtype) for name, value in arrays.items()})

    jax.tree.map(put, sources(config), weights, is_leaf=lambda leaf: isinstance(leaf, Source))
    return named


def export(folder: Path, weights, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Write the model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {f"{name}_token_id": tokenizer.token_to_id(token) for name, token in SPECIAL.items()}
    save_file(
        tensors(weights, config, jax.numpy.bfloat16),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": hf_config(config, **ids) | {"dtype": "bfloat16"},
        "generation_config.json": ids | {"temperature": 1.0},
        "tokenizer_config.json": {f"{name}_token": token for name, token in SPECIAL.items()}
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_len,
            "chat_template": tasks.CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


SPECIAL = {"bos": tasks.BOS, "eos": tasks.END, "pad": tasks.PAD}
