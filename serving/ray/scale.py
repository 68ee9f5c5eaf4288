"""How many replicas there are, where they run, and what each of them serves."""

from dataclasses import dataclass, field
from typing import Any

from ...model.config import ModelError
from ..api.options import HOST, EngineOptions, SizedOptions, options_of
from ..http.settings import ServerSettings
from .affinity import ROUTINGS, Routing


@dataclass(frozen=True)
class ReplicaOptions:
    """The options of the replicas; the names are those of the flags."""

    replicas: int | None = None  # None: 1, or as many as the requests need where a most is given
    min_replicas: int | None = None
    max_replicas: int | None = None
    target_ongoing_requests: float | None = None  # a replica's, which decides how many there are; None: see `target`
    prefill_replicas: int = 0  # that compute long prompts for the others
    routing: Routing = "prefix"
    replica_resources: dict[str, float] | None = None  # of Ray's, for each; None: a CPU, and the devices of the model

    def __post_init__(self):
        for name, low in {"replicas": 1, "min_replicas": 0, "max_replicas": 1, "prefill_replicas": 0}.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ModelError(f"{name} is {value}; it must be at least {low}")
        if self.routing not in ROUTINGS:
            raise ModelError(f"routing is {self.routing!r}; it must be one of {', '.join(ROUTINGS)}")
        scaled = [name for name in ("min_replicas", "target_ongoing_requests") if getattr(self, name) is not None]
        if self.max_replicas is None:
            if scaled:
                raise ModelError(f"{scaled[0]} is given and max_replicas is not: it makes their number change")
        elif self.replicas is not None:
            raise ModelError("replicas is a fixed number and max_replicas makes it change: leave one out")
        elif (self.min_replicas or 0) > self.max_replicas:
            raise ModelError(f"min_replicas is {self.min_replicas}; it must be at most max_replicas")
        if self.target_ongoing_requests is not None and not self.target_ongoing_requests > 0:
            raise ModelError(f"target_ongoing_requests is {self.target_ongoing_requests}; it must be above 0")

    def target(self, options: SizedOptions) -> float:
        """Requests that a replica is to have: three quarters of those that it can compute at once."""
        return self.target_ongoing_requests or max(1.0, 0.75 * options.most_running)

    def number(self, options: SizedOptions) -> dict[str, Any]:
        """The same as arguments of `serve.deployment`."""
        if self.max_replicas is None:
            return {"num_replicas": self.replicas or 1}
        least = 1 if self.min_replicas is None else self.min_replicas
        chosen = {"min_replicas": least, "max_replicas": self.max_replicas, "initial_replicas": max(least, 1)}
        return {"autoscaling_config": chosen | {"target_ongoing_requests": self.target(options)}}

    @property
    def least(self) -> int:
        """Replicas of both kinds at the start."""
        return self.prefill_replicas + (self.replicas or max(self.min_replicas or 1, 1))


@dataclass(frozen=True)
class DeploymentPlan:
    """All that a deployment is made of."""

    models: tuple[tuple[str | None, tuple[str, ...]], ...]  # (model, the names that clients may use)
    settings: ServerSettings
    options: dict[str, Any]  # of every engine
    scale: ReplicaOptions = field(default_factory=ReplicaOptions)
    log_json: bool = False
    log_level: str = "info"

    def __post_init__(self):
        for name, _ in self.models:
            options_of(name, **self.options)  # wrong ones are refused before anything is started
        for name in ("kv_cache_disk", "trace"):
            if self.options.get(name):
                raise ModelError(f"{name} is one process's own; several replicas cannot share it: leave it out")
        if self.scale.prefill_replicas and len(self.models) > 1:
            raise ModelError("prefill_replicas read for one model; there are several")
        if self.scale.prefill_replicas and not self.engine.enable_prefix_caching:
            raise ModelError("prefill_replicas hand over pages of prompts: that needs enable_prefix_caching")

    @property
    def engine(self) -> EngineOptions:
        return options_of(self.models[0][0], **self.options)

    @property
    def chosen(self) -> dict[str, Any]:
        """The engine's options, with host memory for the pages that prefill replicas send."""
        if not self.scale.prefill_replicas or self.options.get("kv_cache_host_bytes"):
            return self.options
        return self.options | {"kv_cache_host_bytes": HOST}
