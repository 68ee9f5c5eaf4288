"""Descriptions of GPUs, for which JAX's CUDA plugin compiles on machines without one."""

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies

from quire.model.planning.cost import DEVICES
from quire.ops.attention.flashinfer_kernel import library
from quire.ops.gpu import device, graphs

DRIVER = (12, 9)  # CUDA driver version to assume; for older ones XLA uses fewer CUDA graphs


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that XLA's compiler needs, by the vendor's figures.

    Memory size and bandwidth are in `DEVICES`.
    """

    name: str
    capability: tuple[int, int]  # CUDA compute capability
    processors: int  # streaming multiprocessors (SMs)
    clock: float  # GHz
    lanes: int  # float32 units per SM
    shared: int  # bytes of shared memory per SM; a block may use all but 1 KiB
    cache: int  # bytes of L2 cache

    def text(self, memory: float, bandwidth: float) -> str:
        major, minor = self.capability
        # Enables architecture-specific instructions of Hopper and Blackwell: wgmma, tcgen05.
        feature = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        driver = f"{DRIVER[0]}.{DRIVER[1]}.0"
        return f"""
gpu_device_info {{
  name: "{self.name}"
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  core_count: {self.processors}
  clock_rate_ghz: {self.clock}
  fpus_per_core: {self.lanes}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared - 1024}
  shared_memory_per_core: {self.shared}
  l2_cache_size: {self.cache}
  memory_bandwidth: {bandwidth:.0f}
  device_memory_size: {memory:.0f}
  driver_version: "{driver}"
  kernel_mode_driver_version: "575.57.8"
  runtime_version: "{driver}"
  compile_time_toolkit_version: "{driver}"
  dnn_version: "9.10.2"
}}
platform_name: "CUDA"
device_description_str: "{self.name}"
runtime_version {{ major: {DRIVER[0]} minor: {DRIVER[1]} patch: 0 }}
dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
"""


CARDS = {
    "h200": Card("NVIDIA H200", (9, 0), 132, 1.98, 128, 228 << 10, 50 << 20),
    "b200": Card("NVIDIA B200", (10, 0), 148, 1.965, 128, 228 << 10, 126 << 20),
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 64, 164 << 10, 40 << 20),
}
PLUGINS = "jax-cuda12-plugin", "jax-cuda12-pjrt"  # must have the same version as jax
# `make gpu-compiler` installs into a folder of its own, so that other programs do not load the
# plugin.
APART = Path(sys.prefix, "gpu-compiler")


def missing() -> str | None:
    """The reason that the compiler is unavailable, with the command to install it, or None."""
    install_command = (
        f"pip install --no-deps jax-cuda12-plugin=={jax.__version__} "
        f"jax-cuda12-pjrt=={jax.__version__}"
    )
    install_command += " nvidia-cuda-nvcc-cu12"
    for name in PLUGINS:
        installed_version = next(
            (
                distribution.version
                for distribution in importlib.metadata.distributions(name=name, path=search_paths())
            ),
            None,
        )
        if installed_version is None:
            return f"{name} is not installed, which compiles for a GPU: {install_command}"
        if installed_version != jax.__version__:
            return (
                f"{name} is of version {installed_version} and jax of {jax.__version__}: "
                f"{install_command}"
            )
    return None if ptxas() is not None else f"ptxas is not installed: {install_command}"


def ptxas() -> Path | None:
    """The path of the PTX assembler from nvidia-cuda-nvcc-cu12, or None."""
    return next(
        (
            path
            for place in search_paths()
            for path in sorted(Path(place).glob("nvidia/*/bin/ptxas"))
        ),
        None,
    )


def search_paths() -> list[str]:
    return [*sys.path, str(APART)]


@contextmanager
def described(name: str, count: int = 1) -> Iterator[Sequence[Any]]:
    """Context in which JAX's devices are `count` GPUs of this name in CARDS.

    A name with "+flashinfer" has FlashInfer's kernels available.
    """
    name, _, extra = name.partition("+")
    text = CARDS[name].text(DEVICES[name].memory, DEVICES[name].bandwidth)
    topology = topologies.get_topology_desc(
        f"{name}:{count}", platform="cuda", target_config=text, topology=f"1x1x{count}"
    )
    devices = list(topology.devices)
    with ExitStack() as changed:
        for target, attribute, value in (
            (jax, "default_backend", lambda: "gpu"),
            (jax, "devices", lambda *args, **kwargs: devices),
            (jax, "local_devices", lambda *args, **kwargs: devices),
            (graphs, "driver_version", lambda: 1000 * DRIVER[0] + 10 * DRIVER[1]),
            # Nothing is run, so that compiling a call of FlashInfer's kernel needs no FlashInfer.
            (library, "PACKAGES", ("jax-tvm-ffi",)),
            (library, "built", lambda kernel: ("", None)),
            (library, "load", lambda path: None),
            *(
                []
                if extra
                else [
                    (library, "missing", lambda: f"it was not asked for, as with {name}+flashinfer")
                ]
            ),
        ):
            changed.enter_context(mock.patch.object(target, attribute, value))
        # Without a GPU, the kernels cannot be self-tested.
        changed.enter_context(mock.patch.dict(os.environ, {"QUIRE_MOSAIC": "trusted"}))
        clear_caches()
        changed.callback(clear_caches)
        yield devices


def clear_caches() -> None:
    """Clear caches of device properties and traces, which are for another device."""
    device.is_hopper.cache_clear()
    jax.clear_caches()
