"""How the processes of one engine find each other and check that all serve the same model with the same options."""

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

JOIN = 300.0  # seconds for all processes to connect
HELLO = 5.0  # seconds for a process that connected to say who it is
OWN = {  # what every process may choose for itself
    "model", "tokenizer", "skip_tokenizer_init", "coordinator_address", "process_id", "max_queued_requests",
    "pooling", "trace", "seed", "enable_prefix_caching", "revision", "download_dir", "generation_config",
    "override_generation_config",
}  # fmt: skip


def join(options: EngineOptions, folder: Path, progress: Callable[[str], None]) -> Leader | Follower | None:
    """Come together with the other processes, and let JAX know of all their devices; None if there is only this one."""
    if options.num_processes == 1:
        return None
    host, port = address_of(options.coordinator_address)
    facts = facts_of(options, folder)
    if options.process_id:
        hosts = Follower(come(host, port, options, facts, progress))
    else:
        hosts = Leader(gather(host, port, options, facts, progress))
    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM for itself
    bound = f"[{host}]" if ":" in host else host
    try:
        jax.distributed.initialize(
            f"{bound}:{port + 1}", options.num_processes, options.process_id, cluster_detection_method="deactivate",
            coordinator_bind_address=f"{bound}:{port + 1}", shutdown_timeout_seconds=5,
        )  # fmt: skip
    except RuntimeError as error:
        why = f"num_processes is {options.num_processes}, and JAX cannot bring them together: {error}"
        hosts.abandon(why)
        raise ModelError(why) from None
    return hosts


def address_of(address: str | None) -> tuple[str, int]:
    host, _, port = (address or "").rpartition(":")
    return host.strip("[]"), int(port)


def facts_of(options: EngineOptions, folder: Path) -> dict[str, Any]:
    """What must be the same in all processes."""
    found = {name: value for name, value in asdict(options).items() if name not in OWN}
    for name in ("kv_cache_dtype_skip_layers", "lora_target_modules"):
        found[name] = list(found[name] or ())  # as it arrives elsewhere
    config = (folder / "config.json").read_bytes() if (folder / "config.json").exists() else b""
    files = [path for path in folder.rglob("*") if path.suffix == ".safetensors" or "weights" in path.parts]
    sizes = sorted((path.name, path.stat().st_size) for path in files if path.is_file())
    code = [path.read_bytes() for path in sorted(Path(__file__).parents[2].rglob("*.py")) if "tests" not in path.parts]
    return found | {
        "the version of JAX": jax.__version__,
        "the digest of Quire's code": digest(b"".join(code)),
        "the digest of the model's config.json": digest(config),
        "the digest of the names and sizes of its weight files": digest(repr(sizes).encode()),
    }


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def gather(
    host: str, port: int, options: EngineOptions, facts: dict[str, Any], progress: Callable[[str], None]
) -> dict[int, HostConnection]:
    """Connections to all the other processes, whose facts were compared with these."""
    others, deadline = range(1, options.num_processes), time.monotonic() + JOIN
    connections: dict[int, HostConnection] = {}
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family, backlog=128)
    except OSError as error:
        raise ModelError(f"coordinator_address is {host}:{port}, which cannot be listened at: {error}") from None
    with listener:
        try:
            while missing := [index for index in others if index not in connections]:
                progress(f"waiting at {host}:{port} for process {', '.join(map(str, missing))}")
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection = HostConnection(listener.accept()[0])
                    index, theirs = said(connection)
                except TimeoutError:
                    raise ModelError(f"process {missing[0]} has not come within {JOIN:g} seconds") from None
                except (ConnectionLost, OSError) as error:
                    log.warning("a connection at %s:%d was not from a process of this engine: %s", host, port, error)
                    continue
                why = refusal(index, theirs, facts, missing, options.num_processes)
                if why is not None:
                    connection.send("refused", why)
                    raise ModelError(f"the process at {connection.peer} is refused: {why}")
                connections[index] = connection
        except BaseException as error:
            for connection in connections.values():
                connection.send("refused", f"process 0 could not begin: {error}")
            raise
    for connection in connections.values():
        connection.send("welcome")
    return connections


def said(connection: HostConnection) -> tuple[int, dict[str, Any]]:
    """(process, facts) of a process that has just connected."""
    try:
        kind, values = connection.receive(HELLO)
        match kind, values:
            case "hello", [int(index), dict(theirs)]:
                return index, theirs
        raise ConnectionLost("it said something else than hello")
    except ConnectionLost:
        connection.close()
        raise


def refusal(index: int, theirs: dict[str, Any], facts: dict[str, Any], missing: list[int], count: int) -> str | None:
    """Why a process is refused, if it is."""
    for name in sorted(facts.keys() | theirs.keys()):
        if facts.get(name) != theirs.get(name):
            return (
                f"{name} is {theirs.get(name)!r} in process {index} and {facts.get(name)!r} in process 0; all "
                "processes need the same model and the same options"
            )
    if index not in missing:
        return f"process_id is {index}; it is taken, or not below num_processes ({count})"
    return None


def come(
    host: str, port: int, options: EngineOptions, facts: dict[str, Any], progress: Callable[[str], None]
) -> HostConnection:
    """A connection to process 0, which has accepted this one."""
    deadline = time.monotonic() + JOIN
    progress(f"waiting for process 0 at {host}:{port}")
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=HELLO)
            if sock.getsockname() != sock.getpeername():  # a port that nobody listens at may be our own
                break
            sock.close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ModelError(
                    f"coordinator_address is {host}:{port}; process 0 does not answer there: {error}"
                ) from None
        time.sleep(0.2)
    connection = HostConnection(sock)
    try:
        connection.send("hello", options.process_id, facts)
        kind, values = connection.receive(JOIN)
    except ConnectionLost as error:
        raise ModelError(f"process 0 at {host}:{port} did not take this process in: {error}") from None
    if kind != "welcome":
        raise ModelError(values[0] if kind == "refused" else f"process 0 at {host}:{port} said {kind}, not welcome")
    return connection
