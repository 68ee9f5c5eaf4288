"""What is wrong with a model."""

from pathlib import Path

POINTER = 64  # bytes of a git-lfs pointer that tell it from any other file


class ModelError(ValueError):
    """A model folder, configuration or weight that cannot be used; the message says what would be right."""


def refuse_pointer(path: Path, data: bytes) -> None:
    """Refuse what git leaves in place of a large file."""
    if data.startswith(b"version ") and b"git-lfs" in data[:POINTER]:
        raise ModelError(
            f"{path} is a git-lfs pointer and not the file itself: run `git lfs pull` in {path.parent}, or give the "
            "model's Hub id in place of the folder"
        )
