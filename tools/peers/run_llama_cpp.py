"""Runner for llama.cpp through its C API, batched as in its server: each call has one token per
running sequence, and chunks of prompts.
"""

# pyright: reportMissingImports=false

import ctypes
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import llama_cpp as lib
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from .loop import LoadSettings, TimedPrompt, TimedTokens, drive

FILES = {"bf16": "bf16.gguf", "int8": "q8_0.gguf", "int4": "q4_0.gguf", "q4_k_m": "q4_k_m.gguf"}
QUANTISED = {
    "int8": lib.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": lib.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}  # fmt: skip
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
LFM2 = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "conv.conv": "shortconv.conv",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}
OUTSIDE = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "embedding_norm": "token_embd_norm.weight",
}
BATCH = 2048  # n_batch: maximum tokens per call; llama.cpp's default
ROWS = 512  # n_ubatch: maximum tokens computed at once; llama.cpp's default


def prepare(settings: LoadSettings) -> None:
    if settings.adapters:
        raise NotImplementedError("its adapters are not compared")
    if settings.weights == "gguf":
        return
    folder = Path(settings.prepared)
    folder.mkdir(parents=True, exist_ok=True)
    bf16_path = folder / FILES["bf16"]
    target_path = folder / FILES[settings.weights]
    if not bf16_path.is_file():
        with publish(bf16_path) as temporary_path:
            write_gguf(Path(settings.model), temporary_path)
    if not target_path.is_file():
        params = lib.llama_model_quantize_default_params()
        params.ftype = QUANTISED[settings.weights]
        params.nthread = settings.threads
        with publish(target_path) as temporary_path:
            if lib.llama_model_quantize(
                str(bf16_path).encode(), str(temporary_path).encode(), ctypes.pointer(params)
            ):
                raise RuntimeError(f"llama_model_quantize failed on {bf16_path}")


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """A temporary file that becomes `path` when it is complete.

    Quire's own `publish` cannot be imported here.
    """
    temporary_path = path.with_name(f"{path.name}.{os.getpid()}")
    yield temporary_path
    temporary_path.replace(path)


