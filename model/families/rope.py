"""Conversion of a checkpoint's RoPE parameters to the decoder's inverse frequencies, in NumPy."""

import math

import numpy as np

from ..config import ModelError, Rope

PARAMS_BY_TYPE = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "proportional": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
    },
    "longrope": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "long_factor",
        "short_factor",
        "long_mscale",
        "short_mscale",
    },
}
COMMON_PARAMS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def build(params: dict, head_dim: int, max_len: int) -> Rope:
    """Build the rotary embedding.

    In Transformers, `dynamic` and `longrope` change the frequencies with the sequence length, but
    cached keys would keep the old ones. Here the frequencies are chosen once, by `max_len`; with a
    `max_len` within the original length nothing is scaled.

    Args:
        params: RoPE parameters as in Transformers 5.
        head_dim: Head size.
        max_len: Maximum length of a sequence to serve.
    """
    rope_type = params.get("rope_type") or params.get("type") or "default"
    if rope_type not in PARAMS_BY_TYPE:
        raise ModelError(
            f"rope_type {rope_type!r} is not known; it can be one of "
            f"{', '.join(sorted(PARAMS_BY_TYPE))}"
        )
    if (
        unknown := {key for key, value in params.items() if value is not None}
        - PARAMS_BY_TYPE[rope_type]
        - COMMON_PARAMS
    ):
        raise ModelError(
            f"rope parameter {sorted(unknown)[0]!r} is not understood for rope_type {rope_type!r}"
        )
    for name, value in params.items():
        check_param(name, value)
    theta = float(params.get("rope_theta") or 10000.0)
    dim = (
        head_dim
        if rope_type == "proportional"
        else int(head_dim * (params.get("partial_rotary_factor") or 1.0))
    )
    freq = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    frequencies_by_type = {
        "default": lambda: (freq, 1.0),
        "linear": lambda: (freq / params["factor"], 1.0),
        "dynamic": lambda: (dynamic(params, theta, dim, max_len), 1.0),
        "proportional": lambda: (proportional(params, freq, head_dim), 1.0),
        "llama3": lambda: (llama3(params, freq), 1.0),
        "yarn": lambda: yarn(params, freq, theta, dim, max_len),
        "longrope": lambda: longrope(params, freq, max_len),
    }[rope_type]
    try:
        inv_freq, factor = frequencies_by_type()
    except KeyError as missing:
        raise ModelError(f"rope_type {rope_type!r} needs the parameter {missing}") from None
    return Rope(tuple(float(f) for f in inv_freq), float(factor))


def check_param(name: str, value) -> None:
    """Raise if a parameter of this name cannot have this value."""
    if value is None or name in ("rope_type", "type", "truncate"):
        return
    is_list = name in ("long_factor", "short_factor")
    numbers = value if is_list and isinstance(value, list) else [value]
    is_valid = is_list == isinstance(value, list) and all(
        type(x) in (int, float) and math.isfinite(x) for x in numbers
    )
    # DeepSeek writes mscale = 0 for none.
    if not is_valid or any(x < 0 or (x == 0 and "mscale" not in name) for x in numbers):
        expected = "a list of positive numbers" if is_list else "a positive number"
        raise ModelError(f"rope parameter {name} = {value!r}; it must be {expected}")
    if name == "partial_rotary_factor" and numbers[0] > 1:
        raise ModelError(f"rope parameter {name} = {value!r}; it must be at most 1")


def dynamic(params, theta, dim, max_len):
    original_len = params["original_max_position_embeddings"]
    if max_len > original_len:
        factor = params["factor"]
        theta = theta * (factor * max_len / original_len - (factor - 1)) ** (dim / (dim - 2))
    return theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)


def proportional(params, freq, head_dim):
    num_rotated = int((params.get("partial_rotary_factor") or 1.0) * head_dim // 2)
    return np.where(np.arange(len(freq)) < num_rotated, freq, 0.0) / (params.get("factor") or 1.0)


def llama3(params, freq):
    factor = params["factor"]
    original_len = params["original_max_position_embeddings"]
    low = params["low_freq_factor"]
    high = params["high_freq_factor"]
    if low > high:
        raise ModelError(
            f"rope parameter high_freq_factor = {high}; it must be at least low_freq_factor = {low}"
        )
    wavelength = 2 * math.pi / freq
    smooth = np.clip((original_len / wavelength - low) / (high - low or 1e-12), 0, 1)
    return (1 - smooth) * freq / factor + smooth * freq


def yarn(params, freq, theta, dim, max_len):
    original_len = params["original_max_position_embeddings"]
    factor = params.get("factor") or params.get("max_position_embeddings", max_len) / original_len

    def mscale(weight):
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        has_mscales = params.get("mscale") and params.get("mscale_all_dim")
        attention_factor = (
            mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
            if has_mscales
            else mscale(1.0)
        )

    def rotary_index(rotations):
        return dim * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = rotary_index(params.get("beta_fast") or 32)
    high = rotary_index(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    return freq / factor * ramp + freq * (1 - ramp), attention_factor


def longrope(params, freq, max_len):
    original_len = params["original_max_position_embeddings"]
    factor = params.get("factor") or 1.0
    is_long = max_len > original_len
    attention_factor = params.get(
        "long_mscale" if is_long else "short_mscale", params.get("attention_factor")
    )
    if attention_factor is None:
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_len))
        )
    name = "long_factor" if is_long else "short_factor"
    scale = np.asarray(params[name], np.float64)
    if scale.shape != freq.shape:
        raise ModelError(
            f"rope parameter {name!r} has {scale.size} entries; the heads have {freq.size} "
            "rotary pairs"
        )
    return freq / scale, attention_factor
