"""The cost of a model: bytes of weights and KV cache, operations, and the batch that balances
compute and reads.

A decode step reads every weight once, whatever the batch, and the cache of each sequence; its
arithmetic grows with the batch. Small batches are bound by memory bandwidth, large ones by compute:

    seconds = max((weights + batch * cache) / bandwidth, batch * operations / speed)
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp

from ...ops.adapter import adapter_stacks
from ...sharding.spec import nbytes
from ..config import Layer, ModelConfig, StatefulMixer
from ..weights import LayerWeights, ModelWeights, abstract, dense_specs


@dataclass(frozen=True)
class Device:
    """A device: bytes of memory; and per second bytes read, operations (bfloat16, dense) and bytes
    sent.

    `link` connects devices of a machine, `network` those of different machines.
    """

    memory: float
    bandwidth: float
    flops: float
    link: float
    network: float
    about: str = "a device of your own"

    @property
    def platform(self) -> str:
        """JAX's name of the platform, as far as the engine's defaults need it."""
        return "gpu" if "NVIDIA" in self.about else "cpu"


# GPUs: memory as reported by the driver, the maker's figures for bandwidth and for dense bfloat16
# products that accumulate in float32, NVLink or PCIe each way, and a network adapter of 400, 200 or
# 100 Gb/s for each. TPUs: Google's figures for a chip; `link` is all of its links to others of the
# slice, one way; `network` is its share of the host's adapter.
DEVICES = {
    "b200": Device(179.1 * 2**30, 8.0e12, 2250e12, 900e9, 50e9, "NVIDIA B200 SXM, NVLink 5"),
    "h200": Device(140.4 * 2**30, 4.8e12, 989e12, 450e9, 50e9, "NVIDIA H200 SXM, NVLink 4"),
    "h100": Device(79.6 * 2**30, 3.35e12, 989e12, 450e9, 50e9, "NVIDIA H100 SXM, NVLink 4"),
    "a100": Device(80.0 * 2**30, 2.04e12, 312e12, 300e9, 25e9, "NVIDIA A100 SXM 80 GB, NVLink 3"),
    "l4": Device(22.5 * 2**30, 0.3e12, 121e12, 32e9, 12.5e9, "NVIDIA L4, PCIe 4"),
    "rtx-5090": Device(
        31.8 * 2**30, 1.792e12, 209.5e12, 64e9, 12.5e9, "NVIDIA GeForce RTX 5090, PCIe 5"
    ),
    "rtx-4090": Device(
        24.0 * 2**30, 1.008e12, 165.2e12, 32e9, 12.5e9, "NVIDIA GeForce RTX 4090, PCIe 4"
    ),
    "tpu-v5e": Device(16.0 * 2**30, 0.819e12, 197e12, 200e9, 3.125e9, "a chip of Google's TPU v5e"),
    "tpu-v5p": Device(95.0 * 2**30, 2.765e12, 459e12, 600e9, 6.25e9, "a chip of Google's TPU v5p"),
    "tpu-v6e": Device(
        32.0 * 2**30, 1.638e12, 918e12, 400e9, 12.5e9, "a chip of Google's TPU v6e, Trillium"
    ),
    "tpu-v7x": Device(
        192.0 * 2**30, 7.38e12, 2307e12, 600e9, 12.5e9, "a chip of Google's TPU7x, Ironwood"
    ),
    # Measured. A copy counts as a read and a write; the network has 10 Gb/s.
    "cpu": Device(
        16.0 * 2**30, 24e9, 0.78e12, 12e9, 1.25e9, "two x86 cores with AVX-512 and AMX, as measured"
    ),
}


@dataclass(frozen=True)
class CacheKind:
    """Layers whose KV cache has the same form."""

    name: str
    layers: int
    token_bytes: int  # in all these layers
    window: int | None  # tokens cached for a sequence; None: all
    fixed: int = 0  # bytes of a sequence at any length

    def sequence_bytes(self, length: int) -> int:
        """Bytes of a sequence of this length."""
        return self.fixed + self.token_bytes * (
            length if self.window is None else min(length, self.window)
        )


def layer_token_bytes(attention, dtype: str) -> int:
    """KV cache bytes of a token in one layer; int8, fp8 and int4 have a float32 scale for each
    head.
    """
    bits = 4 if dtype == "int4" else 8 * jnp.dtype(dtype).itemsize
    return sum(
        heads * (width * bits // 8 + (4 if bits <= 8 else 0)) for heads, width in attention.cached
    )


def state_bytes(config: ModelConfig, layers: Iterable[int] | None = None, drafts: int = 0) -> int:
    """Bytes of a sequence's recurrent states (float32) in all or some layers, with the inputs of
    `drafts` draft tokens.
    """
    mixers = [
        layer.attention
        for index, layer in enumerate(config.layers)
        if isinstance(layer.attention, StatefulMixer) and (layers is None or index in layers)
    ]
    elements = sum(math.prod(shape) for mixer in mixers for shape in mixer.state_shapes.values())
    return 4 * (
        elements + drafts * sum(math.prod(shape) for mixer in mixers for shape in mixer.inputs)
    )


def cache_kinds(config: ModelConfig) -> tuple[CacheKind, ...]:
    """The layers by kind of cache; layers that read another layer's cache come last and take no
    bytes.
    """
    counts = Counter()
    for index, layer in enumerate(config.layers):
        attention = layer.attention
        if attention.state_shapes:
            counts["state", 0, None] += 1
        if not attention.cached:
            continue
        if index not in config.kv_layers:
            counts["shared", 0, 0] += 1
            continue
        name = "latent" if attention.kind == "latent" else "full"
        name = name if attention.window is None else f"window {attention.window}"
        counts[
            name, layer_token_bytes(attention, config.layer_kv_dtype(index)), attention.window
        ] += 1
    return tuple(
        CacheKind(
            name, count, count * token_bytes, window, state_bytes(config) if name == "state" else 0
        )
        for (name, token_bytes, window), count in sorted(
            counts.items(), key=lambda item: item[0][0] == "shared"
        )
    )


def kv_bytes(config: ModelConfig, length: int) -> int:
    """KV cache bytes of a sequence of this length."""
    return sum(kind.sequence_bytes(length) for kind in cache_kinds(config))


def kv_read_bytes(config: ModelConfig, length: int) -> int:
    """KV cache and state bytes that a sequence's next token reads; layers that share a cache each
    read it.
    """
    return state_bytes(config) + sum(
        layer_token_bytes(config.layers[owner].attention, config.layer_kv_dtype(owner))
        * seen(layer.attention, length)
        for layer, owner in zip(config.layers, config.kv_owner, strict=True)
    )


def seen(attention, length: int) -> int:
    """The number of positions that a token attends to."""
    if not attention.cached:
        return 1
    return length if attention.window is None else min(length, attention.window)


def weight_bytes(config: ModelConfig, weights: ModelWeights | None = None) -> int:
    """Bytes of all weights. `weights`, here and below: specs, if they differ from the model's
    weight format.
    """
    return nbytes(abstract(config) if weights is None else weights)


def read_weight_bytes(config: ModelConfig, weights: ModelWeights | None = None) -> int:
    """Bytes of weights that a step of a large batch reads: no embedding tables or adapters."""
    weights = abstract(config) if weights is None else weights
    lookups = [weights.per_layer_embed_VLA, None if config.tied else weights.embed_VD]
    return nbytes(weights) - nbytes([lookups, adapter_stacks(weights)])


def operations(config: ModelConfig, length: int) -> float:
    """Multiplications and additions for one token that attends to `length` positions."""
    total = 2 * config.vocab_size * config.dim
    if config.per_layer_dim:
        total += 2 * dense_specs(config).per_layer_proj_DLA.size
    for layer, weights in zip(config.layers, dense_specs(config).layers, strict=True):
        total += 2 * (
            active_weights(config, layer, weights)
            + score_width(layer) * seen(layer.attention, length)
        )
    return total


def active_weights(
    config: ModelConfig, layer: Layer, weights: LayerWeights, expert: int = 1
) -> float:
    """Weights of a layer that a token is multiplied with, if `expert` devices share the work of its
    experts.
    """
    experts = 0
    if layer.moe is not None:  # router, then the selected experts
        experts = config.dim * (
            layer.moe.experts + layer.moe.top_k * (2 + layer.moe.gated) * layer.moe.dim / expert
        )
    matrices = [
        *matrix_sizes(weights.attention),
        *matrix_sizes(weights.mlp),
        *matrix_sizes(weights.per_layer),
    ]
    return sum(matrices) + experts


def score_width(layer: Layer) -> int:
    """Numbers of each position's key and value that a token is multiplied with."""
    return layer.attention.work


def matrix_sizes(weights) -> list[int]:
    """The sizes of a block's matrices, without biases and norms."""
    specs = [] if weights is None else vars(weights).values()
    return [spec.size for spec in specs if spec is not None and spec.init == "normal"]


def sequences_that_fit(
    config: ModelConfig, length: int, memory: float, weights: ModelWeights | None = None
) -> int:
    """The number of sequences of this length that fit into memory beside the weights."""
    return max(0, math.floor((memory - weight_bytes(config, weights)) / kv_bytes(config, length)))


def balance_batch(
    config: ModelConfig, length: int, device: Device, weights: ModelWeights | None = None
) -> float:
    """The batch at which a decode step's arithmetic takes as long as its reads.

    Infinite if each further sequence adds more reads than arithmetic.
    """
    compute = (
        operations(config, length) / device.flops - kv_read_bytes(config, length) / device.bandwidth
    )
    return (
        math.inf
        if compute <= 0
        else read_weight_bytes(config, weights) / device.bandwidth / compute
    )
