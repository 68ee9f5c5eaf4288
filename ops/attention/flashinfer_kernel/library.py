"""Builds FlashInfer's kernels with nvcc, once, and registers them with XLA through jax-tvm-ffi.

A subprocess builds them (`builder.py`), because FlashInfer's builder imports torch, which nothing
else here needs.
"""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

KNOWN = "0.7.2.post1"  # the version of FlashInfer for which the arguments are correct
PACKAGES = "flashinfer-python", "jax-tvm-ffi"
REMEDY = "pip install 'quire[flashinfer]'"
PLATFORM = "gpu"
BUILDER = f"{__package__}.builder"
SECONDS = 1800  # timeout of a build, which compiles four files of templates
CAUSAL = 1  # of FlashInfer's MaskMode
POSITION_MAJOR = 0  # of FlashInfer's QKVLayout
log = logging.getLogger("quire")
ARGUMENTS = ["args", "rets", "attrs.info", "attrs.window_left", "attrs.soft_cap", "attrs.scale"]


@dataclass(frozen=True)
class Kernel:
    """The compile-time options of a kernel."""

    dtype: str
    width: int  # of a head
    window: bool
    soft_cap: bool
    sinks: bool
    capability: str  # compute capability, such as "8.0"

    @property
    def name(self) -> str:
        options = [name for name in ("window", "soft_cap", "sinks") if getattr(self, name)]
        return "_".join(["quire", self.dtype, str(self.width), *options])


def missing() -> str | None:
    """Which package is missing or of an unknown version, and the remedy; None if all are there."""
    for package in PACKAGES:
        try:
            installed = version(package)
        except PackageNotFoundError:
            return f"{package} is not installed: {REMEDY}"
        if package == "flashinfer-python" and installed != KNOWN:
            return (
                f"{package} is of version {installed}, and the arguments of {KNOWN} are known: "
                f"{REMEDY}"
            )
    return None


@cache
def target(kernel: Kernel) -> str:
    """Build and register the kernel; the name of its FFI target.

    Raises NotImplementedError if the kernel cannot be built.
    """
    import jax_tvm_ffi  # pyright: ignore[reportMissingImports]

    path, reason = built(kernel)
    if reason is not None:
        raise NotImplementedError(reason)
    name = f"quire.flashinfer.{kernel.name}.{kernel.capability}"
    jax_tvm_ffi.register_ffi_target(
        name,
        wrap_for_xla(load(path), kernel.sinks),
        ARGUMENTS,
        PLATFORM,
        allow_cuda_graph=True,
        pass_owned_tensor=True,
    )
    return name


def load(path: str) -> Callable[..., None]:
    """Load a library; FlashInfer's function BatchPrefillWithPagedKVCacheRun."""
    import tvm_ffi  # pyright: ignore[reportMissingImports]

    return tvm_ffi.load_module(path).paged_run


def wrap_for_xla(run: Callable[..., None], sinks: bool) -> Any:
    """Wrap FlashInfer's function: the result takes arguments in XLA's order."""

    def call(q, k, v, words, starts, first_page, pages, last_page, *arguments):
        *sink_arrays, out, scratch, info, window_left, soft_cap, scale = arguments
        assert len(sink_arrays) == sinks
        log_sums = None  # optional results that are not needed
        enable_pdl = False
        run(
            scratch,
            words,
            info,
            q,
            k,
            v,
            starts,
            first_page,
            pages,
            last_page,
            out,
            log_sums,
            CAUSAL,
            POSITION_MAJOR,
            window_left,
            enable_pdl,
            *sink_arrays,
            soft_cap,
            scale,
        )

    return call


@cache
def built(kernel: Kernel) -> tuple[str, str | None]:
    """Build the kernel with nvcc: (path of the library, None), or ("", reason) if that fails."""
    log.info(
        "building FlashInfer's kernel with nvcc, which takes some minutes the first time: %s",
        kernel.name,
    )
    command = [sys.executable, "-P", "-m", BUILDER, json.dumps(asdict(kernel))]
    python_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    env = {"FLASHINFER_CUDA_ARCH_LIST": kernel.capability, **os.environ, "PYTHONPATH": python_path}
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "", f"nvcc did not build FlashInfer's kernel within {SECONDS} s"
        finally:
            with suppress(ProcessLookupError):
                # also the compilers that the subprocess has started
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        error_lines = [line for line in (stdout + stderr).splitlines() if "rror" in line]
        reason = error_lines[-1] if error_lines else f"status {process.returncode}"
        return "", f"FlashInfer's kernel could not be built, which takes nvcc and g++: {reason}"
    output_lines = [line for line in stdout.splitlines() if line.strip()]
    return output_lines[-1], None
