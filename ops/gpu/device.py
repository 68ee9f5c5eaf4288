"""Which GPU this process computes on, and why it cannot run the kernels of a generation."""

import functools

import jax

AMPERE = 8  # its compute capability


@functools.cache
def is_gpu() -> bool:
    return jax.local_devices()[0].platform == "gpu"


@functools.cache
def is_hopper() -> bool:
    """Whether this process's card is one that the kernel is for."""
    return is_gpu() and capability().partition(".")[0] == "9"


def capability() -> str:
    return str(jax.local_devices()[0].compute_capability)  # those of other makers have names


def no_hopper_reason() -> str | None:
    """Why this process's card cannot run the kernel; None if it can."""
    if is_hopper():
        return None
    if not is_gpu():
        return "there is no NVIDIA GPU"
    return f"the kernel's instructions are those of compute capability 9.x (Hopper), and this GPU's is {capability()}"


def no_ampere_reason() -> str | None:
    """Why this card is too old for kernels that are compiled for all later generations; None if it is not."""
    major = capability().partition(".")[0]
    if major.isdecimal() and int(major) >= AMPERE:
        return None
    return f"the kernel needs compute capability {AMPERE}.0 (Ampere) or later, and this GPU's is {capability()}"


def num_processors() -> int:
    return jax.local_devices()[0].core_count
