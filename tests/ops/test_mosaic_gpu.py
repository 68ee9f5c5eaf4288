"""The Hopper attention kernel: in Pallas' interpreter, lowered, and compiled."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret import JaxprInterpreter
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from quire.ops.attention import KVPages, QueryRows, hopper
from quire.ops.attention.hopper_kernel import merge, paged, task
from quire.ops.gpu import device
from quire.tests.support import copies, kernels_ahead
from quire.tests.support.attention_cases import Sequence, Shape, build, check, run
from quire.tests.support.cases import thinned

pytestmark = pytest.mark.usefixtures("interpreted_once")
attend = partial(hopper.attend, interpret=InterpretGPUParams(detect_races=True))
CLOSE = {"rtol": 2e-2, "atol": 1e-2}  # attention weights are rounded to bfloat16

DECODE_SEQUENCES = [
    Sequence(1, 100, 1),
    Sequence(2, 3, 1),
    Sequence(3, 63, 1),
    Sequence(4, 0, 1),
    Sequence(5, 191, 1),
]
MIXED_SEQUENCES = [Sequence(1, 100, 20), Sequence(2, 3, 1), Sequence(3, 40, 17)]


def decode_shape(**options) -> Shape:
    return Shape(**{"K": 2, "G": 4, "H": 64, "T": 6, "B": 6, "dtype": "bfloat16", **options})


def mixed_shape(**options) -> Shape:
    return decode_shape(**{"T": 44, "B": 4, **options})


CASES = {  # each parameter value occurs with several values of the others
    "decoding": (decode_shape(), DECODE_SEQUENCES),
    "decoding, cut": (decode_shape(K=1, T=1, B=1, sinks=True), [Sequence(77, 133, 1)]),
    "decoding, a window": (
        decode_shape(K=1, window=40, sinks=True, soft_cap=3.0),
        DECODE_SEQUENCES,
    ),
    "decoding, MHA": (decode_shape(K=3, G=1, soft_cap=3.0), DECODE_SEQUENCES),
    "decoding, MQA": (decode_shape(K=1, G=8, H=128, S=32), DECODE_SEQUENCES),
    "decoding, wide": (decode_shape(K=1, H=128, S=64, sinks=True), DECODE_SEQUENCES),
    "decoding, long pages": (decode_shape(K=1, G=7, S=128, window=100), DECODE_SEQUENCES),
    "decoding, several rows of one": (decode_shape(K=1), [Sequence(1, 125, 4), Sequence(2, 9, 1)]),
    "decoding, width 256": (decode_shape(K=1, G=2, H=256), DECODE_SEQUENCES[:3]),
    "decoding, int8": (decode_shape(K=4, G=2, S=32, codes="int8", window=100), DECODE_SEQUENCES),
    "decoding, float8": (
        decode_shape(K=4, G=2, H=128, S=32, codes="float8_e4m3fn", sinks=True),
        DECODE_SEQUENCES[:3],
    ),
    "decoding, latent": (decode_shape(K=1, G=8, H=320, value_dim=256), DECODE_SEQUENCES),
    "decoding, latent, many heads": (
        decode_shape(K=1, G=128, H=576, value_dim=512),
        DECODE_SEQUENCES[:2],
    ),
    "mixed": (mixed_shape(), MIXED_SEQUENCES),
    "mixed, width 256": (mixed_shape(K=1, G=8, H=256), MIXED_SEQUENCES),
    "mixed, int8": (mixed_shape(K=4, G=1, S=32, codes="int8"), MIXED_SEQUENCES),
    "mixed, latent": (
        mixed_shape(K=1, G=16, H=320, value_dim=256, T=26),
        [Sequence(1, 100, 17), Sequence(2, 3, 6)],
    ),
    "mixed, a window": (
        mixed_shape(K=1, G=6, H=128, S=32, window=24, sinks=True, soft_cap=2.0),
        MIXED_SEQUENCES,
    ),
    "mixed, MHA": (mixed_shape(G=1, S=64, K=1), MIXED_SEQUENCES),
    "mixed, a wide group": (
        mixed_shape(K=1, G=60, T=12, S=128),
        [Sequence(1, 100, 7), Sequence(2, 3, 1)],
    ),
}

ALWAYS_TESTED = [
    "decoding, cut",
    "decoding, a window",
    "decoding, int8",
    ("mixed, int8"),
    "mixed, latent",
    "mixed, a window",
]


@pytest.fixture(autouse=True)
def small_spans(monkeypatch):
    """Use short spans, and a pipeline of two blocks."""
    monkeypatch.setattr(task, "SPAN", 64)
    monkeypatch.setattr(task, "SPANS", 2)
    monkeypatch.setattr(task.KernelShape, "stages", 2)
    jax.clear_caches()


@pytest.mark.parametrize("name", thinned(CASES, ALWAYS_TESTED))
@pytest.mark.slow
def test_attention_matches_float64(name):
    """All rows match, and no accesses race."""
    shape, sequences = CASES[name]
    check(shape, sequences, np.random.default_rng(0), attend, CLOSE)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    "options",
    thinned(
        [{"sinks": True}, {"S": 32, "codes": "int8"}, {"G": 8, "H": 320, "value_dim": 256}],
        [{"sinks": True}],
    ),
    ids=str,
)
def test_attention_is_batch_and_chunk_invariant(options):
    """A row's output does not depend on other rows, its chunk, or whether its context is split."""
    expected_bits: dict[int, bytes] = {}

    def compare(T: int, B: int, start: int, rows: int, other_sequences: list[Sequence]) -> None:
        shape = decode_shape(K=1, T=T, B=B, **options)
        case = build(
            shape, [*other_sequences, Sequence(77, start, rows)], np.random.default_rng(start)
        )
        out, _ = run(shape, case, attend)
        for offset, row in enumerate(out[case.places[-1]]):
            assert expected_bits.setdefault(start + offset, row.tobytes()) == row.tobytes(), (
                start,
                offset,
                T,
            )

    compare(20, 2, 120, 18, [])  # crosses the end of a span
    compare(20, 2, 130, 4, [Sequence(3, 60, 7)])
    compare(1, 1, 133, 1, [])
    compare(4, 4, 137, 1, DECODE_SEQUENCES[:2])
    # equal work items, so no context is split
    compare(6, 6, 133, 1, [Sequence(seed, 130, 1) for seed in range(5)])


