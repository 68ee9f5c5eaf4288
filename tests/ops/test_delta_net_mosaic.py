"""The GPU kernel of the delta rule: in Pallas' interpreter, and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from quire.ops import delta_net
from quire.ops.delta_net import accuracy, hopper
from quire.ops.gpu import self_test
from quire.ops.state_rows import StateRows
from quire.tests.support import kernels_ahead
from quire.tests.support.cases import thinned

pytestmark = [pytest.mark.usefixtures("interpreted_once"), pytest.mark.slow]
KINDS = {
    "Qwen3-Next": {"keys": 128, "values": 128, "shared": 2, "by_key": False, "corrects": True},
    "Kimi Linear": {"keys": 128, "values": 128, "shared": 1, "by_key": True, "corrects": True},
    "linear attention": {
        "keys": 32,
        "values": 128,
        "shared": 1,
        "by_key": False,
        "corrects": False,
    },
    "Mamba 2": {"keys": 64, "values": 64, "shared": 4, "by_key": False, "corrects": False},
    "long keys": {"keys": 160, "values": 128, "shared": 1, "by_key": False, "corrects": True},
    "two heads, all else": {
        "keys": 160,
        "values": 64,
        "shared": 2,
        "by_key": True,
        "corrects": True,
    },
}


def run_kernel(arrays, rows, corrects: bool):
    def step(arrays, rows):
        return hopper.delta_rule(
            *arrays, rows, corrects, interpret=InterpretGPUParams(detect_races=True)
        )

    outputs = jax.jit(step)(arrays, rows)
    assert not gpu_callbacks.get_races().races_found
    return [np.asarray(x) for x in outputs]


@pytest.mark.parametrize("name", thinned(KINDS, ["Mamba 2", "two heads, all else"]))
def test_kernel_matches_float64(name):
    """First and later steps, saving the state after any row; more rows than the pipeline holds."""
    kind = KINDS[name]
    case = accuracy.DeltaCase(kind, (1, 6, 3, 1, 2))
    _, (*arrays, rows), expected = case.build(3)
    outputs = run_kernel(arrays, rows, kind["corrects"])
    np.testing.assert_allclose(accuracy.stack_results(*outputs), expected, rtol=1e-6, atol=1e-5)


def test_kernel_is_chunk_invariant():
    """In one step, and in chunks with other sequences, discarded rows and padding."""
    kind = KINDS["Qwen3-Next"] | {"keys": 32}
    length = 6
    slots = 3
    _, (*arrays, memory, rows), _ = accuracy.DeltaCase(kind, (length, 2)).build(1)
    is_first_step = jnp.array([True, False])
    expected_out, expected_memory = run_kernel(
        [*arrays, memory],
        StateRows(rows.starts_B1, rows.slots_B, is_first_step, jnp.array([length, 2])),
        True,
    )
    slot = int(rows.slots_B[0])
    position = 0
    chunk_memory = jnp.full((slots, *memory.shape[1:]), jnp.nan)
    for count, num_kept in ((2, 1), (4, 3), (2, 2)):
        chunk = [jnp.concatenate((x[-1:], x[position : position + count], x[-2:])) for x in arrays]
        chunk_rows = StateRows(
            jnp.array([0, 1, 1 + count, 1 + count], jnp.int32),
            jnp.array([(slot + 1) % slots, slot, slots], jnp.int32),
            jnp.array([True, position == 0, False]),
            jnp.array([1, num_kept, 0], jnp.int32),
        )
        out, chunk_memory = run_kernel([*chunk, chunk_memory], chunk_rows, True)
        assert (
            np.array_equal(out[1 : 1 + count], expected_out[position : position + count])
            and not out[1 + count :].any()
        )
        position += num_kept
    assert position == length and np.array_equal(chunk_memory[slot], expected_memory[slot])


def spoil_a_row(out, memory):
    return out.at[1, 0].multiply(1.001), memory


def spoil_a_memory(out, memory):
    return out, memory.at[0, 1, 2].add(0.01)


@pytest.mark.parametrize("spoil", [None, spoil_a_row, spoil_a_memory])
def test_self_test_rejects_inaccurate_kernel(spoil, monkeypatch):
    """The GPU self-test, with few rows in the interpreter, accepts only an accurate kernel."""
    real = accuracy.delta_rule
    monkeypatch.setattr(
        accuracy,
        "delta_rule",
        lambda *arguments: real(*arguments) if spoil is None else spoil(*real(*arguments)),
    )
    case = accuracy.DeltaCase(KINDS["linear attention"], (2, 1), InterpretGPUParams())
    result = self_test.measure(case, 0, repeats=2)
    assert (result.wrong is not None) == (spoil is not None)


def test_error_lists_every_unsupported_property():
    _, (*arrays, rows), _ = accuracy.DeltaCase(KINDS["linear attention"], (1,)).build(0)
    unsupported = [
        arrays[0][..., :6],
        arrays[1],
        arrays[2][..., :32].astype(jnp.bfloat16),
        *arrays[3:],
    ]
    with pytest.raises(
        NotImplementedError,
        match="not bfloat16, and a value must have 64 or 128 numbers, not 32, .* 6",
    ):
        hopper.delta_rule(*unsupported, rows, True, interpret=True)
    single_heads = [*arrays[:2], arrays[2][..., :64], *arrays[3:]]
    with pytest.raises(
        NotImplementedError, match="2 heads of 64 numbers side by side must share a key"
    ):
        hopper.delta_rule(*single_heads, rows, True, interpret=True)
    with pytest.raises(NotImplementedError, match="mosaic_gpu: there is no NVIDIA GPU"):
        delta_net.delta_rule(*arrays, rows, implementation="mosaic_gpu")


def test_lowers_for_cuda_as_one_kernel_that_changes_memories_in_place(monkeypatch):
    monkeypatch.setattr(hopper.device, "is_hopper", lambda: True)
    monkeypatch.setenv("QUIRE_MOSAIC", "trusted")
    _, (*arrays, rows), _ = accuracy.DeltaCase(KINDS["Qwen3-Next"], (1, 1)).build(0)
    traced = jax.jit(lambda arrays, rows: delta_net.delta_rule(*arrays, rows)).trace(arrays, rows)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1 and "stablehlo.while" not in text


PRODUCTION_KINDS = {name: KINDS[name] for name in ("Qwen3-Next", "Kimi Linear")} | {
    "Granite 4": {"keys": 128, "values": 64, "shared": 128, "by_key": False, "corrects": False},
    "Falcon-H1": {"keys": 256, "values": 64, "shared": 24, "by_key": False, "corrects": False},
    "Falcon-H1-34B": {"keys": 256, "values": 128, "shared": 16, "by_key": False, "corrects": False},
    "all at once": {"keys": 256, "values": 64, "shared": 2, "by_key": True, "corrects": True},
}
ALWAYS_COMPILED = ["Kimi Linear", "all at once"]


def step_of(name: str):
    """(a step of the kernel, the shapes of its arguments)."""
    kind = PRODUCTION_KINDS[name]
    _, (*arrays, rows), _ = accuracy.DeltaCase(kind, (1, 1)).build(0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arrays, rows))
    return jax.jit(lambda arrays, rows: hopper.delta_rule(*arrays, rows, kind["corrects"])), shapes


@pytest.fixture(scope="module")
def hopper_steps():
    return kernels_ahead.compile_some(__file__, PRODUCTION_KINDS, ALWAYS_COMPILED)


@kernels_ahead.needs_compiler
@pytest.mark.parametrize("name", thinned(PRODUCTION_KINDS, ALWAYS_COMPILED))
def test_compiles_for_hopper(name, hopper_steps):
    """Compiled to SASS, the kernel spills no registers."""
    (kernel,) = hopper_steps[name].kernels
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
    assert kernel.stored == 0
