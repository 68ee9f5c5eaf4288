"""Cache folders that persist between process starts, with eviction of the least recently used
files.
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
# The disk space that stays free is the smaller of a fraction of the disk and a number of bytes.
MIN_FREE_FRACTION = 0.1
MIN_FREE_BYTES = 16 << 30
PART = ".part"  # suffix of the temporary folders in which files are written
STALE = 24 * 3600  # seconds after which an incomplete file belongs to no running process


def home(name: str) -> Path:
    """The path of a cache folder under XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / name


def code_state(*layers: str) -> str:
    """A fingerprint of the package's source files in these subfolders: names, sizes and times."""
    file_states = []
    for layer in layers:
        for path in sorted((PACKAGE / layer).rglob("*.py")):
            status = path.stat()
            file_states.append(f"{path.relative_to(PACKAGE)} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(file_states)


@contextmanager
def publish(path: Path, durable: bool = True) -> Iterator[Path]:
    """Write a file or a folder so that it appears at `path` complete or not at all.

    Yields a path inside a new temporary folder beside `path`, which no other process or thread
    uses. (Process ids would not be unique: containers may share a volume.) The caller creates a
    file or a folder there, which is renamed to `path` when the block ends, and removed when the
    block or the renaming fails.

    Args:
        path: an existing file or empty folder is replaced; a folder with content raises OSError.
        durable: sync the content to the disk before the renaming, so that a power failure cannot
            leave a name without content. Formats whose reader verifies every byte do not need it.
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
        # if this fails, the next start removes the stale folder
        shutil.rmtree(scratch, ignore_errors=True)


def sync_tree(path: Path) -> None:
    """Sync a file, or a folder with its content, to the disk; symbolic links are not followed."""
    if path.is_symlink():
        return
    if path.is_dir():
        for inner in path.iterdir():
            sync_tree(inner)
    sync(path)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk."""
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
    """Remove temporary files and folders more than `age` seconds old: their writers have ended."""
    for path in folder.glob(f"*{PART}"):
        try:
            if time.time() - path.lstat().st_mtime <= age:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            continue  # another process was faster


def make_room(folder: Path, suffix: str, size: int, limit: int) -> bool:
    """Delete the least recently used files until `size` more bytes fit.

    Args:
        folder: the cache folder.
        suffix: only files with this suffix count and are deleted.
        size: bytes to make room for.
        limit: the largest total size of the files, in bytes.

    Returns:
        Whether the bytes fit within the limit and on the disk. If not, nothing is deleted.
    """
    remove_stale_parts(folder)
    entries = []
    for path in folder.iterdir():
        if path.suffix != suffix:
            continue
        try:
            status = path.stat()
        except FileNotFoundError:  # another process was faster
            continue
        entries.append((status.st_mtime, status.st_size, path))
    file_system = os.statvfs(folder)
    total = sum(file_size for _, file_size, _ in entries)
    free = file_system.f_bavail * file_system.f_frsize - min(
        MIN_FREE_FRACTION * file_system.f_blocks * file_system.f_frsize, MIN_FREE_BYTES
    )
    if size > min(limit, free + total):
        return False
    for _, file_size, path in sorted(entries):
        if total + size <= limit and size <= free:
            break
        path.unlink(missing_ok=True)
        total = total - file_size
        free = free + file_size
    return True
