"""The checkpoints of the comparison: Llama, Mixtral or LFM2 models of several sizes with random
weights, and a tokenizer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quire.model.checkpoint.adapters import FILE
from quire.ops.cache_folder import publish
from quire.scripts.bench.adapters import write_random

from .loop import ADAPTER_RANK

VOCAB = 32000
WIDTH = 3  # kernel width of the short convolutions, in tokens
MAX_LEN = 4096
SPECIALS = ("<s>", "</s>", "<pad>")  # ids 0, 1, 2
# Without scales: a lower bound.
BYTES_A_WEIGHT = {"bf16": 2.0, "int8": 1.0, "int4": 0.5, "q4_k_m": 0.5}


@dataclass(frozen=True)
class ModelShape:
    """The shape of a Llama; with experts, of a Mixtral; with convolutions, of an LFM2. The LM head
    is tied to the embedding.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    head: int = 64
    experts: int = 0
    chosen: int = 0  # experts per token
    # Period of layers: the last layer of each period has attention, the others short convolutions.
    convolved: int = 0

    @property
    def attends(self) -> list[bool]:
        """Whether each layer has attention."""
        return [not self.convolved or (i + 1) % self.convolved == 0 for i in range(self.layers)]

    def read(self, rows: int) -> float:
        """The expected number of weights that a step with `rows` sequences reads, if each token
        chooses experts at random.
        """
        attention = self.width * self.head * 2 * (self.heads + self.kv_heads)
        mlps = self.experts * (1 - (1 - self.chosen / self.experts) ** rows) if self.experts else 1
        layer = self.width * self.experts + mlps * 3 * self.width * self.ffn
        mixers = sum(
            attention if has_attention else 4 * self.width**2 for has_attention in self.attends
        )
        # The embedding table is read once, as the LM head.
        return self.layers * layer + mixers + VOCAB * self.width

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache per token, in bf16."""
        return sum(self.attends) * 2 * self.kv_heads * self.head * 2


SIZES = {
    "60m": ModelShape(layers=12, width=512, heads=8, kv_heads=4, ffn=2048),
    "100m": ModelShape(layers=12, width=768, heads=12, kv_heads=4, ffn=2048),
    "400m": ModelShape(layers=24, width=1024, heads=16, kv_heads=4, ffn=4096),
    # Llama-3.2-1B's shape with a smaller vocabulary
    "1b": ModelShape(layers=16, width=2048, heads=32, kv_heads=8, ffn=8192),
    "hybrid": ModelShape(layers=12, width=768, heads=12, kv_heads=4, ffn=2048, convolved=3),
    "mixture": ModelShape(
        layers=8, width=1024, heads=16, kv_heads=4, ffn=512, experts=32, chosen=4
    ),
}


def config_of(shape: ModelShape, vocab: int = VOCAB, max_len: int = MAX_LEN) -> dict:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    if shape.convolved:
        lfm2_keys = {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "norm_eps": config.pop("rms_norm_eps"),
            "conv_bias": False,
            "conv_L_cache": WIDTH,
            "block_auto_adjust_ff_dim": False,
            "layer_types": [
                "full_attention" if has_attention else "conv" for has_attention in shape.attends
            ],
        }
        return {
            name: value for name, value in config.items() if name not in ("hidden_act", "head_dim")
        } | lfm2_keys
    if not shape.experts:
        return config | {"attention_bias": False, "mlp_bias": False}
    return config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


def write(
    folder: Path, shape: ModelShape, vocab: int = VOCAB, max_len: int = MAX_LEN, seed: int = 0
) -> Path:
    """Write config.json, model.safetensors and the tokenizer, unless they exist."""
    if (folder / "model.safetensors").is_file():
        return folder
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(seed)
    D = shape.width
    F = shape.ffn

    def draw(rows: int, columns: int, scale: float) -> np.ndarray:
        return (rng.standard_normal((rows, columns), np.float32) * scale).astype(ml_dtypes.bfloat16)

    def linear(rows: int, columns: int) -> np.ndarray:
        # Scaled so that outputs are as large as inputs: tokens vary, nothing overflows.
        return draw(rows, columns, columns**-0.5)

    ones = np.ones(D, ml_dtypes.bfloat16)
    if shape.convolved:
        save(folder, shape, vocab, max_len, lfm2(shape, vocab, draw, linear))
        return folder
    tensors = {"model.embed_tokens.weight": draw(vocab, D, 0.02), "model.norm.weight": ones}
    for i in range(shape.layers):
        at = f"model.layers.{i}"
        tensors |= {
            f"{at}.input_layernorm.weight": ones,
            f"{at}.post_attention_layernorm.weight": ones,
        }
        tensors |= {
            f"{at}.self_attn.{x}_proj.weight": linear(n * shape.head, D)
            for x, n in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        }
        tensors[f"{at}.self_attn.o_proj.weight"] = linear(D, shape.heads * shape.head)
        if not shape.experts:
            tensors |= {f"{at}.mlp.{x}_proj.weight": linear(F, D) for x in ("gate", "up")}
            tensors[f"{at}.mlp.down_proj.weight"] = linear(D, F)
            continue
        tensors[f"{at}.block_sparse_moe.gate.weight"] = linear(shape.experts, D)
        for e in range(shape.experts):
            expert = f"{at}.block_sparse_moe.experts.{e}"
            tensors |= {f"{expert}.{x}.weight": linear(F, D) for x in ("w1", "w3")}
            tensors[f"{expert}.w2.weight"] = linear(D, F)
    save(folder, shape, vocab, max_len, tensors)
    return folder


def lfm2(shape: ModelShape, vocab: int, draw, linear) -> dict:
    """The tensors of an LFM2."""
    import ml_dtypes
    import numpy as np

    D = shape.width
    F = shape.ffn
    ones = np.ones(D, ml_dtypes.bfloat16)
    small = np.ones(shape.head, ml_dtypes.bfloat16)
    tensors = {
        "model.embed_tokens.weight": draw(vocab, D, 0.02),
        "model.embedding_norm.weight": ones,
    }
    for i, has_attention in enumerate(shape.attends):
        at = f"model.layers.{i}"
        tensors |= {f"{at}.operator_norm.weight": ones, f"{at}.ffn_norm.weight": ones}
        tensors |= {f"{at}.feed_forward.{x}.weight": linear(F, D) for x in ("w1", "w3")}
        tensors[f"{at}.feed_forward.w2.weight"] = linear(D, F)
        if not has_attention:
            tensors |= {
                f"{at}.conv.in_proj.weight": linear(3 * D, D),
                f"{at}.conv.out_proj.weight": linear(D, D),
                f"{at}.conv.conv.weight": linear(D, WIDTH)[:, None],
            }
            continue
        tensors |= {
            f"{at}.self_attn.{x}_proj.weight": linear(n * shape.head, D)
            for x, n in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        }
        tensors |= {f"{at}.self_attn.{x}_layernorm.weight": small for x in "qk"}
        tensors[f"{at}.self_attn.out_proj.weight"] = linear(D, shape.heads * shape.head)
    return tensors


def save(folder: Path, shape: ModelShape, vocab: int, max_len: int, tensors: dict) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape, vocab, max_len), indent=2))
    write_tokenizer(folder, vocab)
    # Written last: its presence means that the folder is complete.
    with publish(folder / "model.safetensors") as temporary_path:
        save_file(tensors, temporary_path, metadata={"format": "pt"})


def adapter_folder(model: str | Path, number: int) -> Path:
    """The folder of a model's adapter."""
    return Path(model).parent / "adapters" / str(number)


