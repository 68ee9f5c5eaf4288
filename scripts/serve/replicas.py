"""`quire serve --engine ray`: several replicas of the server on Ray Serve."""

import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ...serving.http.settings import ServerSettings
from .. import options as o

PANEL = "Many replicas (--engine ray)"
# settings that Ray's HTTP server ignores
OURS = "uds", "admin", "lora_dir", "receive_seconds", "write_seconds"


def resources(text: str | dict[str, float]) -> dict[str, float]:
    """`CPU=2,GPU=1` by name."""
    if isinstance(text, dict):
        return text
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            found[name] = -1.0
        if not name or not found[name] >= 0:
            raise typer.BadParameter(f"{text!r} is not a list of resources: write CPU=2,GPU=1")
    return found


SCALE_OPTIONS = {
    "replicas": Annotated[
        int | None, o.option("Engines, each with its own weights and cache.", PANEL, "N", "1")
    ],
    "min_replicas": Annotated[
        int | None,
        o.option("Fewest replicas, where their number follows the load.", PANEL, "N", "1"),
    ],
    "max_replicas": Annotated[
        int | None,
        o.option("Most replicas; their number then follows the load.", PANEL, "N", "fixed"),
    ],
    "target_ongoing_requests": Annotated[
        float | None,
        o.option(
            "Requests that a replica should have on average.",
            PANEL,
            "N",
            "three quarters of --max-num-seqs",
        ),
    ],
    "prefill_replicas": Annotated[
        int | None,
        o.option("Further replicas that read long prompts for the others.", PANEL, "N", "0"),
    ],
    "routing": Annotated[
        str | None,
        o.option(
            "prefix: to the replica that has cached the prompt's beginning; round-robin: in turn.",
            PANEL,
            "HOW",
            "prefix",
        ),
    ],
    "replica_resources": Annotated[
        Any,
        o.option(
            "Ray's resources for each replica.",
            PANEL,
            "CPU=2,GPU=1",
            "CPU=1, and the model's GPUs or TPUs where the cluster has any",
            parser=resources,
        ),
    ],
}


def plan_of(given: dict[str, Any], wanted: Any, scale: dict[str, Any]) -> Any:
    """The deployment; `given` are the command's own options."""
    for name in OURS:
        if getattr(wanted.settings, name) != getattr(ServerSettings(), name):
            flag = f"--{name.replace('_', '-')}"
            raise o.UsageError(
                f"{flag} has no effect with --engine ray, whose server is Ray's; leave it out"
            )
    if given["engine"].get("enable_lora") or given.get("lora_modules"):
        raise o.UsageError(
            "--enable-lora and --engine ray do not go together yet: replicas serve no adapters"
        )
    # not at the top: `--help` must not wait for it
    from ...serving.ray.scale import DeploymentPlan, ReplicaOptions

    folders = [
        name if name is None or not Path(name).is_dir() else str(Path(name).resolve())
        for name in wanted.names
    ]
    models = tuple(zip(folders or [None], wanted.called, strict=True))
    logged = {"log_json": given["log_json"], "log_level": given["log_level"]}
    return DeploymentPlan(
        models, wanted.settings, wanted.options, ReplicaOptions(**scale), **logged
    )


def run(plan: Any, address: str | None) -> None:
    """On a cluster: deploy and return. On this machine: serve until a signal comes."""
    try:
        import ray  # noqa: F401 - to tell its absence from what may be wrong in a part of it
    except ImportError as error:
        raise o.UsageError(f"--engine ray needs Ray: pip install 'quire[ray]' ({error})") from None
    from ...serving.http.logs import setup_logging
    from ...serving.ray import deploy

    setup_logging(plan.log_json, plan.log_level)
    if plan.settings.port == 0:
        with socket.socket() as free:
            free.bind((plan.settings.host, 0))
            plan = replace(plan, settings=replace(plan.settings, port=free.getsockname()[1]))
    deploy.connect(address, plan)
    done = threading.Event()
    if address is None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: done.set())
    deploy.run(plan)
    print(f"ready: http://{plan.settings.host}:{plan.settings.port}", file=sys.stderr, flush=True)
    if address is None:
        done.wait()
        deploy.stop()
