"""A checkpoint as one GGUF file, with its tokenizer and chat template, such as llama.cpp reads."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...ops.cache_folder import publish
from ..checkpoint import orbax
from ..checkpoint.folder import merged, read_json
from ..checkpoint.gguf_folder import weights_of
from ..checkpoint.loader import family_of, find_parts
from ..checkpoint.published.matrix import Matrix
from ..config import ModelConfig, ModelError
from ..families import wrapper
from ..gguf import rounding
from ..gguf.architectures import config_of
from ..gguf.blocks import WRITTEN, BlockType
from ..gguf.description import check_same, metadata_of
from ..gguf.origin import Change, Part
from ..gguf.sampling import sampling_metadata
from ..gguf.tensors import file_name, origins, turn_of
from ..gguf.vocabulary import vocabulary_of
from ..gguf.writer import write_file
from ..text.tokenizer import Tokenizer

STRIP = 1 << 20  # elements that are rounded at a time
FEW_BITS = ("Q4_0", "Q4_1", "MXFP4")  # too few for a vocabulary
TABLES = ("token_embd.weight", "output.weight")
WIDE = ("ffn_gate_inp.weight",)  # routers stay in F32
TEMPLATE = "tokenizer.chat_template"
# Types whose blocks are codes and scales that methods choose: the format that has them, and what joins them.
CHOSEN: dict[str, tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "Q4_0": ("int4-32", rounding.fours),
    "Q8_0": ("int8-weights-32", rounding.eights),
}


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint, and which part of the file's tensor it is."""

    part: Part
    source: Any


@dataclass(frozen=True)
class Plan:
    """What is to be written."""

    architecture: str
    config: dict[str, Any]  # config.json as it will be read
    metadata: dict[str, Any]
    tensors: dict[str, tuple[BlockType, tuple[int, ...]]]
    pieces: dict[str, list[Piece]]
    factors: dict[str, np.ndarray]  # tensors that are part of the configuration


def save(
    folder: Path,
    out: Path,
    config: ModelConfig,
    kind: str,
    progress: Callable[[int], None] = lambda count: None,
    hf_overrides: Mapping[str, Any] | None = None,
    made: Mapping[str, Any] | None = None,
) -> int:
    """Write `folder` to the file `out` with its matrices of a type in `WRITTEN`; returns how many they are.

    `out` appears once it is complete. Norms, biases and routers are F32, embedding and head Q8_0 beside four bits.
    What was `made` before, by the names of tensors, is taken from there: matrices of a type in CHOSEN in their codes.
    """
    found = plan(folder, out, config, kind, hf_overrides)
    try:
        with publish(out) as part:
            write_file(part, found.metadata, found.tensors, values(found, made or {}, progress))
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}") from None
    return sum(len(shape) > 1 for _, shape in found.tensors.values())


def plan(
    folder: Path, out: Path, config: ModelConfig, kind: str, hf_overrides: Mapping[str, Any] | None = None
) -> Plan:
    """What `save` would do; all that speaks against it is an error here, before anything is written."""
    if kind not in WRITTEN:
        raise ModelError(f"layout is 'gguf', which has {', '.join(WRITTEN)}; quantization is {kind!r}")
    if out.suffix != ".gguf":
        raise ModelError(f"layout is 'gguf', which is one file: {out} must end in .gguf")
    if os.path.lexists(out):
        raise ModelError(f"{out} is there already; give a new file")
    if orbax.holds_weights(folder):
        raise ModelError(f"{folder} is a converted checkpoint; give the folder of safetensors that it was made from")
    if weights_of(folder) is not None:
        raise ModelError(f"{folder} is made of a GGUF file; give the folder of safetensors that it was made from")
    if config.stored is not None:
        raise ModelError(f"{folder} is quantised already: its config.json has a quantization_config")
    hf = merged(read_json(folder / "config.json"), hf_overrides or {})
    text = wrapper.text_config(hf) if "text_config" in hf else hf
    metadata, factors = metadata_of(config, text, kind, folder.resolve().name)
    architecture = metadata["general.architecture"]
    tensors, parts = find_parts(folder, config)
    names = list(dict.fromkeys(part.name for part in jax.tree.leaves(parts)))
    shapes = {name: value.shape for name, value in factors.items()}
    for name in names:
        own, shape = file_name(architecture, name), tensors[name].shape
        if own is None:
            raise ModelError(f"tensor {name!r} has no place in GGUF files of {architecture} models")
        if own.endswith("_exps.weight"):
            shape = (shapes.get(own, (0,))[0] + 1, *shape)
        shapes[own] = shape
    again = config_of(metadata, shapes, factors.__getitem__)
    check_same(config, family_of(again).config(again))
    pieces: dict[str, list[Piece]] = {}
    for name, origin in origins(architecture, shapes, again).items():
        (part,) = origin.parts
        pieces.setdefault(part.name, []).append(Piece(part, tensors[name]))
    kinds = {own: (kind_of(own, shape, kind), shape) for own, shape in shapes.items()}
    generation = folder / "generation_config.json"
    metadata |= sampling_metadata(read_json(generation) if generation.is_file() else {})
    return Plan(architecture, again, metadata | tokenizer(folder, config), kinds, pieces, factors)


