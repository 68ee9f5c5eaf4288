"""Errors about models."""

from pathlib import Path

POINTER = 64  # bytes that identify a git-lfs pointer


class ModelError(ValueError):
    """An unusable model folder, configuration or weight; the message says what would be right."""


def refuse_pointer(path: Path, data: bytes) -> None:
    """Raise if the data is a git-lfs pointer in place of a file."""
    if data.startswith(b"version ") and b"git-lfs" in data[:POINTER]:
        raise ModelError(
            f"{path} is a git-lfs pointer and not the file itself: run `git lfs pull` in "
            f"{path.parent}, or give the model's Hub id in place of the folder"
        )
