"""Write a checkpoint as one GGUF file with its tokenizer and chat template, for llama.cpp."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...ops.cache_folder import publish
from ..checkpoint import orbax
from ..checkpoint.folder import merge_overrides, read_json
from ..checkpoint.gguf_folder import find_gguf
from ..checkpoint.loader import family_for, find_sources
from ..checkpoint.published.matrix import Matrix
from ..config import ModelConfig, ModelError
from ..families import wrapper
from ..gguf import rounding
from ..gguf.architectures import hf_config
from ..gguf.blocks import WRITTEN, BlockType
from ..gguf.description import check_round_trip, model_metadata
from ..gguf.origin import Change, TensorSlice
from ..gguf.sampling import sampling_metadata
from ..gguf.tensors import gguf_name, origins, tensor_change
from ..gguf.vocabulary import tokenizer_metadata
from ..gguf.writer import write_file
from ..text.tokenizer import Tokenizer

STRIP = 1 << 20  # elements that are quantised at a time
FEW_BITS = ("Q4_0", "Q4_1", "MXFP4")  # too few for embedding and head, which become Q8_0
TABLES = ("token_embd.weight", "output.weight")
ROUTERS = ("ffn_gate_inp.weight",)  # routers, which stay in F32
TEMPLATE = "tokenizer.chat_template"
# Types that a calibration method supports: the format with the same codes, and the block packer.
CALIBRATED_TYPES: dict[str, tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "Q4_0": ("int4-32", rounding.q4_0_blocks),
    "Q8_0": ("int8-weights-32", rounding.q8_0_blocks),
}


@dataclass(frozen=True)
class TensorPiece:
    """A checkpoint tensor and its part of a file's tensor."""

    origin_part: TensorSlice
    source: Any


@dataclass(frozen=True)
class GgufPlan:
    """What to write."""

    architecture: str
    config: dict[str, Any]  # config.json as reconstructed when the file is read
    metadata: dict[str, Any]
    tensors: dict[str, tuple[BlockType, tuple[int, ...]]]
    pieces: dict[str, list[TensorPiece]]
    factors: dict[str, np.ndarray]  # tensors that hold part of the configuration


def save(
    folder: Path,
    out: Path,
    config: ModelConfig,
    kind: str,
    progress: Callable[[int], None] = lambda count: None,
    hf_overrides: Mapping[str, Any] | None = None,
    precomputed: Mapping[str, Any] | None = None,
) -> int:
    """Write `folder` to the GGUF file `out`; return the number of matrices.

    `out` appears once it is complete. Norms, biases and routers are F32; embedding and head are
    Q8_0 if the type has four bits.

    Args:
        kind: a type in `WRITTEN`.
        precomputed: quantised matrices by tensor name; `kind` must then be in CALIBRATED_TYPES.
    """
    writing_plan = plan_writing(folder, out, config, kind, hf_overrides)
    try:
        with publish(out) as temporary:
            write_file(
                temporary,
                writing_plan.metadata,
                writing_plan.tensors,
                tensor_values(writing_plan, precomputed or {}, progress),
            )
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}") from None
    return sum(len(shape) > 1 for _, shape in writing_plan.tensors.values())


def plan_writing(
    folder: Path,
    out: Path,
    config: ModelConfig,
    kind: str,
    hf_overrides: Mapping[str, Any] | None = None,
) -> GgufPlan:
    """Plan what `save` writes. All errors in the arguments are raised here, before any write."""
    if kind not in WRITTEN:
        raise ModelError(
            f"layout is 'gguf', which has {', '.join(WRITTEN)}; quantization is {kind!r}"
        )
    if out.suffix != ".gguf":
        raise ModelError(f"layout is 'gguf', which is one file: {out} must end in .gguf")
    if os.path.lexists(out):
        raise ModelError(f"{out} is there already; give a new file")
    if orbax.holds_weights(folder):
        raise ModelError(
            f"{folder} is a converted checkpoint; give the folder of safetensors that it was "
            "made from"
        )
    if find_gguf(folder) is not None:
        raise ModelError(
            f"{folder} is made of a GGUF file; give the folder of safetensors that it was made from"
        )
    if config.stored is not None:
        raise ModelError(
            f"{folder} is quantised already: its config.json has a quantization_config"
        )
    hf = merge_overrides(read_json(folder / "config.json"), hf_overrides or {})
    text = wrapper.text_config(hf) if "text_config" in hf else hf
    metadata, factors = model_metadata(config, text, kind, folder.resolve().name)
    architecture = metadata["general.architecture"]
    tensors, sources = find_sources(folder, config)
    names = list(dict.fromkeys(source.name for source in jax.tree.leaves(sources)))
    shapes = {name: value.shape for name, value in factors.items()}
    for name in names:
        tensor_name = gguf_name(architecture, name)
        shape = tensors[name].shape
        if tensor_name is None:
            raise ModelError(f"tensor {name!r} has no place in GGUF files of {architecture} models")
        if tensor_name.endswith("_exps.weight"):
            shape = (shapes.get(tensor_name, (0,))[0] + 1, *shape)
        shapes[tensor_name] = shape
    reread_config = hf_config(metadata, shapes, factors.__getitem__)
    check_round_trip(config, family_for(reread_config).config(reread_config))
    pieces: dict[str, list[TensorPiece]] = {}
    for name, origin in origins(architecture, shapes, reread_config).items():
        (source,) = origin.parts
        pieces.setdefault(source.name, []).append(TensorPiece(source, tensors[name]))
    kinds = {
        tensor_name: (block_type_for(tensor_name, shape, kind), shape)
        for tensor_name, shape in shapes.items()
    }
    generation = folder / "generation_config.json"
    metadata |= sampling_metadata(read_json(generation) if generation.is_file() else {})
    return GgufPlan(
        architecture,
        reread_config,
        metadata | read_tokenizer_metadata(folder, config),
        kinds,
        pieces,
        factors,
    )


