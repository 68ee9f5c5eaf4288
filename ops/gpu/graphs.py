"""CUDA graphs: what XLA is to record of a step, so that one launch by the host runs all of it.

`QUIRE_GRAPHS=off` is for steps without graphs. Whoever says in XLA_FLAGS what XLA is to record has
the last word.
"""

import ctypes
import logging
import os
from functools import cache

import jax

OPTION = "xla_gpu_enable_command_buffer"
# XLA's defaults, then what splits a step of experts, or one over several devices, into many graphs.
RECORDED = (
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,COLLECTIVES"
)
OLDEST = 12030  # CUDA 12.3: the first drivers whose graphs have branches and loops
log = logging.getLogger("quire")


def compile_step(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """A step's program as it is served."""
    return lowered.compile(compiler_options())


def compiler_options() -> dict[str, str] | None:
    """What a step is compiled with besides XLA's defaults; None: nothing."""
    setting = os.environ.get("QUIRE_GRAPHS", "")
    if setting not in ("", "off"):
        raise ValueError(f"QUIRE_GRAPHS is {setting!r}, and can be off")
    if not on_cuda():
        return None
    if setting == "off":
        return {OPTION: ""}
    if OPTION in os.environ.get("XLA_FLAGS", ""):
        return None
    if driver_version() < OLDEST:
        warn_once(driver_version())
        return None
    return {OPTION: RECORDED}


def on_cuda() -> bool:
    return (
        jax.default_backend() == "gpu"
        and "rocm" not in jax.local_devices()[0].client.platform_version
    )


@cache
def driver_version() -> int:
    """The newest CUDA that the driver knows, such as 12030 for 12.3; 0 where there is none to
    ask.
    """
    found = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return 0
    return found.value


@cache
def warn_once(version: int) -> None:
    said = (
        f"knows CUDA {version // 1000}.{version % 1000 // 10}"
        if version
        else "does not say which CUDA it knows"
    )
    log.warning(
        "the NVIDIA driver %s, and graphs with loops need 12.3: steps with loops wait for the host",
        said,
    )
