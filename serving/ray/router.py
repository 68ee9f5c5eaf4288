"""Ray Serve's interface to `Affinity`."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .affinity import Affinity


class Router(RequestRouter):
    """The router of each process that sends calls.

    It counts the requests that it has sent, because no other count is as recent.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self.affinity = Affinity(**kwargs)
        self.open: dict[tuple[str, ReplicaID], int] = {}  # calls in flight

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in order, full ones last; Serve calls this again later if none
        accepts.
        """
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = dict.fromkeys(named, 0)
        for (_, replica), count in self.open.items():
            if replica.unique_id in loads:
                loads[replica.unique_id] += count
        prefix, tried = routing_hints(pending_request)
        return [[named[name]] for name in self.affinity.order(prefix, loads, tried)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        key = (pending_request.metadata.internal_request_id, replica_id)
        self.open[key] = self.open.get(key, 0) + 1
        prefix, tried = routing_hints(pending_request)
        self.affinity.record_sent(prefix, replica_id.unique_id)
        if isinstance(tried, list):
            tried.append(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        key = (internal_request_id, replica_id)
        if self.open.get(key, 0) > 1:
            self.open[key] -= 1
        else:
            self.open.pop(key, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.affinity.retain({replica.replica_id.unique_id for replica in replicas})
        self.open = {key: count for key, count in self.open.items() if key[1] in self.curr_replicas}


def routing_hints(request: PendingRequest | None) -> tuple[Sequence[bytes], Sequence[str]]:
    """Return (prefix digests, replicas that failed on the call), if its first argument has them."""
    call = request.args[0] if request is not None and request.args else None
    return getattr(call, "prefix", ()), getattr(call, "tried", ())
