"""Building the CPU kernels: caching, parallel builds, concurrent processes and failures."""

import json
import logging
import os
import platform
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from quire.model.checkpoint.gguf_folder import KEPT
from quire.ops import model_kernels, native, quant
from quire.ops.linear.cpu_layout import pack
from quire.ops.native import build, kernel_names
from quire.scripts import collect_env
from quire.sharding.spec import ArraySpec

try:
    COMMAND = build.compiler()
    ISA = build.choices()[0]
except NotImplementedError:
    pytest.skip("no compiler", allow_module_level=True)

VARIANTS = {
    "probe": ("probe.cc",),
    "pack": ("one.cc", "-DVALUE=0"),
    "attention_f32": ("one.cc", "-DVALUE=1"),
    "attention_bf16": ("one.cc", "-DVALUE=2"),
    "dense_f32": ("two.cc",),
}
EXPORT = '#pragma GCC visibility push(default)\nextern "C" int '
SOURCES = {
    "probe.cc": EXPORT + "quire_permitted() { return 1; }\n",
    "one.cc": EXPORT + "value() { return VALUE; }\n",
    "two.cc": EXPORT + "value() { return 3; }\n",
}
COMPILER = """
case "$*" in *one.cc*|*two.cc*)
  echo "$*" >> {folder}/compiled
  for wait in $(seq 300); do if {ready}; then break; fi; sleep 0.1; done
  {ready} || exit 1
esac
exec {command} "$@"
"""


