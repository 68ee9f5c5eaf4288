"""Settings of every test run. They must be in the environment before JAX is imported."""

import gc
import os
from pathlib import Path

import hypothesis
import pytest

from quire.tests.support.cases import cases

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "tests"

for name, value in {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # compiling takes longer than running at these sizes
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "HF_HUB_OFFLINE": "1",  # a test that needs the network is a bug
}.items():
    os.environ.setdefault(name, value)

# No example may fail because the machine is slow.
hypothesis.settings.register_profile(
    "quire", max_examples=cases(100), deadline=None, print_blob=True
)
hypothesis.settings.load_profile("quire")


MAX_PROGRAMS = (
    400  # thousands of compiled programs in one process exhaust the memory mappings of LLVM
)


class CompiledPrograms:
    """Counts the compiled programs that JAX caches in this process; clearing them recompiles."""

    def __init__(self):
        import jax

        self.count = 0
        self.forget = jax.clear_caches
        jax.monitoring.register_event_duration_secs_listener(self.listen)

    def listen(self, event: str, *_: object, **__: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def forget_many(self) -> None:
        if self.count > MAX_PROGRAMS:
            gc.collect()
            self.forget()
            self.count = 0


@pytest.fixture(scope="session")
def programs():
    return CompiledPrograms()


@pytest.fixture(autouse=True, scope="module")
def few_programs_a_module(programs):
    yield
    programs.forget_many()


@pytest.fixture
def few_programs(programs):
    """Forget compiled programs after each test; for modules in which every test compiles a model."""
    yield
    programs.forget_many()


@pytest.fixture
def compiled_quickly(monkeypatch):
    """Compile in half the time; for tests that compare numbers within a tolerance.

    Not for tests that compare bitwise: without XLA's fusion emitters the results of a row depend on
    the batch.
    """
    from jax._src import compiler

    from quire.tests.support import quick

    options = compiler.get_compile_options

    def quickly(*args, env_options_overrides=None, **kwargs):
        return options(
            *args, env_options_overrides=quick.OPTIONS | (env_options_overrides or {}), **kwargs
        )

    monkeypatch.setattr(compiler, "get_compile_options", quickly)


@pytest.fixture
def interpreted_once(monkeypatch):
    """Compile an interpreted GPU kernel once for all of its threads.

    The interpreter compiles it for each thread, which takes most of its time.
    """
    from threading import Lock

    import jax
    from jax._src.pallas.mosaic.interpret import thread_map

    from quire.tests.support import quick

    programs = {}
    lock = Lock()

    def run(jaxpr, consts, *args):
        operands = (consts, *args)
        key = id(jaxpr), *((x.shape, x.dtype) for x in jax.tree.leaves(operands))
        with lock:
            if key not in programs:
                traced = jax.jit(
                    lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args) and None
                ).trace(*operands)
                programs[key] = jaxpr, traced.lower().compile(quick.OPTIONS)
        programs[key][1](*operands)

    monkeypatch.setattr(thread_map, "_run_jaxpr", run, raising=False)
