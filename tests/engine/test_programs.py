"""Compiled programs on disk: a second start traces nothing, and gives the same answers."""

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
from quire.model.config import ModelError
from quire.model.stored_format import StoredFormat
from quire.ops import native
from quire.serving import build
from quire.serving.device import programs
from quire.serving.device.programs import Call, Compiler, Describer, folder_of_programs
from quire.serving.engine import runner
from quire.tests.support import tiny, tiny_moe

OPTIONS = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
}


@pytest.fixture
def programs_folder(monkeypatch, tmp_path):
    """An empty folder for programs, with JAX's caches emptied; native kernels are not rebuilt."""
    kernels = native.build.cache_folder()
    monkeypatch.setattr(native.build, "cache_folder", lambda: kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "quire" / "jax").mkdir(parents=True)
    jax.clear_caches()
    monkeypatch.setattr(programs, "elsewhere", set())
    jax_cache_dir = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache" / "quire" / "jax"))
    compilation_cache.reset_cache()
    yield tmp_path / "cache" / "quire" / "programs"
    wait_for_writes()
    jax.config.update("jax_compilation_cache_dir", jax_cache_dir)
    compilation_cache.reset_cache()


@pytest.fixture
def traced_names(monkeypatch):
    """The names of functions, recorded whenever one is traced for a program."""
    names = []
    trace = Call.trace
    monkeypatch.setattr(
        Call, "trace", lambda self: names.append(self.function.__name__) or trace(self)
    )
    return names


def wait_for_writes() -> None:
    """Waits for threads that write programs to disk in the background."""
    for thread in threading.enumerate():
        if thread.name == "quire-program-cache":
            thread.join()


def generate(model: str, **options) -> str:
    llm = LLM(str(model), **OPTIONS | options)
    wait_for_writes()
    prompts = [[1, 2, 3], list(range(1, 30))]
    params = [
        SamplingParams(temperature=0.8, seed=n, max_tokens=9, logprobs=2, ignore_eos=True)
        for n in range(2)
    ]
    # batched, and alone with fused steps
    outputs = [*llm.generate(prompts, params), *llm.generate(prompts[:1], params[:1])]
    assert not llm.engine.runner.compiles.recompiles
    return repr([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])


def add(x, y, by: int = 1):
    return x + by * y


ADD = jax.jit(add, static_argnames="by")


def compile_add(*args, **static) -> jax.stages.Compiled:
    with Compiler(folder_of_programs()) as compiler:
        compiled = compiler.make(Call(ADD, args, **static)).result()
    wait_for_writes()
    return compiled


