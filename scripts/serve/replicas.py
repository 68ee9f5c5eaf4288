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
# Server settings that do not apply to Ray's HTTP server.
UNSUPPORTED_SETTINGS = "uds", "admin", "lora_dir", "receive_seconds", "write_seconds"


def parse_resources(text: str | dict[str, float]) -> dict[str, float]:
    """Parse Ray resources such as `CPU=2,GPU=1` into amounts by name."""
    if isinstance(text, dict):
        return text
    resources: dict[str, float] = {}
    for item in text.split(","):
        name, _, amount = item.strip().partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = -1.0
        if not name or not resources[name] >= 0:
            raise typer.BadParameter(f"{text!r} is not a list of resources: write CPU=2,GPU=1")
    return resources


SCALE_OPTIONS = {
    "replicas": Annotated[
        int | None,
        o.option("Number of replicas, each with its own weights and KV cache.", PANEL, "N", "1"),
    ],
    "min_replicas": Annotated[
        int | None,
        o.option("Minimum number of replicas when autoscaling.", PANEL, "N", "1"),
    ],
    "max_replicas": Annotated[
        int | None,
        o.option("Maximum number of replicas; turns on autoscaling.", PANEL, "N", "no autoscaling"),
    ],
    "target_ongoing_requests": Annotated[
        float | None,
        o.option(
            "Autoscaling target: average number of ongoing requests per replica.",
            PANEL,
            "N",
            "three quarters of --max-num-seqs",
        ),
    ],
    "prefill_replicas": Annotated[
        int | None,
        o.option(
            "Additional replicas that only prefill long prompts (disaggregated prefill).",
            PANEL,
            "N",
            "0",
        ),
    ],
    "routing": Annotated[
        str | None,
        o.option(
            "Routing policy. prefix: to the replica that has cached the prompt's prefix; "
            "round-robin: to each replica in turn.",
            PANEL,
            "HOW",
            "prefix",
        ),
    ],
    "replica_resources": Annotated[
        Any,
        o.option(
            "Ray resources of each replica.",
            PANEL,
            "CPU=2,GPU=1",
            "CPU=1, and GPUs or TPUs for the model if the cluster has any",
            parser=parse_resources,
        ),
    ],
}


def make_plan(values: dict[str, Any], setup: Any, scale: dict[str, Any]) -> Any:
    """Make the deployment plan.

    Args:
        values: The values of all options of `quire serve`.
        setup: The `ServerSetup` made from them.
        scale: The replica options that are set.
    """
    for name in UNSUPPORTED_SETTINGS:
        if getattr(setup.settings, name) != getattr(ServerSettings(), name):
            flag = f"--{name.replace('_', '-')}"
            raise o.UsageError(
                f"{flag} has no effect with --engine ray, whose server is Ray's; leave it out"
            )
    if values["engine"].get("enable_lora") or values.get("lora_modules"):
        raise o.UsageError(
            "--enable-lora and --engine ray do not go together yet: replicas serve no adapters"
        )
    # not at the top: `--help` must not wait for it
    from ...serving.ray.scale import DeploymentPlan, ReplicaOptions

    folders = [
        name if name is None or not Path(name).is_dir() else str(Path(name).resolve())
        for name in setup.models
    ]
    models = tuple(zip(folders or [None], setup.served_names, strict=True))
    log_options = {"log_json": values["log_json"], "log_level": values["log_level"]}
    return DeploymentPlan(
        models, setup.settings, setup.options, ReplicaOptions(**scale), **log_options
    )


def run(plan: Any, address: str | None) -> None:
    """Deploy on a cluster and return, or serve on this machine until SIGINT or SIGTERM."""
    try:
        import ray  # noqa: F401 - tells a missing Ray from an import error inside of Ray
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
    stopped = threading.Event()
    if address is None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
    deploy.run(plan)
    print(f"ready: http://{plan.settings.host}:{plan.settings.port}", file=sys.stderr, flush=True)
    if address is None:
        stopped.wait()
        deploy.stop()
