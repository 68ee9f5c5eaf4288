"""CUDA graphs: compiler options that make XLA record a whole step as one graph.

The host then starts a step by one launch. `QUIRE_GRAPHS=off` disables graphs; if XLA_FLAGS sets
`xla_gpu_enable_command_buffer`, that setting is kept.
"""

import ctypes
import logging
import os
from functools import cache
from typing import Any

import jax

OPTION = "xla_gpu_enable_command_buffer"
# XLA's defaults, and the commands that otherwise split steps with experts, or steps over several
# devices, into many graphs: conditionals, loops and collectives
COMMAND_TYPES = (
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,COLLECTIVES"
)
MIN_DRIVER_VERSION = 12030  # CUDA 12.3: the first drivers whose graphs have branches and loops
log = logging.getLogger("quire")


def compile_step(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a step's program with the options of served steps."""
    return lowered.compile(compiler_options())


def compiler_options() -> dict[str, Any] | None:
    """Options for compiling a step, in addition to XLA's defaults; None if there are none."""
    setting = os.environ.get("QUIRE_GRAPHS", "")
    if setting not in ("", "off"):
        raise ValueError(f"QUIRE_GRAPHS is {setting!r}, and can be off")
    if not on_cuda():
        return None
    if setting == "off":
        return {OPTION: ""}
    if OPTION in os.environ.get("XLA_FLAGS", ""):
        return None
    if driver_version() < MIN_DRIVER_VERSION:
        warn_once(driver_version())
        return None
    return {OPTION: COMMAND_TYPES}


def on_cuda() -> bool:
    return (
        jax.default_backend() == "gpu"
        and "rocm" not in jax.local_devices()[0].client.platform_version
    )


@cache
def driver_version() -> int:
    """The newest CUDA version that the driver supports, such as 12030 for 12.3; 0 if unknown."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


@cache
def warn_once(version: int) -> None:
    support = (
        f"knows CUDA {version // 1000}.{version % 1000 // 10}"
        if version
        else "does not say which CUDA it knows"
    )
    log.warning(
        "the NVIDIA driver %s, and graphs with loops need 12.3: steps with loops wait for the host",
        support,
    )
