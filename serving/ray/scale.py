"""Number, placement and configuration of replicas."""

from dataclasses import dataclass, field
from typing import Any

from ...model.config import ModelError
from ..api.options import HOST, EngineOptions, SizedOptions, make_options
from ..http.settings import ServerSettings
from .affinity import ROUTINGS, Routing


@dataclass(frozen=True)
class ReplicaOptions:
    """The options of the replicas, named like their flags."""

    replicas: int | None = None  # None: 1, or scaled with the requests if max_replicas is set
    min_replicas: int | None = None
    max_replicas: int | None = None
    # Per replica, controls scaling; None: see `target`.
    target_ongoing_requests: float | None = None
    prefill_replicas: int = 0  # replicas that compute long prompts for the others
    routing: Routing = "prefix"
    # Ray resources of a replica; None: a CPU and the model's devices.
    replica_resources: dict[str, float] | None = None

    def __post_init__(self):
        for name, minimum in {
            "replicas": 1,
            "min_replicas": 0,
            "max_replicas": 1,
            "prefill_replicas": 0,
        }.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ModelError(f"{name} is {value}; it must be at least {minimum}")
        if self.routing not in ROUTINGS:
            raise ModelError(
                f"routing is {self.routing!r}; it must be one of {', '.join(ROUTINGS)}"
            )
        scaled = [
            name
            for name in ("min_replicas", "target_ongoing_requests")
            if getattr(self, name) is not None
        ]
        if self.max_replicas is None:
            if scaled:
                raise ModelError(
                    f"{scaled[0]} is given and max_replicas is not: it makes their number change"
                )
        elif self.replicas is not None:
            raise ModelError(
                "replicas is a fixed number and max_replicas makes it change: leave one out"
            )
        elif (self.min_replicas or 0) > self.max_replicas:
            raise ModelError(
                f"min_replicas is {self.min_replicas}; it must be at most max_replicas"
            )
        if self.target_ongoing_requests is not None and not self.target_ongoing_requests > 0:
            raise ModelError(
                f"target_ongoing_requests is {self.target_ongoing_requests}; it must be above 0"
            )

    def target(self, options: SizedOptions) -> float:
        """Target number of requests of a replica: three quarters of its maximum batch."""
        return self.target_ongoing_requests or max(1.0, 0.75 * options.max_running)

    def scaling_arguments(self, options: SizedOptions) -> dict[str, Any]:
        """Return the arguments of `serve.deployment` for scaling."""
        if self.max_replicas is None:
            return {"num_replicas": self.replicas or 1}
        min_replicas = 1 if self.min_replicas is None else self.min_replicas
        chosen = {
            "min_replicas": min_replicas,
            "max_replicas": self.max_replicas,
            "initial_replicas": max(min_replicas, 1),
        }
        return {"autoscaling_config": chosen | {"target_ongoing_requests": self.target(options)}}

    @property
    def initial_count(self) -> int:
        """Number of replicas at the start, including prefill replicas."""
        return self.prefill_replicas + (self.replicas or max(self.min_replicas or 1, 1))


@dataclass(frozen=True)
class DeploymentPlan:
    """The complete configuration of a deployment."""

    models: tuple[tuple[str | None, tuple[str, ...]], ...]  # (model, names that clients may use)
    settings: ServerSettings
    options: dict[str, Any]  # options of every engine
    scale: ReplicaOptions = field(default_factory=ReplicaOptions)
    log_json: bool = False
    log_level: str = "info"

    def __post_init__(self):
        for name, _ in self.models:
            make_options(name, **self.options)  # wrong options raise before anything starts
        for name in ("kv_cache_disk", "trace"):
            if self.options.get(name):
                raise ModelError(
                    f"{name} is one process's own; several replicas cannot share it: leave it out"
                )
        if self.scale.prefill_replicas and len(self.models) > 1:
            raise ModelError("prefill_replicas read for one model; there are several")
        if self.scale.prefill_replicas and not self.engine.enable_prefix_caching:
            raise ModelError(
                "prefill_replicas hand over pages of prompts: that needs enable_prefix_caching"
            )

    @property
    def engine(self) -> EngineOptions:
        return make_options(self.models[0][0], **self.options)

    @property
    def replica_options(self) -> dict[str, Any]:
        """The engine's options, with host memory for the pages that prefill replicas send."""
        if not self.scale.prefill_replicas or self.options.get("kv_cache_host_bytes"):
            return self.options
        return self.options | {"kv_cache_host_bytes": HOST}
