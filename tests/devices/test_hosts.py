"""One engine over several processes, each with its own devices: the same answers, and one end
for all.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from quire import LLM, ModelError, follow
from quire.model.checkpoint import loader
from quire.model.checkpoint.orbax import save
from quire.serving.api.options import EngineOptions
from quire.serving.multihost import connection, rendezvous
from quire.serving.multihost.leader import EXIT
from quire.tests.support.cases import nightly_from
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden

HERE = Path(__file__).parent
SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 4 << 20}
FEW = {"max_num_seqs": 4, "max_num_batched_tokens": 16}  # and few programs
LIMIT = 900  # seconds; a test that waits longer has failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    [variant] = [variant for variant in VARIANTS if variant.name == "llama"]
    return Golden(variant, tmp_path_factory.mktemp("golden")).folder


@pytest.fixture
def started():
    """Starts processes, and ends what is left of them."""
    running: list[subprocess.Popen] = []

    def start(command: list[str], log: Path, devices: int = 1) -> subprocess.Popen:
        flags = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        ).strip()
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=HERE.parents[1],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def free_port() -> int:
    """One that is free, and the next one too."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no port is free")


def together(num_processes: int) -> dict:
    return {"coordinator_address": f"127.0.0.1:{free_port()}", "num_processes": num_processes}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process says that has all four devices."""

    def say(model: Path, options: dict) -> dict:
        out = tmp_path_factory.mktemp("alone") / "found"
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
        command = [sys.executable, str(HERE / "host.py"), str(model), json.dumps(options), str(out)]
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, check=True, timeout=LIMIT, env=env)
        return json.loads(out.read_text())

    return say


def engine_options(data: int, **more) -> dict:
    sizes = {"tensor_parallel_size": 4 // data, "data_parallel_size": data}
    return SIZES | {"skip_tokenizer_init": True, "dtype": "float32"} | sizes | more


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory):
    """The same model as an orbax checkpoint."""
    out = tmp_path_factory.mktemp("converted") / "model"
    config = loader.read_config(folder, "float32")
    save(folder, out, loader.load(folder, config, skip_packing=True), config.dtype)
    return out


@pytest.fixture(scope="module")
def with_states(tmp_path_factory):
    """A model whose layers keep states: prompts that begin alike go on from snapshots."""
    return Golden(
        next(variant for variant in VARIANTS if variant.name == "qwen3-5"),
        tmp_path_factory.mktemp("states"),
    ).folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "stored", "data"),
    nightly_from(1, [(2, "folder", 1), (4, "converted", 2), (2, "with_states", 2)]),
)
def test_the_same_answers(processes, stored, data, folder, alone, started, tmp_path, request):
    """200 requests; some of them again after sleep and a reset.

    Sums go another way, so scores differ a little.
    """
    shared = engine_options(data, **together(processes))
    out = tmp_path / "found"
    model = request.getfixturevalue(stored)
    running = [
        started(
            [
                str(HERE / "host.py"),
                str(model),
                json.dumps(shared | {"process_id": index}),
                str(out),
            ],
            tmp_path / f"log{index}",
            4 // processes,
        )
        for index in range(processes)
    ]
    for index, process in enumerate(running):
        assert process.wait(LIMIT) == 0, (tmp_path / f"log{index}").read_text()[-4000:]
    found = json.loads(out.read_text())
    alone = alone(folder if stored == "converted" else model, engine_options(data))
    for name in ("first", "again"):
        assert [tokens for tokens, _ in found[name]] == [tokens for tokens, _ in alone[name]]
        for (_, scores), (_, wanted) in zip(found[name], alone[name], strict=True):
            np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-4)
    assert len(found["first"]) == 225  # some of the 200 have two
    assert found["recompiles"] == alone["recompiles"] == 0
    if data == 1:
        assert found["read"] < alone["read"] / 20  # norms; of the rest each process reads its part
    assert re.search("tokens that were cached: [1-9]", (tmp_path / "log0").read_text())
    for index in range(1, processes):
        assert "following process 0" in (tmp_path / f"log{index}").read_text()


class Served:
    """`quire serve` in two processes."""

    def __init__(self, started, folder: Path, name: str):
        flags = {**SIZES, **FEW, **together(2), "tensor_parallel_size": 2, "max_model_len": 256}
        self.logs = [folder / f"{name}{index}" for index in range(2)]
        words = [
            word
            for key, value in flags.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        command = ["-m", "quire", "serve", str(HERE.parents[1] / "model" / "quill_draft"), *words]
        own = ["--port", "0"], ["--process-id", "1"]
        self.processes = [
            started([*command, *more], log) for more, log in zip(own, self.logs, strict=True)
        ]

    def wait(self) -> None:
        deadline = time.monotonic() + LIMIT
        while "ready:" not in self.said(0):
            assert time.monotonic() < deadline, self.said(0) + self.said(1)
            assert all(process.poll() is None for process in self.processes), self.said(
                0
            ) + self.said(1)
            time.sleep(0.1)

    def said(self, index: int) -> str:
        return self.logs[index].read_text()

    def ask(self, **body) -> tuple[int, dict]:
        request = urllib.request.Request(
            self.said(0).split("ready: ")[1].split()[0] + "/v1/completions",
            json.dumps({"prompt": "Once upon a time", "temperature": 0} | body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.mark.slow
def test_a_process_is_lost(started, tmp_path):
    """Under load: requests fail, the first process says who is gone and ends; all start again, and
    serve.
    """
    one = Served(started, tmp_path, "one")
    one.wait()
    status, first = one.ask(max_tokens=20)
    assert status == 200
    status, shaped = one.ask(
        structured_outputs={"choice": ["seven geese", "eleven"]}, max_tokens=20
    )
    assert status == 200
    assert shaped["choices"][0]["text"] in ("seven geese", "eleven")

    found: list[tuple[int, dict]] = []
    asks = [
        threading.Thread(target=lambda: found.append(one.ask(max_tokens=240, ignore_eos=True)))
        for _ in range(12)
    ]
    for ask in asks:
        ask.start()
    time.sleep(0.5)
    one.processes[1].kill()
    assert one.processes[0].wait(120) == EXIT
    for ask in asks:
        ask.join(120)
        assert not ask.is_alive()
    assert [status for status, _ in found] == [503] * len(asks)
    assert "process 1 at 127.0.0.1 is gone: its connection" in one.said(0)

    two = Served(started, tmp_path, "two")
    two.wait()
    status, again = two.ask(max_tokens=20)
    assert (status, again["choices"][0]["text"]) == (200, first["choices"][0]["text"])
    two.processes[0].kill()
    # JAX has its own way to end such a process
    assert two.processes[1].wait(120) in (EXIT, -signal.SIGABRT)
    assert "process 0 at 127.0.0.1 is gone: its connection" in two.said(1)


@pytest.mark.slow
def test_another_wish_is_refused(folder, started, tmp_path):
    """A process with other options is told so, and so is the first; both end."""
    shared = together(2)
    options = (
        engine_options(1, **shared),
        engine_options(1, **shared) | {"process_id": 1, "max_num_seqs": 8},
    )
    running = [
        started(
            [str(HERE / "host.py"), str(folder), json.dumps(each), "none"], tmp_path / f"log{index}"
        )
        for index, each in enumerate(options)
    ]
    for index, process in enumerate(running):
        assert process.wait(LIMIT) == 1
        last = (tmp_path / f"log{index}").read_text().splitlines()[-1]
        assert (
            "max_num_seqs is 8 in process 1 and 16 in process 0; all processes need the same"
            in last
        )


@pytest.mark.parametrize(
    ("index", "theirs", "said"),
    [
        (
            1,
            {"dtype": "bfloat16", "block_size": 16},
            "dtype is 'bfloat16' in process 1 and 'float32' in process 0",
        ),
        (1, {"dtype": "float32"}, "block_size is None in process 1 and 16 in process 0"),
        (
            3,
            {"dtype": "float32", "block_size": 16},
            r"process_id is 3; it is taken, or not below num_processes \(3\)",
        ),
        (2, {"dtype": "float32", "block_size": 16}, None),
    ],
)
def test_who_is_refused(index, theirs, said):
    why = rendezvous.refusal_reason(
        index, theirs, {"dtype": "float32", "block_size": 16}, [1, 2], 3
    )
    assert why is None if said is None else re.search(said, why)


@pytest.mark.slow
def test_what_must_be_the_same(folder, tmp_path):
    """The model by what is in it, wherever it lies; not what each process may choose."""
    other = tmp_path / "model"
    shutil.copytree(folder, other)
    one = rendezvous.shared_facts(EngineOptions(str(folder), seed=1), folder)
    assert one == rendezvous.shared_facts(EngineOptions(str(other), seed=2), other)
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    changed = rendezvous.shared_facts(EngineOptions(str(other)), other)
    assert {name for name in one if one[name] != changed[name]} == {
        "the digest of the model's config.json"
    }


def test_strangers_are_left_outside(folder):
    """Somebody who knocks with something else does not disturb those who come together."""
    options = [EngineOptions(**together(3), process_id=index) for index in range(3)]
    host, port = rendezvous.split_address(options[0].coordinator_address)
    found: dict[int, connection.HostConnection] = {}

    def come(index: int) -> None:
        found[index] = rendezvous.connect_to_leader(host, port, options[index], {"a": 1}, print)

    def knock() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((host, port)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return

    stranger = threading.Thread(target=knock)
    stranger.start()
    others = [threading.Thread(target=come, args=(index,)) for index in (1, 2)]
    for thread in others[:1]:
        thread.start()
    late = threading.Timer(0.5, others[1].start)
    late.start()
    lines = rendezvous.accept_processes(host, port, options[0], {"a": 1}, print)
    for thread in (stranger, late, *others):
        thread.join()
    assert sorted(lines) == sorted(found) == [1, 2]
    for line in (*lines.values(), *found.values()):
        line.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_processes": 2}, "coordinator_address is None.*HOST:PORT"),
        ({"num_processes": 2, "coordinator_address": "here"}, "coordinator_address is 'here'"),
        ({"num_processes": 2, "coordinator_address": "a:65535"}, "at most 65534"),
        ({"num_processes": 0}, "num_processes is 0; it must be an integer of at least 1"),
        ({"process_id": 1}, "process_id is 1; with num_processes 1 it must be at most 0"),
        ({"num_processes": 2, "process_id": -1}, "process_id is -1"),
        (
            {"num_processes": 2, "coordinator_address": "a:1", "kv_cache_host_bytes": 1},
            "kv_cache_host_bytes is given",
        ),
        (
            {"num_processes": 2, "coordinator_address": "a:1", "kv_cache_disk": "d"},
            "kv_cache_disk is given",
        ),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(ModelError, match=said):
        EngineOptions(**options)


def test_only_process_0_can_be_asked():
    options = {"num_processes": 2, "coordinator_address": "127.0.0.1:9"}
    with pytest.raises(ModelError, match="only process 0 .* quire.follow"):
        LLM(process_id=1, **options)
    with pytest.raises(ModelError, match="process_id is 0, and process 0 leads"):
        follow(process_id=0, **options)


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    bias = np.full(50000, -np.inf, np.float32)
    bias[rng.integers(0, 50000, 9000)] = 0
    few = np.zeros(50000, np.int32)
    few[[3, 49999]] = 7, -1
    return [
        rng.integers(-9, 9, 3000, np.int32),
        bias,
        few,
        few > 0,
        np.zeros((70, 80), bool),
        np.zeros(0, np.float32),
        rng.random((40, 50)).astype(np.float32),
        np.where(few > 0, -0.0, 0.0).astype(np.float32),
        np.full(5000, np.nan, np.float32),
        np.arange(9000, dtype=np.int64)[::2],
    ]


def test_arrays_arrive_as_they_were():
    for array in arrays():
        kind, (found,) = received(connection.frame("step", array))
        assert kind == "step"
        assert (found.dtype, found.shape, found.tobytes()) == (
            array.dtype,
            array.shape,
            array.tobytes(),
        )
    assert len(connection.frame("set_bias", arrays()[1])) < 50000 / 8 + 100  # a bit a word
    assert len(connection.frame("reset_slot", arrays()[2])) < 100


def test_changes_arrive():
    rng = np.random.default_rng(0)
    there = connection.BufferDeltas()
    here = connection.BufferDeltas()
    buffers = {size: rng.integers(0, 9, 10 * size, np.int32) for size in (3, 70)}
    for step in range(50):
        size = (3, 70)[step % 3 == 0]
        buffers[size][rng.integers(0, 10 * size, step % 4 * size)] = step
        where, what = there.encode((size,), buffers[size])
        kept = here.last.get((size,))
        before = None if kept is None else kept.copy()
        np.testing.assert_array_equal(here.decode((size,), where, what.copy()), buffers[size])
        if before is not None:  # the device may still read it
            np.testing.assert_array_equal(kept, before)


def received(data: bytes) -> tuple[str, list]:
    one, two = pair()
    with one, two:
        sender = threading.Thread(target=one.sendall, args=(data,))
        sender.start()
        with contextlib.closing(connection.HostConnection(two)) as line:
            found = line.receive(5)
        sender.join()
        return found


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "was closed"),
        (b"\x05\x00\x00\x00\x91", "was closed"),
        (b"GET / HTTP/1.1\r\n\r\n", "a message of"),
        (b"\x01\x00\x00\x00\xc1", "no message"),
        (b"\x01\x00\x00\x00\x05", "no message"),
        (b"\x05\x00\x00\x00\x91\xc7\x01\x07\x00", "extension 7"),
    ],
)
def test_what_is_no_message(data, said):
    one, two = pair()
    with two:
        one.sendall(data)
        one.close()
        with (
            contextlib.closing(connection.HostConnection(two)) as line,
            pytest.raises(connection.ConnectionLost, match=said),
        ):
            line.receive(5)


def test_silence():
    one, two = pair()
    told = "nothing was heard .* 0.05 s"
    with (
        one,
        contextlib.closing(connection.HostConnection(two)) as line,
        pytest.raises(connection.ConnectionLost, match=told),
    ):
        line.receive(0.05)
