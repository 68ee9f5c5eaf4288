"""Building the kernels: once for a machine, side by side, into a private folder, by many at once,
or not at all.
"""

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
def small(monkeypatch, tmp_path):
    """Libraries of one short source each, so that building them takes no time."""
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
    forget()
    yield folder
    # a build that outlived the test would leave its library among the real ones
    native.builders.shutdown()
    forget()


def forget():
    for cached in (build.source_hash, native.choose, native.explain):
        cached.cache_clear()


def slow_compiler(folder: Path, ready: str) -> str:
    """A compiler that waits until a condition holds, half a minute at most, and keeps count."""
    script = folder / "slow.sh"
    script.write_text(
        COMPILER.format(folder=folder, ready=ready.format(folder=folder), command=" ".join(COMMAND))
    )
    return f"sh {script}"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_every_variant_has_its_source():
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
    others = {
        *kernel_names.ATTENTION.values(),
        kernel_names.SAMPLING,
        kernel_names.DELTA_NET,
        "heads",
        "residual",
    }
    others |= {kernel_names.ADAPTER, "blank", "unpack", "probe", "pack"}
    assert products | others == {*build.VARIANTS}


@pytest.mark.parametrize("isa", build.ISAS.get(platform.machine(), ()))
@pytest.mark.parametrize("variant", ["dense_bf16", "int4", "int8_weights", "int4_f32", "fp8_f32"])
@pytest.mark.slow
def test_products_are_well_formed_for_every_instruction_set(isa, variant):
    """Also for those that this machine lacks, and for which nothing else is compiled here."""
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


def test_built_once_and_kept_private(small, monkeypatch):
    path = build.library(ISA, "attention_f32")
    state = path.parent.stat()
    assert stat.S_IMODE(state.st_mode) == 0o700 and list(path.parent.iterdir()) == [path]
    other = build.library(ISA, "dense_f32")
    assert set(path.parent.iterdir()) == {path, other}
    monkeypatch.setattr(build, "compile_into", lambda *_: pytest.fail("built twice"))
    assert build.library(ISA, "attention_f32") == path


def test_another_source_compiler_or_instruction_set_is_another_library(small, monkeypatch):
    isa, *others = build.choices()
    seen = {build.key(COMMAND, isa)}
    for other in others:
        seen.add(build.key(COMMAND, other))
    seen.add(build.key([*COMMAND, "-g"], isa))
    (small / "one.cc").write_text("int other;\n")
    build.source_hash.cache_clear()
    seen.add(build.key(COMMAND, isa))
    monkeypatch.setattr(build, "VARIANTS", {**VARIANTS, "attention_f32": ("one.cc", "-DVALUE=9")})
    build.source_hash.cache_clear()
    seen.add(build.key(COMMAND, isa))
    assert len(seen) == 4 + len(others)


@pytest.mark.parametrize("place", ["key", "prebuilt"])
def test_native_flags_mean_this_processor(small, monkeypatch, place):
    def name(flag: str, cpu: str) -> str:
        monkeypatch.setattr(
            build, "ISAS", {build.platform.machine(): {"arm": build.Isa((flag,), frozenset())}}
        )
        monkeypatch.setattr(build, "cpu_info", lambda *_: (cpu,))
        return (
            build.key(COMMAND, "arm")
            if place == "key"
            else build.prebuilt(Path("ready"), "arm").name
        )

    assert name("-mcpu=native", "sve") != name("-mcpu=native", "neon")
    assert name("-mcpu=native", "sve") == name("-mcpu=native", "sve")
    assert name("-mcpu=armv8", "sve") == name("-mcpu=armv8", "neon")


def test_a_folder_that_others_can_write_to_is_refused(small):
    folder = build.cache_folder()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(NotImplementedError, match="can be written to by others"):
        build.library(ISA, "pack")


def test_a_source_that_does_not_compile(small):
    (small / "two.cc").write_text("int x = oops;\n")
    build.source_hash.cache_clear()
    with pytest.raises(
        NotImplementedError, match=r"could not compile the kernel dense_f32: .*error.*oops"
    ) as error:
        build.library(ISA, "dense_f32")
    assert "\n" not in str(error.value)
    assert not list(build.cache_folder().rglob("*.so"))
    assert build.library(ISA, "attention_f32").exists()


def test_one_that_fails_leaves_the_others(small, caplog):
    """Its products stay XLA's, the log says why once, and the rest is in use."""
    (small / "two.cc").write_text("int x = oops;\n")
    forget()
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


def test_attention_falls_back_to_xla(small):
    (small / "one.cc").write_text("#if VALUE == 2\nint x = oops;\n#endif\n")
    forget()
    assert "xla; native declines: " in (said := dict(collect_env.attention())["full"])
    assert "could not compile the kernel attention_bf16" in said
    assert native.has("attention_f32")


