"""FlashInfer's kernels as functions that a compiled step calls: built by nvcc once, and known to
XLA by jax-tvm-ffi.

A process of its own builds them (`builder.py`): FlashInfer's builder imports torch, which nothing
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

KNOWN = "0.7.2.post1"  # the version of FlashInfer whose arguments these are
PACKAGES = "flashinfer-python", "jax-tvm-ffi"
REMEDY = "pip install 'quire[flashinfer]'"
PLATFORM = "gpu"
BUILDER = f"{__package__}.builder"
SECONDS = 1800  # for a build: four files of templates
CAUSAL = 1  # FlashInfer's MaskMode and QKVLayout
POSITION_MAJOR = 0
log = logging.getLogger("quire")
ARGUMENTS = ["args", "rets", "attrs.info", "attrs.window_left", "attrs.soft_cap", "attrs.scale"]


@dataclass(frozen=True)
class Kernel:
    """What nvcc builds a kernel for."""

    dtype: str
    width: int
    window: bool
    soft_cap: bool
    sinks: bool
    capability: str  # "8.0"

    @property
    def name(self) -> str:
        options = [name for name in ("window", "soft_cap", "sinks") if getattr(self, name)]
        return "_".join(["quire", self.dtype, str(self.width), *options])


def missing() -> str | None:
    """What is to be installed; None: nothing."""
    for package in PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            return f"{package} is not installed: {REMEDY}"
        if package == "flashinfer-python" and found != KNOWN:
            return (
                f"{package} is of version {found}, and the arguments of {KNOWN} are known: {REMEDY}"
            )
    return None


@cache
def target(kernel: Kernel) -> str:
    """The name by which XLA calls the kernel; NotImplementedError where it cannot be built."""
    import jax_tvm_ffi  # pyright: ignore[reportMissingImports]

    path, reason = built(kernel)
    if reason is not None:
        raise NotImplementedError(reason)
    name = f"quire.flashinfer.{kernel.name}.{kernel.capability}"
    jax_tvm_ffi.register_ffi_target(
        name,
        called(load(path), kernel.sinks),
        ARGUMENTS,
        PLATFORM,
        allow_cuda_graph=True,
        pass_owned_tensor=True,
    )
    return name


def load(path: str) -> Callable[..., None]:
    """FlashInfer's BatchPrefillWithPagedKVCacheRun."""
    import tvm_ffi  # pyright: ignore[reportMissingImports]

    return tvm_ffi.load_module(path).paged_run


def called(run: Callable[..., None], sinks: bool) -> Callable[..., None]:
    """The function that XLA calls with a step's arrays, which are put into FlashInfer's order."""

    def call(q, k, v, words, starts, first_page, pages, last_page, *rest):
        *rest, out, scratch, info, window_left, soft_cap, scale = rest
        assert len(rest) == sinks
        # the logarithms of sums are not asked for; nothing starts before it is its turn
        sums = None
        together = False
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
            sums,
            CAUSAL,
            POSITION_MAJOR,
            window_left,
            together,
            *rest,
            soft_cap,
            scale,
        )

    return call


@cache
def built(kernel: Kernel) -> tuple[str, str | None]:
    """(the library's path, why there is none)."""
    log.info(
        "building FlashInfer's kernel with nvcc, which takes some minutes the first time: %s",
        kernel.name,
    )
    command = [sys.executable, "-P", "-m", BUILDER, json.dumps(asdict(kernel))]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    env = {"FLASHINFER_CUDA_ARCH_LIST": kernel.capability, **os.environ, "PYTHONPATH": path}
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
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "", f"nvcc did not build FlashInfer's kernel within {SECONDS} s"
        finally:
            with suppress(ProcessLookupError):
                # with the compilers that it has started, whatever ended this
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        wrong = [line for line in (out + err).splitlines() if "rror" in line]
        why = wrong[-1] if wrong else f"status {process.returncode}"
        return "", f"FlashInfer's kernel could not be built, which takes nvcc and g++: {why}"
    said = [line for line in out.splitlines() if line.strip()]
    return said[-1], None
