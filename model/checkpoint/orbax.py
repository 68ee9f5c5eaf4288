"""A converted model folder: config.json and tokenizer as they came, the weights as an orbax checkpoint.

Each device reads its own part of each array, so that a model larger than the memory of any one host can be loaded.
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
from ..extras import imported
from .folder import merged, read_json

WEIGHTS = "weights"
COPIED = ("*.json", "*.jinja")
CHUNK = 16 << 20  # bytes that are read together: a device that wants a part of an array reads little besides


def holds_weights(folder: Path) -> bool:
    """Whether a folder was written by `save`."""
    return (folder / WEIGHTS).is_dir()


def names(tree) -> dict[str, jax.Array]:
    """The leaves of a weight tree by name: `layers.0.attention.qkv_DGH`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def make_empty(out: Path) -> None:
    """A new folder; one that holds something is not touched."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ModelError(f"{out} is there already and holds something; give a new or an empty folder")
    except OSError as error:
        raise ModelError(f"{out} cannot be made: {error.strerror}") from None


def library(what: str) -> Any:
    """orbax, a second of imports."""
    return imported("orbax.checkpoint", "convert", what)


def save(folder: Path, out: Path, weights, dtype: str, hf_overrides: Mapping[str, Any] | None = None) -> None:
    """Write weights and the rest of `folder` to `out`, which then is a model folder of its own."""
    ocp = library("to write a converted checkpoint")
    make_empty(out)
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = names(weights)
        checkpointer.save(
            out.absolute() / WEIGHTS, arrays, save_args=dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=CHUNK))
        )
    hf = merged(read_json(folder / "config.json"), hf_overrides or {})
    for part in (hf, hf.get("text_config")):
        if isinstance(part, dict):
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
    write_rest(folder, out, hf)


def write_rest(folder: Path, out: Path, hf: dict[str, Any]) -> None:
    """config.json; the tokenizer's files and the others as they are."""
    for path in sorted(path for pattern in COPIED for path in folder.glob(pattern)):
        if path.name != "config.json" and not path.name.endswith(".safetensors.index.json"):
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


def load_weights(folder: Path, specs, progress: Callable[[int], None], locations=None):
    """The weights that `specs` describe; over a mesh each process reads its own part, as each array's `Location` says.

    An array that the devices have in another order, as a fused `qkv`, is read whole.
    """
    ocp = library(f"{folder} is a converted checkpoint, which")
    path, wanted, places = folder.absolute() / WEIGHTS, names(specs), names(locations)
    whole = {name for name, place in places.items() if not local_shards.as_stored(wanted[name], place.mesh)}

    def target_of(name: str, spec: ArraySpec) -> Any:
        if name in whole:
            return np.empty(spec.shape, spec.dtype)
        where = SingleDeviceSharding(jax.devices()[0]) if name not in places else places[name].sharding(spec)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=where)

    target = {name: target_of(name, spec) for name, spec in wanted.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(path).item_metadata.tree
        except Exception as error:  # a damaged checkpoint makes orbax raise errors of many kinds
            raise ModelError(f"{path} is not a complete checkpoint: {first_line(error)}") from None
        check_shapes(path, wanted, stored)
        try:
            arrays = checkpointer.restore(path, target)
        except Exception as error:
            raise ModelError(f"{path} cannot be read: {first_line(error)}") from None
    progress(nbytes(specs))
    for name in whole:
        arrays[name] = places[name].split(wanted[name], arrays[name])
    return jax.tree.unflatten(jax.tree.structure(specs), [arrays[name] for name in wanted])


def check_shapes(path: Path, wanted, stored) -> None:
    """Refuse a checkpoint that does not hold exactly the arrays that config.json describes."""
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored:
            raise ModelError(f"{path} lacks the array {name!r}, which config.json describes")
        if name not in wanted:
            raise ModelError(f"{path} holds the array {name!r}, which config.json does not describe")
        if tuple(stored[name].shape) != wanted[name].shape:
            shape = list(stored[name].shape)
            raise ModelError(f"array {name!r} has shape {shape}; config.json wants {list(wanted[name].shape)}")


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
