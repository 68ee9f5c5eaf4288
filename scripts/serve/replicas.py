"""`quire serve --engine ray`: several replicas of the server on Ray Serve."""

import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options as o

PANEL = "Many replicas (--engine ray)"
OURS = {  # options of `quire serve` that Ray's HTTP server ignores, with their defaults
    "uds": None, "admin": False, "receive_seconds": 30.0, "write_seconds": 30.0,
}  # fmt: skip


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


def many(name: str, help: str, default: str, metavar: str = "N"):
    return typer.Option(name, help=help, metavar=metavar, show_default=default, rich_help_panel=PANEL)


SCALE_OPTIONS = {
    "replicas": Annotated[int | None, many("--replicas", "Engines, each with its own weights and cache.", "1")],
    "min_replicas": Annotated[
        int | None, many("--min-replicas", "Fewest replicas, where their number follows the load.", "1")
    ],
    "max_replicas": Annotated[
        int | None, many("--max-replicas", "Most replicas; their number then follows the load.", "fixed")
    ],
    "target_ongoing_requests": Annotated[
        float | None,
        many(
            "--target-ongoing-requests",
            "Requests that a replica should have on average.",
            "three quarters of --max-num-seqs",
        ),
    ],
    "prefill_replicas": Annotated[
        int | None, many("--prefill-replicas", "Further replicas that read long prompts for the others.", "0")
    ],
    "routing": Annotated[
        str | None,
        many(
            "--routing",
            "prefix: to the replica that has cached the prompt's beginning; round-robin: in turn.",
            "prefix",
            "HOW",
        ),
    ],
    "replica_resources": Annotated[
        Any,
        typer.Option(
            "--replica-resources",
            help="Ray's resources for each replica.",
            metavar="CPU=2,GPU=1",
            parser=resources,
            show_default="CPU=1, and the model's GPUs or TPUs where the cluster has any",
            rich_help_panel=PANEL,
        ),
    ],
}


def plan_of(given: dict[str, Any], wanted: Any, scale: dict[str, Any]) -> Any:
    """The deployment; `given` are the command's own options."""
    for name, default in OURS.items():
        if given[name] != default:
            flag = f"--{name.replace('_', '-')}"
            raise o.UsageError(f"{flag} has no effect with --engine ray, whose server is Ray's; leave it out")
    from ...serving.ray.scale import Plan, Scale  # not at the top: `--help` must not wait for it

    folders = [name if name is None or not Path(name).is_dir() else str(Path(name).resolve()) for name in wanted.names]
    models = tuple(zip(folders or [None], wanted.called, strict=True))
    logged = {"log_json": given["log_json"], "log_level": given["log_level"]}
    return Plan(models, wanted.settings, wanted.options, Scale(**scale), **logged)


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
