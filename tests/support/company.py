"""Requests that come while others run, on an engine that is stepped by hand."""

from quire.serving.engine.engine import Engine
from quire.serving.request.request import Request


def serve(
    engine: Engine, requests: dict[str, tuple], arrivals: dict[str, int]
) -> dict[str, Request]:
    """Every request at its end; `arrivals` are the steps at which they come."""
    got = {}
    step = 0
    while engine.busy or step <= max(arrivals.values()):
        for name, at in arrivals.items():
            if at == step:
                got[name] = engine.add(name, *requests[name])
        engine.step()
        step += 1
    engine.scheduler.check()
    return got
