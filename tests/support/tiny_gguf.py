"""A tiny Llama as a GGUF file, written by the `gguf` package as by llama.cpp's converter."""

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
# Offsets of the float16 scales in a block, and their size for weights of about one.
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
    """(blocks, dequantised matrix): quantised by the package or, if it cannot, random codes."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        data = gguf.quants.quantize(value, number)
    else:
        elements, nbytes = gguf.GGML_QUANT_SIZES[number]
        data = rng.integers(0, 256, (value.size // elements, nbytes), np.uint8)
        scale_offsets, size = SCALES[kind]
        for at in scale_offsets:
            scale = (rng.uniform(0.5, 1, len(data)) * size / np.sqrt(value.shape[-1])).astype(
                np.float16
            )
            data[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
        data = data.reshape(len(value), -1)
    return data, decoded(data, number)


def decoded(data: np.ndarray, number: gguf.GGMLQuantizationType) -> np.ndarray:
    """Dequantise uint8 blocks [..., bytes] by the package; Q1_0, which it lacks, as llama.cpp does."""
    if number.name != "Q1_0":
        return gguf.quants.dequantize(data, number)
    blocks = data.reshape(-1, 18)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    bits = blocks[:, 2:, None] >> np.arange(8, dtype=np.uint8) & 1
    values = np.where(bits.reshape(-1, 128) == 1, scale, -scale) + np.float32(0)  # no -0
    return values.reshape(*data.shape[:-1], -1)


def side_by_side(value: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the rows of both halves of each head, the order in which llama.cpp rotates."""
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
    """A SentencePiece vocabulary of letters and a few words, without bytes."""
    pieces = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz.,!?"]
    pieces += [f"\u2581{word}" for word in WORDS]
    pieces += [f"<extra{i}>" for i in range(size - len(pieces))]
    kinds = [2, 3, 3] + [1] * (len(pieces) - 3)
    return pieces, [-float(i) for i in range(len(pieces))], kinds


def write(
    file: Path,
    kind: str,
    config: dict = LLAMA,
    seed: int = 0,
    v_proj_kind: str | None = None,
    **writer,
):
    """Write the file; returns the dequantised tensors by the checkpoint's names.

    `v_proj_kind` is the type of the `v_proj` matrices.
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
    dequantized_tensors = {}
    for name, value in tiny.even(tiny.shapes(config), seed).items():
        stem = name.removesuffix(".weight")
        target = f"{names.get_name(stem)}.weight"
        heads = {"q_proj": N, "k_proj": K}.get(stem.rpartition(".")[2])
        if value.ndim == 1:
            out.add_tensor(target, value)
            dequantized_tensors[name] = value
            continue
        tensor_kind = v_proj_kind if v_proj_kind is not None and stem.endswith("v_proj") else kind
        data, dequantized = blocks(rng, side_by_side(value, heads) if heads else value, tensor_kind)
        out.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType[tensor_kind])
        dequantized_tensors[name] = np.ascontiguousarray(
            halves(dequantized, heads) if heads else dequantized, np.float32
        )
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return dequantized_tensors
