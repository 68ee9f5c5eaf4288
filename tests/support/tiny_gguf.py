"""A tiny Llama as a GGUF file, written by the format's own package as llama.cpp's converter
does.
"""

from pathlib import Path

import gguf
import numpy as np

from quire.tests.support import tiny

LLAMA = tiny.LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
# Where a block has its float16 scales, and how large these are for weights of about one.
SCALES = {
    "Q4_K": ((0, 2), 1 / 300),
    "Q5_K": ((0, 2), 1 / 600),
    "Q6_K": ((208,), 1 / 1200),
    "Q3_K": ((108,), 1 / 40),
    "Q2_K": ((80, 82), 1 / 15),
    "IQ4_NL": ((0,), 1 / 70),
    "IQ4_XS": ((0,), 1 / 1200),
    "IQ3_S": ((0,), 1 / 40),
    "IQ2_XXS": ((0,), 1 / 15),
    "Q1_0": ((0,), 1),
}
WORDS = "a story about fox who met small bird and went home in rain one two".split()


def blocks(rng, value: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """A matrix in blocks, rounded by the package or, where it cannot, of random codes; and what
    they mean.
    """
    number = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        data = gguf.quants.quantize(value, number)
    else:
        elements, nbytes = gguf.GGML_QUANT_SIZES[number]
        data = rng.integers(0, 256, (value.size // elements, nbytes), np.uint8)
        places, size = SCALES[kind]
        for at in places:
            scale = (rng.uniform(0.5, 1, len(data)) * size / np.sqrt(value.shape[-1])).astype(
                np.float16
            )
            data[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
        data = data.reshape(len(value), -1)
    return data, decoded(data, number)


def decoded(data: np.ndarray, number: gguf.GGMLQuantizationType) -> np.ndarray:
    """What blocks uint8 [..., bytes] mean, as the package has it; Q1_0, which it has not, as
    llama.cpp's code does.
    """
    if number.name != "Q1_0":
        return gguf.quants.dequantize(data, number)
    each = data.reshape(-1, 18)
    scale = each[:, :2].copy().view(np.float16).astype(np.float32)
    bits = each[:, 2:, None] >> np.arange(8, dtype=np.uint8) & 1
    values = np.where(bits.reshape(-1, 128) == 1, scale, -scale) + np.float32(0)  # no -0
    return values.reshape(*data.shape[:-1], -1)


def side_by_side(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp rotates them: the first of one half of a head, the first of the other, and
    so on.
    """
    rows, columns = value.shape
    return (
        value.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def halves(value: np.ndarray, heads: int) -> np.ndarray:
    rows, columns = value.shape
    return (
        value.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def tokens(size: int) -> tuple[list[str], list[float], list[int]]:
    """A SentencePiece vocabulary with letters, bytes left out, and a few words."""
    pieces = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz.,!?"]
    pieces += [f"\u2581{word}" for word in WORDS]
    pieces += [f"<extra{i}>" for i in range(size - len(pieces))]
    kinds = [2, 3, 3] + [1] * (len(pieces) - 3)
    return pieces, [-float(i) for i in range(len(pieces))], kinds


def write(
    file: Path, kind: str, config: dict = LLAMA, seed: int = 0, other: str | None = None, **writer
):
    """The file, and every tensor in float32 by the checkpoint's names; `other`: the type of the
    values' matrices.
    """
    rng = np.random.default_rng(seed)
    N = config["num_attention_heads"]
    K = config["num_key_value_heads"]
    out = gguf.GGUFWriter(str(file), "llama", **writer)
    H = config["hidden_size"] // N
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(N)
    out.add_head_count_kv(K)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_rope_dimension_count(H)
    out.add_vocab_size(config["vocab_size"])
    pieces, scores, kinds = tokens(config["vocab_size"])
    out.add_tokenizer_model("llama")
    out.add_token_list(pieces)
    out.add_token_scores(scores)
    out.add_token_types(kinds)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    means = {}
    for name, value in tiny.even(tiny.shapes(config), seed).items():
        stem = name.removesuffix(".weight")
        target = f"{names.get_name(stem)}.weight"
        heads = {"q_proj": N, "k_proj": K}.get(stem.rpartition(".")[2])
        if value.ndim == 1:
            out.add_tensor(target, value)
            means[name] = value
            continue
        own = other if other is not None and stem.endswith("v_proj") else kind
        data, meant = blocks(rng, side_by_side(value, heads) if heads else value, own)
        out.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType[own])
        means[name] = np.ascontiguousarray(halves(meant, heads) if heads else meant, np.float32)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return means
