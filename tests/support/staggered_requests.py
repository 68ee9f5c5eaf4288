"""Requests that arrive while others run, on an engine that the test steps."""

from quire.serving.engine.engine import Engine
from quire.serving.request.request import Request


def serve(
    engine: Engine, requests: dict[str, tuple], arrivals: dict[str, int]
) -> dict[str, Request]:
    """Serve all requests; returns the finished ones. `arrivals` are steps."""
    started_requests = {}
    step = 0
    while engine.busy or step <= max(arrivals.values()):
        for name, at in arrivals.items():
            if at == step:
                started_requests[name] = engine.add(name, *requests[name])
        engine.step()
        step += 1
    engine.scheduler.check()
    return started_requests
