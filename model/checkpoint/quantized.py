"""Write a quantised checkpoint, tensor by tensor, in a layout that other engines read."""

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
from .folder import merge_overrides, read_json
from .loader import find_sources
from .orbax import holds_weights, write_other_files
from .published import (
    make_mixed_config,
    make_quantization_config,
    round_matrix,
    split_quantization,
    writer_for_format,
)
from .safetensors import INDEX, SINGLE, Tensor, find_tensors, write_tensors

EXPERTS = r"re:.*\.experts\..*"
LAYOUT = "compressed-tensors"  # the default of `published.LAYOUTS`
# The format of each matrix by tensor name; None: it stays unquantised.
FormatByTensor = Mapping[str, str | None]


@dataclass(frozen=True)
class WritingPlan:
    """What to write for a folder."""

    hf: dict[str, Any]  # the new config.json
    tensors: list[Tensor]
    matrices: set[str]  # names of the tensors to quantise
    stored: StoredFormat
    fused: dict[str, tuple[Tensor, ...]]  # by tensor name: the tensors fused into the same weight
    narrowed_dtypes: dict[str, Any] = field(default_factory=dict)  # of embeddings and heads
    largest_values: dict[str, float] = field(default_factory=dict)  # cache of `largest_value`

    def largest_value(self, tensor: Tensor, dtype: str) -> float:
        """The largest magnitude in the weight that a matrix is fused into."""
        fused_tensors = self.fused[tensor.name]
        if fused_tensors[0].name not in self.largest_values:
            maxima = (
                np.abs(member.read().astype(jnp.dtype(dtype)).astype(np.float32)).max()
                for member in fused_tensors
            )
            self.largest_values[fused_tensors[0].name] = float(max(maxima))
        return self.largest_values[fused_tensors[0].name]

    def group(self, tensor: Tensor) -> StoredGroup:
        """The format group of a matrix to quantise."""
        return self.stored.group_of(tensor.name.removesuffix(".weight")) or self.stored.groups[0]

    def layout_for(self, tensor: Tensor) -> Layout:
        """The tensors that a quantised matrix is written as."""
        return writer_for_format(self.stored).layout(tensor.name, self.group(tensor), tensor.shape)


def plan_writing(
    folder: Path,
    out: Path,
    config: ModelConfig,
    hf_overrides: Mapping[str, Any] | None = None,
    layout: str = LAYOUT,
    chosen: FormatByTensor | None = None,
) -> WritingPlan:
    """Plan what `save` writes. All errors in the arguments are raised here, before any write."""
    if holds_weights(folder):
        raise ModelError(
            f"{folder} is a converted checkpoint; give the folder of safetensors that it was "
            "made from"
        )
    source = merge_overrides(read_json(folder / "config.json"), hf_overrides or {})
    if source.get("quantization_config") is not None:
        raise ModelError(
            f"{folder} is quantised already: its config.json has a quantization_config"
        )
    if os.path.lexists(out):
        raise ModelError(f"{out} is there already; give a new folder")
    tensors, fused, ignore, vocabulary = survey_tensors(folder, config)
    if chosen is None:
        assert config.quant is not None
        described = make_quantization_config(layout, config.quant, ignore)
    else:
        modules = {tensor: tensor.removesuffix(".weight") for tensor in fused}
        ignore = sorted({*ignore, *(modules[tensor] for tensor in fused if chosen[tensor] is None)})
        fused = {
            tensor: fused_tensors
            for tensor, fused_tensors in fused.items()
            if chosen[tensor] is not None
        }
        modules_by_format: dict[str, list[str]] = {}
        for tensor in fused:
            modules_by_format.setdefault(str(chosen[tensor]), []).append(modules[tensor])
        described = make_mixed_config(modules_by_format, ignore)
    hf = source | {"quantization_config": described}
    stored = split_quantization(hf)[1]
    assert stored is not None
    dtype = jnp.dtype(config.dtype)
    narrowed = {
        tensor.name: dtype
        for tensor in vocabulary
        if dtype.itemsize < np.dtype(tensor.dtype).itemsize
    }
    if narrowed:
        for config_part in (hf, hf.get("text_config")):
            if isinstance(config_part, dict):
                config_part |= dict.fromkeys(
                    {"dtype", "torch_dtype"} & config_part.keys() or {"torch_dtype"}, config.dtype
                )
    result = WritingPlan(hf, tensors, {*fused}, stored, fused, narrowed)
    for tensor in tensors:
        if tensor.name in fused:
            result.layout_for(tensor)  # rejects shapes that the layout cannot hold
    return result