def kind_of(name: str, shape: tuple[int, ...], kind: str) -> BlockType:
    """The type of a tensor."""
    if len(shape) < 2 or name.endswith(WIDE):
        return WRITTEN["F32"]
    found = WRITTEN["Q8_0" if kind in FEW_BITS and name in TABLES else kind]
    if shape[-1] % found.elements:
        raise ModelError(
            f"the tensor {name} has {shape[-1]} inputs, which do not divide by the {found.elements} of a block of "
            f"{found.name}; F16, BF16 and F32 have no blocks"
        )
    return found


def tokenizer(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The keys of the tokenizer and the chat template."""
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(f"{file} does not exist; a GGUF file has the tokenizer in it")
    own = Tokenizer(folder)
    special = {name.removesuffix("_token"): token for name, token in own.special_tokens.items()}
    found = vocabulary_of(file.read_text(), config.vocab_size, special, sorted(own.eos_token_ids))
    return found if own.chat_template is None else found | {TEMPLATE: own.chat_template}


def values(plan: Plan, made: Mapping[str, Any], progress: Callable[[int], None]) -> Iterator[np.ndarray]:
    """The tensors' blocks, one tensor in memory at a time."""
    for name, (kind, shape) in plan.tensors.items():
        if name in plan.factors:
            yield encoded(plan.factors[name], kind, name)
            continue
        change = turn_of(plan.architecture, name, plan.config)
        whole = None
        for piece in plan.pieces[name]:
            own = blocks_of(made.get(piece.source.name, piece.source), change, kind, name)
            if piece.part.rows is not None:
                turned = np.empty_like(own)
                turned[piece.part.rows] = own
                own = turned
            if piece.part.expert is None:
                whole = own
            else:
                whole = np.empty((shape[0], *own.shape), np.uint8) if whole is None else whole
                whole[piece.part.expert] = own
            progress(piece.source.nbytes)
        assert whole is not None
        yield whole


def blocks_of(source: Any, change: Change, kind: BlockType, name: str) -> np.ndarray:
    """The blocks of a tensor's rows [rows, bytes]."""
    if isinstance(source, Matrix) and kind.name in CHOSEN:
        assert change.back is None and source.format is not None
        codes, scale = source.fields_for(source.format).values()
        blocks = CHOSEN[kind.name][1](scale.reshape(-1, 1), codes.reshape(-1, kind.elements))
    else:
        own = source.read()
        own = own if change.back is None else change.back(own)
        blocks = encoded(own, kind, name)
    return blocks.reshape(source.shape[0], -1)


def encoded(numbers: np.ndarray, kind: BlockType, name: str) -> np.ndarray:
    """Their blocks, a strip at a time: rounding takes several times the memory of what it makes."""
    rest = numbers.reshape(-1, kind.elements)
    out = np.empty((len(rest), kind.nbytes), np.uint8)
    step = STRIP // kind.elements
    for at in range(0, len(rest), step):
        strip = rest[at : at + step]
        if not np.isfinite(strip.astype(np.float32)).all():
            raise ModelError(f"the tensor {name} holds what is no finite number")
        out[at : at + step] = kind.encode(strip)
        if kind.plain and not np.isfinite(out[at : at + step].view(kind.dtype).astype(np.float32)).all():
            raise ModelError(f"the tensor {name} holds a number that is too large for {kind.name}; BF16 holds it")
    return out
