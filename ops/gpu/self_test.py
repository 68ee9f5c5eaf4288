"""Self-tests of the kernels for NVIDIA GPUs: a kernel serves only configurations that it passed.

GPUs, drivers and compilers differ. So before a kernel serves a configuration (its `kind`: shapes,
dtypes and options as a dict), a subprocess, which may crash or hang, compares it with a float64
reference. The subprocess runs every case many times, because a race shows as differing bits. A pass
is cached on disk. After a failure XLA computes the configuration, and the log gives the reason. A
missing library is an error and has no fallback. If there are several processes, all use the kernel
or none does. `QUIRE_MOSAIC=off` disables the kernels, `QUIRE_MOSAIC=trusted` skips the self-tests.
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

SECONDS = 240  # timeout of the subprocess, which starts JAX and compiles a few kernels
# seconds to wait for the verdicts of other processes, which may still be reading weights
VERDICT_TIMEOUT = 1800
REPEATS = 50  # runs of each case
LAYERS = 3  # layers of an `InLayers` case
MISSING_LIBRARY = 3  # exit status of the subprocess if an import of the kernel fails
# modules of the kernel compilers
MOSAIC = "jax.experimental.pallas.mosaic_gpu"
TRITON = "jax.experimental.pallas.triton"
REMEDY = (
    "pip install 'quire[cuda]' (or 'quire[cuda12]') brings all that the kernels for NVIDIA GPUs "
    "need; QUIRE_MOSAIC=off starts without them, slower"
)
ROW_ERROR_FACTOR = 2  # a single row may have this multiple of the error allowed for all rows
PACKAGES = (  # whose versions the results depend on
    "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc",
    "flashinfer-python", "jax-tvm-ffi", "apache-tvm-ffi",
)  # fmt: skip
log = logging.getLogger("quire")
lock = Lock()


class Case(Protocol):
    """One case of a self-test: inputs, the kernel's computation, and the expected result."""

    @property
    def name(self) -> str: ...

    @property
    def allowed(self) -> float:
        """Largest allowed relative error, ||out - expected|| / ||expected||."""
        ...

    def build(self, seed: int) -> tuple[Any, Any, np.ndarray]:
        """Make the inputs and the expected result.

        Returns:
            (donated, inputs, expected): arrays that `run` may overwrite, arrays that it only reads,
            and the float64 result in the shape of `run`'s output.
        """
        ...

    def run(self, donated: Any, inputs: Any) -> tuple[Any, Any]:
        """Compute the result; traced and compiled as one program.

        Returns:
            (out, donated). The last axis of `out` is one row. `donated` is passed to the next run,
            which must give the same `out`.
        """
        ...


@dataclass(frozen=True)
class InLayers:
    """A case repeated as the layers of a step: different inputs, run one after the other."""

    case: Case

    @property
    def name(self) -> str:
        return f"{self.case.name}, in a step of {LAYERS} layers"

    @property
    def allowed(self) -> float:
        return self.case.allowed

    def build(self, seed: int):
        donated, inputs, expected = zip(
            *(self.case.build(seed + layer) for layer in range(LAYERS)), strict=True
        )
        return donated, inputs, np.stack(expected)

    def run(self, donated, inputs):
        out = None
        outs = []
        states = []
        for layer_donated, layer_inputs in zip(donated, inputs, strict=True):
            layer_inputs, _ = jax.lax.optimization_barrier((layer_inputs, out))
            out, state = self.case.run(layer_donated, layer_inputs)
            outs.append(out)
            states.append(state)
        return jnp.stack(outs), tuple(states)


@dataclass(frozen=True)
class SelfTestedKernel:
    """A kernel and how to self-test it.

    Args:
        module: Name of the module with `cases(kind) -> list[Case]`, which the subprocess imports;
            `kind` is a dict that JSON can represent.
        work: What the kernel computes, for log messages, such as "attention".
        sources: Files on which results depend, in addition to this one.
        ready: Builds the kernel of a kind and returns why that failed; None if it did not.
        compiler: Module of the compiler, which must be importable; None if `ready` checks it.
    """

    module: str
    work: str
    sources: Iterable[Path]
    ready: Callable[[dict], str | None] = lambda kind: None
    compiler: str | None = MOSAIC


