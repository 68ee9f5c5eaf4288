"""One engine over several processes, each with its own devices: same outputs as one process, and
all processes end together.
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
FEW_SEQUENCES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}  # few sequences, so few compiled programs
LIMIT = 900  # seconds; a test that waits longer has failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    [variant] = [variant for variant in VARIANTS if variant.name == "llama"]
    return Golden(variant, tmp_path_factory.mktemp("golden")).folder


@pytest.fixture
def start_process():
    """A function that starts processes; those still running at the end are killed."""
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
    """A free port whose successor is free as well."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with (
            socket.socket() as first_socket,
            socket.socket() as second_socket,
            contextlib.suppress(OSError),
        ):
            first_socket.bind(("127.0.0.1", port))
            second_socket.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no port is free")


def cluster_options(num_processes: int) -> dict:
    return {"coordinator_address": f"127.0.0.1:{free_port()}", "num_processes": num_processes}


@pytest.fixture(scope="module")
def run_single_process(tmp_path_factory):
    """Run one process with all four devices and return its outputs."""

    def run(model: Path, options: dict) -> dict:
        out = tmp_path_factory.mktemp("alone") / "found"
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
        command = [sys.executable, str(HERE / "host.py"), str(model), json.dumps(options), str(out)]
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, check=True, timeout=LIMIT, env=env)
        return json.loads(out.read_text())

    return run


