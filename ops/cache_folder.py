"""Folders in which one start leaves files for the next; what was used least recently makes room for
more.
"""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
LEFT = 0.1  # what stays free: a share of the disk, or so many bytes where that is less
ENOUGH = 16 << 30
PART = ".part"  # suffix of the temporary folder in which a file is written before it gets its name
STALE = 24 * 3600  # seconds after which a file that was not completed belongs to no running process


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


@contextmanager
def publish(path: Path, durable: bool = True) -> Iterator[Path]:
    """Write a file or a folder so that it appears at `path` complete or not at all.

    Yields a path inside a new temporary folder beside `path`, which no other process or thread can
    have: process ids do not tell the containers apart that share a volume. The caller creates a
    file or a folder there, which is renamed to `path` when the block ends, and removed when the
    block or the renaming fails.

    Args:
        path: a file there is replaced, and so is an empty folder; a folder with content is an
            OSError.
        durable: write the content to the disk before the renaming, so that a power failure cannot
            leave a name without content. A format whose reader checks every byte can do without.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=".", suffix=PART))
    try:
        yield scratch / path.name
        if durable:
            sync_tree(scratch / path.name)
        os.rename(scratch / path.name, path)
        if durable:
            sync(path.parent)
    finally:
        # what is left is stale, and the next start removes it
        shutil.rmtree(scratch, ignore_errors=True)


def sync_tree(path: Path) -> None:
    """Write a file, or a folder and all that it holds, to the disk; the targets of symbolic links
    are left alone.
    """
    if path.is_symlink():
        return
    if path.is_dir():
        for inner in path.iterdir():
            sync_tree(inner)
    sync(path)


def sync(path: Path) -> None:
    """Write a file, or the table of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some file systems sync files only
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def remove_stale_parts(folder: Path, age: float = STALE) -> None:
    """Remove temporary files and folders of processes that ended while they wrote, when they are
    `age` seconds old.
    """
    for part in folder.glob(f"*{PART}"):
        try:
            if time.time() - part.lstat().st_mtime <= age:
                continue
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink()
        except FileNotFoundError:
            continue  # another process was faster


def make_room(folder: Path, suffix: str, size: int, limit: int) -> bool:
    """Delete what was used least recently until `size` more bytes fit below the limit; whether they
    do.
    """
    remove_stale_parts(folder)
    held = []
    for path in folder.iterdir():
        if path.suffix != suffix:
            continue
        try:
            state = path.stat()
        except FileNotFoundError:  # another process was faster
            continue
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
        total = total - each
        free = free + each
    return True
