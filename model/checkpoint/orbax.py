"""Converted model folders: config.json, tokenizer, and the weights as an orbax checkpoint.

Each device reads its own shard of each array, so that models larger than a host's memory load.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ...sharding import local_shards
from ...sharding.spec import ArraySpec, nbytes
from ..config import ModelError
from ..extras import import_extra
from .folder import merge_overrides, read_json

WEIGHTS = "weights"
COPIED = ("*.json", "*.jinja")
CHUNK = 16 << 20  # bytes of a storage chunk: small, so that a shard reads little of its neighbours


def holds_weights(folder: Path) -> bool:
    """Whether `save` wrote this folder."""
    return (folder / WEIGHTS).is_dir()


def leaves_by_name(tree) -> dict[str, Any]:
    """The leaves of a weight tree by name, such as `layers.0.attention.qkv_DGH`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def make_empty_folder(out: Path) -> None:
    """Make a new folder; an existing one must be empty."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ModelError(
                f"{out} is there already and holds something; give a new or an empty folder"
            )
    except OSError as error:
        raise ModelError(f"{out} cannot be made: {error.strerror}") from None


def import_orbax(purpose: str) -> Any:
    """Import orbax, which takes a second. `purpose` begins the error message if it is missing."""
    return import_extra("orbax.checkpoint", "convert", purpose)


def save(
    folder: Path, out: Path, weights, dtype: str, hf_overrides: Mapping[str, Any] | None = None
) -> None:
    """Write weights and the other files of `folder` to `out`, a model folder of its own."""
    ocp = import_orbax("to write a converted checkpoint")
    make_empty_folder(out)
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = leaves_by_name(weights)
        checkpointer.save(
            out.absolute() / WEIGHTS,
            arrays,
            save_args=dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=CHUNK)),
        )
    hf = merge_overrides(read_json(folder / "config.json"), hf_overrides or {})
    for config_part in (hf, hf.get("text_config")):
        if isinstance(config_part, dict):
            config_part.pop("torch_dtype", None)
            config_part["dtype"] = dtype
    write_other_files(folder, out, hf)


def write_other_files(folder: Path, out: Path, hf: dict[str, Any]) -> None:
    """Write config.json, and copy the tokenizer's and other files."""
    for path in sorted(path for pattern in COPIED for path in folder.glob(pattern)):
        if path.name != "config.json" and not path.name.endswith(".safetensors.index.json"):
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


def load_weights(folder: Path, specs, progress: Callable[[int], None], locations=None):
    """Load the weights that `specs` describe; over a mesh each process reads its own shards.

    An array whose elements are permuted on the mesh, such as a fused `qkv`, is read whole.
    """
    ocp = import_orbax(f"{folder} is a converted checkpoint, which")
    path = folder.absolute() / WEIGHTS
    specs_by_name = leaves_by_name(specs)
    location_by_name = leaves_by_name(locations)
    whole_arrays = {
        name
        for name, place in location_by_name.items()
        if not local_shards.as_stored(specs_by_name[name], place.mesh)
    }

    def target_of(name: str, spec: ArraySpec) -> Any:
        if name in whole_arrays:
            return np.empty(spec.shape, spec.dtype)
        array_sharding = (
            SingleDeviceSharding(jax.devices()[0])
            if name not in location_by_name
            else location_by_name[name].sharding(spec)
        )
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=array_sharding)

    target = {name: target_of(name, spec) for name, spec in specs_by_name.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(path).item_metadata.tree
        except Exception as error:  # orbax raises many types of errors for a damaged checkpoint
            raise ModelError(f"{path} is not a complete checkpoint: {first_line(error)}") from None
        check_shapes(path, specs_by_name, stored)
        try:
            arrays = checkpointer.restore(path, target)
        except Exception as error:
            raise ModelError(f"{path} cannot be read: {first_line(error)}") from None
    progress(nbytes(specs))
    for name in whole_arrays:
        arrays[name] = location_by_name[name].shard(specs_by_name[name], arrays[name])
    return jax.tree.unflatten(jax.tree.structure(specs), [arrays[name] for name in specs_by_name])


def check_shapes(path: Path, specs_by_name, stored) -> None:
    """Check that the checkpoint has exactly the arrays that config.json describes."""
    for name in sorted(specs_by_name.keys() | stored.keys()):
        if name not in stored:
            raise ModelError(f"{path} lacks the array {name!r}, which config.json describes")
        if name not in specs_by_name:
            raise ModelError(
                f"{path} holds the array {name!r}, which config.json does not describe"
            )
        if tuple(stored[name].shape) != specs_by_name[name].shape:
            shape = list(stored[name].shape)
            raise ModelError(
                f"array {name!r} has shape {shape}; config.json wants "
                f"{list(specs_by_name[name].shape)}"
            )


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
