"""Compiled programs on disk: a second start traces nothing, and serves what the first did."""

import json
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from quire import LLM, SamplingParams
from quire.model.checkpoint.loader import family_for
from quire.model.stored_format import StoredFormat
from quire.ops import native
from quire.serving.device import programs
from quire.serving.device.programs import Call, Compiler, described, folder_of_programs
from quire.serving.engine import runner
from quire.tests.support import tiny, tiny_moe

OPTIONS = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
}


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty folder, and a process that has no programs of JAX's own cache; the kernels stay
    where they are.
    """
    kernels = native.build.cache_folder()
    monkeypatch.setattr(native.build, "cache_folder", lambda: kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "quire" / "jax").mkdir(parents=True)
    jax.clear_caches()
    monkeypatch.setattr(programs, "elsewhere", set())
    others = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache" / "quire" / "jax"))
    compilation_cache.reset_cache()
    yield tmp_path / "cache" / "quire" / "programs"
    written()
    jax.config.update("jax_compilation_cache_dir", others)
    compilation_cache.reset_cache()


@pytest.fixture
def traced(monkeypatch):
    """The names of the functions that are traced for a program."""
    found = []
    trace = Call.trace
    monkeypatch.setattr(
        Call, "trace", lambda self: found.append(self.function.__name__) or trace(self)
    )
    return found


def written() -> None:
    """Wait for what is written beside the first requests."""
    for thread in threading.enumerate():
        if thread.name == "quire-program-cache":
            thread.join()


def answers(model: str, **options) -> str:
    llm = LLM(str(model), **OPTIONS | options)
    written()
    prompts = [[1, 2, 3], list(range(1, 30))]
    chosen = [
        SamplingParams(temperature=0.8, seed=n, max_tokens=9, logprobs=2, ignore_eos=True)
        for n in range(2)
    ]
    # in a batch, and in a series
    found = [*llm.generate(prompts, chosen), *llm.generate(prompts[:1], chosen[:1])]
    assert not llm.engine.runner.compiles.recompiles
    return repr([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found])


def add(x, y, by: int = 1):
    return x + by * y


ADD = jax.jit(add, static_argnames="by")


def made(*args, **static) -> jax.stages.Compiled:
    with Compiler(folder_of_programs()) as compiler:
        program = compiler.make(Call(ADD, args, **static)).result()
    written()
    return program


@pytest.mark.parametrize(
    "model", [tiny.LLAMA, tiny.LLAMA | {"torch_dtype": "bfloat16"}, tiny_moe.MIXTRAL]
)
@pytest.mark.slow
def test_a_second_start_traces_nothing(home, traced, tmp_path, model):
    """And gives the bits of the first, in batches, alone and in series."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    first = answers(tmp_path, load_format="dummy")
    count = len(traced)
    assert {"step", "fused_steps", "copy_pages"} <= {*traced}
    assert len([*home.iterdir()]) == count
    assert answers(tmp_path, load_format="dummy") == first
    assert traced[count:] == []


@pytest.mark.slow
def test_beside_a_full_cache_of_jax(home, traced, tmp_path, monkeypatch):
    """What JAX has loaded from it could not be written again."""
    tiny.write(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "folder_of_programs", lambda: None)
        jax.clear_caches()
        first = answers(tmp_path / "model")
    assert not home.exists() and [*home.with_name("jax").iterdir()]
    assert answers(tmp_path / "model") == first
    assert not [*home.iterdir()], "this process may still have those of JAX's cache"
    jax.clear_caches()  # as in another process
    programs.elsewhere.clear()
    assert [answers(tmp_path / "model") for _ in range(2)] == [first] * 2
    assert [*home.iterdir()] and jax.config.jax_enable_compilation_cache


@pytest.mark.slow
def test_with_a_draft_model_and_adapters(home, traced):
    drafts = {"method": "draft_model", "model": "quill-draft", "num_speculative_tokens": 2}
    options = {
        "speculative_config": drafts,
        "enable_lora": True,
        "max_loras": 2,
        "skip_tokenizer_init": False,
    }
    first = answers("quill", **options)
    count = len(traced)
    assert {"draft_prefill", "write_adapter"} <= {*traced}
    assert answers("quill", **options) == first
    assert traced[count:] == []


