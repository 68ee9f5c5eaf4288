"""Properties of this process's GPU, and reasons why it cannot run kernels of a generation."""

import functools

import jax

AMPERE = 8  # major number of its compute capability
NO_GPU = "there is no NVIDIA GPU"


@functools.cache
def is_gpu() -> bool:
    return jax.local_devices()[0].platform == "gpu"


@functools.cache
def is_hopper() -> bool:
    """Whether this process's GPU is of the Hopper generation, whose kernels run on no other."""
    return is_gpu() and capability().partition(".")[0] == "9"


def capability() -> str:
    """The compute capability, such as "9.0"; GPUs of other makers have names instead."""
    return str(jax.local_devices()[0].compute_capability)


def no_hopper_reason() -> str | None:
    """Why this process's GPU cannot run kernels for Hopper; None if it can."""
    if is_hopper():
        return None
    if not is_gpu():
        return NO_GPU
    return (
        "the kernel's instructions are those of compute capability 9.x (Hopper), and this "
        f"GPU's is {capability()}"
    )


def no_ampere_reason() -> str | None:
    """Why this GPU cannot run kernels for Ampere and later generations; None if it can."""
    if not is_gpu():
        return NO_GPU
    major = capability().partition(".")[0]
    if major.isdecimal() and int(major) >= AMPERE:
        return None
    return (
        f"the kernel needs compute capability {AMPERE}.0 (Ampere) or later, and this GPU's is "
        f"{capability()}"
    )


def num_processors() -> int:
    """Number of streaming multiprocessors of the GPU."""
    return jax.local_devices()[0].core_count
