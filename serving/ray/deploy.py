"""Deploys a plan on Ray Serve, on a cluster or on this machine only."""

import math
import os
from typing import Any, cast

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from ...model.config import ModelError
from ..api.options import PARALLEL
from .front import APP, ENGINE, FRONT, READER, Front
from .replica import PrefillReplica, Replica
from .router import Router
from .scale import DeploymentPlan

THREADS = "PJRT_NPROC"  # threads of XLA; by default each replica would use all cores
# Serve gives up proxies that take longer to start.
PATIENCE = "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"


def application(plan: DeploymentPlan) -> serve.Application:
    """Return the application: front, replicas, and prefill replicas if planned."""
    actors = actor_options(plan)
    options = plan.engine.on("gpu" if actors["num_gpus"] else "cpu")
    shared: dict[str, Any] = {
        "ray_actor_options": actors,
        # This many wait at the replica, which knows priorities.
        "max_ongoing_requests": 2 * options.max_running,
        "max_queued_requests": options.max_queued_requests or -1,  # the rest wait at the front
        "request_router_config": RequestRouterConfig(
            # Ray's type lacks the name of a class.
            request_router_class=cast(Any, f"{Router.__module__}:{Router.__name__}"),
            request_router_kwargs={"routing": plan.scale.routing},
        ),
        "graceful_shutdown_timeout_s": plan.settings.shutdown_grace,
        "health_check_period_s": 5,
    }
    engine = serve.deployment(name=ENGINE, **shared, **plan.scale.scaling_arguments(options))(
        Replica
    )
    front = serve.deployment(
        name=FRONT,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=plan.settings.max_connections,
        graceful_shutdown_timeout_s=plan.settings.shutdown_grace,
    )(Front)
    if not plan.scale.prefill_replicas:
        return front.bind(plan, engine.bind(plan))
    readers = serve.deployment(name=READER, **shared, num_replicas=plan.scale.prefill_replicas)(
        PrefillReplica
    ).bind(plan)
    return front.bind(plan, engine.bind(plan, readers), readers)


def actor_options(plan: DeploymentPlan) -> dict[str, Any]:
    """Return the machine resources of a replica."""
    resources = dict(plan.scale.replica_resources or default_resources(plan))
    cpus = resources.pop("CPU", 0)
    options: dict[str, Any] = {
        "num_cpus": cpus,
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
    }
    if THREADS not in os.environ:
        options["runtime_env"] = {"env_vars": {THREADS: str(max(1, int(cpus)))}}
    return options


def default_resources(plan: DeploymentPlan) -> dict[str, float]:
    """Return a CPU and, if the cluster has accelerators, as many as the model needs."""
    available = ray.cluster_resources()
    options = plan.engine
    devices = math.prod(getattr(options, name) for name in PARALLEL.values())
    return {"CPU": 1.0} | {kind: float(devices) for kind in ("GPU", "TPU") if available.get(kind)}


def connect(address: str | None, plan: DeploymentPlan) -> None:
    """Connect to a cluster, or start one on this machine for the lifetime of this process."""
    if address is not None:
        ray.init(address=address, log_to_driver=False)
        return
    # The default of 5 s is too short while all cores load replicas.
    os.environ.setdefault(PATIENCE, "60")
    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    available = ray.cluster_resources()
    resources = plan.scale.replica_resources or default_resources(plan)
    for name, amount in resources.items():
        has = available.get(name, 0)
        count = plan.scale.initial_count
        if amount * count > has:
            raise ModelError(
                f"{count} replicas of {amount:g} {name} do not fit: this machine has {has:g}; "
                f"replica_resources, as in {name}={has / count:.2g}, says what one takes"
            )


def run(plan: DeploymentPlan) -> None:
    """Deploy the plan, replacing the previous one replica by replica after their answers.

    Returns when everything runs.
    """
    settings = plan.settings
    http = {
        "host": settings.host,
        "port": settings.port,
        "keep_alive_timeout_s": int(settings.idle_seconds),
    }
    serve.start(http_options=http)
    try:
        serve.run(application(plan), name=APP, route_prefix="/")
    except RuntimeError as error:
        raise ModelError(f"the replicas cannot be started: {reason() or error}") from None


def reason() -> str:
    """Return the last error line of a replica that could not start."""
    deployments = serve.status().applications[APP].deployments.values()
    lines = [
        line.strip()
        for deployment in deployments
        for line in deployment.message.splitlines()
        if "Error: " in line
    ]
    return lines[-1].partition("Error: ")[2] if lines else ""


def stop() -> None:
    """Stop the deployment on this machine; answers may finish within the grace period."""
    serve.delete(APP)
    serve.shutdown()
    ray.shutdown()