@pytest.mark.parametrize("num_ahead", thinned([8, 2], []))
def test_merge_does_not_depend_on_the_order_of_processors(num_ahead, monkeypatch):
    """The outputs are bit-identical, and the arrival counters are zero for the next layer."""
    monkeypatch.setattr(task, "SPANS", 4)
    monkeypatch.setattr(merge, "UNROLL", num_ahead)  # spans read ahead, and heads
    monkeypatch.setattr(merge, "MAX_LOADS", 2 * num_ahead)
    shape = decode_shape(K=1, G=10, T=2, B=2, sinks=True)
    case = build(shape, [Sequence(77, 190, 1), Sequence(3, 140, 1)], np.random.default_rng(0))
    axis_index = JaxprInterpreter._interpret_axis_index_p
    outputs = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):

        def reordered_axis_index(self, eqn, order=order):
            index = axis_index(self, eqn)
            return jnp.asarray(order)[index] if eqn.params["axis_name"] == "processor" else index

        def layers(q, k, v, pages, rows, params, sinks_N=None):
            rows = rows.replace(arrivals=paged.new_arrivals(3))
            first_out, pages = attend(q, k, v, pages, rows, params, sinks_N)
            second_out, pages = attend(q, k, v, pages, rows, params, sinks_N)
            max_count = jnp.broadcast_to(
                jnp.max(jnp.abs(rows.arrivals[...])), first_out.shape
            ).astype(first_out.dtype)
            return jnp.stack([first_out, second_out, max_count]), pages

        monkeypatch.setattr(JaxprInterpreter, "_interpret_axis_index_p", reordered_axis_index)
        out, _ = run(shape, case, layers)
        assert not gpu_callbacks.get_races().races_found
        assert out[0].tobytes() == out[1].tobytes() and not out[2].any()
        outputs.append(out[0].tobytes())
    assert len(set(outputs)) == 1


@pytest.mark.parametrize(("window", "codes"), [(70, None), (None, "int8")])
@pytest.mark.slow
def test_context_is_copied_once(window, codes, monkeypatch):
    """Keys and values in blocks of 64 positions, their scales, and the queries."""
    shape = decode_shape(K=4, G=2, S=32, codes=codes, window=window)
    sequences = [Sequence(1, 127, 1), Sequence(2, 63, 1), Sequence(3, 179, 1)]
    num_hidden_blocks = 1 if window else 0  # blocks of the last sequence outside of its window
    copied_blocks = copies.record_copies(monkeypatch)
    run(shape, build(shape, sequences, np.random.default_rng(0)), attend)
    positions = 64 * (2 + 1 + 3 - num_hidden_blocks)
    keys = positions * shape.K * (shape.H * 2 if codes is None else shape.H + 4)
    queries = 3 * 8 * shape.H * 2
    assert sum(block.nbytes for block in copied_blocks) == 2 * keys + queries


