"""The attention kernel for TPUs where there is none: in Pallas' interpreter, lowered, and compiled
where libtpu is.
"""

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
DECODE = [
    Sequence(1, 100, 1),
    Sequence(2, 3, 1),
    Sequence(3, 63, 1),
    Sequence(4, 0, 1),
    Sequence(5, 191, 1),
]
# rows 32 and on are the next block's
MIXED = [Sequence(1, 100, 20), Sequence(2, 3, 1), Sequence(3, 40, 17)]
# a block of rows ends with a sequence
EDGE = [Sequence(1, 60, 31), Sequence(2, 9, 1), Sequence(3, 127, 8)]


def decoding(**more) -> Shape:
    return Shape(
        **{"K": 2, "G": 4, "H": 128, "T": 6, "B": 6, "dtype": "bfloat16", "paired": True, **more}
    )


def mixed(**more) -> Shape:
    return decoding(**{"T": 44, "B": 4, **more})


CASES = {  # each value of each parameter beside several of the others
    "decoding": (decoding(), DECODE),
    "decoding, a window": (decoding(window=40, soft_cap=3.0), DECODE),
    "decoding, MHA in two blocks of heads": (decoding(K=16, G=1, S=64), DECODE),
    "decoding, MQA, wide": (decoding(K=1, G=2, H=256, S=32, window=100), DECODE),
    "mixed": (mixed(), MIXED),
    "mixed, an odd group": (mixed(G=3, S=8, window=24), EDGE),
    "mixed, MQA": (mixed(K=1, G=8, soft_cap=2.0), EDGE),
    "a chunk that sees as many pages as it can": (
        mixed(K=1, S=8, T=20, B=1, window=60),
        [Sequence(1, 106, 20)],
    ),
}


class Block:
    """A block of pages, read at once: the interpreter does not know a buffer by another shape
    or type.
    """

    def __init__(self, value):
        self.value, self.dtype = value, value.dtype

    def reshape(self, *shape):
        return Block(self.value.reshape(*shape))

    def bitcast(self, dtype):
        """As a TPU packs them: of two rows, the first is the lower half of a word."""
        halves = jax.lax.bitcast_convert_type(self.value, jnp.uint16).astype(dtype)
        return halves[0::2] | halves[1::2] << 16

    def __getitem__(self, at):
        return self.value[at]


def store(ref, value, mask):
    """A masked store, which the interpreter does not know for a part of a buffer."""
    ref[...] = jnp.where(mask, value, ref[...])


@pytest.fixture
def interpreter(monkeypatch):
    """The kernel runs on this CPU, with copies that end late, buffers full of NaN, and races looked
    for.
    """
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
def test_against_float64(name, interpreter):
    """Each row is right, and no access races with another."""
    shape, sequences = CASES[name]
    check(shape, sequences, np.random.default_rng(0), tpu.BACKEND, CLOSE)
    assert not interpret_pallas_call.races.races_found


def rows_of(shape: Shape, sequences: list[Sequence]) -> list[bytes]:
    """The bits of each sequence's rows."""
    case = build(shape, sequences, np.random.default_rng(len(sequences)))
    out, _ = run(shape, case, tpu.BACKEND)
    assert not out[case.places[-1].stop :].any()
    return [out[place].tobytes() for place in case.places]


@pytest.mark.slow
def test_the_same_bits_in_any_batch(interpreter):
    """Of one chunk: neither company nor the step's sizes change it."""
    shape = mixed(K=1, window=40)
    own = Sequence(77, 133, 1)
    (alone,) = rows_of(dataclasses.replace(shape, T=1, B=1), [own])
    assert rows_of(dataclasses.replace(shape, T=4, B=4), [*DECODE[:2], own])[2] == alone
    first, _, chunk = rows_of(shape, [own, Sequence(3, 60, 9), Sequence(78, 100, 30)])
    assert first == alone
    assert rows_of(dataclasses.replace(shape, T=64, B=2), [Sequence(78, 100, 30)]) == [chunk]


