"""A checkpoint with its matrices rounded, written tensor by tensor in one of the layouts that other engines read."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.cache_folder import publish
from ...ops.quant.compressed import Layout
from ...sharding.spec import ArraySpec
from ..config import ModelConfig, ModelError
from ..stored_format import StoredFormat, StoredGroup
from ..weights import abstract, dense_specs
from .folder import merged, read_json
from .loader import find_parts
from .orbax import holds_weights, write_rest
from .published import described_as, mixed_as, round_matrix, split, writer_for
from .safetensors import INDEX, SINGLE, Tensor, find_tensors, write_tensors

EXPERTS = r"re:.*\.experts\..*"
LAYOUT = "compressed-tensors"  # one of `published.LAYOUTS`, unless another is asked for
Chosen = Mapping[str, str | None]  # the format of each matrix, by the name of its tensor; None: it is left as it is


@dataclass(frozen=True)
class Plan:
    """What is to be written of a folder."""

    hf: dict[str, Any]  # its config.json
    tensors: list[Tensor]
    matrices: set[str]  # the names of those to round
    stored: StoredFormat
    fused: dict[str, tuple[Tensor, ...]]  # by the name of a matrix, those that make one weight with it
    narrowed: dict[str, Any] = field(default_factory=dict)  # the dtype of embeddings and heads that were of a wider one
    sizes: dict[str, float] = field(default_factory=dict)  # the largest value of such, once it is known

    def largest(self, tensor: Tensor, dtype: str) -> float:
        """The largest value of all matrices that make one weight with one."""
        together = self.fused[tensor.name]
        if together[0].name not in self.sizes:
            found = (np.abs(each.read().astype(jnp.dtype(dtype)).astype(np.float32)).max() for each in together)
            self.sizes[together[0].name] = float(max(found))
        return self.sizes[together[0].name]

    def group(self, tensor: Tensor) -> StoredGroup:
        """How a matrix that is to be rounded is kept."""
        return self.stored.group_of(tensor.name.removesuffix(".weight")) or self.stored.groups[0]

    def endings(self, tensor: Tensor) -> Layout:
        """The tensors of a matrix that is to be rounded."""
        return writer_for(self.stored).layout(tensor.name, self.group(tensor), tensor.shape)


def plan(
    folder: Path,
    out: Path,
    config: ModelConfig,
    hf_overrides: Mapping[str, Any] | None = None,
    layout: str = LAYOUT,
    chosen: Chosen | None = None,
) -> Plan:
    """What `save` would do; all that speaks against it is an error here, before anything is written."""
    if holds_weights(folder):
        raise ModelError(f"{folder} is a converted checkpoint; give the folder of safetensors that it was made from")
    source = merged(read_json(folder / "config.json"), hf_overrides or {})
    if source.get("quantization_config") is not None:
        raise ModelError(f"{folder} is quantised already: its config.json has a quantization_config")
    if os.path.lexists(out):
        raise ModelError(f"{out} is there already; give a new folder")
    tensors, fused, ignore, vocabulary = survey(folder, config)
    if chosen is None:
        described = described_as(layout, config.quant, ignore)
    else:
        modules = {tensor: tensor.removesuffix(".weight") for tensor in fused}
        ignore = sorted({*ignore, *(modules[tensor] for tensor in fused if chosen[tensor] is None)})
        fused = {tensor: together for tensor, together in fused.items() if chosen[tensor] is not None}
        each: dict[str, list[str]] = {}
        for tensor in fused:
            each.setdefault(str(chosen[tensor]), []).append(modules[tensor])
        described = mixed_as(each, ignore)
    hf = source | {"quantization_config": described}
    stored = split(hf)[1]
    assert stored is not None
    dtype = jnp.dtype(config.dtype)
    narrowed = {tensor.name: dtype for tensor in vocabulary if dtype.itemsize < np.dtype(tensor.dtype).itemsize}
    if narrowed:
        for part in (hf, hf.get("text_config")):
            if isinstance(part, dict):
                part |= dict.fromkeys({"dtype", "torch_dtype"} & part.keys() or {"torch_dtype"}, config.dtype)
    found = Plan(hf, tensors, {*fused}, stored, fused, narrowed)
    for tensor in tensors:
        if tensor.name in fused:
            found.endings(tensor)  # refuses shapes that the layout has no form for
    return found


def save(
    folder: Path,
    out: Path,
    config: ModelConfig,
    progress: Callable[[int], None] = lambda count: None,
    hf_overrides: Mapping[str, Any] | None = None,
    made: Mapping[str, Tensor] | None = None,
    layout: str = LAYOUT,
    chosen: Chosen | None = None,
) -> int:
    """Write `folder` to `out` with its matrices in the format `config.quant`; returns how many were rounded.

    `out` appears once it is complete. Embeddings and the head are stored in `config.dtype` where that is narrower than
    theirs. Norms and routers stay as they are, and so do experts that share one tensor: the layouts have matrices only.
    What was `made` before is taken from there. With formats `chosen` each matrix is in its own.
    """
    found = plan(folder, out, config, hf_overrides, layout, chosen)
    try:
        with publish(out) as part:
            part.mkdir()
            write_weights(part, found, config.dtype, progress, made or {})
            write_rest(folder, part, found.hf)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}") from None
    return len(found.matrices)


def survey(
    folder: Path, config: ModelConfig
) -> tuple[list[Tensor], dict[str, tuple[Tensor, ...]], list[str], list[Tensor]]:
    """All tensors, `Plan.fused` of those to round, the linear modules that are left as they are, and the vocabulary.

    The vocabulary is embeddings and the head.
    """
    tensors, parts = find_parts(folder, config)
    matrices: dict[str, tuple[Tensor, ...]] = {}

    def collect(_, spec, parts) -> None:
        if not isinstance(spec, ArraySpec):
            found = tuple(tensor for part in parts if len((tensor := tensors[part.name]).shape) == 2)
            matrices.update((tensor.name, found) for tensor in found)

    jax.tree.map(collect, dense_specs(config).layers, abstract(config).layers, parts.layers)
    tables = {part.name for leaf in (parts.embed_VD, parts.per_layer_embed_VLA) for part in leaf or ()}
    vocabulary = [tensors[name] for name in sorted(tables | {part.name for part in parts.head_VD or ()})]
    left = {
        tensor.name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.name not in matrices and name not in tables and len(tensor.shape) > 1 and ".experts." not in name
    }
    experts = [name for name, tensor in tensors.items() if ".experts." in name and tensor.name not in matrices]
    # vLLM asks for the head by name even where it is the embedding.
    ignore = sorted(left | {"lm_head"}) + [EXPERTS] * bool(experts)
    return sorted(tensors.values(), key=lambda tensor: (tensor.file, tensor.start)), matrices, ignore, vocabulary


def keeps_experts(out: Path) -> bool:
    """Whether a folder that `save` wrote has experts that were left as they are."""
    return any(".experts." in name and len(tensor.shape) > 2 for name, tensor in find_tensors(out).items())


def write_weights(
    out: Path, plan: Plan, dtype: str, progress: Callable[[int], None], made: Mapping[str, Tensor]
) -> None:
    """One file for each file of the source, and an index if there are several."""
    files: dict[Path, list[Tensor]] = {}
    for tensor in plan.tensors:
        files.setdefault(tensor.file, []).append(tensor)
    index: dict[str, str] = {}
    for file, inside in files.items():
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for tensor in inside:
            if tensor.name in plan.matrices:
                stem = tensor.name.removesuffix(".weight")
                shapes |= {
                    stem + ending: (dtypes[0], each[0]) for ending, (dtypes, each) in plan.endings(tensor).items()
                }
            else:
                shapes[tensor.name] = plan.narrowed.get(tensor.name, tensor.dtype), tensor.shape
        name = SINGLE if len(files) == 1 else file.name
        write_tensors(out / name, shapes, values(inside, plan, dtype, progress, made))
        index |= dict.fromkeys(shapes, name)
    if len(files) > 1:
        total = sum(file.stat().st_size for file in out.iterdir())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (out / INDEX).write_text(text + "\n")


def values(
    tensors: list[Tensor], plan: Plan, dtype: str, progress: Callable[[int], None], made: Mapping[str, Tensor]
) -> Iterator[np.ndarray]:
    """The tensors of a file in the order of its layout, one in memory at a time."""
    for tensor in tensors:
        endings = plan.endings(tensor) if tensor.name in plan.matrices else ()
        stem = tensor.name.removesuffix(".weight")
        if endings and all(stem + ending in made for ending in endings):
            yield from (made[stem + ending].read() for ending in endings)
        elif endings:
            # First to the dtype that the model would be loaded in: then both ways of rounding give the same codes.
            value = tensor.read().astype(jnp.dtype(dtype))
            rounded = round_matrix(value, plan.stored, plan.group(tensor), partial(plan.largest, tensor, dtype))
            yield from (rounded[ending] for ending in endings)
        else:
            value = made.get(tensor.name, tensor).read()
            yield value.astype(plan.narrowed.get(tensor.name, value.dtype), copy=False)
        progress(tensor.nbytes)
