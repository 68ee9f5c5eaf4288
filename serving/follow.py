"""Follower processes, whose devices serve the engine of process 0 by repeating its calls."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ..model.config import ModelError
from ..ops.sampling import SlotState
from .api.options import EngineOptions, make_options
from .build import config_of, folder_of, joined, make_runner, use_compile_cache
from .cache.page_moves import PageMoves
from .device.step_shape import Size
from .engine.cache_size import claim_memory
from .engine.runner import Runner
from .multihost.connection import BufferDeltas
from .multihost.leader import GRACE, Follower

log = logging.getLogger("quire")

CALLS: dict[str, Callable[..., Any]] = {
    "reset_slot": lambda runner, slot, *row: runner.reset_slot(slot, SlotState(*row)),
    "set_bias": lambda runner, slot, row, bias_V: runner.set_bias(slot, row, bias_V),
    "copy": lambda runner, copies, saves, loads: runner.move(
        PageMoves(copies=copies, saves=saves, loads=loads)
    ),
    "draft_prefill": lambda runner, size, buffer: runner.draft_prefill(Size(*size), buffer),
    "reset": lambda runner: runner.reset(),
    "sleep": lambda runner, weights, pages: runner.sleep(weights, pages),
    "wake_up": lambda runner: runner.wake_up(),
}


def follow(
    model: str | Path | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Join the processes that serve a model together, until process 0 ends.

    The options are those of process 0, with another `process_id`. If process 0 is lost, this
    process exits.
    """
    follow_options(make_options(model, **options), progress or (lambda note: None))


def follow_options(options: EngineOptions, progress: Callable[[str], None]) -> None:
    if not options.process_id:
        raise ModelError(
            "process_id is 0, and process 0 leads; the others follow, from 1 to num_processes - 1"
        )
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
        hosts.has_ended = True
    log.info("process 0 has ended; programs compiled while serving: %d", runner.compiles.recompiles)


def serve(runner: Runner, hosts: Follower) -> None:
    """Repeat calls, at most one step behind, so that a failed step is noticed."""
    changes = BufferDeltas()
    previous = None
    try:
        while True:
            call, values = hosts.link.inbox.get()
            if call == "end":
                return
            if call != "step":
                CALLS[call](runner, *values)
                continue
            size, is_plain, *change = values
            result = runner.step(Size(*size), is_plain, changes.decode(tuple(size), *change))
            jax.block_until_ready(previous)
            previous = result
    except Exception:
        # The step failed because another process is gone, which is reported instead.
        time.sleep(GRACE)
        raise