@pytest.mark.slow
def test_sequences_without_rows(interpreter):
    """Wherever they stand, and where there are no others, they change nothing and nothing waits for
    them.
    """
    shape = mixed(K=1, T=40, B=7)
    none = Sequence(9, 0, 0)
    first = Sequence(1, 60, 32)  # the first fills a block of rows
    second = Sequence(2, 100, 1)
    assert rows_of(shape, [none, first, none, none, second]) == [
        b"",
        *rows_of(shape, [first])[:1],
        b"",
        b"",
        *rows_of(shape, [second]),
    ]
    assert rows_of(shape, [none]) == [b""]
    empty = build(shape, [none], np.random.default_rng(0)).rows
    lengths_B, _, starts_B1, count_1 = tpu.describe(empty, shape.S, None, 12)
    assert (int(lengths_B[0]), int(starts_B1[1]), count_1.tolist()) == (1, 1, [1]), (
        "what was fetched is waited for"
    )


REFUSED = {
    "sinks": (decoding(sinks=True), "neither sinks"),
    "float32": (decoding(dtype="float32"), "must be bfloat16"),
    "two arrays": (decoding(paired=False), "right after its key"),
    "narrow": (decoding(H=64), "of a width of 128, or a multiple with one head, not 64"),
    "wide": (decoding(H=256), "of a width of 128, or a multiple with one head, not 256"),
    "ten heads": (decoding(K=10), "not 10 of 4"),
    "odd groups": (decoding(K=16, G=3), "not 16 of 3"),
    "long pages": (decoding(S=1024), "at most 512 positions, not 1024"),
    "long tables": (decoding(S=1, T=1024, B=1024), "page tables take 786432 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_declines(name, monkeypatch):
    shape, reason = REFUSED[name]
    with pytest.raises(NotImplementedError, match="there is no TPU"):
        trace(shape, 192)
    monkeypatch.setattr(tpu, "has_tpu", lambda: True)
    with pytest.raises(NotImplementedError, match=reason):
        trace(shape, 192)


def test_what_serves_on_a_tpu(monkeypatch):
    monkeypatch.setattr(tpu, "has_tpu", lambda: True)
    monkeypatch.setattr(attention, "pairs", lambda dtype: True)
    monkeypatch.setenv("QUIRE_NATIVE", "off")
    said = dict(collect_env.attention())
    for name in ("full", "window", "soft cap"):
        assert (
            said[name]
            == "mosaic_tpu; native declines: keys and values must lie in arrays of their own"
        )
    for name in ("sinks", "latent"):
        serves, _, reason, *_ = said[name].split("; ")
        assert serves == "xla" and reason.startswith(
            "mosaic_tpu declines: the kernel has neither sinks nor values"
        )


# What is lowered for a device, at the sizes that are served, with a context of so many tokens.
PRODUCTION = {
    "Llama-3-8B, decoding": (decoding(K=8, T=64, B=64), 8192),
    "Llama-3-8B, a chunk": (decoding(K=8, T=2048, B=64), 8192),
    "Llama-3.1-8B, decoding": (decoding(K=8, T=64, B=64, S=64), 131072),
    "Llama-3-70B, a chunk": (decoding(K=8, G=8, T=2048, B=64), 8192),
    "Gemma-3-1B, decoding": (decoding(K=1, H=256, T=64, B=64, window=512), 32768),
    "Gemma-3-27B, decoding": (decoding(K=16, G=2, T=64, B=64, window=1024), 131072),
    "Gemma-3-27B, a chunk": (decoding(K=16, G=2, T=2048, B=64, S=64), 131072),
    "MHA": (decoding(K=32, G=1, T=64, B=64, S=512, soft_cap=50.0), 32768),
    "a wide group": (decoding(K=8, G=16, T=512, B=64), 8192),
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


def on(kind: str):
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize(
    "name", thinned(PRODUCTION, ["Llama-3-8B, decoding", "Gemma-3-27B, a chunk", "MHA"])
)
def test_lowers_for_tpus(name, monkeypatch):
    monkeypatch.setattr(tpu, "has_tpu", lambda: True)
    with on("TPU v5e"):
        lowered = trace(*PRODUCTION[name]).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which has the compiler, is not installed",
)
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("name", PRODUCTION)
def test_compiles_for_tpus(name, chip, monkeypatch):
    """It fits, and the cache is written where it is: nothing of its size is allocated."""
    # do not look for the machine's description in a cloud
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setattr(tpu, "has_tpu", lambda: True)
    device = topologies.get_topology_desc(chip, "tpu").devices[0]
    shape, length = PRODUCTION[name]
    with on(device.device_kind):
        used = (
            trace(shape, length, SingleDeviceSharding(device)).lower().compile().memory_analysis()
        )
    assert used.alias_size_in_bytes == 1024 * shape.S * 2 * shape.K * shape.H * 2
    assert used.temp_size_in_bytes < 1 << 21
