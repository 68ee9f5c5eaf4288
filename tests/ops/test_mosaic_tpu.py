"""The TPU attention kernel: in Pallas' interpreter, lowered, and compiled if libtpu is there."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from quire.ops import attention
from quire.ops.attention import KVPages, QueryRows, tpu
from quire.scripts import collect_env
from quire.tests.support.attention_cases import Sequence, Shape, build, check, run
from quire.tests.support.cases import thinned

CLOSE = {"rtol": 1e-2, "atol": 6e-3}
DECODE_SEQUENCES = [
    Sequence(1, 100, 1),
    Sequence(2, 3, 1),
    Sequence(3, 63, 1),
    Sequence(4, 0, 1),
    Sequence(5, 191, 1),
]
# rows from 32 on belong to the next block
MIXED_SEQUENCES = [Sequence(1, 100, 20), Sequence(2, 3, 1), Sequence(3, 40, 17)]
# a block of rows ends with the end of a sequence
EDGE_SEQUENCES = [Sequence(1, 60, 31), Sequence(2, 9, 1), Sequence(3, 127, 8)]


def decode_shape(**options) -> Shape:
    return Shape(
        **{"K": 2, "G": 4, "H": 128, "T": 6, "B": 6, "dtype": "bfloat16", "paired": True, **options}
    )


def mixed_shape(**options) -> Shape:
    return decode_shape(**{"T": 44, "B": 4, **options})


CASES = {  # each parameter value occurs with several values of the others
    "decoding": (decode_shape(), DECODE_SEQUENCES),
    "decoding, a window": (decode_shape(window=40, soft_cap=3.0), DECODE_SEQUENCES),
    "decoding, MHA in two blocks of heads": (decode_shape(K=16, G=1, S=64), DECODE_SEQUENCES),
    "decoding, MQA, wide": (decode_shape(K=1, G=2, H=256, S=32, window=100), DECODE_SEQUENCES),
    "mixed": (mixed_shape(), MIXED_SEQUENCES),
    "mixed, an odd group": (mixed_shape(G=3, S=8, window=24), EDGE_SEQUENCES),
    "mixed, MQA": (mixed_shape(K=1, G=8, soft_cap=2.0), EDGE_SEQUENCES),
    "a chunk that sees as many pages as it can": (
        mixed_shape(K=1, S=8, T=20, B=1, window=60),
        [Sequence(1, 106, 20)],
    ),
}


class Block:
    """A block of pages as a value: the interpreter cannot reshape or bitcast a buffer."""

    def __init__(self, value):
        self.value, self.dtype = value, value.dtype

    def reshape(self, *shape):
        return Block(self.value.reshape(*shape))

    def bitcast(self, dtype):
        """TPU packing: the first of two rows is the lower half of a word."""
        halves = jax.lax.bitcast_convert_type(self.value, jnp.uint16).astype(dtype)
        return halves[0::2] | halves[1::2] << 16

    def __getitem__(self, at):
        return self.value[at]


def store(ref, value, mask):
    """A masked store, which the interpreter does not support for a slice of a buffer."""
    ref[...] = jnp.where(mask, value, ref[...])


@pytest.fixture
def interpreter(monkeypatch):
    """Run the kernel in the TPU interpreter, with late copies, NaN buffers and race detection."""
    wait = kernel.MultiPageAsyncCopyDescriptor.wait
    monkeypatch.setattr(
        kernel.MultiPageAsyncCopyDescriptor, "wait", lambda copy: Block(wait(copy)[...])
    )
    monkeypatch.setattr(pltpu, "store", store)
    monkeypatch.setattr(tpu, "has_tpu", lambda: True)
    monkeypatch.setattr(tpu, "BLOCK", 64)
    jax.clear_caches()
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    pltpu.reset_tpu_interpret_mode_state()
    jax.clear_caches()


@pytest.mark.parametrize(
    "name", thinned(CASES, ["decoding, a window", "decoding, MQA, wide", "mixed, an odd group"])
)
@pytest.mark.slow
def test_attention_matches_float64(name, interpreter):
    """All rows match, and no accesses race."""
    shape, sequences = CASES[name]
    check(shape, sequences, np.random.default_rng(0), tpu.BACKEND, CLOSE)
    assert not interpret_pallas_call.races.races_found


def sequence_outputs(shape: Shape, sequences: list[Sequence]) -> list[bytes]:
    """The bytes of each sequence's output rows."""
    case = build(shape, sequences, np.random.default_rng(len(sequences)))
    out, _ = run(shape, case, tpu.BACKEND)
    assert not out[case.places[-1].stop :].any()
    return [out[place].tobytes() for place in case.places]


