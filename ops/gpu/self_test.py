"""Kernels for NVIDIA GPUs serve the kinds of work in which they passed a trial on this card.

Cards, drivers and compilers differ. So before a kernel serves a kind of work, a process of its own,
which may crash or hang, tries it against float64, again and again, since a race shows as other
bits. A pass is remembered on disk; a kind that fails is left to XLA, and the log says why. A
library that is missing is an error and not left to XLA. Of several processes all take the kernel or
none. `QUIRE_MOSAIC=off` turns the kernels off, `QUIRE_MOSAIC=trusted` uses them without the trial.
"""

import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .. import cache_folder
from ..errors import MissingLibrary
from . import graphs

SECONDS = 240  # for a trial: it starts JAX and compiles a few kernels
WAIT = 1800  # seconds for the verdicts of other processes, which may still be reading weights
REPEATS = 50
LAYERS = 3  # of a case in a step
# exit status of the process that tries, when it cannot import what the kernel needs
MISSING_LIBRARY = 3
MOSAIC = "jax.experimental.pallas.mosaic_gpu"  # compilers of kernels
TRITON = "jax.experimental.pallas.triton"
REMEDY = (
    "pip install 'quire[cuda]' (or 'quire[cuda12]') brings all that the kernels for NVIDIA GPUs "
    "need; QUIRE_MOSAIC=off starts without them, slower"
)
A_ROW = 2  # times the error allowed of all rows together is allowed of one
PACKAGES = (
    "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc",
    "flashinfer-python", "jax-tvm-ffi", "apache-tvm-ffi",
)  # fmt: skip
log = logging.getLogger("quire")
lock = Lock()


class Case(Protocol):
    """One piece of work of a trial: what the kernel computes from arrays, and what it should."""

    @property
    def name(self) -> str: ...

    @property
    def allowed(self) -> float:
        """The largest ||out - wanted|| / ||wanted||."""
        ...

    def build(self, seed: int) -> tuple[Any, Any, np.ndarray]:
        """(held, given, wanted): what is donated, what is only read, and the result in float64, of
        `out`'s shape.
        """
        ...

    def run(self, held: Any, given: Any) -> tuple[Any, Any]:
        """(out [..., numbers of a row], held), traced into one program; the same again from what it
        returned.
        """
        ...


@dataclass(frozen=True)
class InLayers:
    """A case in a step of several layers, each with its own numbers and after the one before, as in
    a model.
    """

    case: Case

    @property
    def name(self) -> str:
        return f"{self.case.name}, in a step of {LAYERS} layers"

    @property
    def allowed(self) -> float:
        return self.case.allowed

    def build(self, seed: int):
        held, given, wanted = zip(
            *(self.case.build(seed + layer) for layer in range(LAYERS)), strict=True
        )
        return held, given, np.stack(wanted)

    def run(self, held, given):
        out = None
        outs = []
        after = []
        for held_here, given_here in zip(held, given, strict=True):
            given_here, _ = jax.lax.optimization_barrier((given_here, out))
            out, kept = self.case.run(held_here, given_here)
            outs.append(out)
            after.append(kept)
        return jnp.stack(outs), tuple(after)


@dataclass(frozen=True)
class TriedKernel:
    """A kernel and its trial."""

    # has `cases(kind) -> list[Case]`, where kind is a dict of JSON; the process that tries imports
    # it
    module: str
    work: str  # "attention": what it serves, for the log
    sources: Iterable[Path]  # on which its results depend, beside this file
    # why it is not there, once it was built for a kind
    ready: Callable[[dict], str | None] = lambda kind: None
    # the module that the kernel is written with; None: `ready` finds out
    compiler: str | None = MOSAIC


@dataclass(frozen=True)
class Found:
    """What a case showed."""

    error: float  # ||out - wanted|| / ||wanted||; NaN where anything is NaN
    worst_row: float  # the same of the row that is farthest off
    other_bits: int  # runs of REPEATS whose bits are not those of the first
    allowed: float

    @property
    def wrong(self) -> str | None:
        if not self.error < self.allowed:
            return f"by {self.error:.1e}, where {self.allowed:.0e} is allowed"
        if not self.worst_row < A_ROW * self.allowed:
            return (
                f"in one row by {self.worst_row:.1e}, where {A_ROW * self.allowed:.0e} is allowed"
            )
        if self.other_bits:
            return f"in having other bits in {self.other_bits} of {REPEATS} runs"
        return None