@dataclass(frozen=True)
class CaseResult:
    """Errors that a case measured."""

    error: float  # ||out - expected|| / ||expected||; NaN if any number is NaN
    worst_row: float  # largest relative error of a single row
    other_bits: int  # runs whose bits differ from those of the first
    allowed: float  # the limit for `error`

    @property
    def wrong(self) -> str | None:
        """Which limit was exceeded, as the end of a sentence; None if none was."""
        if not self.error < self.allowed:
            return f"by {self.error:.1e}, where {self.allowed:.0e} is allowed"
        if not self.worst_row < ROW_ERROR_FACTOR * self.allowed:
            allowed = ROW_ERROR_FACTOR * self.allowed
            return f"in one row by {self.worst_row:.1e}, where {allowed:.0e} is allowed"
        if self.other_bits:
            return f"in having other bits in {self.other_bits} of {REPEATS} runs"
        return None


def measure(case: Case, seed: int, repeats: int = REPEATS) -> CaseResult:
    """Run a case in this process, with the compiler options of a served step."""
    donated, inputs, expected = case.build(seed)
    run = graphs.compile_step(jax.jit(case.run, donate_argnums=0).lower(donated, inputs))
    reference = None
    num_differing = 0
    for _ in range(repeats):
        out, donated = run(donated, inputs)
        bits = np.asarray(out)
        reference = bits if reference is None else reference
        num_differing += bits.tobytes() != reference.tobytes()
    assert reference is not None and reference.shape == expected.shape, (reference, expected.shape)
    error_R, size_R = (
        np.linalg.norm(x.reshape(-1, x.shape[-1]), axis=1)
        for x in (reference.astype(np.float64) - expected, expected)
    )
    # The relative error of a row that is nearly zero is taken against a tenth of the RMS row norm.
    rms_size = np.linalg.norm(size_R) / np.sqrt(len(size_R))
    worst_row = np.max(error_R / np.maximum(size_R, 0.1 * rms_size))
    return CaseResult(
        float(np.linalg.norm(error_R) / np.linalg.norm(size_R)),
        float(worst_row),
        num_differing,
        case.allowed,
    )


def require_pass(kernel: SelfTestedKernel, kind: dict, device_reason: str | None = None) -> None:
    """Raise NotImplementedError with the reason of `unverified`, if there is one."""
    if (reason := unverified(kernel, kind, device_reason)) is not None:
        raise NotImplementedError(reason)


def unverified(
    kernel: SelfTestedKernel, kind: dict, device_reason: str | None = None
) -> str | None:
    """Why the kernel must not serve this kind; None if it passed its self-test in every process.

    Runs the self-test if its result is not cached.

    Args:
        device_reason: Why this process's GPU cannot run the kernel, if that is known already.

    Raises:
        MissingLibrary: The GPU could run the kernel, but its compiler is not installed.
    """
    if (
        device_reason is None
        and kernel.compiler is not None
        and os.environ.get("QUIRE_MOSAIC") != "off"
    ):
        import_compiler(kernel.compiler, kernel.work)
    with lock:  # other threads wait for the result of the self-test
        reason = verdict(
            kernel, json.dumps(kind), os.environ.get("QUIRE_MOSAIC", ""), device_reason
        )
    if reason is not None:
        warn_once(kernel.work, reason)
    return reason


@cache
def import_compiler(compiler: str, work: str) -> None:
    """Import a kernel compiler; raise MissingLibrary, which names the remedy, if that fails."""
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
def verdict(
    kernel: SelfTestedKernel, kind: str, setting: str, device_reason: str | None
) -> str | None:
    """Why some process must not use the kernel for this kind; None if all may. Cached."""
    local_reason = device_reason or rejection_reason(kernel, kind, setting)
    if jax.process_count() == 1:
        return local_reason
    return agree_across_processes(
        local_reason, f"quire/trial/{hashlib.sha256(f'{kernel.work} {kind}'.encode()).hexdigest()}"
    )


def agree_across_processes(local_reason: str | None, key: str) -> str | None:
    """The reason of this process, or of the first other process that has one.

    All processes run one program together, so they must choose the same kernels.
    """
    # JAX has no public API to exchange values between processes without a device.
    from jax._src import distributed

    client = distributed.global_state.client
    processes = range(jax.process_count())
    if client is None:
        return (
            local_reason
            or "the processes cannot agree on it: JAX's distributed runtime was not started"
        )
    client.key_value_set(f"{key}/{jax.process_index()}", local_reason or "", allow_overwrite=True)
    for process in processes:
        try:
            reason = client.blocking_key_value_get(f"{key}/{process}", VERDICT_TIMEOUT * 1000)
        except jax.errors.JaxRuntimeError as error:
            reason = f"it did not say whether it may: {error}"
        if reason:
            return local_reason or f"process {process}: {reason}"
    return None


