"""Deploys a plan on Ray Serve, on a cluster or on this machine alone."""

import math
import os
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from ...model.config import ModelError
from ..api.options import PARALLEL
from .front import APP, ENGINE, FRONT, READER, Front
from .replica import PrefillReplica, Replica
from .router import Router
from .scale import DeploymentPlan

THREADS = "PJRT_NPROC"  # XLA's threads; by default each replica would take one a core of the machine
PATIENCE = "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"  # Serve gives up a proxy that has not started by then


def application(plan: DeploymentPlan) -> serve.Application:
    """Front, replicas, and prefill replicas if the plan has any."""
    actors = actor_options(plan)
    options = plan.engine.on("gpu" if actors["num_gpus"] else "cpu")
    shared: dict[str, Any] = {
        "ray_actor_options": actors,
        "max_ongoing_requests": 2 * options.most_running,  # so many wait at the replica, which knows priorities
        "max_queued_requests": options.max_queued_requests or -1,  # and the others at the front
        "request_router_config": RequestRouterConfig(
            request_router_class=f"{Router.__module__}:{Router.__name__}",
            request_router_kwargs={"routing": plan.scale.routing},
        ),
        "graceful_shutdown_timeout_s": plan.settings.shutdown_grace,
        "health_check_period_s": 5,
    }
    engine = serve.deployment(name=ENGINE, **shared, **plan.scale.number(options))(Replica)
    front = serve.deployment(
        name=FRONT,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=plan.settings.max_connections,
        graceful_shutdown_timeout_s=plan.settings.shutdown_grace,
    )(Front)
    if not plan.scale.prefill_replicas:
        return front.bind(plan, engine.bind(plan))
    readers = serve.deployment(name=READER, **shared, num_replicas=plan.scale.prefill_replicas)(PrefillReplica).bind(
        plan
    )
    return front.bind(plan, engine.bind(plan, readers), readers)


def actor_options(plan: DeploymentPlan) -> dict[str, Any]:
    """What each replica gets of the machines."""
    resources = dict(plan.scale.replica_resources or default_resources(plan))
    cpus = resources.pop("CPU", 0)
    found: dict[str, Any] = {"num_cpus": cpus, "num_gpus": resources.pop("GPU", 0), "resources": resources}
    if THREADS not in os.environ:
        found["runtime_env"] = {"env_vars": {THREADS: str(max(1, int(cpus)))}}
    return found


def default_resources(plan: DeploymentPlan) -> dict[str, float]:
    """A CPU, and as many accelerators as the model is spread over, where the cluster has any."""
    there, options = ray.cluster_resources(), plan.engine
    devices = math.prod(getattr(options, name) for name in PARALLEL.values())
    return {"CPU": 1} | {kind: devices for kind in ("GPU", "TPU") if there.get(kind)}


def connect(address: str | None, plan: DeploymentPlan) -> None:
    """To a cluster, or to one made on this machine for as long as this process lives."""
    if address is not None:
        ray.init(address=address, log_to_driver=False)
        return
    os.environ.setdefault(PATIENCE, "60")  # its own 5 are too few where all cores load replicas
    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    there, wanted = ray.cluster_resources(), plan.scale.replica_resources or default_resources(plan)
    for name, each in wanted.items():
        if each * plan.scale.least > there.get(name, 0):
            raise ModelError(
                f"{plan.scale.least} replicas of {each:g} {name} do not fit: this machine has {there.get(name, 0):g}; "
                f"replica_resources, as in {name}={there.get(name, 0) / plan.scale.least:.2g}, says what one takes"
            )


def run(plan: DeploymentPlan) -> None:
    """Deploy the plan, in place of what was deployed before: replica after replica, none of them in the middle of an
    answer. Returns when all of it runs."""
    settings = plan.settings
    http = {"host": settings.host, "port": settings.port, "keep_alive_timeout_s": int(settings.idle_seconds)}
    serve.start(http_options=http)
    try:
        serve.run(application(plan), name=APP, route_prefix="/")
    except RuntimeError as error:
        raise ModelError(f"the replicas cannot be started: {reason() or error}") from None


def reason() -> str:
    """The last line of what a replica said when it could not start."""
    deployments = serve.status().applications[APP].deployments.values()
    lines = [line.strip() for one in deployments for line in one.message.splitlines() if "Error: " in line]
    return lines[-1].partition("Error: ")[2] if lines else ""


def stop() -> None:
    """End what runs on this machine; answers may be finished within their grace."""
    serve.delete(APP)
    serve.shutdown()
    ray.shutdown()