@pytest.mark.parametrize(
    "config", [tiny.LLAMA, tiny.LLAMA | {"torch_dtype": "bfloat16"}, tiny_moe.MIXTRAL]
)
@pytest.mark.slow
def test_second_start_loads_all_programs_without_tracing(
    programs_folder, traced_names, tmp_path, config
):
    """Answers are bit-identical, batched and alone."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    first_answers = generate(tmp_path, load_format="dummy")
    num_traced = len(traced_names)
    assert {"step", "fused_steps", "copy_pages"} <= {*traced_names}
    assert len([*programs_folder.iterdir()]) == num_traced
    assert generate(tmp_path, load_format="dummy") == first_answers
    assert traced_names[num_traced:] == []


@pytest.mark.slow
def test_programs_loaded_from_the_jax_cache_are_not_saved(
    programs_folder, traced_names, tmp_path, monkeypatch
):
    """JAX cannot serialise an executable that it loaded from its own compilation cache."""
    tiny.write(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "folder_of_programs", lambda: None)
        jax.clear_caches()
        first_answers = generate(tmp_path / "model")
    assert not programs_folder.exists() and [*programs_folder.with_name("jax").iterdir()]
    assert generate(tmp_path / "model") == first_answers
    assert not [*programs_folder.iterdir()], "programs from JAX's cache must not be saved"
    jax.clear_caches()  # as in another process
    programs.elsewhere.clear()
    assert [generate(tmp_path / "model") for _ in range(2)] == [first_answers] * 2
    assert [*programs_folder.iterdir()] and jax.config.jax_enable_compilation_cache


@pytest.mark.slow
def test_programs_of_draft_models_and_adapters_are_reused(programs_folder, traced_names):
    speculative_config = {
        "method": "draft_model",
        "model": "quill-draft",
        "num_speculative_tokens": 2,
    }
    options = {
        "speculative_config": speculative_config,
        "enable_lora": True,
        "max_loras": 2,
        "skip_tokenizer_init": False,
    }
    first_answers = generate("quill", **options)
    num_traced = len(traced_names)
    assert {"draft_prefill", "write_adapter"} <= {*traced_names}
    assert generate("quill", **options) == first_answers
    assert traced_names[num_traced:] == []


def test_program_key_covers_arguments_and_environment(programs_folder, monkeypatch, traced_names):
    x = jnp.arange(3.0)
    y = np.ones(3, np.float32)
    weak_scalar = jnp.asarray(2.0)
    integers = jnp.arange(3)
    matrix = jnp.ones((2, 3))
    assert compile_add(x, y)(x, y).tolist() == [1, 2, 3]
    calls = [
        ((x, y), {"by": 2}),
        ((y, x), {}),
        ((x, weak_scalar), {}),
        ((x, integers), {}),
        ((x, matrix), {}),
        ((x, x), {}),
    ]
    for count, (args, static) in enumerate(calls, 2):
        assert np.array_equal(compile_add(*args, **static)(*args), add(*args, **static))
        assert len(traced_names) == count == len([*programs_folder.iterdir()])
    for args, static in calls:
        compile_add(*args, **static)
    assert len(traced_names) == len(calls) + 1
    changes = [
        lambda: monkeypatch.setattr(programs, "code_state", lambda *layers: "changed"),
        lambda: monkeypatch.setenv("QUIRE_NATIVE", "off"),
        lambda: monkeypatch.setenv("XLA_FLAGS", ""),
        lambda: monkeypatch.setattr(jax, "__version__", "0.0.1"),
        lambda: monkeypatch.setattr(
            native.build, "cpu_info", lambda *names: ("another processor",)
        ),
    ]
    for count, change in enumerate(changes, len(calls) + 2):
        change()
        compile_add(x, y)
        assert len(traced_names) == count == len([*programs_folder.iterdir()])
    with jax.default_matmul_precision("highest"):
        compile_add(x, y)
    assert len(traced_names) == len(calls) + len(changes) + 2


def test_missing_tokenizer_is_an_error_before_weights_are_loaded(tmp_path, monkeypatch):
    """The tokenizer itself is read later, while programs compile."""
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA))
    monkeypatch.setattr(build, "make_runner", lambda *_: pytest.fail("weights are loaded"))
    with pytest.raises(ModelError, match="no tokenizer.json"):
        LLM(str(tmp_path), load_format="dummy", max_model_len=64)


def test_descriptions_include_fields_without_repr():
    """A field that `repr` omits is part of the description too."""
    describe = Describer(by_value=True).describe
    config = family_for(tiny.LLAMA).config(tiny.LLAMA, None)
    stored = replace(config, stored=StoredFormat("fp8", ()))
    assert repr(stored) == repr(config) and describe(stored) != describe(config)
    assert describe(config) == describe(family_for(tiny.LLAMA).config(tiny.LLAMA, None))
    with pytest.raises(TypeError, match="function has no description"):
        describe({"act": lambda x: x})


def test_dataclasses_are_described_once_and_by_their_own_content():
    """Objects that live one after the other at the same address have descriptions of their own."""
    describe = Describer(by_value=True).describe
    formats = [describe(StoredFormat(f"format-{number}", ())) for number in range(100)]
    assert len(set(formats)) == 100
    kept = StoredFormat("fp8", ())
    assert describe(kept) is describe(kept)


@pytest.mark.parametrize("damage", ["cut", "changed", "another", "runtime"])
def test_damaged_program_files_are_rebuilt(
    programs_folder, traced_names, caplog, monkeypatch, damage
):
    x = jnp.arange(3.0)
    compile_add(x, x)
    (path,) = programs_folder.iterdir()
    content = path.read_bytes()
    if damage == "runtime":  # the file is intact, but the runtime refuses it
        monkeypatch.setattr(programs, "deserialize_and_load", lambda *arguments, **device: 1 / 0)
    else:
        changed_content = content[:-1] + bytes([content[-1] ^ 1])
        path.write_bytes(
            {"cut": content[:-9], "changed": changed_content, "another": b"pickle" + content}[
                damage
            ]
        )
    assert compile_add(x, x)(x, x).tolist() == [0, 2, 4]
    assert len(traced_names) == 2
    assert (
        ": division by zero" if damage == "runtime" else "is damaged and made again"
    ) in caplog.text
    assert path.exists() == (damage != "runtime")


def test_program_key_covers_available_kernels(programs_folder, traced_names, monkeypatch):
    """A program is compiled again when a kernel becomes available."""
    x = jnp.arange(3.0)
    has_kernel = {"probe": False}
    monkeypatch.setattr(native, "outcomes", lambda: {"probe": has_kernel["probe"]})
    monkeypatch.setattr(native, "has", lambda name: has_kernel[name])
    for _ in range(2):
        compile_add(x, x)
    assert len(traced_names) == 1
    has_kernel["probe"] = True
    for _ in range(2):
        compile_add(x, x)
    assert len(traced_names) == 2


def test_programs_that_cannot_be_saved(
    programs_folder, traced_names, monkeypatch, caplog, tmp_path
):
    """No program is saved without room or a safe folder, with JAX's cache off or elsewhere, or for
    a call that cannot be described.
    """
    x = jnp.arange(3.0)
    monkeypatch.setattr(programs, "LIMIT", 10)
    compile_add(x, x)
    assert [
        *programs_folder.iterdir()
    ] == [] and "not kept for the next start: there is no room" in caplog.text
    monkeypatch.setattr(programs, "LIMIT", 1 << 30)
    programs_folder.chmod(0o777)
    assert folder_of_programs() is None and "can be written to by others" in caplog.text
    programs_folder.chmod(0o700)
    assert folder_of_programs() == programs_folder
    for setting, value in {
        "jax_enable_compilation_cache": False,
        "jax_compilation_cache_dir": str(tmp_path),
    }.items():
        previous_value = getattr(jax.config, setting)
        jax.config.update(setting, value)
        assert folder_of_programs() is None
        jax.config.update(setting, previous_value)
    assert folder_of_programs() == programs_folder
    assert compile_add(x, x, by=2j)(x, x).tolist() == [0, 1 + 2j, 2 + 4j]
    assert [
        *programs_folder.iterdir()
    ] == [] and "add is not kept for the next start: complex has no description" in caplog.text
