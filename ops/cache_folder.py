"""Folders in which one start leaves files for the next; what was used least recently makes room for more."""

import os
import time
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
LEFT, ENOUGH = 0.1, 16 << 30  # what stays free: a share of the disk, or so many bytes where that is less
STALE = 24 * 3600  # seconds after which a file that was not completed is nobody's


def home(name: str) -> Path:
    """One of those folders."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / name


def code_state(*layers: str) -> str:
    """What changes with the code of these parts of the package."""
    found = []
    for layer in layers:
        for path in sorted((PACKAGE / layer).rglob("*.py")):
            state = path.stat()
            found.append(f"{path.relative_to(PACKAGE)} {state.st_size} {state.st_mtime_ns}")
    return "\n".join(found)


def make_room(folder: Path, suffix: str, size: int, limit: int) -> bool:
    """Delete what was used least recently until `size` more bytes fit below the limit; whether they do."""
    held = []
    for path in folder.iterdir():
        try:
            state = path.stat()
        except FileNotFoundError:  # another process was faster
            continue
        if path.suffix == ".part" and time.time() - state.st_mtime > STALE:
            path.unlink(missing_ok=True)
        elif path.suffix == suffix:
            held.append((state.st_mtime, state.st_size, path))
    disk = os.statvfs(folder)
    total = sum(each for _, each, _ in held)
    free = disk.f_bavail * disk.f_frsize - min(LEFT * disk.f_blocks * disk.f_frsize, ENOUGH)
    if size > min(limit, free + total):
        return False
    for _, each, path in sorted(held):
        if total + size <= limit and size <= free:
            break
        path.unlink(missing_ok=True)
        total, free = total - each, free + each
    return True