@pytest.fixture
def small_sources(monkeypatch, tmp_path):
    """Libraries of one short source each, which build quickly."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "VARIANTS", VARIANTS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_NATIVE", ISA)
    monkeypatch.delenv("QUIRE_KERNELS", raising=False)
    monkeypatch.setattr(native, "library_builds", {})
    monkeypatch.setattr(native, "builders", ThreadPoolExecutor(4))
    clear_caches()
    yield folder
    # wait for builds, which would otherwise write into the real cache
    native.builders.shutdown()
    clear_caches()


def clear_caches():
    for cached in (build.source_hash, native.choose, native.explain):
        cached.cache_clear()


def slow_compiler(folder: Path, ready: str) -> str:
    """A compiler that waits up to 30 s until a condition holds, and logs its calls."""
    script = folder / "slow.sh"
    script.write_text(
        COMPILER.format(folder=folder, ready=ready.format(folder=folder), command=" ".join(COMMAND))
    )
    return f"sh {script}"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_every_variant_has_a_source():
    for source, *_ in build.VARIANTS.values():
        assert (build.SOURCES / source).exists()
    assert {source for source, *_ in build.VARIANTS.values()} == {
        path.name for path in build.SOURCES.glob("*.cc")
    }
    formats = {*quant.FORMATS, *quant.stored_schemes(), *KEPT.values()}
    products = {
        *kernel_names.DENSE.values(),
        *(kernel for name in formats for kernel in quant.kernels(name)),
    }
    products |= {*kernel_names.ROUNDING.values(), *kernel_names.FLOAT_ROWS.values()}
    other_kernels = {
        *kernel_names.ATTENTION.values(),
        kernel_names.SAMPLING,
        kernel_names.DELTA_NET,
        "heads",
        "residual",
    }
    other_kernels |= {kernel_names.ADAPTER, "blank", "unpack", "probe", "pack"}
    assert products | other_kernels == {*build.VARIANTS}


@pytest.mark.parametrize("isa", build.ISAS.get(platform.machine(), ()))
@pytest.mark.parametrize("variant", ["dense_bf16", "int4", "int8_weights", "int4_f32", "fp8_f32"])
@pytest.mark.slow
def test_products_compile_for_every_instruction_set(isa, variant):
    """Also for instruction sets that this machine lacks."""
    source, *defines = build.VARIANTS[variant]
    flags = [
        *build.FLAGS,
        *build.named(isa).flags,
        *defines,
        "-isystem",
        jax.ffi.include_dir(),
        "-fsyntax-only",
    ]
    build.run([*COMMAND, *flags, str(build.SOURCES / source)], variant)


def test_library_is_built_once_in_a_private_folder(small_sources, monkeypatch):
    path = build.library(ISA, "attention_f32")
    state = path.parent.stat()
    assert stat.S_IMODE(state.st_mode) == 0o700 and list(path.parent.iterdir()) == [path]
    other_path = build.library(ISA, "dense_f32")
    assert set(path.parent.iterdir()) == {path, other_path}
    monkeypatch.setattr(build, "compile_into", lambda *_: pytest.fail("built twice"))
    assert build.library(ISA, "attention_f32") == path


def test_library_key_depends_on_source_compiler_and_instruction_set(small_sources, monkeypatch):
    isa, *other_isas = build.choices()
    keys = {build.key(COMMAND, isa)}
    for other_isa in other_isas:
        keys.add(build.key(COMMAND, other_isa))
    keys.add(build.key([*COMMAND, "-g"], isa))
    (small_sources / "one.cc").write_text("int other;\n")
    build.source_hash.cache_clear()
    keys.add(build.key(COMMAND, isa))
    monkeypatch.setattr(build, "VARIANTS", {**VARIANTS, "attention_f32": ("one.cc", "-DVALUE=9")})
    build.source_hash.cache_clear()
    keys.add(build.key(COMMAND, isa))
    assert len(keys) == 4 + len(other_isas)


@pytest.mark.parametrize("cache_kind", ["key", "prebuilt"])
def test_key_of_native_flags_depends_on_the_processor(small_sources, monkeypatch, cache_kind):
    def name(flag: str, cpu: str) -> str:
        monkeypatch.setattr(
            build, "ISAS", {build.platform.machine(): {"arm": build.Isa((flag,), frozenset())}}
        )
        monkeypatch.setattr(build, "cpu_info", lambda *_: (cpu,))
        return (
            build.key(COMMAND, "arm")
            if cache_kind == "key"
            else build.prebuilt(Path("ready"), "arm").name
        )

    assert name("-mcpu=native", "sve") != name("-mcpu=native", "neon")
    assert name("-mcpu=native", "sve") == name("-mcpu=native", "sve")
    assert name("-mcpu=armv8", "sve") == name("-mcpu=armv8", "neon")


@pytest.mark.parametrize(
    ("vendor", "best"), [("GenuineIntel", "avx512_vnni"), ("AuthenticAMD", "avx512_bf16")]
)
def test_bfloat16_dot_products_are_avoided_where_they_are_slow(monkeypatch, vendor, best):
    flags = " ".join(build.ISAS["x86_64"]["avx512_bf16"].required_flags)
    info = {"vendor_id": vendor, "flags": flags}
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(
        build, "cpu_info", lambda *names: tuple(info[name] for name in names if name in info)
    )
    first, *others = build.choices()
    assert first == best and {"avx512_bf16", "avx512_vnni", "avx512", "avx2"} <= {first, *others}


def test_cache_folder_writable_by_others_is_rejected(small_sources):
    folder = build.cache_folder()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(NotImplementedError, match="can be written to by others"):
        build.library(ISA, "pack")


def test_compile_error_is_reported_in_one_line(small_sources):
    (small_sources / "two.cc").write_text("int x = oops;\n")
    build.source_hash.cache_clear()
    with pytest.raises(
        NotImplementedError, match=r"could not compile the kernel dense_f32: .*error.*oops"
    ) as error:
        build.library(ISA, "dense_f32")
    assert "\n" not in str(error.value)
    assert not list(build.cache_folder().rglob("*.so"))
    assert build.library(ISA, "attention_f32").exists()


def test_failed_kernel_does_not_disable_the_others(small_sources, caplog):
    """XLA runs the failed kernel's products, and one warning says why."""
    (small_sources / "two.cc").write_text("int x = oops;\n")
    clear_caches()
    leaf = np.ones((32, 16), np.float32)
    spec = ArraySpec((32, 16), np.float32, (None, None), fan_in=32, inputs=(0,))
    with caplog.at_level(logging.WARNING):
        assert pack(spec, leaf) is leaf and pack(spec, leaf) is leaf
    (record,) = caplog.records
    assert "could not compile the kernel dense_f32" in record.message and "oops" in record.message
    assert (
        native.serves()
        and native.has("pack", "attention_f32")
        and not native.has("pack", "dense_f32")
    )
    with pytest.raises(NotImplementedError, match="oops"):
        native.target("dense_f32")


