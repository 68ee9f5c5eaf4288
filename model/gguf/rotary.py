"""The rotary embedding of a GGUF file as config.json states it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import ModelError
from .metadata import Metadata, format_value

Read = Callable[[str], np.ndarray]  # returns a decoded tensor of the file

FREQS = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
# Low and high frequency factor and original context length of Llama 3.1 and later, and of Llama 4.
LLAMA3 = [
    (low, high, length)
    for length in (8192, 4096, 16384, 32768)
    for low, high in ((1.0, 4.0), (1.0, 1.0))
]


def rope_config(
    meta: Metadata, shapes: Mapping[str, Any], read: Read | None, head_dim: int, max_len: int
) -> dict:
    """`rope_theta`, and the keys for scaled frequencies or for heads that are rotated in part."""
    theta = meta.positive(".rope.freq_base", 10000.0)
    rotary_dim = meta.count(".rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        name = meta.full_key(".rope.dimension_count")
        raise ModelError(
            f"GGUF: {name} = {rotary_dim}; it must be even and at most the heads' {head_dim}"
        )
    config: dict[str, Any] = {"rope_theta": float(theta)}
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_fraction(rotary_dim, head_dim)
    if scaling := scaling_config(meta, shapes, read, float(theta), rotary_dim, max_len):
        config["rope_scaling"] = scaling
    return config


def rotary_fraction(rotary_dim: int, head_dim: int) -> float:
    """The rotated fraction of a head, such that its product with the head size does not round
    down.
    """
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 2.0)


def scaling_config(
    meta: Metadata,
    shapes: Mapping[str, Any],
    read: Read | None,
    theta: float,
    rotary_dim: int,
    max_len: int,
) -> dict[str, Any] | None:
    """`rope_scaling`: a rule with a factor, or a factor for each frequency, stored in tensors."""
    kind = meta.text(".rope.scaling.type", None)
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        name = meta.full_key(".rope.scaling.type")
        raise ModelError(
            f"GGUF: {name} = {format_value(kind)}; it can be none, linear, yarn or longrope"
        )
    trained = meta.count(".rope.scaling.original_context_length", max_len)
    if FREQS in shapes:
        factors = read_factors(FREQS, read, rotary_dim)
        return (
            None if set(factors) == {1.0} else factors_config(factors, theta, rotary_dim, max_len)
        )
    if LONG in shapes or SHORT in shapes:
        return longrope_config(
            meta,
            read_factors(LONG, read, rotary_dim),
            read_factors(SHORT, read, rotary_dim),
            trained,
            max_len,
        )
    factor = meta.number(".rope.scaling.factor", meta.number(".rope.scale_linear", 0.0))
    if kind == "yarn":
        return yarn_config(meta, float(factor), trained)
    # Older files have a factor without a type; 0 and 1 mean no scaling.
    if kind in (None, "linear") and factor not in (0, 1):
        return {
            "rope_type": "linear",
            "factor": float(meta.positive(".rope.scaling.factor", factor)),
        }
    return None


def yarn_config(meta: Metadata, factor: float, trained: int) -> dict[str, Any]:
    if factor <= 0:
        raise ModelError(
            f"GGUF: {meta.full_key('.rope.scaling.factor')} = {factor}; yarn needs a positive "
            "number"
        )
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
    }
    meta.reject(".rope.scaling.yarn_ext_factor", 1.0)
    for name, key in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := meta.positive(f".rope.scaling.{name}", None)) is not None:
            scaling[key] = float(value)
    meta.reject(".rope.scaling.attn_factor", 1.0)
    if (value := meta.positive(".rope.scaling.yarn_attn_factor", None)) is not None:
        scaling["attention_factor"] = float(value)
    return scaling


def longrope_config(
    meta: Metadata,
    long_factors: list[float],
    short_factors: list[float],
    trained: int,
    max_len: int,
) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope", "long_factor": long_factors, "short_factor": short_factors,
        "original_max_position_embeddings": trained,
    }  # fmt: skip
    default_factor = (
        math.sqrt(1 + math.log(max_len / trained) / math.log(trained))
        if max_len > trained > 1
        else 1.0
    )
    attention_factor = meta.positive(".rope.scaling.attn_factor", default_factor)
    return (
        scaling
        if abs(attention_factor / default_factor - 1) < 1e-6
        else scaling | {"attention_factor": attention_factor}
    )


def read_factors(name: str, read: Read | None, rotary_dim: int) -> list[float]:
    """The divisor of each frequency."""
    if read is None:
        raise ModelError(
            f"GGUF: the tensor {name} is part of the configuration; a reader of tensors is needed"
        )
    numbers = np.asarray(read(name), np.float32).reshape(-1)
    if (
        numbers.shape != (rotary_dim // 2,)
        or not np.all(np.isfinite(numbers))
        or np.any(numbers <= 0)
    ):
        raise ModelError(
            f"GGUF: the tensor {name} has {numbers.size} numbers; it must have {rotary_dim // 2} "
            "above zero"
        )
    return [float(str(number)) for number in numbers]


def factors_config(
    factors: list[float], theta: float, rotary_dim: int, max_len: int
) -> dict[str, Any]:
    """Llama 3's rule if it yields these factors, else the factors themselves.

    The latter use longrope with the same list for all lengths and no attention scaling, which
    divides each frequency by its factor.
    """
    exact = np.array(factors)
    factor = float(max(factors))
    for low, high, length in LLAMA3:
        if np.allclose(
            llama3_factors(theta, rotary_dim, factor, low, high, length), exact, rtol=2e-6, atol=0
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": max_len,
    }


def llama3_factors(
    theta: float, rotary_dim: int, factor: float, low: float, high: float, length: int
) -> np.ndarray:
    """The divisor of each frequency by Llama 3's rule: the full factor for long wavelengths, 1 for
    short ones.
    """
    rotations = (
        length * theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim) / (2 * math.pi)
    )  # over the original context
    smooth = np.clip((rotations - low) / (high - low or 1e-12), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
