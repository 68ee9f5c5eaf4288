"""Where a model lives: the bundled one, a folder, or the Hugging Face Hub."""

import re
from pathlib import Path

from ..config import ModelError

BUNDLED = {"quill": "quill", "quill-draft": "quill_draft"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
FILES = ["*.json", "*.safetensors", "*.jinja"]  # no code, and one format of weights
SECOND_COPIES = ["*/*", "consolidated*"]  # the same weights again, under their makers' own names


def resolve(model: str | None, files: list[str] = FILES) -> Path:
    """The folder of a model; one from the Hub is fetched, with progress bars, unless it is there already."""
    if model is None or model in BUNDLED:
        return Path(__file__).parents[1] / BUNDLED[model or "quill"]
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(model) or folder.exists():
        raise ModelError(
            f"model {model!r} is not a folder; give a folder with config.json, an owner/name on the Hugging Face Hub, "
            f"or one of {', '.join(BUNDLED)}"
        )
    return fetch(model, files)


def fetch(model: str, files: list[str]) -> Path:
    """Download a snapshot, or find the one in the cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=files, ignore_patterns=SECOND_COPIES))
    except GatedRepoError:
        remedy = "accept its licence on its page, then run `hf auth login`"
        raise ModelError(f"model {model!r} is gated: {remedy}") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"model {model!r} is neither a folder here nor a public model on the Hub; for a private one run "
            "`hf auth login`"
        ) from None
    except LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub does not answer"
        raise ModelError(f"model {model!r} is neither a folder here nor in the Hub's cache, and {reason}") from None
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"model {model!r} could not be fetched: {reason[0] if reason else type(error).__name__}"
        ) from None
