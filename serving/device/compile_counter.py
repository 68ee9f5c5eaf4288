"""Counts XLA compilations, which must not occur while serving."""

import weakref

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Compilations of this process since `mark()`; cache hits count, since they stall too."""

    def __init__(self):
        self.total = 0
        self.marked = 0
        me = weakref.ref(self)  # listeners live as long as the process; a counter does not

        def listen(event: str, duration_secs: float, **labels) -> None:
            if event == EVENT and (counter := me()) is not None:
                counter.total += 1

        jax.monitoring.register_event_duration_secs_listener(listen)

    def mark(self) -> None:
        """Count compilations from now on as recompilations."""
        self.marked = self.total

    @property
    def recompiles(self) -> int:
        return self.total - self.marked
