"""The disk cache returns whole pages or none, even if files are damaged or a writer is killed."""

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from quire.ops.cache_folder import publish
from quire.serving.cache import disk_cache as disk_cache_module
from quire.serving.cache.disk_cache import DiskCache

DIGEST = bytes(range(32))
TOKENS = np.arange(16, dtype=np.int32).tobytes()
DATA = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
PAGE_HEADER = (DIGEST, 1, TOKENS, DATA.size)


def disk_with_one_page(folder):
    disk = DiskCache(folder, 1 << 20)
    assert disk.write("a.page", *PAGE_HEADER[:3], DATA)
    return disk


def test_page_is_read_back_by_a_second_cache(tmp_path):
    disk = disk_with_one_page(tmp_path)
    for data in (
        disk.read("a.page", *PAGE_HEADER),
        DiskCache(tmp_path, 1 << 20).read("a.page", *PAGE_HEADER),
    ):
        assert np.array_equal(data, DATA)
    assert oct((tmp_path / "a.page").stat().st_mode)[-3:] == "600"
    assert "b.page" not in disk and disk.read("b.page", *PAGE_HEADER) is None


@pytest.mark.parametrize("changed_field", range(4))
def test_page_with_a_colliding_name_is_not_returned(tmp_path, changed_field):
    """Two contents with the same name (a hash collision) are distinguished by their headers."""
    disk = disk_with_one_page(tmp_path)
    different = [bytes(32), 0, TOKENS[::-1], DATA.size - 1]
    changed_header = [
        *PAGE_HEADER[:changed_field],
        different[changed_field],
        *PAGE_HEADER[changed_field + 1 :],
    ]
    assert disk.read("a.page", *changed_header) is None
    assert np.array_equal(disk.read("a.page", *PAGE_HEADER), DATA)


def test_damaged_file_is_removed_with_a_warning(tmp_path, caplog):
    rng = random.Random(0)
    disk = disk_with_one_page(tmp_path)
    content = (tmp_path / "a.page").read_bytes()
    offsets = [
        0,
        15,
        16,
        47,
        48,
        79,
        80,
        84,
        88,
        len(content) - 1,
        *(rng.randrange(len(content)) for _ in range(40)),
    ]
    damaged_contents = [
        content[:offset] + bytes([content[offset] ^ 1 << rng.randrange(8)]) + content[offset + 1 :]
        for offset in offsets
    ]
    damaged_contents += [content[:length] for length in (0, 1, 87, 88, 200, len(content) - 1)] + [
        content + b"x"
    ]
    for damaged_content in damaged_contents:
        disk = disk_with_one_page(tmp_path)
        (tmp_path / "a.page").write_bytes(damaged_content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert disk.read("a.page", *PAGE_HEADER) is None
        assert "is damaged" in caplog.text
        assert not list(tmp_path.iterdir()) and disk.total == 0
    assert disk.write("a.page", *PAGE_HEADER[:3], DATA)


def test_deleted_file_is_a_miss(tmp_path):
    disk = disk_with_one_page(tmp_path)
    (tmp_path / "a.page").unlink()
    assert disk.read("a.page", *PAGE_HEADER) is None
    assert "a.page" not in disk and disk.total == 0


def test_least_recently_used_file_is_evicted(tmp_path):
    file_size = len(DATA) + len(TOKENS) + disk_cache_module.HEAD.size
    disk = DiskCache(tmp_path, 3 * file_size)
    for name in "abc":
        assert disk.write(f"{name}.page", *PAGE_HEADER[:3], DATA)
        time.sleep(0.01)
    assert disk.read("a.page", *PAGE_HEADER) is not None
    assert disk.write("d.page", *PAGE_HEADER[:3], DATA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.page", "c.page", "d.page"]
    assert disk.total == 3 * file_size
    smaller = DiskCache(tmp_path, 2 * file_size)  # recency is known from the files' times
    assert sorted(smaller.sizes) == ["a.page", "d.page"]
    smaller.clear()
    assert not list(tmp_path.iterdir()) and smaller.total == 0


def test_full_disk_pauses_writes_with_one_warning(tmp_path, monkeypatch, caplog):
    disk = disk_with_one_page(tmp_path)
    monkeypatch.setattr(
        disk_cache_module, "open_private", lambda path, flags: os.open("/dev/full", os.O_WRONLY)
    )
    with caplog.at_level(logging.WARNING):
        assert not disk.write("b.page", *PAGE_HEADER[:3], DATA)
        assert not disk.write("c.page", *PAGE_HEADER[:3], DATA)
    assert [
        record.message for record in caplog.records if os.strerror(errno.ENOSPC) in record.message
    ] == [record.message for record in caplog.records]
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert not disk.write("b.page", *PAGE_HEADER[:3], DATA)  # writes are still paused
    disk.resumes = 0.0
    assert disk.write("b.page", *PAGE_HEADER[:3], DATA)
    assert np.array_equal(disk.read("a.page", *PAGE_HEADER), DATA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.page", "b.page"]


def test_file_being_written_by_another_container_is_kept(tmp_path):
    """A process id means nothing in another container, whose unfinished files must stay."""
    disk = disk_with_one_page(tmp_path)
    with publish(tmp_path / "b.page", durable=False) as part_file:
        part_file.write_bytes(b"half")
        second_disk = DiskCache(tmp_path, 1 << 20)  # removes files of dead processes
        assert second_disk.write("b.page", *PAGE_HEADER[:3], DATA)
        part_file.write_bytes((tmp_path / "b.page").read_bytes())
    assert np.array_equal(disk.read("b.page", *PAGE_HEADER), DATA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.page", "b.page"]


NUM_BYTES = 4_000_000  # bytes, so that most of the time is writing
WRITER_SCRIPT = f"""
import sys
import numpy as np
from pathlib import Path
from quire.serving.cache.disk_cache import DiskCache
disk = DiskCache(Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
for index in range(10**6):
    data = np.full({NUM_BYTES}, index % 251, np.uint8)
    disk.write(str(index) + ".page", bytes(32), 0, b"", data)
"""


@pytest.mark.slow
def test_process_killed_while_writing_leaves_no_partial_pages(tmp_path):
    """Repeated until three processes were killed in the middle of a file."""
    rng = random.Random(1)
    num_part_files = 0
    num_rounds = 0
    while num_part_files < 3:
        num_rounds += 1
        assert num_rounds < 100, (
            "no process was killed in the middle of a file: the test proves nothing"
        )
        folder = tmp_path / str(num_rounds)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER_SCRIPT, str(folder)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.001, 0.05))
            process.send_signal(signal.SIGKILL)
        num_part_files += any(path.suffix == ".part" for path in folder.iterdir())
        for part_file in folder.glob("*.part"):
            os.utime(part_file, (time.time() - 2 * disk_cache_module.STALE_PART,) * 2)
        disk = DiskCache(folder, 1 << 30)
        assert not [path for path in folder.iterdir() if path.suffix == ".part"]
        for name in list(disk.sizes):
            data = disk.read(name, bytes(32), 0, b"", NUM_BYTES)
            assert (
                data is not None
                and bytes(data) == bytes([int(name.split(".")[0]) % 251]) * NUM_BYTES
            )