def write_adapter(folder: Path, shape: ModelShape, number: int) -> None:
    """Write a random LoRA adapter for every matrix of a Llama's layers, unless it exists."""
    if (folder / FILE).is_file():
        return
    D = shape.width
    query_width = shape.heads * shape.head
    kv_width = shape.kv_heads * shape.head
    shapes = {
        "self_attn.q_proj": (query_width, D),
        "self_attn.k_proj": (kv_width, D),
        "self_attn.v_proj": (kv_width, D),
        "self_attn.o_proj": (D, query_width),
        "mlp.gate_proj": (shape.ffn, D),
        "mlp.up_proj": (shape.ffn, D),
        "mlp.down_proj": (D, shape.ffn),
    }
    stems = {
        f"model.layers.{i}.{name}": size
        for i in range(shape.layers)
        for name, size in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_random(folder, stems, ADAPTER_RANK, number)


def quantise(folder: Path, out: Path, weights: str) -> None:
    """Write a quantised checkpoint for engines that do not quantise, unless it exists."""
    if not out.exists():
        kind = {"int4": "int4-128"}.get(weights, weights)
        command = [
            sys.executable,
            "-m",
            "quire",
            "quantize",
            str(folder),
            str(out),
            "--quantization",
            kind,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a byte-level BPE tokenizer with merges of byte pairs up to the vocabulary's size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters for b in letters][
        : max(0, vocab - len(SPECIALS) - len(letters))
    ]
    names = [*SPECIALS, *letters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LEN,
        **names,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