def save(
    folder: Path,
    out: Path,
    config: ModelConfig,
    progress: Callable[[int], None] = lambda count: None,
    hf_overrides: Mapping[str, Any] | None = None,
    precomputed: Mapping[str, Tensor] | None = None,
    layout: str = LAYOUT,
    chosen: FormatByTensor | None = None,
) -> int:
    """Quantise `folder` to `config.quant` and write it to `out`; return the number of matrices.

    `out` appears once it is complete. Embeddings and the head are stored in `config.dtype` if it is
    narrower than theirs. Norms, routers and experts that share one tensor stay unquantised: the
    layouts hold matrices only.

    Args:
        precomputed: tensors that are already quantised, by name.
        chosen: the format of each matrix, instead of `config.quant`.
    """
    writing_plan = plan_writing(folder, out, config, hf_overrides, layout, chosen)
    try:
        with publish(out) as temporary:
            temporary.mkdir()
            write_weights(temporary, writing_plan, config.dtype, progress, precomputed or {})
            write_other_files(folder, temporary, writing_plan.hf)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}") from None
    return len(writing_plan.matrices)


def survey_tensors(
    folder: Path, config: ModelConfig
) -> tuple[list[Tensor], dict[str, tuple[Tensor, ...]], list[str], list[Tensor]]:
    """(all tensors, `WritingPlan.fused`, the linear modules left unquantised, the vocabulary).

    The vocabulary is the embeddings and the head.
    """
    tensors, sources = find_sources(folder, config)
    matrices: dict[str, tuple[Tensor, ...]] = {}

    def collect(_, spec, sources) -> None:
        if not isinstance(spec, ArraySpec):
            fused = tuple(
                tensor for source in sources if len((tensor := tensors[source.name]).shape) == 2
            )
            matrices.update((tensor.name, fused) for tensor in fused)

    jax.tree.map(collect, dense_specs(config).layers, abstract(config).layers, sources.layers)
    tables = {
        source.name
        for leaf in (sources.embed_VD, sources.per_layer_embed_VLA)
        for source in leaf or ()
    }
    vocabulary = [
        tensors[name] for name in sorted(tables | {source.name for source in sources.head_VD or ()})
    ]
    unquantised = {
        tensor.name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.name not in matrices
        and name not in tables
        and len(tensor.shape) > 1
        and ".experts." not in name
    }
    experts = [
        name
        for name, tensor in tensors.items()
        if ".experts." in name and tensor.name not in matrices
    ]
    # vLLM expects the head in the list even if it is tied to the embedding.
    ignore = sorted(unquantised | {"lm_head"}) + [EXPERTS] * bool(experts)
    return (
        sorted(tensors.values(), key=lambda tensor: (tensor.file, tensor.start)),
        matrices,
        ignore,
        vocabulary,
    )


def has_unquantised_experts(out: Path) -> bool:
    """Whether a folder that `save` wrote has unquantised stacks of experts."""
    return any(
        ".experts." in name and len(tensor.shape) > 2 for name, tensor in find_tensors(out).items()
    )


def write_weights(
    out: Path,
    plan: WritingPlan,
    dtype: str,
    progress: Callable[[int], None],
    precomputed: Mapping[str, Tensor],
) -> None:
    """Write one file for each file of the source, and an index if there are several."""
    files: dict[Path, list[Tensor]] = {}
    for tensor in plan.tensors:
        files.setdefault(tensor.file, []).append(tensor)
    index: dict[str, str] = {}
    for file, file_tensors in files.items():
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for tensor in file_tensors:
            if tensor.name in plan.matrices:
                stem = tensor.name.removesuffix(".weight")
                shapes |= {
                    stem + ending: (dtypes[0], shapes_of_ending[0])
                    for ending, (dtypes, shapes_of_ending) in plan.layout_for(tensor).items()
                }
            else:
                shapes[tensor.name] = (
                    plan.narrowed_dtypes.get(tensor.name, tensor.dtype),
                    tensor.shape,
                )
        name = SINGLE if len(files) == 1 else file.name
        write_tensors(
            out / name, shapes, tensor_values(file_tensors, plan, dtype, progress, precomputed)
        )
        index |= dict.fromkeys(shapes, name)
    if len(files) > 1:
        total = sum(file.stat().st_size for file in out.iterdir())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (out / INDEX).write_text(text + "\n")


def tensor_values(
    tensors: list[Tensor],
    plan: WritingPlan,
    dtype: str,
    progress: Callable[[int], None],
    precomputed: Mapping[str, Tensor],
) -> Iterator[np.ndarray]:
    """Yield the tensors of a file in the order of its layout, one in memory at a time."""
    for tensor in tensors:
        endings = plan.layout_for(tensor) if tensor.name in plan.matrices else ()
        stem = tensor.name.removesuffix(".weight")
        if endings and all(stem + ending in precomputed for ending in endings):
            yield from (precomputed[stem + ending].read() for ending in endings)
        elif endings:
            # Cast to the dtype that the model is loaded in: quantising at load gives equal values.
            value = tensor.read().astype(jnp.dtype(dtype))
            rounded = round_matrix(
                value, plan.stored, plan.group(tensor), partial(plan.largest_value, tensor, dtype)
            )
            yield from (rounded[ending] for ending in endings)
        else:
            value = precomputed.get(tensor.name, tensor).read()
            yield value.astype(plan.narrowed_dtypes.get(tensor.name, value.dtype), copy=False)
        progress(tensor.nbytes)