def test_anything_else_is_another_program(home, monkeypatch, traced):
    x = jnp.arange(3.0)
    y = np.ones(3, np.float32)
    weak = jnp.asarray(2.0)
    whole = jnp.arange(3)
    two = jnp.ones((2, 3))
    assert made(x, y)(x, y).tolist() == [1, 2, 3]
    calls = [
        ((x, y), {"by": 2}),
        ((y, x), {}),
        ((x, weak), {}),
        ((x, whole), {}),
        ((x, two), {}),
        ((x, x), {}),
    ]
    for number, (args, static) in enumerate(calls, 2):
        assert np.array_equal(made(*args, **static)(*args), add(*args, **static))
        assert len(traced) == number == len([*home.iterdir()])
    for args, static in calls:
        made(*args, **static)
    assert len(traced) == len(calls) + 1
    changes = [
        lambda: monkeypatch.setattr(programs, "code_state", lambda *layers: "changed"),
        lambda: monkeypatch.setenv("QUIRE_NATIVE", "off"),
        lambda: monkeypatch.setenv("XLA_FLAGS", ""),
        lambda: monkeypatch.setattr(jax, "__version__", "0.0.1"),
        lambda: monkeypatch.setattr(
            native.build, "cpu_info", lambda *names: ("another processor",)
        ),
    ]
    for number, change in enumerate(changes, len(calls) + 2):
        change()
        made(x, y)
        assert len(traced) == number == len([*home.iterdir()])
    with jax.default_matmul_precision("highest"):
        made(x, y)
    assert len(traced) == len(calls) + len(changes) + 2


def test_what_describes_a_model_is_complete():
    """A field that `repr` leaves out counts too."""
    config = family_for(tiny.LLAMA).config(tiny.LLAMA, None)
    stored = replace(config, stored=StoredFormat("fp8", ()))
    assert repr(stored) == repr(config) and described(stored, True) != described(config, True)
    assert described(config, True) == described(
        family_for(tiny.LLAMA).config(tiny.LLAMA, None), True
    )
    with pytest.raises(TypeError, match="function has no description"):
        described({"act": lambda x: x}, True)


@pytest.mark.parametrize("damage", ["cut", "changed", "another", "runtime"])
def test_damage_is_noticed_and_mended(home, traced, caplog, monkeypatch, damage):
    x = jnp.arange(3.0)
    made(x, x)
    (path,) = home.iterdir()
    whole = path.read_bytes()
    if damage == "runtime":  # whole, and the runtime does not take it
        monkeypatch.setattr(programs, "deserialize_and_load", lambda *given, **device: 1 / 0)
    else:
        changed = whole[:-1] + bytes([whole[-1] ^ 1])
        path.write_bytes(
            {"cut": whole[:-9], "changed": changed, "another": b"pickle" + whole}[damage]
        )
    assert made(x, x)(x, x).tolist() == [0, 2, 4]
    assert len(traced) == 2
    assert (
        ": division by zero" if damage == "runtime" else "is damaged and made again"
    ) in caplog.text
    assert path.exists() == (damage != "runtime")


def test_kernels_that_come_and_go(home, traced, monkeypatch):
    """A program belongs to the kernels that it was made with: one that could not be had may be
    there now.
    """
    x = jnp.arange(3.0)
    there = {"probe": False}
    monkeypatch.setattr(native, "outcomes", lambda: {"probe": there["probe"]})
    monkeypatch.setattr(native, "has", lambda name: there[name])
    for _ in range(2):
        made(x, x)
    assert len(traced) == 1
    there["probe"] = True
    for _ in range(2):
        made(x, x)
    assert len(traced) == 2


def test_nothing_is_kept(home, traced, monkeypatch, caplog, tmp_path):
    """Where JAX keeps nothing either, where a call cannot be described, and where there is no room
    or no folder.
    """
    x = jnp.arange(3.0)
    monkeypatch.setattr(programs, "LIMIT", 10)
    made(x, x)
    assert [
        *home.iterdir()
    ] == [] and "not kept for the next start: there is no room" in caplog.text
    monkeypatch.setattr(programs, "LIMIT", 1 << 30)
    home.chmod(0o777)
    assert folder_of_programs() is None and "can be written to by others" in caplog.text
    home.chmod(0o700)
    assert folder_of_programs() == home
    for setting, value in {
        "jax_enable_compilation_cache": False,
        "jax_compilation_cache_dir": str(tmp_path),
    }.items():
        before = getattr(jax.config, setting)
        jax.config.update(setting, value)
        assert folder_of_programs() is None
        jax.config.update(setting, before)
    assert folder_of_programs() == home
    assert made(x, x, by=2j)(x, x).tolist() == [0, 1 + 2j, 2 + 4j]
    assert [
        *home.iterdir()
    ] == [] and "add is not kept for the next start: complex has no description" in caplog.text