@pytest.mark.slow
def test_attention_is_batch_invariant(interpreter):
    """Neither other sequences nor the step's size change an output."""
    shape = mixed_shape(K=1, window=40)
    sequence = Sequence(77, 133, 1)
    (alone,) = sequence_outputs(dataclasses.replace(shape, T=1, B=1), [sequence])
    assert (
        sequence_outputs(dataclasses.replace(shape, T=4, B=4), [*DECODE_SEQUENCES[:2], sequence])[2]
        == alone
    )
    first, _, chunk = sequence_outputs(shape, [sequence, Sequence(3, 60, 9), Sequence(78, 100, 30)])
    assert first == alone
    assert sequence_outputs(dataclasses.replace(shape, T=64, B=2), [Sequence(78, 100, 30)]) == [
        chunk
    ]


@pytest.mark.slow
def test_sequences_without_rows_change_nothing(interpreter):
    """At any place in the batch, and alone; the kernel does not hang."""
    shape = mixed_shape(K=1, T=40, B=7)
    without_rows = Sequence(9, 0, 0)
    full_block = Sequence(1, 60, 32)  # fills a block of rows
    single_row = Sequence(2, 100, 1)
    assert sequence_outputs(
        shape, [without_rows, full_block, without_rows, without_rows, single_row]
    ) == [
        b"",
        *sequence_outputs(shape, [full_block])[:1],
        b"",
        b"",
        *sequence_outputs(shape, [single_row]),
    ]
    assert sequence_outputs(shape, [without_rows]) == [b""]
    empty = build(shape, [without_rows], np.random.default_rng(0)).rows
    lengths_B, _, starts_B1, count_1 = tpu.describe(empty, shape.S, None, 12)
    assert (int(lengths_B[0]), int(starts_B1[1]), count_1.tolist()) == (1, 1, [1]), (
        "a prefetch must be waited for"
    )


