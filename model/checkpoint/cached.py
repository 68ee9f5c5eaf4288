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
from .folder import quant_of
from .gguf_folder import PART
from .hub import BUNDLED


@dataclass(frozen=True)
class CachedModel:
    """A model by the name under which commands find it."""

    name: str
    size: int  # bytes
    format: str
    modified: float | None  # seconds since 1970; None: it came with Quire
    files: Sequence[Path] = ()  # links in the cache; none of a bundled model


def bundled() -> list[CachedModel]:
    folder = Path(__file__).parents[1]
    return [
        CachedModel(name, sum(file.stat().st_size for file in (folder / place).iterdir()), "bundled", None)
        for name, place in BUNDLED.items()
    ]


def cached(cache: Path | None = None) -> tuple[list[CachedModel], int]:
    """The models of the cache that can be read, by their names, and how many there are that cannot."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache).repos
    except CacheNotFound:
        return [], 0
    found, others = [], 0
    for repo in repos:
        if repo.repo_type != "model":
            continue
        models = [model for revision in repo.revisions for model in models_of(repo.repo_id, revision)]
        newest = {model.name: model for model in sorted(models, key=lambda model: model.modified or 0.0)}
        found += newest.values()
        others += not newest
    return sorted(found, key=lambda model: model.name), others


def models_of(name: str, revision: Any) -> Iterator[CachedModel]:
    """Those of one snapshot: a folder of safetensors, or each GGUF file."""
    files = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
    if any(path.endswith(".safetensors") for path in files) and (form := folder_format(revision.snapshot_path)):
        size = sum(file.size_on_disk for file in files.values())
        paths = [file.file_path for file in files.values()]
        yield CachedModel(name, size, form, revision.last_modified, paths)
    firsts = [path for path in files if path.endswith(".gguf") and not Path(path).name.startswith("mmproj")]
    quants = [quant_of(path) for path in firsts]
    for path in firsts:
        part = PART.search(path)
        if (part and int(part[1]) != 1) or not readable_gguf(files[path].file_path):
            continue
        stem = PART.sub("", path)
        parts = [files[other] for other in firsts if other == path or (part and PART.sub("", other) == stem)]
        alone = quants.count(quant_of(path)) == len(parts)  # else its whole path is its name
        yield CachedModel(
            f"{name}:{quant_of(path)}" if alone else f"{name}/{path}",
            sum(file.size_on_disk for file in parts),
            f"GGUF {quant_of(path)}",
            revision.last_modified,
            [file.file_path for file in parts],
        )


def folder_format(folder: Path) -> str | None:
    """What the weights of a folder are kept in; None: it is not read here."""
    try:
        config = json.loads((folder / "config.json").read_text())
        known = config["model_type"] in FAMILIES
        if not known:
            return None
        method = (config.get("quantization_config") or {}).get("quant_method")
        return str(method or config.get("dtype") or config.get("torch_dtype") or "safetensors")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def readable_gguf(file: Path) -> bool:
    try:
        return read_part(file).metadata.get("general.architecture") in ARCHITECTURES
    except (ModelError, OSError):
        return False


def remove(model: CachedModel) -> int:
    """Delete a model from the cache, with its repository where that has no other; how many bytes are free now."""
    repo = next(parent for parent in model.files[0].parents if parent.name.startswith("models--"))
    links = [path for path in (repo / "snapshots").rglob("*") if path.is_file()]
    wanted = {within(repo, path) for path in model.files}
    own = [path for path in links if within(repo, path) in wanted]
    kept = {path.resolve() for path in links if path not in own}
    if any(path.suffix in (".safetensors", ".gguf") for path in links if path not in own):
        gone = {path.resolve() for path in own} - kept
        freed = sum(blob.stat().st_size for blob in gone)
        for path in (*own, *gone):
            path.unlink(missing_ok=True)
        return freed
    freed = sum(path.stat().st_size for path in (repo / "blobs").iterdir())
    shutil.rmtree(repo)  # by its folder and not by its commits, which a copy of a repository shares
    return freed


def within(repo: Path, path: Path) -> Path:
    """The place of a file in its snapshot."""
    return Path(*path.relative_to(repo / "snapshots").parts[1:])
