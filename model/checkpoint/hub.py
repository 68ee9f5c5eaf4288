"""Where a model lives: the bundled one, a folder, or the Hugging Face Hub."""

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
HUB_FILE = re.compile(rf"({HUB_ID.pattern})(?::([\w.-]+)|/([\w./-]+\.gguf))", re.ASCII)  # one GGUF file of a model's
HOSTS = ("hf.co/", "huggingface.co/")  # which other engines have before an id
FILES = ["*.json", "*.safetensors", "*.jinja", "tiktoken.model"]  # no code, and one format of weights
WITHOUT_WEIGHTS = ["*.json", "*.jinja", "tiktoken.model"]
# The same weights again, under their makers' own names; 1_Pooling and the like are parts of the model.
SECOND_COPIES = ["[!0-9]*/*", "consolidated*"]


def resolve(
    model: str | None, files: list[str] = FILES, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """The folder of a model; one from the Hub is fetched, with progress bars, unless it is there already.

    `revision` is a branch, tag or commit of the Hub's; downloads are kept in `download_dir`, or the Hub's own cache.
    """
    model = None if model is None else plain_name(model)
    folder = Path(model or "").expanduser()
    if model is None or model in BUNDLED:
        folder = Path(__file__).parents[1] / BUNDLED[model or "quill"]
    if model != "" and folder.is_dir():
        if revision is not None:
            raise ModelError(f"revision is {revision!r}, and {folder} is a folder here: only the Hub has revisions")
        return folder_of_gguf(folder)
    if folder.is_file() and folder.suffix == ".gguf":
        return gguf_folder.folder_of(folder)
    if folder.is_file():
        here = (folder.parent / "config.json").is_file()
        remedy = f"give the folder that holds it, {folder.parent}" if here else "give a folder with config.json"
        raise ModelError(f"model {model!r} is a file and not a folder: {remedy}, or a GGUF file")
    cache = None if download_dir is None else str(Path(download_dir).expanduser())
    if model is not None and not folder.exists() and (named := HUB_FILE.fullmatch(model)):
        return gguf_folder.folder_of(fetch_gguf(*named.groups(), revision, cache))
    if model is None or not HUB_ID.fullmatch(model) or folder.exists():
        raise ModelError(
            f"there is no model {model!r} here; give a folder with config.json, a GGUF file, an owner/name on the Hub, "
            f"or one of {', '.join(BUNDLED)}"
        )
    return fetch(model, files, revision, cache)


def plain_name(model: str) -> str:
    """An id without the Hub's host before it."""
    host = next((host for host in HOSTS if model.startswith(host) and not Path(model).exists()), "")
    return model.removeprefix(host)


def folder_of_gguf(folder: Path) -> Path:
    """The folder itself, or that of the one GGUF file in it where it has nothing else."""
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        return folder
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))
    firsts = [file for file in files if not (part := gguf_folder.PART.search(file.name)) or int(part[1]) == 1]
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts)
        raise ModelError(f"{folder} holds several GGUF files, {names}: give one of them")
    return gguf_folder.folder_of(firsts[0]) if firsts else folder


def fetch_gguf(model: str, quant: str | None, file: str | None, revision: str | None, cache: str | None) -> Path:
    """One GGUF file of a model, or the first part of one: by its path, or by what its name ends in, such as Q4_K_M."""
    if quant is not None and quant.endswith(".gguf"):
        quant, file = None, quant
    stem = (file or "").removesuffix(".gguf")
    whole = gguf_folder.PART.sub("", file or "")
    patterns = [f"{stem}.gguf", f"{whole}-*-of-*.gguf"]
    if quant is not None:
        patterns = [f"*{case}*.gguf" for case in (quant, quant.lower(), quant.upper())]
    folder = fetch(model, patterns, revision, cache)
    ends = re.compile(rf"(.*[-./])?{re.escape(quant or '')}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gguf"))
    found = [name for name in names if (ends.fullmatch(name) if quant is not None else name == file)]
    if len(found) != 1:
        wish = f"ends in {quant}" if quant is not None else f"is {file}"
        raise ModelError(f"model {model!r} on the Hub has {len(found) or 'no'} GGUF files whose name {wish}")
    return folder / found[0]


def fetch(model: str, files: list[str], revision: str | None = None, cache: str | None = None) -> Path:
    """Download a snapshot, or find the one in the cache."""
    from huggingface_hub import constants, list_repo_files, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=cache, allow_patterns=files, ignore_patterns=SECOND_COPIES
        )
        if files == FILES and not constants.HF_HUB_OFFLINE and not any(Path(found).glob("*.safetensors")):
            refuse_other_weights(f"model {model!r} on the Hub", list_repo_files(model, revision=revision))
        return Path(found)
    except ModelError:
        raise
    except GatedRepoError:
        remedy = "accept its licence on its page, then run `hf auth login`"
        raise ModelError(f"model {model!r} is gated: {remedy}") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"model {model!r} is neither a folder here nor a public model on the Hub; for a private one run "
            "`hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"model {model!r} has no revision {revision!r}; it is a branch, a tag or a commit") from None
    except LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub does not answer"
        raise ModelError(f"model {model!r} is neither a folder here nor in the Hub's cache, and {reason}") from None
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"model {model!r} could not be fetched: {reason[0] if reason else type(error).__name__}"
        ) from None
