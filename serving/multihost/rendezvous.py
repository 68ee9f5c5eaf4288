"""Rendezvous of the processes of one engine, which check that model and options agree."""

import hashlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from ...model.config import ModelError
from ..api.options import EngineOptions
from .connection import ConnectionLost, HostConnection
from .leader import Follower, Leader

log = logging.getLogger("quire")

JOIN_SECONDS = 300.0  # seconds for all processes to connect
HELLO_SECONDS = 5.0  # seconds for a connected process to identify itself
PER_PROCESS = {  # options that each process may choose for itself
    "model",
    "tokenizer",
    "skip_tokenizer_init",
    "coordinator_address",
    "process_id",
    "max_queued_requests",
    "pooling",
    "trace",
    "seed",
    "enable_prefix_caching",
    "revision",
    "download_dir",
    "generation_config",
    "override_generation_config",
}


def join(
    options: EngineOptions, folder: Path, progress: Callable[[str], None]
) -> Leader | Follower | None:
    """Connect to the other processes and let JAX know all devices; None for a single process."""
    if options.num_processes == 1:
        return None
    host, port = split_address(options.coordinator_address)
    facts = shared_facts(options, folder)
    if options.process_id:
        hosts = Follower(connect_to_leader(host, port, options, facts, progress))
    else:
        hosts = Leader(accept_processes(host, port, options, facts, progress))
    jax.config.update("jax_enable_preemption_service", False)  # it would intercept SIGTERM
    bound = f"[{host}]" if ":" in host else host
    try:
        jax.distributed.initialize(
            f"{bound}:{port + 1}",
            options.num_processes,
            options.process_id,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{bound}:{port + 1}",
            shutdown_timeout_seconds=5,
        )
    except RuntimeError as error:
        reason = (
            f"num_processes is {options.num_processes}, and JAX cannot bring them together: {error}"
        )
        hosts.abandon(reason)
        raise ModelError(reason) from None
    return hosts


def split_address(address: str | None) -> tuple[str, int]:
    host, _, port = (address or "").rpartition(":")
    return host.strip("[]"), int(port)


def shared_facts(options: EngineOptions, folder: Path) -> dict[str, Any]:
    """Return what must be equal in all processes."""
    facts = {name: value for name, value in asdict(options).items() if name not in PER_PROCESS}
    for name in ("kv_cache_dtype_skip_layers", "lora_target_modules"):
        facts[name] = list(facts[name] or ())  # as msgpack delivers it
    config = (folder / "config.json").read_bytes() if (folder / "config.json").exists() else b""
    files = [
        path
        for path in folder.rglob("*")
        if path.suffix == ".safetensors" or "weights" in path.parts
    ]
    sizes = sorted((path.name, path.stat().st_size) for path in files if path.is_file())
    code = [
        path.read_bytes()
        for path in sorted(Path(__file__).parents[2].rglob("*.py"))
        if "tests" not in path.parts
    ]
    return facts | {
        "the version of JAX": jax.__version__,
        "the digest of Quire's code": digest(b"".join(code)),
        "the digest of the model's config.json": digest(config),
        "the digest of the names and sizes of its weight files": digest(repr(sizes).encode()),
    }


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def accept_processes(
    host: str,
    port: int,
    options: EngineOptions,
    facts: dict[str, Any],
    progress: Callable[[str], None],
) -> dict[int, HostConnection]:
    """Return connections to all other processes, after comparing their facts with `facts`."""
    expected = range(1, options.num_processes)
    deadline = time.monotonic() + JOIN_SECONDS
    connections: dict[int, HostConnection] = {}
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise ModelError(
            f"coordinator_address is {host}:{port}, which cannot be listened at: {error}"
        ) from None
    with listener:
        try:
            while missing := [index for index in expected if index not in connections]:
                progress(f"waiting at {host}:{port} for process {', '.join(map(str, missing))}")
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection = HostConnection(listener.accept()[0])
                    index, peer_facts = receive_hello(connection)
                except TimeoutError:
                    raise ModelError(
                        f"process {missing[0]} has not come within {JOIN_SECONDS:g} seconds"
                    ) from None
                except (ConnectionLost, OSError) as error:
                    log.warning(
                        "a connection at %s:%d was not from a process of this engine: %s",
                        host,
                        port,
                        error,
                    )
                    continue
                reason = refusal_reason(index, peer_facts, facts, missing, options.num_processes)
                if reason is not None:
                    connection.send("refused", reason)
                    raise ModelError(f"the process at {connection.peer} is refused: {reason}")
                connections[index] = connection
        except BaseException as error:
            for connection in connections.values():
                connection.send("refused", f"process 0 could not begin: {error}")
            raise
    for connection in connections.values():
        connection.send("welcome")
    return connections


def receive_hello(connection: HostConnection) -> tuple[int, dict[str, Any]]:
    """Return (process index, facts) of a process that has just connected."""
    try:
        kind, values = connection.receive(HELLO_SECONDS)
        match kind, values:
            case "hello", [int(index), dict(theirs)]:
                return index, theirs
        raise ConnectionLost("it said something else than hello")
    except ConnectionLost:
        connection.close()
        raise


def refusal_reason(
    index: int, peer_facts: dict[str, Any], facts: dict[str, Any], missing: list[int], count: int
) -> str | None:
    """Return why a process is refused, or None."""
    for name in sorted(facts.keys() | peer_facts.keys()):
        if facts.get(name) != peer_facts.get(name):
            return (
                f"{name} is {peer_facts.get(name)!r} in process {index} and {facts.get(name)!r} in "
                "process 0; all processes need the same model and the same options"
            )
    if index not in missing:
        return f"process_id is {index}; it is taken, or not below num_processes ({count})"
    return None


def connect_to_leader(
    host: str,
    port: int,
    options: EngineOptions,
    facts: dict[str, Any],
    progress: Callable[[str], None],
) -> HostConnection:
    """Return a connection to process 0, which has accepted this process."""
    deadline = time.monotonic() + JOIN_SECONDS
    progress(f"waiting for process 0 at {host}:{port}")
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=HELLO_SECONDS)
            # On a port without a listener, a socket may connect to itself.
            if sock.getsockname() != sock.getpeername():
                break
            sock.close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ModelError(
                    f"coordinator_address is {host}:{port}; process 0 does not answer there: "
                    f"{error}"
                ) from None
        time.sleep(0.2)
    connection = HostConnection(sock)
    try:
        connection.send("hello", options.process_id, facts)
        kind, values = connection.receive(JOIN_SECONDS)
    except ConnectionLost as error:
        raise ModelError(
            f"process 0 at {host}:{port} did not take this process in: {error}"
        ) from None
    if kind != "welcome":
        raise ModelError(
            values[0]
            if kind == "refused"
            else f"process 0 at {host}:{port} said {kind}, not welcome"
        )
    return connection