UNSUPPORTED = {
    "sinks": (decode_shape(sinks=True), "neither sinks"),
    "float32": (decode_shape(dtype="float32"), "must be bfloat16"),
    "two arrays": (decode_shape(paired=False), "right after its key"),
    "narrow": (decode_shape(H=64), "of a width of 128, or a multiple with one head, not 64"),
    "wide": (decode_shape(H=256), "of a width of 128, or a multiple with one head, not 256"),
    "ten heads": (decode_shape(K=10), "not 10 of 4"),
    "odd groups": (decode_shape(K=16, G=3), "not 16 of 3"),
    "long pages": (decode_shape(S=1024), "at most 512 positions, not 1024"),
    "long tables": (decode_shape(S=1, T=1024, B=1024), "page tables take 786432 bytes"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_cases_raise_the_reason(name, monkeypatch):
    shape, reason = UNSUPPORTED[name]
    with pytest.raises(NotImplementedError, match="there is no TPU"):
        trace(shape, 192)
    monkeypatch.setattr(tpu, "has_tpu", lambda: True)
    with pytest.raises(NotImplementedError, match=reason):
        trace(shape, 192)


def test_chosen_implementations_on_a_tpu(monkeypatch):
    monkeypatch.setattr(tpu, "has_tpu", lambda: True)
    monkeypatch.setattr(attention, "uses_paired_pages", lambda dtype: True)
    monkeypatch.setenv("QUIRE_NATIVE", "off")
    report = dict(collect_env.attention())
    for name in ("full", "window", "soft cap"):
        assert (
            report[name]
            == "mosaic_tpu; native declines: keys and values must lie in arrays of their own"
        )
    for name in ("sinks", "latent"):
        serves, _, reason, *_ = report[name].split("; ")
        assert serves == "xla" and reason.startswith(
            "mosaic_tpu declines: the kernel has neither sinks nor values"
        )


# Production shapes with their maximum context lengths, which are lowered for a device
PRODUCTION_CASES = {
    "Llama-3-8B, decoding": (decode_shape(K=8, T=64, B=64), 8192),
    "Llama-3-8B, a chunk": (decode_shape(K=8, T=2048, B=64), 8192),
    "Llama-3.1-8B, decoding": (decode_shape(K=8, T=64, B=64, S=64), 131072),
    "Llama-3-70B, a chunk": (decode_shape(K=8, G=8, T=2048, B=64), 8192),
    "Gemma-3-1B, decoding": (decode_shape(K=1, H=256, T=64, B=64, window=512), 32768),
    "Gemma-3-27B, decoding": (decode_shape(K=16, G=2, T=64, B=64, window=1024), 131072),
    "Gemma-3-27B, a chunk": (decode_shape(K=16, G=2, T=2048, B=64, S=64), 131072),
    "MHA": (decode_shape(K=32, G=1, T=64, B=64, S=512, soft_cap=50.0), 32768),
    "a wide group": (decode_shape(K=8, G=16, T=512, B=64), 8192),
}


def trace(shape: Shape, length: int, sharding=None):
    T = shape.T
    B = shape.B
    K = shape.K
    H = shape.H
    S = shape.S

    def array(*sizes: int, dtype=shape.dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    def numbers(*sizes: int):
        return array(*sizes, dtype=jnp.int32)

    page = array(1024, S, K, H)
    new = array(T, K, H)
    pages = KVPages(kv_PSYH=array(1024, S, 2 * K, H)) if shape.paired else KVPages(page, page)
    rows = QueryRows(numbers(T), numbers(B + 1), numbers(B, -(-length // S)), numbers(T))
    sinks = array(K * shape.G, dtype=jnp.float32) if shape.sinks else None

    def step(q, k, v, pages, rows, sinks):
        return tpu.BACKEND(q, k, v, pages, rows, shape.params, sinks)

    return jax.jit(step, donate_argnums=3).trace(
        array(T, K * shape.G, H), new, new, pages, rows, sinks
    )


def abstract_device(kind: str):
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize(
    "name", thinned(PRODUCTION_CASES, ["Llama-3-8B, decoding", "Gemma-3-27B, a chunk", "MHA"])
)
def test_lowers_for_tpus(name, monkeypatch):
    monkeypatch.setattr(tpu, "has_tpu", lambda: True)
    with abstract_device("TPU v5e"):
        lowered = trace(*PRODUCTION_CASES[name]).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which has the compiler, is not installed",
)
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("name", PRODUCTION_CASES)
def test_compiles_for_tpus(name, chip, monkeypatch):
    """The program fits, and the KV cache is updated in place."""
    # do not query the cloud's metadata server
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setattr(tpu, "has_tpu", lambda: True)
    device = topologies.get_topology_desc(chip, "tpu").devices[0]
    shape, length = PRODUCTION_CASES[name]
    with abstract_device(device.device_kind):
        memory = (
            trace(shape, length, SingleDeviceSharding(device)).lower().compile().memory_analysis()
        )
    assert memory.alias_size_in_bytes == 1024 * shape.S * 2 * shape.K * shape.H * 2
    assert memory.temp_size_in_bytes < 1 << 21
