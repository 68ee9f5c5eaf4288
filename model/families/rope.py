"""From a checkpoint's rope settings to the frequencies that the decoder uses, in numpy, when a model is loaded."""

import math

import numpy as np

from ..config import ModelError, Rope

ALLOWED = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "proportional": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim",
             "beta_fast", "beta_slow", "truncate"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "long_factor", "short_factor",
                 "long_mscale", "short_mscale"},
}  # fmt: skip
COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def build(params: dict, head_dim: int, max_len: int) -> Rope:
    """`params` as `transformers` 5 writes them; `max_len` is the longest sequence that will be served.

    `dynamic` and `longrope` change their frequencies with the length of the sequence, but keys in the cache keep
    theirs. So the choice is made once, from `max_len`: a sequence's result does not depend on its length, and with a
    `max_len` within the original length nothing is scaled.
    """
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in ALLOWED:
        raise ModelError(f"rope_type {kind!r} is not known; it can be one of {', '.join(sorted(ALLOWED))}")
    if unknown := {key for key, value in params.items() if value is not None} - ALLOWED[kind] - COMMON:
        raise ModelError(f"rope parameter {sorted(unknown)[0]!r} is not understood for rope_type {kind!r}")
    for name, value in params.items():
        check(name, value)
    theta = float(params.get("rope_theta") or 10000.0)
    dim = head_dim if kind == "proportional" else int(head_dim * (params.get("partial_rotary_factor") or 1.0))
    freq = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    rule = {
        "default": lambda: (freq, 1.0),
        "linear": lambda: (freq / params["factor"], 1.0),
        "dynamic": lambda: (dynamic(params, theta, dim, max_len), 1.0),
        "proportional": lambda: (proportional(params, freq, head_dim), 1.0),
        "llama3": lambda: (llama3(params, freq), 1.0),
        "yarn": lambda: yarn(params, freq, theta, dim, max_len),
        "longrope": lambda: longrope(params, freq, max_len),
    }[kind]
    try:
        inv_freq, factor = rule()
    except KeyError as missing:
        raise ModelError(f"rope_type {kind!r} needs the parameter {missing}") from None
    return Rope(tuple(float(f) for f in inv_freq), float(factor))


def check(name: str, value) -> None:
    """Refuse a value that a parameter of this name cannot have."""
    if value is None or name in ("rope_type", "type", "truncate"):
        return
    is_list = name in ("long_factor", "short_factor")
    numbers = value if is_list and isinstance(value, list) else [value]
    good = is_list == isinstance(value, list) and all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
    # DeepSeek writes mscale = 0 for none
    if not good or any(x < 0 or (x == 0 and "mscale" not in name) for x in numbers):
        right = "a list of positive numbers" if is_list else "a positive number"
        raise ModelError(f"rope parameter {name} = {value!r}; it must be {right}")
    if name == "partial_rotary_factor" and numbers[0] > 1:
        raise ModelError(f"rope parameter {name} = {value!r}; it must be at most 1")


def dynamic(params, theta, dim, max_len):
    trained = params["original_max_position_embeddings"]
    if max_len > trained:
        factor = params["factor"]
        theta = theta * (factor * max_len / trained - (factor - 1)) ** (dim / (dim - 2))
    return theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)


def proportional(params, freq, head_dim):
    turned = int((params.get("partial_rotary_factor") or 1.0) * head_dim // 2)
    return np.where(np.arange(len(freq)) < turned, freq, 0.0) / (params.get("factor") or 1.0)


def llama3(params, freq):
    factor, trained = params["factor"], params["original_max_position_embeddings"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    if low > high:
        raise ModelError(f"rope parameter high_freq_factor = {high}; it must be at least low_freq_factor = {low}")
    wavelength = 2 * math.pi / freq
    smooth = np.clip((trained / wavelength - low) / (high - low or 1e-12), 0, 1)
    return (1 - smooth) * freq / factor + smooth * freq


def yarn(params, freq, theta, dim, max_len):
    trained = params["original_max_position_embeddings"]
    factor = params.get("factor") or params.get("max_position_embeddings", max_len) / trained

    def mscale(weight):
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        both = params.get("mscale") and params.get("mscale_all_dim")
        attention_factor = mscale(params["mscale"]) / mscale(params["mscale_all_dim"]) if both else mscale(1.0)

    def turning_dim(rotations):
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning_dim(params.get("beta_fast") or 32), turning_dim(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    return freq / factor * ramp + freq * (1 - ramp), attention_factor


def longrope(params, freq, max_len):
    trained = params["original_max_position_embeddings"]
    factor = params.get("factor") or 1.0
    long = max_len > trained
    attention_factor = params.get("long_mscale" if long else "short_mscale", params.get("attention_factor"))
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    name = "long_factor" if long else "short_factor"
    scale = np.asarray(params[name], np.float64)
    if scale.shape != freq.shape:
        raise ModelError(f"rope parameter {name!r} has {scale.size} entries; the heads have {freq.size} rotary pairs")
    return freq / scale, attention_factor