def rejection_reason(kernel: SelfTestedKernel, kind: str, setting: str) -> str | None:
    """Why the kernel must not serve this kind in this process; None if it may."""
    if setting == "off":
        return "QUIRE_MOSAIC is off"
    if setting not in ("", "trusted"):
        return f"QUIRE_MOSAIC is {setting!r}, and can be off or trusted"
    if (missing_reason := kernel.ready(json.loads(kind))) is not None:
        return missing_reason
    result_path = results_folder() / f"{digest(kernel, kind)}.json"
    # Path.exists raises where reading is not allowed
    if setting == "trusted" or os.path.exists(result_path):
        return None
    log.info("trying the kernel for %s on this GPU, once: %s", kernel.work, kind)
    try:
        results = run_self_test(kernel.module, kind)
    except OSError as error:
        return f"it could not be tried: {error}"
    except SelfTestFailed as error:
        return f"its trial on this GPU failed: {error}"
    if failures := [f"{name} {result.wrong}" for name, result in results.items() if result.wrong]:
        return f"it is wrong on this GPU: {'; '.join(failures)}"
    with suppress(OSError):  # if the result cannot be written, the next process tests again
        results_json = {name: asdict(result) for name, result in results.items()}
        write(
            result_path, {"kind": json.loads(kind), "found": results_json, "card": describe_gpu()}
        )
    return None


class SelfTestFailed(Exception):
    """The subprocess of a self-test crashed, timed out, or printed something unexpected."""


def run_self_test(module: str, kind: str) -> dict[str, CaseResult]:
    """Run the cases of a module in a subprocess; the results by the cases' names.

    The subprocess preallocates no GPU memory, most of which this process has already taken.
    """
    command = [sys.executable, "-P", "-m", __spec__.name, module, kind]
    python_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    env = {
        # without a GPU JAX fails with the reason, rather than falling back to the CPU
        "JAX_PLATFORMS": "cuda",
        **os.environ,
        "PYTHONPATH": python_path,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    try:
        process = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise SelfTestFailed(f"it took longer than {SECONDS} s") from None
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    if process.returncode == MISSING_LIBRARY:
        raise MissingLibrary(f"a kernel for this GPU cannot be imported: {lines[-1]}. {REMEDY}")
    if process.returncode:
        last_line = lines[-1] if lines else "it said nothing"
        raise SelfTestFailed(f"it ended with status {process.returncode}: {last_line}")
    try:
        return {
            name: CaseResult(**fields)
            for name, fields in json.loads(process.stdout.splitlines()[-1]).items()
        }
    except (AttributeError, IndexError, TypeError, ValueError):
        raise SelfTestFailed(f"it said {process.stdout[-200:]!r}") from None


def results_folder() -> Path:
    return cache_folder.home("proven")


def digest(kernel: SelfTestedKernel, kind: str) -> str:
    """A hash of everything on which the result of a self-test depends."""
    hasher = hashlib.sha256(
        json.dumps([describe_gpu(), kernel.work, kind, graphs.compiler_options()]).encode()
    )
    for path in sorted((Path(__file__), *kernel.sources)):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()[:16]


def describe_gpu() -> dict[str, str]:
    """The GPU, its driver and the versions of the packages that compile for it."""
    device = jax.local_devices()[0]
    return {
        "device": str(device.device_kind),
        "processors": str(getattr(device, "core_count", "")),  # CPUs do not have it
        "driver": driver(),
        "platform": " ".join(str(getattr(device.client, "platform_version", "")).split()),
        "jax": jax.__version__,
        **{name: version(name) for name in PACKAGES if is_installed(name)},
    }


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def driver() -> str:
    """The version line of the NVIDIA driver; empty without one."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.exists() else ""


def write(path: Path, content: dict) -> None:
    """Write a JSON file atomically, since other processes may read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with cache_folder.publish(path) as temporary_path:
        temporary_path.write_text(json.dumps(content, indent=1))


def main() -> None:
    """Entry point of the subprocess: run the cases and print their results as JSON."""
    module, kind = sys.argv[1:]
    try:
        cases = importlib.import_module(module).cases(json.loads(kind))
        results = {case.name: asdict(measure(case, seed=0)) for case in cases}
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(MISSING_LIBRARY)
    except Exception as error:
        first_line, *_ = str(error).splitlines() or [""]
        sys.exit(f"{type(error).__name__}: {first_line}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