def write_gguf(model: Path, path: Path) -> None:
    """Convert the checkpoint to GGUF."""
    config = json.loads((model / "config.json").read_text())
    hybrid = config["model_type"] == "lfm2"
    writer = gguf.GGUFWriter(path, "lfm2" if hybrid else "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    kinds = config.get("layer_types")
    kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv(
        [kv_heads * (kind != "conv") for kind in kinds] if hybrid else kv_heads
    )
    if hybrid:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    size = config["hidden_size"] // config["num_attention_heads"] if hybrid else config["head_dim"]
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["norm_eps" if hybrid else "rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_vocabulary(writer, model)
    if experts := config.get("num_local_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    heads = (
        {}
        if hybrid
        else {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    )
    for name, bits in stack_experts(read_tensors(model / "model.safetensors"), experts).items():
        module_name = name.removesuffix(".weight").removeprefix("model.")
        if module_name.startswith("layers."):
            _, layer, inner = module_name.split(".", 2)
            gguf_name = (LFM2 if hybrid else NAMES)[inner]
            # llama.cpp's RoPE is interleaved, the checkpoint's split in halves
            if gguf_name in heads:
                rows, columns = bits.shape
                bits = (
                    bits.reshape(heads[gguf_name], 2, -1, columns)
                    .swapaxes(1, 2)
                    .reshape(rows, columns)
                )
            target = f"blk.{layer}.{gguf_name}.weight"
        else:
            target = OUTSIDE[module_name]
        if short_conv := target.endswith("shortconv.conv.weight"):
            bits = bits[:, 0]
        # Norms and routers are stored in float32.
        if bits.ndim == 1 or short_conv or target.endswith("gate_inp.weight"):
            writer.add_tensor(target, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            data = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(
                target, data, raw_shape=data.shape, raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, model: Path) -> None:
    """Add the vocabulary, without which llama.cpp rejects a model (prompts are token ids)."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(words, key=words.__getitem__))
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL
            for i in range(len(words))
        ]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read the bf16 tensors of a safetensors file as uint16, because NumPy has no bf16."""
    data = np.memmap(path, np.uint8, "r")
    (size,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    bits_by_name = {}
    for name, entry in header.items():
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        bits_by_name[name] = data[start:end].view(np.uint16).reshape(entry["shape"])
    return bits_by_name


def stack_experts(bits_by_name: dict[str, np.ndarray], experts: int) -> dict[str, np.ndarray]:
    """Stack the experts of each layer into one tensor."""
    first = ".block_sparse_moe.experts.0."
    stacked = {}
    for name, bits in bits_by_name.items():
        if first in name:
            expert_bits = (
                bits_by_name[name.replace(first, f".block_sparse_moe.experts.{e}.")]
                for e in range(experts)
            )
            stacked[name.replace(first, ".")] = np.stack(list(expert_bits))
        elif ".experts." not in name:
            stacked[name] = bits
    return stacked


def load(settings: LoadSettings) -> Callable[[list[TimedPrompt]], list[TimedTokens]]:
    lib.llama_backend_init()
    path = settings.file or Path(settings.prepared) / FILES[settings.weights]
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    vocabulary = lib.llama_model_get_vocab(model)
    assert vocabulary is not None
    vocab = lib.llama_vocab_n_tokens(vocabulary)

    def serve(requests: list[TimedPrompt]) -> list[TimedTokens]:
        seqs = min(settings.max_seqs, len(requests))
        context = lib.llama_init_from_model(model, context_params(settings, seqs, requests))
        assert context is not None
        batch = lib.llama_batch_init(BATCH, 0, 1)
        try:
            return Slots(context, batch, vocab, seqs, requests, settings.drafts).run()
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)

    return serve


def score(settings: LoadSettings, tokens: list[int]) -> np.ndarray:
    """Logits [T, V] of the next token after each token."""
    llm = lib.Llama(
        settings.file,
        n_ctx=len(tokens),
        logits_all=True,
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
        verbose=False,
    )
    llm.eval(tokens)
    return llm.scores[: len(tokens)]


def context_params(settings: LoadSettings, seqs: int, requests: list[TimedPrompt]):
    """Parameters of a context with room for `seqs` sequences as long as the longest request."""
    longest = max(len(request.prompt) + request.count for request in requests)
    params = lib.llama_context_default_params()
    params.n_ctx = seqs * -(-(longest + settings.drafts) // 256) * 256
    params.n_batch = BATCH
    params.n_ubatch = ROWS
    params.n_seq_max = seqs
    params.n_threads = params.n_threads_batch = settings.threads
    # With one cache for all sequences, short ones batch three times better. Long ones lose more
    # than that, because each also attends to all other sequences' positions, masked.
    params.kv_unified = longest <= 1024
    return params


class Slots:
    """Continuous batching: a request gets a free sequence; its prompt is prefilled in chunks in the
    same calls that decode other sequences.
    """

    def __init__(
        self, context, batch, vocab: int, seqs: int, requests: list[TimedPrompt], drafts: int
    ):
        self.context = context
        self.batch = batch
        self.vocab = vocab
        self.requests = requests
        self.drafter = LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None
        self.free = list(range(seqs))
        self.queue: list[int] = []
        self.slots: dict[int, int] = {}  # request -> sequence
        # Tokens not yet computed: the prompt, then the newest token and its drafts.
        self.rest: dict[int, list[int]] = {}
        self.drafts: dict[int, list[int]] = {}  # draft tokens, the last of `rest`
        self.texts: dict[int, list[int]] = {}  # prompt and output tokens
        self.place: dict[int, int] = {}  # next position
        self.left: dict[int, int] = {}  # tokens still to generate

    def run(self) -> list[TimedTokens]:
        return drive(self.requests, lambda index, request: self.queue.append(index), self.step)

    def step(self):
        while self.free and self.queue:
            index = self.queue.pop(0)
            self.slots[index] = self.free.pop()
            self.place[index] = 0
            self.rest[index] = list(self.requests[index].prompt)
            self.left[index] = self.requests[index].count
            self.texts[index] = list(self.requests[index].prompt)
            self.drafts[index] = []
        output_rows = {}
        used = 0
        b = self.batch
        # decoding sequences come first
        for index in sorted(self.slots, key=lambda index: len(self.rest[index])):
            fed, self.rest[index] = (
                self.rest[index][: BATCH - used],
                self.rest[index][BATCH - used :],
            )
            for token in fed:
                b.token[used] = token
                b.pos[used] = self.place[index]
                b.n_seq_id[used] = 1
                b.seq_id[used][0] = self.slots[index]
                b.logits[used] = 0
                used = used + 1
                self.place[index] = self.place[index] + 1
            if fed and not self.rest[index]:
                output_rows[index] = range(used - 1 - len(self.drafts[index]), used)
                for row in output_rows[index]:
                    b.logits[row] = 1
        b.n_tokens = used
        if lib.llama_decode(self.context, b):
            raise RuntimeError("llama_decode failed")
        memory = lib.llama_get_memory(self.context)
        assert memory is not None
        for index, rows in output_rows.items():
            tokens = self.accepted(rows, self.drafts[index])[: self.left[index]]
            self.texts[index] += tokens
            self.left[index] -= len(tokens)
            self.place[index] -= len(rows) - len(tokens)  # rejected drafts
            lib.llama_memory_seq_rm(memory, self.slots[index], self.place[index], -1)
            self.drafts[index] = self.draft(index)
            self.rest[index] = [tokens[-1], *self.drafts[index]]
            if not self.left[index]:
                lib.llama_memory_seq_rm(memory, self.slots[index], -1, -1)
                self.free.append(self.slots.pop(index))
            yield index, tokens

    def accepted(self, rows: range, drafts: list[int]) -> list[int]:
        """The greedy tokens of these rows, up to the first that differs from its draft."""
        tokens = []
        for row, draft in zip(rows, [*drafts, None], strict=True):
            logits = lib.llama_get_logits_ith(self.context, row)
            tokens.append(int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
            if tokens[-1] != draft:
                break
        return tokens

    def draft(self, index: int) -> list[int]:
        if self.drafter is None:
            return []
        return [int(token) for token in self.drafter(np.array(self.texts[index], np.intc))][
            : self.left[index]
        ]