def test_no_compiler_is_one_clear_line(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(
        NotImplementedError, match="install g\\+\\+ or clang\\+\\+, or name one in CXX"
    ):
        build.compiler()
    with caplog.at_level(logging.WARNING):
        native.explain.cache_clear()
        monkeypatch.setattr(
            native, "choose", lambda wish: NotImplementedError("there is no C++ compiler")
        )
        assert not native.serves() and not native.serves()
    assert [r.message for r in caplog.records] == [
        "native kernels are not in use, XLA's own serve instead: there is no C++ compiler"
    ]


def test_off_is_no_warning(monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_NATIVE", "off")
    assert native.prepare(["pack"]).result() is False
    assert not native.serves() and not native.has("pack") and not caplog.records


def test_an_instruction_set_that_is_not_there(monkeypatch):
    monkeypatch.setenv("QUIRE_NATIVE", "mmx")
    with pytest.raises(
        NotImplementedError, match="this processor has no 'mmx'; it can be .*baseline"
    ):
        native.instruction_set()


def test_what_is_prepared_is_built_meanwhile_and_once(small, monkeypatch, tmp_path):
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


def test_variants_are_built_side_by_side(small, monkeypatch, tmp_path):
    """Each compiler waits until there are two."""
    monkeypatch.setenv("CXX", slow_compiler(tmp_path, 'test "$(wc -l < {folder}/compiled)" -ge 2'))
    native.prepare(["attention_f32", "attention_bf16"])
    assert [native.library(name).value() for name in ("attention_f32", "attention_bf16")] == [1, 2]
    assert len(lines(tmp_path / "compiled")) == 2


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        (("bfloat16", None, ["bfloat16"]), "attention_bf16 dense_bf16 pack sampling"),
        (("float32", None, ["float32"]), "attention_f32 dense_f32 pack sampling"),
        (("float32", None, ["bfloat16"]), "attention_bf16_f32 dense_f32 pack sampling"),
        (("bfloat16", "int8", ["int8"]), "attention_int8_bf16 int8 pack sampling"),
        (
            ("float32", "int8-weights", ["int8"]),
            "attention_int8_f32 int8 int8_weights_f32 pack sampling",
        ),
        (
            ("bfloat16", None, ["uint8", "uint16"]),
            "attention_bf16 attention_int4_bf16 dense_bf16 pack sampling",
        ),
        (("bfloat16", None, ["float8_e4m3fn"]), "dense_bf16 pack sampling"),
        (("bfloat16", "int4-64-zero", ["bfloat16"]), "attention_bf16 int4 int8 pack sampling"),
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
            "attention_bf16 dense_f32 int4_a8 int8 mxfp4_a8 pack sampling",
        ),
        (
            ("float32", "int4-64", ["float32"], (None, "mxfp4"), ("int4-64", "k6-16"), True),
            "attention_f32 dense_f32 int4_a8 mxfp4_a8 pack sampling uint6_levels_f32",
        ),
        (
            ("bfloat16", None, ["bfloat16"], ("mxfp4",)),
            "attention_bf16 dense_bf16 dense_f32 mxfp4 pack sampling",
        ),
    ],
)
def test_what_a_model_calls(model, kernels):
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


def test_many_processes_at_once(small):
    command = [sys.executable, "-c", CHILD, str(small), json.dumps(VARIANTS)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = {run.communicate(timeout=900)[0] for run in runs}
    assert all(run.returncode == 0 for run in runs) and len(found) == 1
    paths = {Path(line) for line in found.pop().split()}
    (folder,) = {path.parent for path in paths}
    assert set(folder.iterdir()) == paths and len(paths) == len(VARIANTS)


def test_built_ahead_for_a_place_without_a_compiler(small, tmp_path, monkeypatch):
    ready = tmp_path / "ready"
    made = [
        build.built(COMMAND, ISA, name, build.prebuilt(build.private(ready), ISA))
        for name in VARIANTS
    ]
    ready.chmod(0o555)
    monkeypatch.setenv("QUIRE_KERNELS", str(ready))
    monkeypatch.setattr(build, "compiler", lambda: pytest.fail("looked for a compiler"))
    assert [build.library(ISA, name) for name in VARIANTS] == made
    assert all(os.access(path, os.R_OK) for path in made)


def test_command_builds_every_variant(tmp_path):
    """By a compiler that only makes the file."""
    fake = tmp_path / "fake.sh"
    fake.write_text('for last in "$@"; do :; done\ncase "$last" in *.so) touch "$last";; esac\n')
    run = subprocess.run(
        [sys.executable, "-m", "quire", "build-kernels", "--out", str(tmp_path / "ready")],
        env={**os.environ, "CXX": f"sh {fake}"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    folder = build.prebuilt(tmp_path / "ready", ISA)
    assert run.stdout.split() == [str(folder / f"{name}.so") for name in build.VARIANTS]
    assert sorted(path.stem for path in folder.iterdir()) == sorted(build.VARIANTS)


def test_command_refuses_a_wrong_name(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "quire", "build-kernels", "--out", str(tmp_path), "--isa", "mmx"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 2 and "--isa is 'mmx'; it can be amx" in run.stderr.replace("\n", " ")
