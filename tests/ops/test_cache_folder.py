"""Room in a folder of files that one start leaves for the next: on disks of any size, the oldest go first."""

import os
from types import SimpleNamespace

import pytest

from quire.ops import cache_folder

GIB = 1 << 30


def disk(monkeypatch, size: int, free: int) -> None:
    state = SimpleNamespace(f_frsize=4096, f_blocks=size // 4096, f_bavail=free // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: state)


@pytest.mark.parametrize(
    ("size", "free", "fits"),
    [
        (20, 4, True),
        (20, 2, False),
        (252, 26, True),
        (252, 18, True),
        (252, 16, False),
        (4000, 20, True),
        (4000, 16, False),
    ],
)
def test_what_stays_free(tmp_path, monkeypatch, size, free, fits):
    """A tenth of the disk, or 16 GiB of a large one."""
    disk(monkeypatch, size * GIB, free * GIB)
    assert cache_folder.make_room(tmp_path, ".kept", GIB, 2 * GIB) is fits


def test_the_oldest_go_first(tmp_path, monkeypatch):
    disk(monkeypatch, 20 * GIB, 10 * GIB)
    for age, name in enumerate(("new.kept", "older.kept", "oldest.kept", "other.txt")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age,) * 2)
    assert cache_folder.make_room(tmp_path, ".kept", 100, 310)
    assert {path.name for path in tmp_path.iterdir()} == {"new.kept", "older.kept", "other.txt"}
    assert not cache_folder.make_room(tmp_path, ".kept", 400, 310)
    assert len([*tmp_path.iterdir()]) == 3
