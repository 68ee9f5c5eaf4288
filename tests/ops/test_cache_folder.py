"""Cache folders on disk: free space, eviction by age and atomic publication."""

import os
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from quire.ops import cache_folder

GIB = 1 << 30


def fake_disk(monkeypatch, size: int, free: int) -> None:
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
def test_make_room_keeps_a_tenth_of_the_disk_free(tmp_path, monkeypatch, size, free, fits):
    """At most 16 GiB on large disks."""
    fake_disk(monkeypatch, size * GIB, free * GIB)
    assert cache_folder.make_room(tmp_path, ".kept", GIB, 2 * GIB) is fits


def test_oldest_files_are_deleted_first(tmp_path, monkeypatch):
    fake_disk(monkeypatch, 20 * GIB, 10 * GIB)
    for age, name in enumerate(("new.kept", "older.kept", "oldest.kept", "other.txt")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age,) * 2)
    assert cache_folder.make_room(tmp_path, ".kept", 100, 310)
    assert {path.name for path in tmp_path.iterdir()} == {"new.kept", "older.kept", "other.txt"}
    assert not cache_folder.make_room(tmp_path, ".kept", 400, 310)
    assert len([*tmp_path.iterdir()]) == 3


def test_publish_is_atomic_with_several_writers_of_one_process_id(tmp_path):
    """Every writer has its own temporary file, so none publishes another's partial content."""
    target = tmp_path / "a.kept"
    with cache_folder.publish(target) as first_temporary:
        first_temporary.write_bytes(b"first, ha")
        with cache_folder.publish(target) as second_temporary:
            assert not target.exists()
            second_temporary.write_bytes(b"second, whole")
        assert target.read_bytes() == b"second, whole"
        first_temporary.write_bytes(b"first, whole")
    assert target.read_bytes() == b"first, whole"
    assert [*tmp_path.iterdir()] == [target]


def test_publish_keeps_the_old_file_when_the_writer_fails(tmp_path):
    target = tmp_path / "deep" / "a.kept"
    with pytest.raises(ZeroDivisionError), cache_folder.publish(target) as temporary:
        temporary.write_bytes(b"ha")
        raise ZeroDivisionError
    assert not [*target.parent.iterdir()]
    target.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), cache_folder.publish(target) as temporary:
        temporary.write_bytes(b"ne")
        raise ZeroDivisionError
    assert target.read_bytes() == b"old" and [*target.parent.iterdir()] == [target]


def test_publish_does_not_replace_a_folder_with_content(tmp_path):
    for content, outcome in (("first", nullcontext()), ("second", pytest.raises(OSError))):
        with outcome, cache_folder.publish(tmp_path / "a") as temporary:
            temporary.mkdir()
            (temporary / "text").write_text(content)
    assert (tmp_path / "a" / "text").read_text() == "first" and len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("durable", [True, False])
def test_publish_syncs_content_before_it_renames(tmp_path, monkeypatch, durable):
    """Files and folders inside first, then the rename, then the parent folder."""
    target = tmp_path / "folder"
    calls = []
    names = {}
    opened = os.open
    rename = os.rename

    def open_file(path, *args, **options):
        descriptor = opened(path, *args, **options)
        names[descriptor] = os.path.basename(path)
        return descriptor

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(f"sync {names[descriptor]}"))
    monkeypatch.setattr(os, "rename", lambda a, b: calls.append("rename") or rename(a, b))
    with cache_folder.publish(target, durable) as temporary:
        temporary.mkdir()
        (temporary / "text").write_text("text")
        (temporary / "link").symlink_to("/nowhere")
    syncs = ["sync text", "sync folder"], [f"sync {tmp_path.name}"]
    assert calls == ([*syncs[0], "rename", *syncs[1]] if durable else ["rename"])


def test_only_stale_temporary_files_are_removed(tmp_path):
    for name, age in (("old", 2), ("new", 0)):
        (tmp_path / f".{name}.part").mkdir()
        (tmp_path / f".{name}.part" / "a.kept").write_text("")
        (tmp_path / f"{name}.1.part").write_text("")
        for path in (tmp_path / f".{name}.part", tmp_path / f"{name}.1.part"):
            os.utime(path, (time.time() - age * cache_folder.STALE,) * 2)
    cache_folder.remove_stale_parts(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".new.part", "new.1.part"}
