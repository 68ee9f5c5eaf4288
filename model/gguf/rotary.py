"""What a GGUF file says of rotary embeddings, as config.json has it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import ModelError
from .metadata import Metadata, shown

Read = Callable[[str], np.ndarray]  # a tensor of the file, in numbers

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# Low and high frequency factor, and the length that was trained for: of Llama 3.1 and what follows it, and Llama 4.
LLAMA3 = [(low, high, length) for length in (8192, 4096, 16384, 32768) for low, high in ((1.0, 4.0), (1.0, 1.0))]


def rope_of(meta: Metadata, shapes: Mapping[str, Any], read: Read | None, head_dim: int, longest: int) -> dict:
    """`rope_theta`, and the keys beside it where frequencies are scaled or only a part of each head turns."""
    theta = meta.positive(".rope.freq_base", 10000.0)
    turned = meta.count(".rope.dimension_count", head_dim)
    if turned > head_dim or turned % 2:
        name = meta.name(".rope.dimension_count")
        raise ModelError(f"GGUF: {name} = {turned}; it must be even and at most the heads' {head_dim}")
    found: dict[str, Any] = {"rope_theta": float(theta)}
    if turned != head_dim:
        found["partial_rotary_factor"] = part(turned, head_dim)
    if scaling := scaling_of(meta, shapes, read, float(theta), turned, longest):
        found["rope_scaling"] = scaling
    return found


def part(turned: int, head_dim: int) -> float:
    """The share of a head that turns, so that the product with its size is not rounded down."""
    share = turned / head_dim
    return share if int(head_dim * share) == turned else math.nextafter(share, 2.0)


def scaling_of(
    meta: Metadata, shapes: Mapping[str, Any], read: Read | None, theta: float, turned: int, longest: int
) -> dict[str, Any] | None:
    """`rope_scaling`: a rule with a factor, or the factors of all frequencies, which are tensors."""
    kind = meta.text(".rope.scaling.type", None)
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        name = meta.name(".rope.scaling.type")
        raise ModelError(f"GGUF: {name} = {shown(kind)}; it can be none, linear, yarn or longrope")
    trained = meta.count(".rope.scaling.original_context_length", longest)
    if FREQS in shapes:
        factors = read_factors(FREQS, read, turned)
        return None if set(factors) == {1.0} else factored(factors, theta, turned, longest)
    if LONG in shapes or SHORT in shapes:
        return longrope(meta, read_factors(LONG, read, turned), read_factors(SHORT, read, turned), trained, longest)
    factor = meta.number(".rope.scaling.factor", meta.number(".rope.scale_linear", 0.0))
    if kind == "yarn":
        return yarn(meta, float(factor), trained)
    # Files of before the type was written have a factor alone; and 0 or 1 are of none.
    if kind in (None, "linear") and factor not in (0, 1):
        return {"rope_type": "linear", "factor": float(meta.positive(".rope.scaling.factor", factor))}
    return None


def yarn(meta: Metadata, factor: float, trained: int) -> dict[str, Any]:
    if factor <= 0:
        raise ModelError(f"GGUF: {meta.name('.rope.scaling.factor')} = {factor}; yarn needs a positive number")
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    meta.refuse(".rope.scaling.yarn_ext_factor", 1.0)
    for name, key in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := meta.positive(f".rope.scaling.{name}", None)) is not None:
            found[key] = float(value)
    meta.refuse(".rope.scaling.attn_factor", 1.0)
    if (value := meta.positive(".rope.scaling.yarn_attn_factor", None)) is not None:
        found["attention_factor"] = float(value)
    return found


def longrope(meta: Metadata, long: list[float], short: list[float], trained: int, longest: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "longrope", "long_factor": long, "short_factor": short,
        "original_max_position_embeddings": trained,
    }  # fmt: skip
    usual = math.sqrt(1 + math.log(longest / trained) / math.log(trained)) if longest > trained > 1 else 1.0
    said = meta.positive(".rope.scaling.attn_factor", usual)
    return found if abs(said / usual - 1) < 1e-6 else found | {"attention_factor": said}


def read_factors(name: str, read: Read | None, turned: int) -> list[float]:
    """What each frequency is divided by."""
    if read is None:
        raise ModelError(f"GGUF: the tensor {name} is part of the configuration; it must be read for it")
    numbers = np.asarray(read(name), np.float32).reshape(-1)
    if numbers.shape != (turned // 2,) or not np.all(np.isfinite(numbers)) or np.any(numbers <= 0):
        raise ModelError(f"GGUF: the tensor {name} has {numbers.size} numbers; it must have {turned // 2} above zero")
    return [float(str(number)) for number in numbers]


def factored(factors: list[float], theta: float, turned: int, longest: int) -> dict[str, Any]:
    """Llama 3's rule where it gives these factors, else the factors themselves.

    longrope with the same list for all lengths, and nothing done to the scores, divides each frequency by its own.
    """
    exact, factor = np.array(factors), float(max(factors))
    for low, high, length in LLAMA3:
        if np.allclose(llama3(theta, turned, factor, low, high, length), exact, rtol=2e-6, atol=0):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }  # fmt: skip
    return {
        "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
        "original_max_position_embeddings": longest,
    }  # fmt: skip


def llama3(theta: float, turned: int, factor: float, low: float, high: float, length: int) -> np.ndarray:
    """What Llama 3's rule divides each frequency by: those of long waves by all of the factor, of short ones by 1."""
    turns = length * theta ** -(np.arange(0, turned, 2) / turned) / (2 * math.pi)  # in the length trained for
    smooth = np.clip((turns - low) / (high - low or 1e-12), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
