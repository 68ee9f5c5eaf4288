"""Compiled programs by all that they are made of: a second start loads them, and neither traces nor
lowers any.

JAX's own compile cache is asked with the lowered program. To get one takes longer than to load what
was compiled. What that cache has loaded cannot be written again (XLA says that functions are not
found when it runs), so it is left out where programs are made to be kept.
"""

import hashlib
import logging
import os
import pickle
import platform
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

import jax
import jaxlib.version
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import PartitionSpec

from ...ops import native
from ...ops.cache_folder import code_state, home, make_room, publish
from ...ops.implementations import variance

Build = Callable[[jax.stages.Lowered], jax.stages.Compiled]

MAGIC = b"quirep01"
SUFFIX = ".program"
LIMIT = 1 << 30  # bytes of all files together

PREFIXES = "QUIRE_", "XLA_", "JAX_", "PJRT_"  # of settings in the environment
PLAIN: tuple[type, ...] = (
    bool,
    int,
    float,
    str,
    bytes,
    range,
    Enum,
    np.dtype,
    np.generic,
    PartitionSpec,
)  # said by their `repr`

log = logging.getLogger("quire")


class Call:
    """A jitted function with its arguments and static parameters."""

    def __init__(self, function: Any, args: tuple[Any, ...], **static):
        self.function = function
        self.args = args
        self.static = static

    def trace(self) -> jax.stages.Traced:
        return self.function.trace(*self.args, **self.static)


class Program(NamedTuple):
    """A program that is compiled or loaded in a thread."""

    compiled: Future[jax.stages.Compiled]
    variance: frozenset[str]  # why bits may depend on the batch
    out_info: Any = None  # of one that was lowered here

    def result(self) -> jax.stages.Compiled:
        return self.compiled.result()


class Kept(NamedTuple):
    """A compiled program in a file."""

    binary: bytes
    out: Any  # a tree like that of its results
    variance: frozenset[str]
    kernels: dict[str, bool]  # those that it may call, and whether they could be had


class Compiler:
    """Compiles programs in parallel, or loads them from a folder."""

    def __init__(self, folder: Path | None):
        self.folder, self.threads = folder, ThreadPoolExecutor()
        self.about = about_here() if folder else ""
        self.device = jax_settings.jax_default_device  # of this thread
        self.made: list[tuple[Path, Program]] = []  # to be kept
        self.describe_types = Describer(by_value=False)
        self.describe_values = Describer(by_value=True)
        self.pause = ExitStack()

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *error) -> None:
        # after Ctrl-C only those under way are waited for
        self.threads.shutdown(cancel_futures=True)
        self.pause.close()
        if self.folder and self.made and not any(error):
            Thread(target=keep, args=(self.folder, self.made), name="quire-program-cache").start()

    def make(self, call: Call, build: Build = jax.stages.Lowered.compile) -> Program:
        """Compile or load the program of a call."""
        path = self.path_of(call)
        if path is not None and (stored := read(path)) is not None:
            return Program(
                self.threads.submit(self.load, path, stored, call, build), stored.variance
            )
        if path is None:
            elsewhere.add(call.function)
        elif not self.made:
            self.pause.enter_context(pauses)
        traced = call.trace()
        reasons = variance(traced.jaxpr.jaxpr)
        lowered = traced.lower()
        program = Program(self.threads.submit(build, lowered), reasons, lowered.out_info)
        if path is not None and call.function not in elsewhere:
            self.made.append((path, program))
        return program

    def load(self, path: Path, stored: Kept, call: Call, build: Build) -> jax.stages.Compiled:
        """Load a stored program, or compile it if it cannot be loaded."""
        trees = jax.tree.structure((call.args, {})), jax.tree.structure(stored.out)
        try:
            return deserialize_and_load(
                stored.binary, *trees, execution_devices=[device_of(call.args)]
            )
        except Exception as error:  # whatever the runtime says
            log.warning("%s cannot be loaded, and the next start makes it again: %s", path, error)
            path.unlink(missing_ok=True)
        with jax.default_device(self.device):
            return build(call.trace().lower())

    def path_of(self, call: Call) -> Path | None:
        """The file of a call's program; None if it cannot be stored."""
        if self.folder is None:
            return None
        name = f"{call.function.__module__}.{call.function.__qualname__}"
        try:
            about = "\n".join(
                [
                    self.about,
                    name,
                    self.describe_types.describe(call.args),
                    self.describe_values.describe(call.static),
                ]
            )
        except TypeError as error:
            log.warning("%s is not kept for the next start: %s", name, error)
            return None
        return (
            self.folder / f"{hashlib.blake2b(about.encode(), digest_size=16).hexdigest()}{SUFFIX}"
        )


class Pauses:
    """Turns JAX's compilation cache off while programs that will be stored are compiled."""

    def __init__(self):
        self.lock = Lock()
        self.count = 0

    def __enter__(self) -> None:
        self.add(1)

    def __exit__(self, *error) -> None:
        self.add(-1)

    def add(self, delta: int) -> None:
        with self.lock:
            self.count += delta
            if self.count == max(delta, 0):
                jax.config.update("jax_enable_compilation_cache", delta < 0)
                compilation_cache.reset_cache()  # it looks at the setting once