def measure(case: Case, seed: int, repeats: int = REPEATS) -> Found:
    """Run a case in this process, compiled as a step is."""
    held, given, wanted = case.build(seed)
    run = graphs.compile_step(jax.jit(case.run, donate_argnums=0).lower(held, given))
    first = None
    other_bits = 0
    for _ in range(repeats):
        out, held = run(held, given)
        bits = np.asarray(out)
        first = bits if first is None else first
        other_bits += bits.tobytes() != first.tobytes()
    assert first is not None and first.shape == wanted.shape, (first, wanted.shape)
    off_R, size_R = (
        np.linalg.norm(x.reshape(-1, x.shape[-1]), axis=1)
        for x in (first.astype(np.float64) - wanted, wanted)
    )
    # A row that should be zero, or nearly, is judged beside a tenth of the usual row.
    usual = np.linalg.norm(size_R) / np.sqrt(len(size_R))
    worst_row = np.max(off_R / np.maximum(size_R, 0.1 * usual))
    return Found(
        float(np.linalg.norm(off_R) / np.linalg.norm(size_R)),
        float(worst_row),
        other_bits,
        case.allowed,
    )


def require_pass(kernel: TriedKernel, kind: dict, declined: str | None = None) -> None:
    """Raises NotImplementedError, with the reason, unless the kernel may serve this kind of work:
    see `unverified`.
    """
    if (reason := unverified(kernel, kind, declined)) is not None:
        raise NotImplementedError(reason)


def unverified(kernel: TriedKernel, kind: dict, declined: str | None = None) -> str | None:
    """Why the kernel must not serve this kind of work; None if it may in every process.

    `declined` is why this process's card cannot run it, if it is known before a trial. A kernel
    that could run and whose libraries are missing raises MissingLibrary.
    """
    if declined is None and kernel.compiler is not None and os.environ.get("QUIRE_MOSAIC") != "off":
        import_compiler(kernel.compiler, kernel.work)
    with lock:  # others wait until the trial is done
        reason = verdict(kernel, json.dumps(kind), os.environ.get("QUIRE_MOSAIC", ""), declined)
    if reason is not None:
        warn_once(kernel.work, reason)
    return reason


@cache
def import_compiler(compiler: str, work: str) -> None:
    """Import what kernels are written with; an error that names the remedy where a library is
    missing.
    """
    try:
        importlib.import_module(compiler)
    except ImportError as error:
        raise MissingLibrary(
            f"the kernel for {work} on this GPU cannot be imported: {error}. {REMEDY}"
        ) from error


@cache
def warn_once(work: str, reason: str) -> None:
    log.warning(
        "%s: its kernel is not in use on this GPU, where what serves instead may be slower: %s",
        work,
        reason,
    )


@cache
def verdict(kernel: TriedKernel, kind: str, setting: str, declined: str | None) -> str | None:
    """Why the kernel must not serve this kind of work; None if it may in every process."""
    own = declined or refusal(kernel, kind, setting)
    if jax.process_count() == 1:
        return own
    return agree(own, f"quire/trial/{hashlib.sha256(f'{kernel.work} {kind}'.encode()).hexdigest()}")


def agree(own: str | None, key: str) -> str | None:
    """This process's reason, or that of the first other process that has one: they run one program
    together.
    """
    # what processes tell each other without a device has no public name
    from jax._src import distributed

    client = distributed.global_state.client
    processes = range(jax.process_count())
    if client is None:
        return own or "the processes cannot agree on it: JAX's distributed runtime was not started"
    client.key_value_set(f"{key}/{jax.process_index()}", own or "", allow_overwrite=True)
    for process in processes:
        try:
            reason = client.blocking_key_value_get(f"{key}/{process}", WAIT * 1000)
        except jax.errors.JaxRuntimeError as failure:
            reason = f"it did not say whether it may: {failure}"
        if reason:
            return own or f"process {process}: {reason}"
    return None


