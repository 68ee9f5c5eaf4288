"""Pages on disk: whole or not there, whatever happens to the files and to the process that writes
them.
"""

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
from quire.serving.cache import disk_cache as module
from quire.serving.cache.disk_cache import DiskCache

DIGEST = bytes(range(32))
TOKENS = np.arange(16, dtype=np.int32).tobytes()
DATA = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
WANTED = (DIGEST, 1, TOKENS, DATA.size)


def one_page(folder):
    disk = DiskCache(folder, 1 << 20)
    assert disk.write("a.page", *WANTED[:3], DATA)
    return disk


def test_a_page_comes_back_as_it_was_also_to_another_process(tmp_path):
    disk = one_page(tmp_path)
    for found in (
        disk.read("a.page", *WANTED),
        DiskCache(tmp_path, 1 << 20).read("a.page", *WANTED),
    ):
        assert np.array_equal(found, DATA)
    assert oct((tmp_path / "a.page").stat().st_mode)[-3:] == "600"
    assert "b.page" not in disk and disk.read("b.page", *WANTED) is None


@pytest.mark.parametrize("wrong", range(4))
def test_a_name_is_not_believed(tmp_path, wrong):
    """Where two contents have the same name (a hash that collides), each is told from the other."""
    disk = one_page(tmp_path)
    other = [bytes(32), 0, TOKENS[::-1], DATA.size - 1]
    wanted = [*WANTED[:wrong], other[wrong], *WANTED[wrong + 1 :]]
    assert disk.read("a.page", *wanted) is None
    assert np.array_equal(disk.read("a.page", *WANTED), DATA)


def test_a_damaged_file_is_a_miss_and_a_warning(tmp_path, caplog):
    rng = random.Random(0)
    disk = one_page(tmp_path)
    raw = (tmp_path / "a.page").read_bytes()
    places = [
        0,
        15,
        16,
        47,
        48,
        79,
        80,
        84,
        88,
        len(raw) - 1,
        *(rng.randrange(len(raw)) for _ in range(40)),
    ]
    damaged = [raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :] for at in places]
    damaged += [raw[:length] for length in (0, 1, 87, 88, 200, len(raw) - 1)] + [raw + b"x"]
    for bad in damaged:
        disk = one_page(tmp_path)
        (tmp_path / "a.page").write_bytes(bad)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert disk.read("a.page", *WANTED) is None
        assert "is damaged" in caplog.text
        assert not list(tmp_path.iterdir()) and disk.total == 0
    assert disk.write("a.page", *WANTED[:3], DATA)


def test_a_file_that_vanished_is_a_miss(tmp_path):
    disk = one_page(tmp_path)
    (tmp_path / "a.page").unlink()
    assert disk.read("a.page", *WANTED) is None
    assert "a.page" not in disk and disk.total == 0


def test_what_was_used_longest_ago_goes_first(tmp_path):
    size = len(DATA) + len(TOKENS) + module.HEAD.size
    disk = DiskCache(tmp_path, 3 * size)
    for name in "abc":
        assert disk.write(f"{name}.page", *WANTED[:3], DATA)
        time.sleep(0.01)
    assert disk.read("a.page", *WANTED) is not None
    assert disk.write("d.page", *WANTED[:3], DATA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.page", "c.page", "d.page"]
    assert disk.total == 3 * size
    smaller = DiskCache(tmp_path, 2 * size)  # what was used last is told from the files' times
    assert sorted(smaller.sizes) == ["a.page", "d.page"]
    smaller.clear()
    assert not list(tmp_path.iterdir()) and smaller.total == 0


def test_a_full_disk_is_one_warning_and_no_page(tmp_path, monkeypatch, caplog):
    disk = one_page(tmp_path)
    monkeypatch.setattr(
        module, "open_private", lambda path, flags: os.open("/dev/full", os.O_WRONLY)
    )
    with caplog.at_level(logging.WARNING):
        assert not disk.write("b.page", *WANTED[:3], DATA)
        assert not disk.write("c.page", *WANTED[:3], DATA)
    assert [
        record.message for record in caplog.records if os.strerror(errno.ENOSPC) in record.message
    ] == [record.message for record in caplog.records]
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert not disk.write("b.page", *WANTED[:3], DATA)  # not yet
    disk.resumes = 0.0
    assert disk.write("b.page", *WANTED[:3], DATA)
    assert np.array_equal(disk.read("a.page", *WANTED), DATA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.page", "b.page"]


def test_a_page_that_another_container_writes_is_left_alone(tmp_path):
    """A process id says nothing about other containers: a file that one of them writes is not
    removed or shared.
    """
    disk = one_page(tmp_path)
    with publish(tmp_path / "b.page", durable=False) as part:
        part.write_bytes(b"half")
        other = DiskCache(tmp_path, 1 << 20)  # removes what processes have left
        assert other.write("b.page", *WANTED[:3], DATA)
        part.write_bytes((tmp_path / "b.page").read_bytes())
    assert np.array_equal(disk.read("b.page", *WANTED), DATA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.page", "b.page"]


SIZE = 4_000_000  # bytes, so that most of the time is writing
WRITER = f"""
import sys
import numpy as np
from pathlib import Path
from quire.serving.cache.disk_cache import DiskCache
disk = DiskCache(Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
for index in range(10**6):
    data = np.full({SIZE}, index % 251, np.uint8)
    disk.write(str(index) + ".page", bytes(32), 0, b"", data)
"""


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_whole_files(tmp_path):
    """Again and again, until it was three times in the middle of a file."""
    rng = random.Random(1)
    parts = 0
    rounds = 0
    while parts < 3:
        rounds += 1
        assert rounds < 100, (
            "no process was killed in the middle of a file: the test proves nothing"
        )
        folder = tmp_path / str(rounds)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.001, 0.05))
            process.send_signal(signal.SIGKILL)
        parts += any(path.suffix == ".part" for path in folder.iterdir())
        for part in folder.glob("*.part"):
            os.utime(part, (time.time() - 2 * module.STALE_PART,) * 2)
        disk = DiskCache(folder, 1 << 30)
        assert not [path for path in folder.iterdir() if path.suffix == ".part"]
        for name in list(disk.sizes):
            data = disk.read(name, bytes(32), 0, b"", SIZE)
            assert data is not None and bytes(data) == bytes([int(name.split(".")[0]) % 251]) * SIZE