def block_type_for(name: str, shape: tuple[int, ...], kind: str) -> BlockType:
    """The type to write a tensor in."""
    if len(shape) < 2 or name.endswith(ROUTERS):
        return WRITTEN["F32"]
    block_type = WRITTEN["Q8_0" if kind in FEW_BITS and name in TABLES else kind]
    if shape[-1] % block_type.elements:
        raise ModelError(
            f"the tensor {name} has {shape[-1]} inputs, which do not divide by the "
            f"{block_type.elements} of a block of {block_type.name}; F16, BF16 and F32 have no "
            "blocks"
        )
    return block_type


def read_tokenizer_metadata(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The metadata of the tokenizer and the chat template."""
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(f"{file} does not exist; a GGUF file has the tokenizer in it")
    text_tokenizer = Tokenizer(folder)
    special = {
        name.removesuffix("_token"): token for name, token in text_tokenizer.special_tokens.items()
    }
    metadata = tokenizer_metadata(
        file.read_text(), config.vocab_size, special, sorted(text_tokenizer.eos_token_ids)
    )
    return (
        metadata
        if text_tokenizer.chat_template is None
        else metadata | {TEMPLATE: text_tokenizer.chat_template}
    )


def tensor_values(
    plan: GgufPlan, precomputed: Mapping[str, Any], progress: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """Yield the tensors' blocks, one tensor in memory at a time."""
    for name, (kind, shape) in plan.tensors.items():
        if name in plan.factors:
            yield encode_values(plan.factors[name], kind, name)
            continue
        change = tensor_change(plan.architecture, name, plan.config)
        blocks = None
        for piece in plan.pieces[name]:
            piece_blocks = encode_source(
                precomputed.get(piece.source.name, piece.source), change, kind, name
            )
            if piece.origin_part.rows is not None:
                permuted = np.empty_like(piece_blocks)
                permuted[piece.origin_part.rows] = piece_blocks
                piece_blocks = permuted
            if piece.origin_part.expert is None:
                blocks = piece_blocks
            else:
                blocks = (
                    np.empty((shape[0], *piece_blocks.shape), np.uint8)
                    if blocks is None
                    else blocks
                )
                blocks[piece.origin_part.expert] = piece_blocks
            progress(piece.source.nbytes)
        assert blocks is not None
        yield blocks


def encode_source(source: Any, change: Change, kind: BlockType, name: str) -> np.ndarray:
    """The blocks of a tensor's rows [rows, bytes]."""
    if isinstance(source, Matrix) and kind.name in CALIBRATED_TYPES:
        assert change.inverse is None and source.format is not None
        codes, scale = source.fields_for(source.format).values()
        blocks = CALIBRATED_TYPES[kind.name][1](
            scale.reshape(-1, 1), codes.reshape(-1, kind.elements)
        )
    else:
        value = source.read()
        value = value if change.inverse is None else change.inverse(value)
        blocks = encode_values(value, kind, name)
    return blocks.reshape(source.shape[0], -1)


def encode_values(numbers: np.ndarray, kind: BlockType, name: str) -> np.ndarray:
    """Encode values as blocks, a strip at a time to bound the memory of intermediates."""
    grouped = numbers.reshape(-1, kind.elements)
    out = np.empty((len(grouped), kind.nbytes), np.uint8)
    step = STRIP // kind.elements
    for at in range(0, len(grouped), step):
        strip = grouped[at : at + step]
        if not np.isfinite(strip.astype(np.float32)).all():
            raise ModelError(f"the tensor {name} holds a value that is not finite")
        out[at : at + step] = kind.encode(strip)
        if (
            kind.is_plain
            and not np.isfinite(out[at : at + step].view(kind.dtype).astype(np.float32)).all()
        ):
            raise ModelError(
                f"the tensor {name} holds a number that is too large for {kind.name}; BF16 holds it"
            )
    return out