def refusal(kernel: TriedKernel, kind: str, setting: str) -> str | None:
    """Why the kernel must not serve this kind of work in this process; None if it may."""
    if setting == "off":
        return "QUIRE_MOSAIC is off"
    if setting not in ("", "trusted"):
        return f"QUIRE_MOSAIC is {setting!r}, and can be off or trusted"
    if (lacking := kernel.ready(json.loads(kind))) is not None:
        return lacking
    passed = folder() / f"{digest(kernel, kind)}.json"
    # Path.exists raises where reading is not allowed
    if setting == "trusted" or os.path.exists(passed):
        return None
    log.info("trying the kernel for %s on this GPU, once: %s", kernel.work, kind)
    try:
        found = test(kernel.module, kind)
    except OSError as failure:
        return f"it could not be tried: {failure}"
    except TrialFailed as failure:
        return f"its trial on this GPU failed: {failure}"
    if wrong := [f"{name} {each.wrong}" for name, each in found.items() if each.wrong]:
        return f"it is wrong on this GPU: {'; '.join(wrong)}"
    with suppress(OSError):  # where it cannot be written, the next process tries again
        shown = {name: asdict(each) for name, each in found.items()}
        write(passed, {"kind": json.loads(kind), "found": shown, "card": card()})
    return None


class TrialFailed(Exception):
    """The trial did not finish."""


def test(module: str, kind: str) -> dict[str, Found]:
    """What each case showed, in a process of its own.

    It preallocates no memory: this one has most.
    """
    command = [sys.executable, "-P", "-m", __spec__.name, module, kind]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    env = {
        # without a GPU it fails and says why, in place of falling back to the CPU
        "JAX_PLATFORMS": "cuda",
        **os.environ,
        "PYTHONPATH": path,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise TrialFailed(f"it took longer than {SECONDS} s") from None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == MISSING_LIBRARY:
        raise MissingLibrary(f"a kernel for this GPU cannot be imported: {lines[-1]}. {REMEDY}")
    if done.returncode:
        raise TrialFailed(
            f"it ended with status {done.returncode}: {lines[-1] if lines else 'it said nothing'}"
        )
    try:
        return {
            name: Found(**each) for name, each in json.loads(done.stdout.splitlines()[-1]).items()
        }
    except (AttributeError, IndexError, TypeError, ValueError):
        raise TrialFailed(f"it said {done.stdout[-200:]!r}") from None


def folder() -> Path:
    return cache_folder.home("proven")


def digest(kernel: TriedKernel, kind: str) -> str:
    """A hash of everything on which a result depends."""
    found = hashlib.sha256(
        json.dumps([card(), kernel.work, kind, graphs.compiler_options()]).encode()
    )
    for path in sorted((Path(__file__), *kernel.sources)):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def card() -> dict[str, str]:
    device = jax.local_devices()[0]
    return {
        "device": str(device.device_kind),
        "processors": str(getattr(device, "core_count", "")),  # CPUs do not have it
        "driver": driver(),
        "platform": " ".join(str(getattr(device.client, "platform_version", "")).split()),
        "jax": jax.__version__,
        **{name: version(name) for name in PACKAGES if has(name)},
    }


def has(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def driver() -> str:
    """The version of the NVIDIA driver; empty without one."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.exists() else ""


def write(path: Path, found: dict) -> None:
    """Replace the file at once, since other processes may read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with cache_folder.publish(path) as part:
        part.write_text(json.dumps(found, indent=1))


def main() -> None:
    """The process that tries."""
    module, kind = sys.argv[1:]
    try:
        cases = importlib.import_module(module).cases(json.loads(kind))
        found = {case.name: asdict(measure(case, seed=0)) for case in cases}
    except ImportError as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        sys.exit(MISSING_LIBRARY)
    except Exception as failure:
        first, *_ = str(failure).splitlines() or [""]
        sys.exit(f"{type(failure).__name__}: {first}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
