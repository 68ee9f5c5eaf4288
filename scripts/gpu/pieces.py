"""Timings of the parts of a step other than attention, to find those far below the GPU's limits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...model import decoder
from ...model.checkpoint.loader import family_for
from ...model.config import Attention, ModelConfig
from ...model.families import llama
from ...model.weights import abstract
from ...ops.attention import KVPages, page_dtype
from ...ops.attention.xla import append
from ...ops.delta_net import delta_rule
from ...ops.residual import Residual, add_and_norm
from ...ops.rope import angles, rotate
from ...ops.sampling import SamplingInputs, empty_state, sample
from ...ops.state_rows import StateRows
from ...sharding.spec import nbytes, random_arrays
from .common import PAGE, CheckSizes, PartReport, measured_rates, seconds

FORMATS = None, "int8", "int8-weights", "int4-32"
POOL = 4096  # pages of the KV cache that new keys and values are written to


@dataclass
class StepPiece:
    """A part of a step, `run(*inputs)`, with the bytes it must move and operations to compute."""

    name: str
    run: Callable
    inputs: tuple
    bytes: int
    operations: int = 0


def measure(report: PartReport, scale: CheckSizes, seed: int) -> None:
    """Time each piece, with its share of the measured copy bandwidth and product throughput.

    Each piece is a separate call. The first does nothing: pieces that take as long as that measure
    the launch overhead.
    """
    copy, product = measured_rates(report, scale)
    report(f"{'piece':44} {'ms':>9} {'% copy':>7} {'% prod.':>7}")
    for piece in pieces(scale, seed):
        took = seconds(piece.run, *piece.inputs, bursts=3)
        shares = piece.bytes / took / copy, piece.operations / took / product
        report(
            f"{piece.name:44} {took * 1e3:9.3f} {shares[0]:7.1%} {shares[1]:7.1%}",
            **{piece.name: {"seconds": took, "copy": shares[0], "product": shares[1]}},
        )


def pieces(scale: CheckSizes, seed: int) -> Iterator[StepPiece]:
    """Yield the pieces, the most important first; a generator, so that each frees its memory."""
    yield StepPiece(
        "a call that does next to nothing", jax.jit(lambda x: x + 1), (jnp.zeros(8),), 64
    )
    config = llama.config(scale.hf | {"num_hidden_layers": 1}, scale.prompt)
    for hf in scale.mixtures:
        mixture = replace(family_for(hf).config(hf, scale.prompt), dtype=config.dtype)
        yield from mixtures(hf["model_type"], mixture, (1, scale.streams, scale.rows), seed)
    for quant in FORMATS:
        yield from dense(replace(config, quant=quant), (1, scale.streams, scale.rows), seed)
    yield kv_write(config, scale.streams, seed)
    yield norm_and_rope(config, scale.streams, seed)
    yield delta_net(config, scale.streams, 1, seed)
    yield delta_net(config, 1, scale.rows, seed)
    yield from logits_and_sampling(config, scale.streams, seed)


def random_hidden(config: ModelConfig, rows: int, seed: int):
    return jax.random.normal(jax.random.key(seed), (rows, config.dim), config.dtype)


def mixtures(
    name: str, config: ModelConfig, row_counts: tuple[int, ...], seed: int
) -> Iterator[StepPiece]:
    """The MoE layer with its router; only experts chosen by some token are read."""
    moe = config.layers[0].moe
    assert moe is not None
    w = random_arrays(abstract(config).layers[0].moe, seed, on_device=True)
    mix = jax.jit(lambda w, x_TD: decoder.mix(moe, w, x_TD, x_TD, jnp.ones(len(x_TD), bool)))
    for rows in row_counts:
        x_TD = random_hidden(config, rows, seed)
        chosen = len(np.unique(np.asarray(mix(w, x_TD)[1])))
        read = nbytes((w.up_EDGF, w.down_EFD)) * chosen // moe.experts
        operations = 2 * rows * moe.top_k * config.dim * 3 * moe.dim
        yield StepPiece(f"experts of {name}, {plural(rows)}", mix, (w, x_TD), read, operations)


def dense(config: ModelConfig, row_counts: tuple[int, ...], seed: int) -> Iterator[StepPiece]:
    mlp = config.layers[0].mlp
    assert mlp is not None
    w = random_arrays(abstract(config).layers[0].mlp, seed, on_device=True)
    run = jax.jit(lambda w, x_TD: decoder.mlp(mlp, w, x_TD, decoder.ONE_DEVICE))
    for rows in row_counts:
        inputs = w, random_hidden(config, rows, seed)
        operations = 2 * rows * config.dim * 3 * mlp.dim
        yield StepPiece(
            f"dense block in {config.quant or config.dtype}, {plural(rows)}",
            run,
            inputs,
            nbytes(w),
            operations,
        )


def kv_write(config: ModelConfig, rows: int, seed: int) -> StepPiece:
    """Write new keys and values into the KV cache in place, each row into another page."""
    a = config.layers[0].attention
    assert isinstance(a, Attention)
    new_TKH = jax.random.normal(jax.random.key(seed), (rows, a.kv_heads, a.head_dim), config.dtype)
    slots_T = jnp.arange(1, rows + 1) * PAGE
    shape = max(POOL, rows + 1), PAGE, a.kv_heads, a.head_dim
    kv_pages = [jnp.zeros(shape, page_dtype(config.dtype)) for _ in range(2)]
    write = jax.jit(
        lambda k, v, new, slots: append(KVPages(k, v), new, new, slots), donate_argnums=(0, 1)
    )

    def run(new_TKH, slots_T):
        pages = write(*kv_pages, new_TKH, slots_T)
        kv_pages[:] = pages.k_PSKH, pages.v_PSKH
        return kv_pages

    return StepPiece(f"append, {plural(rows)}", run, (new_TKH, slots_T), 4 * nbytes(new_TKH))


def norm_and_rope(config: ModelConfig, rows: int, seed: int) -> StepPiece:
    """Residual addition with norm, and rotary embeddings of queries and keys."""
    a = config.layers[0].attention
    assert isinstance(a, Attention)
    x_TD = random_hidden(config, rows, seed)
    y_TD = random_hidden(config, rows, seed + 1)
    qk_TNH = jax.random.normal(
        jax.random.key(seed), (rows, a.heads + a.kv_heads, a.head_dim), config.dtype
    )
    positions_T = jnp.arange(rows)
    frequencies = 1e4 ** -np.linspace(0, 1, a.head_dim // 2)

    @jax.jit
    def run(x_TD, y_TD, qk_TNH, scale_D):
        normed = add_and_norm(Residual(x_TD, y_TD), scale_D, config.norm_eps)
        return normed, rotate(qk_TNH, angles(positions_T, frequencies))

    inputs = x_TD, y_TD, qk_TNH, jnp.ones(config.dim)
    return StepPiece(f"sum, norm and rope, {plural(rows)}", run, inputs, 2 * nbytes(inputs[:3]))


def delta_net(config: ModelConfig, sequences: int, rows: int, seed: int) -> StepPiece:
    """The gated delta rule with as many heads as attention has; each recurrent state is read and
    written once, in place.
    """
    a = config.layers[0].attention
    assert isinstance(a, Attention)
    T = sequences * rows
    q_key, k_key, v_key, decay_key = jax.random.split(jax.random.key(seed), 4)
    q_TKH, k_TKH = (
        jax.random.normal(key, (T, a.kv_heads, a.head_dim)) * a.head_dim**-0.5
        for key in (q_key, k_key)
    )
    v_TNV = jax.random.normal(v_key, (T, a.heads, a.head_dim))
    decay_TN = jax.random.uniform(decay_key, (T, a.heads), minval=0.9)
    count_B = jnp.full(sequences, rows)
    of_rows = StateRows(
        jnp.arange(sequences + 1) * rows, jnp.arange(sequences), count_B < 0, count_B
    )
    states = [jnp.zeros((sequences, a.heads, a.head_dim, a.head_dim))]
    rule = jax.jit(
        lambda memory, q, k, v, decay, beta, rows: delta_rule(q, k, v, decay, beta, memory, rows),
        donate_argnums=0,
    )

    def run(*arrays):
        out_TNV, states[0] = rule(states[0], *arrays)
        return out_TNV

    inputs = q_TKH, k_TKH, v_TNV, decay_TN, decay_TN, of_rows
    name = f"delta rule, {sequences} sequence{'s' * (sequences > 1)} of {plural(rows)}"
    return StepPiece(name, run, inputs, 2 * nbytes(states) + nbytes(inputs[:-1]) + nbytes(v_TNV))


def logits_and_sampling(config: ModelConfig, rows: int, seed: int) -> Iterator[StepPiece]:
    """The logits, and sampling from them with several parameters."""
    specs = abstract(config)
    R = rows
    V = config.vocab_size
    head = random_arrays(
        specs.embed_VD if specs.head_VD is None else specs.head_VD, seed, on_device=True
    )
    product = jax.jit(lambda head, x_RD: jnp.dot(x_RD, head.T, preferred_element_type=jnp.float32))
    x_RD = random_hidden(config, rows, seed)
    yield StepPiece(
        f"logits, {plural(rows)}", product, (head, x_RD), nbytes(head), 2 * R * V * config.dim
    )
    logits_RV = product(head, x_RD)
    state = empty_state(R, V)
    for name, is_plain, temperature, top_p in (
        ("without branches", True, 0.8, 1.0),
        ("greedy", False, 0.0, 1.0),
        ("with top-p", False, 0.8, 0.9),
    ):
        run = jax.jit(partial(sample, temperature_only=is_plain))
        yield StepPiece(
            f"tokens, {name}, {plural(rows)}",
            run,
            (logits_RV, state, sampling_inputs(R, seed, temperature, top_p)),
            nbytes(logits_RV),
        )


def sampling_inputs(R: int, seed: int, temperature: float, top_p: float) -> SamplingInputs:
    def each(value: Any, dtype=jnp.float32):
        return jnp.full(R, value, dtype)

    return SamplingInputs(
        slots_R=jnp.arange(R),
        bias_rows_R=each(0, jnp.int32),
        drafted_RJ=jnp.full((R, 1), -1),
        positions_R=each(7, jnp.int32),
        seeds_R2=jnp.full((R, 2), seed, jnp.uint32),
        temperature_R=each(temperature),
        top_k_R=each(0, jnp.int32),
        top_p_R=each(top_p),
        min_p_R=each(0.0),
        repetition_penalty_R=each(1.0),
        presence_penalty_R=each(0.0),
        frequency_penalty_R=each(0.0),
        ban_stop_R=each(False, bool),
        ban_RX=jnp.full((R, 1), -1),
        targets_R=each(-1, jnp.int32),
        biased_R=each(False, bool),
        wants_logprobs_R=each(False, bool),
    )


def plural(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"