# Shapes in production, which are lowered for a GPU
PRODUCTION_SHAPES = {
    "Llama-3-8B, decoding": Shape(K=8, G=4, H=128, T=64, B=64),
    "Llama-3-8B, a chunk": Shape(K=8, G=4, H=128, T=2048, B=64),
    "Mistral, decoding": Shape(K=8, G=4, H=128, T=64, B=64, window=4096),
    "gpt-oss, decoding": Shape(K=8, G=8, H=64, T=64, B=64, window=128, sinks=True),
    "gpt-oss, a chunk": Shape(K=8, G=8, H=64, T=2048, B=64, sinks=True),
    "Gemma-3, decoding": Shape(K=8, G=2, H=256, T=64, B=64, window=1024),
    "Gemma-3, a chunk": Shape(K=8, G=2, H=256, T=2048, B=64),
    "DeepSeek-V3, decoding": Shape(K=1, G=128, H=576, T=64, B=64, value_dim=512),
    "DeepSeek-V3, a chunk": Shape(K=1, G=128, H=576, T=2048, B=64, value_dim=512),
    "MLA of 256, a chunk": Shape(K=1, G=16, H=320, T=2048, B=64, value_dim=256),
    "Llama-3-8B in int8, decoding": Shape(K=8, G=4, H=128, T=64, B=64, S=32, codes="int8"),
    "Llama-3-8B in float8, a chunk": Shape(
        K=8, G=4, H=128, T=2048, B=64, S=32, codes="float8_e4m3fn"
    ),
    "gpt-oss in int8, decoding": Shape(
        K=8, G=8, H=64, T=64, B=64, S=32, codes="int8", window=128, sinks=True
    ),
    "Gemma-3 in int8, decoding": Shape(K=8, G=2, H=256, T=64, B=64, S=32, codes="int8"),
    "MHA, long pages": Shape(K=32, G=1, H=128, S=128, T=64, B=64, soft_cap=50.0),
}

ALWAYS_LOWERED = [
    "gpt-oss, decoding",
    "Gemma-3, a chunk",
    "DeepSeek-V3, decoding",
    "Llama-3-8B in int8, decoding",
]


def step_of(name: str):
    """(a step of attention, the shapes of its arguments)."""
    shape = PRODUCTION_SHAPES[name]

    def array(*sizes: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def numbers(*sizes: int):
        return array(*sizes, dtype=jnp.int32)

    T = shape.T
    B = shape.B
    K = shape.K
    H = shape.H
    S = shape.S
    new = array(T, K, H)
    if shape.codes is None:
        page = array(4096, S, K, H)
        pages = KVPages(page) if shape.value_dim else KVPages(page, page)
    else:
        page = array(4096, S, K, H, dtype=shape.codes)
        scale = array(4096, K, S, dtype=jnp.float32)
        pages = KVPages(page, page, scale, scale)
    rows = QueryRows(numbers(T), numbers(B + 1), numbers(B, 131072 // S), numbers(T))
    sinks = array(K * shape.G, dtype=jnp.float32) if shape.sinks else None

    def step(q, k, v, pages, rows, sinks):
        return hopper.attend(q, k, v, pages, rows, shape.params, sinks)

    return jax.jit(step), (
        array(T, K * shape.G, H),
        new,
        None if shape.value_dim else new,
        pages,
        rows,
        sinks,
    )


@pytest.mark.parametrize("name", thinned(PRODUCTION_SHAPES, ALWAYS_LOWERED))
@pytest.mark.slow
def test_lowers_for_cuda(name, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(device, "is_hopper", lambda: True)
    monkeypatch.setattr(device, "num_processors", lambda: 132)
    step, arguments = step_of(name)
    assert "mosaic_gpu" in step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture(scope="module")
def hopper_steps():
    return kernels_ahead.compile_some(__file__, PRODUCTION_SHAPES, ALWAYS_LOWERED)


@pytest.mark.slow
@kernels_ahead.needs_compiler
@pytest.mark.parametrize("name", thinned(PRODUCTION_SHAPES, ALWAYS_LOWERED))
def test_compiles_for_hopper(name, hopper_steps):
    """Compiled to SASS: fits, does not serialise `wgmma`, and spills at most two addresses."""
    assert hopper_steps[name].kernels
    for kernel in hopper_steps[name].kernels:
        print(
            "|",
            name,
            "|",
            kernel.registers,
            "|",
            kernel.stored,
            "/",
            kernel.loaded,
            "|",
            kernel.shared,
            "|",
        )
        assert kernel.shared <= task.MEMORY
        assert "wgmma" not in kernel.log
        assert kernel.stored <= 8