def test_attention_falls_back_to_xla(small_sources):
    (small_sources / "one.cc").write_text("#if VALUE == 2\nint x = oops;\n#endif\n")
    clear_caches()
    assert "xla; native declines: " in (report := dict(collect_env.attention())["full"])
    assert "could not compile the kernel attention_bf16" in report
    assert native.has("attention_f32")


def test_missing_compiler_is_reported_in_one_line(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(
        NotImplementedError, match="install g\\+\\+ or clang\\+\\+, or name one in CXX"
    ):
        build.compiler()
    with caplog.at_level(logging.WARNING):
        native.explain.cache_clear()
        monkeypatch.setattr(
            native, "choose", lambda isa: NotImplementedError("there is no C++ compiler")
        )
        assert not native.serves() and not native.serves()
    assert [r.message for r in caplog.records] == [
        "native kernels are not in use, XLA's own serve instead: there is no C++ compiler"
    ]


def test_quire_native_off_logs_nothing(monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_NATIVE", "off")
    assert native.prepare(["pack"]).result() is False
    assert not native.serves() and not native.has("pack") and not caplog.records


def test_unavailable_instruction_set_is_rejected(monkeypatch):
    monkeypatch.setenv("QUIRE_NATIVE", "mmx")
    with pytest.raises(
        NotImplementedError, match="this processor has no 'mmx'; it can be .*baseline"
    ):
        native.instruction_set()


def test_prepared_kernels_are_built_once_in_the_background(small_sources, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", slow_compiler(tmp_path, "test -e {folder}/go"))
    begun = native.prepare(["attention_f32"])
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(native.target, "attention_f32") for _ in range(4)]
        while not lines(tmp_path / "compiled"):
            time.sleep(0.01)
        assert not any(future.done() for future in waiting)
        (tmp_path / "go").touch()
        (name,) = {future.result() for future in waiting}
    assert ISA in name and build.source_hash() in name
    assert native.library("attention_f32").value() == 1
    assert len(lines(tmp_path / "compiled")) == 1
    assert begun.result() is True
    assert native.prepare(["attention_f32"]).result() is False  # nothing is left to compile


def test_variants_are_built_in_parallel(small_sources, monkeypatch, tmp_path):
    """Each compiler waits until two are running."""
    monkeypatch.setenv("CXX", slow_compiler(tmp_path, 'test "$(wc -l < {folder}/compiled)" -ge 2'))
    counts = []
    native.prepare(["attention_f32", "attention_bf16"], lambda *built: counts.append(built))
    assert [native.library(name).value() for name in ("attention_f32", "attention_bf16")] == [1, 2]
    native.builders.shutdown()  # waits for the callbacks
    assert counts[-1] == (2, 2)
    assert len(lines(tmp_path / "compiled")) == 2


def test_kernels_compile_without_precompiled_headers(small_sources, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "HEADERS", tmp_path / "missing.h")
    build.precompiled_headers.cache_clear()
    assert native.library("attention_f32").value() == 1
    build.precompiled_headers.cache_clear()


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        (("bfloat16", None, ["bfloat16"]), "attention_bf16 dense_bf16 pack sampling"),
        (("float32", None, ["float32"]), "attention_f32 dense_f32 pack sampling"),
        (("float32", None, ["bfloat16"]), "attention_bf16_f32 dense_f32 pack sampling"),
        (("bfloat16", "int8", ["int8"]), "attention_int8_bf16 int8 pack sampling"),
        (
            ("float32", "int8-weights", ["int8"]),
            "attention_int8_f32 int8_weights_f32 pack sampling",
        ),
        (
            ("bfloat16", None, ["uint8", "uint16"]),
            "attention_bf16 attention_int4_bf16 dense_bf16 pack sampling",
        ),
        (("bfloat16", None, ["float8_e4m3fn"]), "dense_bf16 pack sampling"),
        (
            ("bfloat16", "int4-64-zero", ["bfloat16"]),
            "attention_bf16 int4 int8_weights pack sampling",
        ),
        (
            ("bfloat16", "int8", ["int8"], (None,)),
            "attention_int8_bf16 dense_f32 int8 pack sampling",
        ),
        (
            ("bfloat16", "int4-32-least", ["bfloat16"], (), ("int4-32-least", "int8-weights-16")),
            "attention_bf16 dense_bf16 int8_groups pack sampling uint4",
        ),
        (
            ("bfloat16", "k4-32-least", ["bfloat16"], (), ("k4-32-least", "k6-16", "iq4-levels")),
            "attention_bf16 dense_bf16 iq4_levels pack sampling uint4_levels uint6_levels",
        ),
        (
            ("bfloat16", "int4-64", ["bfloat16"], (None, "mxfp4"), (), True),
            "attention_bf16 dense_f32 int4_a8 int8_weights mxfp4_a8 pack sampling",
        ),
        (
            ("float32", "int4-64", ["float32"], (None, "mxfp4"), ("int4-64", "k6-16"), True),
            "attention_f32 dense_f32 int4_a8 mxfp4_a8 pack sampling uint6_levels_a8",
        ),
        (
            ("bfloat16", None, ["bfloat16"], ("mxfp4",)),
            "attention_bf16 dense_bf16 dense_f32 mxfp4 pack sampling",
        ),
    ],
)
def test_kernels_that_a_model_needs(model, kernels):
    assert sorted(model_kernels.kernels_for_model(*model)) == sorted(
        ["blank", "heads", "residual", "unpack", *kernels.split()]
    )


