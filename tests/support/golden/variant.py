"""The description of a tiny model and of its test prompts."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One tiny model. Its weights depend only on names, shapes and a seed: see `folder.py`."""

    name: str
    config: dict[str, Any]
    max_len: int | None = None  # served length; None: the config's own
    prompts: tuple[int, ...] = (80, 11)
    new_tokens: int = 64  # 0: compare logits only
    # tensor-name prefixes of transformers -> of older checkpoints
    renames: tuple[tuple[str, str], ...] = ()


SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
