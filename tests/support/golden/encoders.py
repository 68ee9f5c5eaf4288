"""Tiny encoders, and the text vectors of transformers: mean and CLS pooling of hidden states."""

import json
from pathlib import Path

import numpy as np

from .families import VARIANTS
from .folder import HERE, prompts, write_folder
from .variant import Variant

LENGTHS = 5, 1, 40, 100, 23
SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
BERT = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
}
ROBERTA = BERT | {"layer_norm_eps": 1e-5, "type_vocab_size": 1, "pad_token_id": 1}
MODERN = {
    "local_attention": 16,
    "global_attn_every_n_layers": 3,
    "norm_eps": 1e-5,
    "hidden_activation": "gelu",
}
GEMMA = next(variant.config for variant in VARIANTS if variant.name == "gemma3-text")
BOTH_WAYS = {
    "use_bidirectional_attention": True,
    "sliding_window": 24,
    "architectures": ["Gemma3TextModel"],
}


def variant(name: str, kind: str, architecture: str, config: dict) -> Variant:
    return Variant(
        name,
        SIZES | {"model_type": kind, "architectures": [architecture]} | config,
        120,
        LENGTHS,
        0,
    )


ENCODERS = [
    variant("bert", "bert", "BertModel", BERT),
    variant("roberta", "roberta", "RobertaModel", ROBERTA),
    variant("xlm-roberta", "xlm-roberta", "XLMRobertaModel", ROBERTA),
    variant("modernbert", "modernbert", "ModernBertModel", MODERN),
    Variant("embeddinggemma", GEMMA | BOTH_WAYS, 120, LENGTHS, 0),
]


def texts_of(variant: Variant, seed: int) -> list[list[int]]:
    """Random texts without special tokens, since RoBERTa skips positions of padding tokens."""
    special = 3
    drawn = prompts(variant.prompts, variant.config["vocab_size"] - special, seed)
    return [[token + special for token in ids] for ids in drawn]


class GoldenEncoder:
    """One golden file, and a folder with the model that it was made with."""

    def __init__(self, variant: Variant, folder: Path):
        with np.load(HERE / f"{variant.name}.npz") as arrays:
            self.mean = arrays["mean"]
            self.cls = arrays["cls"]
            meta = json.loads(arrays["meta"].tobytes())
        self.texts = texts_of(variant, meta["seed"])
        self.folder = write_folder(
            folder / variant.name, variant.config, meta["tensors"], meta["seed"]
        )