CHILD = """
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from quire.ops.native import build
build.SOURCES, build.VARIANTS = Path(sys.argv[1]), json.loads(sys.argv[2])
with ThreadPoolExecutor() as threads:
    for path in threads.map(lambda name: build.library(build.choices()[0], name), build.VARIANTS):
        print(path)
"""


def test_concurrent_processes_build_once(small_sources):
    command = [sys.executable, "-c", CHILD, str(small_sources), json.dumps(VARIANTS)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {run.communicate(timeout=900)[0] for run in runs}
    assert all(run.returncode == 0 for run in runs) and len(outputs) == 1
    paths = {Path(line) for line in outputs.pop().split()}
    (folder,) = {path.parent for path in paths}
    assert set(folder.iterdir()) == paths and len(paths) == len(VARIANTS)


def test_prebuilt_kernels_need_no_compiler(small_sources, tmp_path, monkeypatch):
    ready = tmp_path / "ready"
    paths = [
        build.built(COMMAND, ISA, name, build.prebuilt(build.private(ready), ISA))
        for name in VARIANTS
    ]
    ready.chmod(0o555)
    monkeypatch.setenv("QUIRE_KERNELS", str(ready))
    monkeypatch.setattr(build, "compiler", lambda: pytest.fail("looked for a compiler"))
    assert [build.library(ISA, name) for name in VARIANTS] == paths
    assert all(os.access(path, os.R_OK) for path in paths)


def test_build_kernels_command_builds_every_variant(tmp_path):
    """With a compiler that only creates the output file."""
    fake = tmp_path / "fake.sh"
    fake.write_text('for last in "$@"; do :; done\ncase "$last" in *.so) touch "$last";; esac\n')
    run = subprocess.run(
        [sys.executable, "-m", "quire", "build-kernels", "--out", str(tmp_path / "ready")],
        env={**os.environ, "CXX": f"sh {fake}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    folder = build.prebuilt(tmp_path / "ready", ISA)
    assert run.stdout.split() == [str(folder / f"{name}.so") for name in build.VARIANTS]
    assert sorted(path.stem for path in folder.iterdir()) == sorted(build.VARIANTS)


def test_build_kernels_command_rejects_an_unknown_isa(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "quire", "build-kernels", "--out", str(tmp_path), "--isa", "mmx"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 2 and "--isa is 'mmx'; it can be amx" in run.stderr.replace("\n", " ")