def engine_options(data: int, **options) -> dict:
    sizes = {"tensor_parallel_size": 4 // data, "data_parallel_size": data}
    return SIZES | {"skip_tokenizer_init": True, "dtype": "float32"} | sizes | options


@pytest.fixture(scope="module")
def orbax_folder(folder, tmp_path_factory):
    """The same model as an Orbax checkpoint."""
    out = tmp_path_factory.mktemp("converted") / "model"
    config = loader.read_config(folder, "float32")
    save(folder, out, loader.load(folder, config, skip_packing=True), config.dtype)
    return out


@pytest.fixture(scope="module")
def recurrent_folder(tmp_path_factory):
    """A model with recurrent-state layers; prefix caching resumes from state snapshots."""
    return Golden(
        next(variant for variant in VARIANTS if variant.name == "qwen3-5"),
        tmp_path_factory.mktemp("states"),
    ).folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "stored", "data"),
    nightly_from(1, [(2, "folder", 1), (4, "orbax_folder", 2), (2, "recurrent_folder", 2)]),
)
def test_processes_give_same_outputs_as_one_process(
    processes, stored, data, folder, run_single_process, start_process, tmp_path, request
):
    """200 requests, some of them repeated after sleep and a reset.

    Reductions have another order, so scores differ slightly.
    """
    shared = engine_options(data, **cluster_options(processes))
    out = tmp_path / "found"
    model = request.getfixturevalue(stored)
    running = [
        start_process(
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
    outputs = json.loads(out.read_text())
    expected = run_single_process(
        folder if stored == "orbax_folder" else model, engine_options(data)
    )
    for name in ("first", "again"):
        assert [tokens for tokens, _ in outputs[name]] == [tokens for tokens, _ in expected[name]]
        for (_, scores), (_, expected_scores) in zip(outputs[name], expected[name], strict=True):
            np.testing.assert_allclose(scores, expected_scores, rtol=0, atol=1e-4)
    assert len(outputs["first"]) == 225  # some of the 200 requests have two outputs
    assert outputs["recompiles"] == expected["recompiles"] == 0
    if data == 1:
        # Each process reads all norms, and its shard of the other weights.
        assert outputs["read"] < expected["read"] / 20
    assert re.search("tokens that were cached: [1-9]", (tmp_path / "log0").read_text())
    for index in range(1, processes):
        assert "following process 0" in (tmp_path / f"log{index}").read_text()


class TwoProcessServer:
    """`quire serve` in two processes."""

    def __init__(self, start_process, folder: Path, name: str):
        flags = {
            **SIZES,
            **FEW_SEQUENCES,
            **cluster_options(2),
            "tensor_parallel_size": 2,
            "max_model_len": 256,
        }
        self.logs = [folder / f"{name}{index}" for index in range(2)]
        arguments = [
            word
            for key, value in flags.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        command = [
            "-m",
            "quire",
            "serve",
            str(HERE.parents[1] / "model" / "quill_draft"),
            *arguments,
        ]
        process_flags = ["--port", "0"], ["--process-id", "1"]
        self.processes = [
            start_process([*command, *flags_of_process], log)
            for flags_of_process, log in zip(process_flags, self.logs, strict=True)
        ]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + LIMIT
        while "ready:" not in self.log_text(0):
            assert time.monotonic() < deadline, self.log_text(0) + self.log_text(1)
            assert all(process.poll() is None for process in self.processes), self.log_text(
                0
            ) + self.log_text(1)
            time.sleep(0.1)

    def log_text(self, index: int) -> str:
        return self.logs[index].read_text()

    def complete(self, **body) -> tuple[int, dict]:
        request = urllib.request.Request(
            self.log_text(0).split("ready: ")[1].split()[0] + "/v1/completions",
            json.dumps({"prompt": "Once upon a time", "temperature": 0} | body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.mark.slow
def test_lost_process_ends_all_and_restart_serves(start_process, tmp_path):
    """Under load, requests fail, and the first process reports the lost one and exits; restarted
    processes serve again.
    """
    first_server = TwoProcessServer(start_process, tmp_path, "one")
    first_server.wait_until_ready()
    status, expected_body = first_server.complete(max_tokens=20)
    assert status == 200
    status, structured_body = first_server.complete(
        structured_outputs={"choice": ["seven geese", "eleven"]}, max_tokens=20
    )
    assert status == 200
    assert structured_body["choices"][0]["text"] in ("seven geese", "eleven")

    replies: list[tuple[int, dict]] = []
    request_threads = [
        threading.Thread(
            target=lambda: replies.append(first_server.complete(max_tokens=240, ignore_eos=True))
        )
        for _ in range(12)
    ]
    for thread in request_threads:
        thread.start()
    time.sleep(0.5)
    first_server.processes[1].kill()
    assert first_server.processes[0].wait(120) == EXIT
    for thread in request_threads:
        thread.join(120)
        assert not thread.is_alive()
    assert [status for status, _ in replies] == [503] * len(request_threads)
    assert "process 1 at 127.0.0.1 is gone: its connection" in first_server.log_text(0)

    second_server = TwoProcessServer(start_process, tmp_path, "two")
    second_server.wait_until_ready()
    status, body = second_server.complete(max_tokens=20)
    assert (status, body["choices"][0]["text"]) == (200, expected_body["choices"][0]["text"])
    second_server.processes[0].kill()
    # JAX may abort the process itself.
    assert second_server.processes[1].wait(120) in (EXIT, -signal.SIGABRT)
    assert "process 0 at 127.0.0.1 is gone: its connection" in second_server.log_text(1)


@pytest.mark.slow
def test_processes_with_different_options_are_rejected(folder, start_process, tmp_path):
    """Both the first process and the differing one report the difference and exit."""
    shared = cluster_options(2)
    options = (
        engine_options(1, **shared),
        engine_options(1, **shared) | {"process_id": 1, "max_num_seqs": 8},
    )
    running = [
        start_process(
            [str(HERE / "host.py"), str(folder), json.dumps(process_options), "none"],
            tmp_path / f"log{index}",
        )
        for index, process_options in enumerate(options)
    ]
    for index, process in enumerate(running):
        assert process.wait(LIMIT) == 1
        last = (tmp_path / f"log{index}").read_text().splitlines()[-1]
        assert (
            "max_num_seqs is 8 in process 1 and 16 in process 0; all processes need the same"
            in last
        )


@pytest.mark.parametrize(
    ("index", "options", "message"),
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
def test_refusal_reason(index, options, message):
    reason = rendezvous.refusal_reason(
        index, options, {"dtype": "float32", "block_size": 16}, [1, 2], 3
    )
    assert reason is None if message is None else re.search(message, reason)


@pytest.mark.slow
def test_shared_facts_cover_model_contents_not_paths(folder, tmp_path):
    """Processes compare the model's contents, not its path, nor options that may differ between
    processes.
    """
    copied_folder = tmp_path / "model"
    shutil.copytree(folder, copied_folder)
    facts = rendezvous.shared_facts(EngineOptions(str(folder), seed=1), folder)
    assert facts == rendezvous.shared_facts(
        EngineOptions(str(copied_folder), seed=2), copied_folder
    )
    (copied_folder / "config.json").write_text((copied_folder / "config.json").read_text() + " ")
    changed = rendezvous.shared_facts(EngineOptions(str(copied_folder)), copied_folder)
    assert {name for name in facts if facts[name] != changed[name]} == {
        "the digest of the model's config.json"
    }


def test_foreign_connections_do_not_disturb_rendezvous(folder):
    """A connection that sends something else does not prevent the processes from connecting."""
    options = [EngineOptions(**cluster_options(3), process_id=index) for index in range(3)]
    host, port = rendezvous.split_address(options[0].coordinator_address)
    connections: dict[int, connection.HostConnection] = {}

    def connect_process(index: int) -> None:
        connections[index] = rendezvous.connect_to_leader(
            host, port, options[index], {"a": 1}, print
        )

    def send_foreign_request() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((host, port)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return

    foreign_thread = threading.Thread(target=send_foreign_request)
    foreign_thread.start()
    follower_threads = [threading.Thread(target=connect_process, args=(index,)) for index in (1, 2)]
    for thread in follower_threads[:1]:
        thread.start()
    delayed_start = threading.Timer(0.5, follower_threads[1].start)
    delayed_start.start()
    accepted = rendezvous.accept_processes(host, port, options[0], {"a": 1}, print)
    for thread in (foreign_thread, delayed_start, *follower_threads):
        thread.join()
    assert sorted(accepted) == sorted(connections) == [1, 2]
    for host_connection in (*accepted.values(), *connections.values()):
        host_connection.close()


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_invalid_process_options_are_rejected(options, message):
    with pytest.raises(ModelError, match=message):
        EngineOptions(**options)


def test_only_process_0_accepts_requests():
    options = {"num_processes": 2, "coordinator_address": "127.0.0.1:9"}
    with pytest.raises(ModelError, match="only process 0 .* quire.follow"):
        LLM(process_id=1, **options)
    with pytest.raises(ModelError, match="process_id is 0, and process 0 leads"):
        follow(process_id=0, **options)


def example_arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    bias = np.full(50000, -np.inf, np.float32)
    bias[rng.integers(0, 50000, 9000)] = 0
    sparse = np.zeros(50000, np.int32)
    sparse[[3, 49999]] = 7, -1
    return [
        rng.integers(-9, 9, 3000, np.int32),
        bias,
        sparse,
        sparse > 0,
        np.zeros((70, 80), bool),
        np.zeros(0, np.float32),
        rng.random((40, 50)).astype(np.float32),
        np.where(sparse > 0, -0.0, 0.0).astype(np.float32),
        np.full(5000, np.nan, np.float32),
        np.arange(9000, dtype=np.int64)[::2],
    ]


def test_arrays_round_trip_compressed():
    for array in example_arrays():
        kind, (received_array,) = send_and_receive(connection.frame("step", array))
        assert kind == "step"
        assert (received_array.dtype, received_array.shape, received_array.tobytes()) == (
            array.dtype,
            array.shape,
            array.tobytes(),
        )
    assert (
        len(connection.frame("set_bias", example_arrays()[1])) < 50000 / 8 + 100
    )  # one bit per element
    assert len(connection.frame("reset_slot", example_arrays()[2])) < 100


def test_buffer_deltas_round_trip():
    rng = np.random.default_rng(0)
    sender = connection.BufferDeltas()
    receiver = connection.BufferDeltas()
    buffers = {size: rng.integers(0, 9, 10 * size, np.int32) for size in (3, 70)}
    for step in range(50):
        size = (3, 70)[step % 3 == 0]
        buffers[size][rng.integers(0, 10 * size, step % 4 * size)] = step
        positions, changed_values = sender.encode((size,), buffers[size])
        previous = receiver.last.get((size,))
        expected = None if previous is None else previous.copy()
        np.testing.assert_array_equal(
            receiver.decode((size,), positions, changed_values.copy()), buffers[size]
        )
        if expected is not None:  # the device may still read the previous array
            np.testing.assert_array_equal(previous, expected)


def send_and_receive(data: bytes) -> tuple[str, list]:
    client_socket, server_socket = socket_pair()
    with client_socket, server_socket:
        sender = threading.Thread(target=client_socket.sendall, args=(data,))
        sender.start()
        with contextlib.closing(connection.HostConnection(server_socket)) as host_connection:
            message = host_connection.receive(5)
        sender.join()
        return message


def socket_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client_socket = socket.create_connection(listener.getsockname())
        return client_socket, listener.accept()[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "was closed"),
        (b"\x05\x00\x00\x00\x91", "was closed"),
        (b"GET / HTTP/1.1\r\n\r\n", "a message of"),
        (b"\x01\x00\x00\x00\xc1", "no message"),
        (b"\x01\x00\x00\x00\x05", "no message"),
        (b"\x05\x00\x00\x00\x91\xc7\x01\x07\x00", "extension 7"),
    ],
)
def test_malformed_messages_close_the_connection(data, message):
    client_socket, server_socket = socket_pair()
    with server_socket:
        client_socket.sendall(data)
        client_socket.close()
        with (
            contextlib.closing(connection.HostConnection(server_socket)) as host_connection,
            pytest.raises(connection.ConnectionLost, match=message),
        ):
            host_connection.receive(5)


def test_silent_connection_is_lost_after_timeout():
    client_socket, server_socket = socket_pair()
    message_pattern = "nothing was heard .* 0.05 s"
    with (
        client_socket,
        contextlib.closing(connection.HostConnection(server_socket)) as host_connection,
        pytest.raises(connection.ConnectionLost, match=message_pattern),
    ):
        host_connection.receive(0.05)