jax_settings: Any = jax.config  # whose type lacks its settings
pauses = Pauses()
# functions of which this process may have programs from JAX's own cache
elsewhere: set[Any] = set()


def folder_of_programs() -> Path | None:
    """The folder of compiled programs, if Quire's own compile cache is in use; CPUs only."""
    is_cache_used = jax_settings.jax_enable_compilation_cache or pauses.count
    is_own_cache = jax_settings.jax_compilation_cache_dir == str(home("jax"))
    if jax.default_backend() != "cpu" or not is_cache_used or not is_own_cache:
        return None
    try:
        return native.build.private(home("programs"))
    except (NotImplementedError, OSError) as error:
        log.warning("compiled steps are not kept for the next start: %s", error)
        return None


def about_here() -> str:
    """Everything that all programs depend on: code, versions, processor and settings."""
    kernels = (
        f"{native.instruction_set()} {native.build.source_hash()}" if native.serves() else "none"
    )
    versions = platform.python_version(), jax.__version__, jaxlib.version.__version__
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = platform.machine(), cores, *native.build.cpu_info("model name", "flags", "Features")
    settings = {
        name: value for name, value in sorted(jax.config.values.items()) if "cache" not in name
    }
    chosen = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)
    }
    code = code_state("ops", "model", "serving", "sharding")
    return repr((kernels, versions, processor, settings, chosen, code, jax.devices()))


class Describer:
    """Describes all that a program can depend on in trees: types and shardings of arrays, or their
    values.

    Dataclasses are described once, since all programs of an engine have the same weights.
    """

    def __init__(self, by_value: bool):
        self.by_value = by_value
        self.described: dict[int, tuple[Any, str]] = {}  # by id, with the object that has this id

    def describe(self, x: Any) -> str:
        if is_dataclass(x) and not isinstance(x, type):
            if id(x) not in self.described:
                self.described[id(x)] = x, self.describe_dataclass(x)
            return self.described[id(x)][1]
        if isinstance(x, Mapping):
            items = (f"{key!r}: {self.describe(value)}" for key, value in x.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(x, tuple | list):
            return f"{type(x).__qualname__}({', '.join(map(self.describe, x))})"
        if isinstance(x, set | frozenset):
            return f"{{{', '.join(sorted(map(self.describe, x)))}}}"
        if isinstance(x, jax.Array) and not self.by_value and len(x.sharding.device_set) == 1:
            return f"{x.dtype}{x.shape}{x.aval.weak_type, x.sharding, x.committed}"
        if isinstance(x, jax.ShapeDtypeStruct):
            return f"{x.dtype}{x.shape}{x.weak_type, x.sharding}"
        if isinstance(x, np.ndarray):
            digest = hashlib.blake2b(x.tobytes()).hexdigest() if self.by_value else ""
            return f"{x.dtype}{x.shape}{digest}"
        if isinstance(x, type):
            return f"{x.__module__}.{x.__qualname__}"
        if x is None or isinstance(x, PLAIN):
            return repr(x)
        raise TypeError(f"{type(x).__qualname__} has no description")

    def describe_dataclass(self, x: Any) -> str:
        values = {item.name: getattr(x, item.name) for item in fields(x)}
        return f"{type(x).__module__}.{type(x).__qualname__}{self.describe(values)}"


def device_of(args: Any) -> Any:
    """The device of a program that is called with these arguments."""
    arrays = (leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))
    return next(
        (device for array in arrays for device in array.sharding.device_set), jax.devices()[0]
    )


def read(path: Path) -> Kept | None:
    """Read a stored program; None if it is missing, damaged, or was compiled with other kernels."""
    try:
        content = path.read_bytes()
        os.utime(path)  # when it was last used
    except OSError:
        return None
    begin = len(MAGIC) + hashlib.blake2b().digest_size
    if content[:begin] != MAGIC + hashlib.blake2b(content[begin:]).digest():
        log.warning("%s is damaged and made again", path)
        return None
    stored = pickle.loads(content[begin:])
    return stored if all(native.has(name) == had for name, had in stored.kernels.items()) else None


def keep(folder: Path, programs: Iterable[tuple[Path, Program]]) -> None:
    """Store programs, if there is room."""
    kernels = native.outcomes()
    files = {}
    try:
        for path, program in programs:
            binary, _, tree = serialize(program.result())
            out = jax.tree.unflatten(tree, range(tree.num_leaves))
            content = pickle.dumps(Kept(binary, out, program.variance, kernels))
            files[path] = MAGIC + hashlib.blake2b(content).digest() + content
        if not make_room(folder, SUFFIX, sum(map(len, files.values())), LIMIT):
            raise OSError("there is no room")
        for path, whole in files.items():
            with publish(path) as file:
                file.write_bytes(whole)
    except Exception as error:  # what is served does not depend on it
        log.warning("compiled steps are not kept for the next start: %s", error)
