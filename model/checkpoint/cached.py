"""The models in the Hub's cache on this machine, and the bundled ones."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ModelError
from ..families import FAMILIES
from ..gguf.architectures import ARCHITECTURES
from ..gguf.file import read_part
from .folder import quant_suffix
from .gguf_folder import PART
from .hub import BUNDLED


@dataclass(frozen=True)
class CachedModel:
    """A model on this machine, by the name that commands accept."""

    name: str
    size: int  # bytes
    format: str
    modified: float | None  # seconds since 1970; None for a bundled model
    files: Sequence[Path] = ()  # links in the cache; empty for a bundled model


def bundled_models() -> list[CachedModel]:
    folder = Path(__file__).parents[1]
    return [
        CachedModel(
            name,
            sum(file.stat().st_size for file in (folder / folder_name).iterdir()),
            "bundled",
            None,
        )
        for name, folder_name in BUNDLED.items()
    ]


def cached_models(cache: Path | None = None) -> tuple[list[CachedModel], int]:
    """The readable models of the cache by name, and the number of repositories without any."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache).repos
    except CacheNotFound:
        return [], 0
    all_models = []
    num_unreadable = 0
    for repo in repos:
        if repo.repo_type != "model":
            continue
        models = [
            model
            for revision in repo.revisions
            for model in models_in_snapshot(repo.repo_id, revision)
        ]
        newest = {
            model.name: model for model in sorted(models, key=lambda model: model.modified or 0.0)
        }
        all_models += newest.values()
        num_unreadable += not newest
    return sorted(all_models, key=lambda model: model.name), num_unreadable


def models_in_snapshot(name: str, revision: Any) -> Iterator[CachedModel]:
    """The models in one snapshot: a folder of safetensors, and each GGUF file."""
    files = {
        str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files
    }
    if any(path.endswith(".safetensors") for path in files) and (
        form := folder_format(revision.snapshot_path)
    ):
        size = sum(file.size_on_disk for file in files.values())
        paths = [file.file_path for file in files.values()]
        yield CachedModel(name, size, form, revision.last_modified, paths)
    firsts = [
        path
        for path in files
        if path.endswith(".gguf") and not Path(path).name.startswith("mmproj")
    ]
    quants = [quant_suffix(path) for path in firsts]
    for path in firsts:
        part_match = PART.search(path)
        if (part_match and int(part_match[1]) != 1) or not is_readable_gguf(files[path].file_path):
            continue
        stem = PART.sub("", path)
        part_files = [
            files[candidate]
            for candidate in firsts
            if candidate == path or (part_match and PART.sub("", candidate) == stem)
        ]
        is_unique = quants.count(quant_suffix(path)) == len(part_files)
        yield CachedModel(
            f"{name}:{quant_suffix(path)}" if is_unique else f"{name}/{path}",
            sum(file.size_on_disk for file in part_files),
            f"GGUF {quant_suffix(path)}",
            revision.last_modified,
            [file.file_path for file in part_files],
        )


def folder_format(folder: Path) -> str | None:
    """The weight format of a model folder; None if its model type is not supported."""
    try:
        config = json.loads((folder / "config.json").read_text())
        is_supported = config["model_type"] in FAMILIES
        if not is_supported:
            return None
        method = (config.get("quantization_config") or {}).get("quant_method")
        return str(method or config.get("dtype") or config.get("torch_dtype") or "safetensors")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def is_readable_gguf(file: Path) -> bool:
    try:
        return read_part(file).metadata.get("general.architecture") in ARCHITECTURES
    except (ModelError, OSError):
        return False


def remove(model: CachedModel) -> int:
    """Delete a model from the cache and return the bytes freed.

    Its repository is deleted too if it holds no other model.
    """
    repo = next(parent for parent in model.files[0].parents if parent.name.startswith("models--"))
    links = [path for path in (repo / "snapshots").rglob("*") if path.is_file()]
    paths_to_remove = {path_in_snapshot(repo, path) for path in model.files}
    links_to_remove = [path for path in links if path_in_snapshot(repo, path) in paths_to_remove]
    blobs_in_use = {path.resolve() for path in links if path not in links_to_remove}
    if any(
        path.suffix in (".safetensors", ".gguf") for path in links if path not in links_to_remove
    ):
        blobs_to_remove = {path.resolve() for path in links_to_remove} - blobs_in_use
        freed = sum(blob.stat().st_size for blob in blobs_to_remove)
        for path in (*links_to_remove, *blobs_to_remove):
            path.unlink(missing_ok=True)
        return freed
    freed = sum(path.stat().st_size for path in (repo / "blobs").iterdir())
    shutil.rmtree(repo)  # not by commit hashes: a copy of a repository has the same ones
    return freed


def path_in_snapshot(repo: Path, path: Path) -> Path:
    """A file's path relative to its snapshot."""
    return Path(*path.relative_to(repo / "snapshots").parts[1:])
