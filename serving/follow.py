"""A process whose devices belong to the engine of process 0: it repeats the calls that process 0 makes."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ..model.config import ModelError
from ..ops.sampling import SlotState
from .api.options import EngineOptions, options_of
from .build import config_of, folder_of, joined, make_runner, use_compile_cache
from .cache.page_moves import PageMoves
from .device.step_shape import Size
from .engine.cache_size import claim_memory
from .engine.runner import Runner
from .multihost.connection import Changes
from .multihost.leader import GRACE, Follower

log = logging.getLogger("quire")

CALLS: dict[str, Callable[..., Any]] = {
    "reset_slot": lambda runner, slot, *row: runner.reset_slot(slot, SlotState(*row)),
    "set_bias": lambda runner, slot, row, bias_V: runner.set_bias(slot, row, bias_V),
    "copy": lambda runner, copies, saves, loads: runner.move(PageMoves(copies=copies, saves=saves, loads=loads)),
    "catch_up": lambda runner, size, buffer: runner.catch_up(Size(*size), buffer),
    "reset": lambda runner: runner.reset(),
    "sleep": lambda runner, weights, pages: runner.sleep(weights, pages),
    "wake_up": lambda runner: runner.wake_up(),
}


def follow(model: str | Path | None = None, *, progress: Callable[[str], None] | None = None, **options: Any) -> None:
    """Be one of several processes that serve a model together, until process 0 ends.

    The options are those of process 0, with a `process_id` of its own. If process 0 is lost this process exits.
    """
    follow_options(options_of(model, **options), progress or (lambda note: None))


def follow_options(options: EngineOptions, progress: Callable[[str], None]) -> None:
    if not options.process_id:
        raise ModelError("process_id is 0, and process 0 leads; the others follow, from 1 to num_processes - 1")
    use_compile_cache()
    claim_memory(options)
    folder = folder_of(options)
    progress("reading config")
    config = config_of(folder, options)
    with joined(options, folder, progress) as hosts:
        assert isinstance(hosts, Follower)
        runner = make_runner(options, folder, config, hosts, progress).runner
        progress("following process 0")
        serve(runner, hosts)
        hosts.over = True
    log.info("process 0 has ended; programs compiled while serving: %d", runner.compiles.recompiles)


def serve(runner: Runner, hosts: Follower) -> None:
    """Call after call, a step behind at most: one that failed here is not to go unnoticed."""
    changes, before = Changes(), None
    try:
        while True:
            call, values = hosts.link.inbox.get()
            if call == "end":
                return
            if call != "step":
                CALLS[call](runner, *values)
                continue
            size, plain, *change = values
            result = runner.step(Size(*size), plain, changes.read(tuple(size), *change))
            jax.block_until_ready(before)
            before = result
    except Exception:
        time.sleep(GRACE)  # a step fails here too where another process is gone, and that is what to tell
        raise
