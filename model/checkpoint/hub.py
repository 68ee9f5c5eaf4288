"""Resolve a model name to a folder: bundled, on disk, or on the Hugging Face Hub."""

import re
from pathlib import Path

from ..config import ModelError
from . import gguf_folder
from .folder import refuse_other_weights

BUNDLED = {
    "quill": "quill",
    "quill-draft": "quill_draft",
    "quill-eagle": "quill_eagle",  # heads that draft for quill
    "quill-medusa": "quill_medusa",
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# A GGUF file of a model on the Hub.
HUB_FILE = re.compile(rf"({HUB_ID.pattern})(?::([\w.-]+)|/([\w./-]+\.gguf))", re.ASCII)
HOSTS = ("hf.co/", "huggingface.co/")  # prefixes that other engines accept before an id
FILES = ["*.json", "*.safetensors", "*.jinja", "tiktoken.model"]  # no code, and one weight format
WITHOUT_WEIGHTS = ["*.json", "*.jinja", "tiktoken.model"]
# Second copies of the weights in the makers' formats; folders such as 1_Pooling are model modules.
SECOND_COPIES = ["[!0-9]*/*", "consolidated*"]


def resolve(
    model: str | None,
    files: list[str] = FILES,
    revision: str | None = None,
    download_dir: str | None = None,
) -> Path:
    """The folder of a model; a model on the Hub is downloaded unless it is in the cache.

    `revision` is a branch, tag or commit on the Hub; `download_dir` overrides the Hub's cache.
    """
    model = None if model is None else strip_host(model)
    folder = Path(model or "").expanduser()
    if model is None or model in BUNDLED:
        folder = Path(__file__).parents[1] / BUNDLED[model or "quill"]
    if model != "" and folder.is_dir():
        if revision is not None:
            raise ModelError(
                f"revision is {revision!r}, and {folder} is a folder here: only the Hub has "
                "revisions"
            )
        return resolve_gguf_folder(folder)
    if folder.is_file() and folder.suffix == ".gguf":
        return gguf_folder.make_folder(folder)
    if folder.is_file():
        has_config = (folder.parent / "config.json").is_file()
        remedy = (
            f"give the folder that holds it, {folder.parent}"
            if has_config
            else "give a folder with config.json"
        )
        raise ModelError(f"model {model!r} is a file and not a folder: {remedy}, or a GGUF file")
    cache = None if download_dir is None else str(Path(download_dir).expanduser())
    if model is not None and not folder.exists() and (named := HUB_FILE.fullmatch(model)):
        return gguf_folder.make_folder(fetch_gguf(named[1], named[2], named[3], revision, cache))
    if model is None or not HUB_ID.fullmatch(model) or folder.exists():
        raise ModelError(
            f"there is no model {model!r} here; give a folder with config.json, a GGUF file, an "
            f"owner/name on the Hub, or one of {', '.join(BUNDLED)}"
        )
    return fetch(model, files, revision, cache)


def strip_host(model: str) -> str:
    """Remove the Hub's host name before an id."""
    host = next((host for host in HOSTS if model.startswith(host) and not Path(model).exists()), "")
    return model.removeprefix(host)


def resolve_gguf_folder(folder: Path) -> Path:
    """The folder itself, or the one made from its GGUF file if it holds one and nothing else."""
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        return folder
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))
    firsts = [
        file
        for file in files
        if not (part_match := gguf_folder.PART.search(file.name)) or int(part_match[1]) == 1
    ]
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts)
        raise ModelError(f"{folder} holds several GGUF files, {names}: give one of them")
    return gguf_folder.make_folder(firsts[0]) if firsts else folder


def fetch_gguf(
    model: str, quant: str | None, file: str | None, revision: str | None, cache: str | None
) -> Path:
    """Download a GGUF file, by its path or by the end of its name (such as Q4_K_M)."""
    if quant is not None and quant.endswith(".gguf"):
        file = quant
        quant = None
    stem = (file or "").removesuffix(".gguf")
    unsplit_name = gguf_folder.PART.sub("", file or "")
    patterns = [f"{stem}.gguf", f"{unsplit_name}-*-of-*.gguf"]
    if quant is not None:
        patterns = [f"*{case}*.gguf" for case in (quant, quant.lower(), quant.upper())]
    folder = fetch(model, patterns, revision, cache)
    name_pattern = re.compile(
        rf"(.*[-./])?{re.escape(quant or '')}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE
    )
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gguf"))
    matches = [
        name
        for name in names
        if (name_pattern.fullmatch(name) if quant is not None else name == file)
    ]
    if len(matches) != 1:
        condition = f"ends in {quant}" if quant is not None else f"is {file}"
        raise ModelError(
            f"model {model!r} on the Hub has {len(matches) or 'no'} GGUF files whose name "
            f"{condition}"
        )
    return folder / matches[0]


def fetch(
    model: str, files: list[str], revision: str | None = None, cache: str | None = None
) -> Path:
    """Download a snapshot, or find it in the cache."""

    from huggingface_hub import constants, list_repo_files, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        snapshot = snapshot_download(
            model,
            revision=revision,
            cache_dir=cache,
            allow_patterns=files,
            ignore_patterns=SECOND_COPIES,
        )
        if (
            files == FILES
            and not constants.HF_HUB_OFFLINE
            and not any(Path(snapshot).glob("*.safetensors"))
        ):
            refuse_other_weights(
                f"model {model!r} on the Hub", list_repo_files(model, revision=revision)
            )
        return Path(snapshot)
    except ModelError:
        raise
    except GatedRepoError:
        remedy = "accept its licence on its page, then run `hf auth login`"
        raise ModelError(f"model {model!r} is gated: {remedy}") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"model {model!r} is neither a folder here nor a public model on the Hub; for a "
            "private one run `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(
            f"model {model!r} has no revision {revision!r}; it is a branch, a tag or a commit"
        ) from None
    except LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub does not answer"
        raise ModelError(
            f"model {model!r} is neither a folder here nor in the Hub's cache, and {reason}"
        ) from None
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"model {model!r} could not be fetched: {reason[0] if reason else type(error).__name__}"
        ) from None
