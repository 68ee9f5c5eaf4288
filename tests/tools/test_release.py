"""Wheels with compiled kernels: platform tags, the record, and use without a compiler."""

import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.ops.native import build
from quire.tests.support.arm_tools import COMPILER, needed
from tools.release.wheel import machine, oldest_glibc, platform_wheel

ROOT = Path(__file__).parents[2]
PURE_WHEEL_FILES = {
    "quire/__init__.py": "x = 1\n",
    "quire-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "quire-1.dist-info/RECORD": "quire/__init__.py,,\n",
}
BUNDLED_MODEL_KERNELS = [
    "probe",
    "blank",
    "pack",
    "unpack",
    "dense_f32",
    "dense_bf16",
    "heads",
    "residual",
    "attention_f32",
    "attention_bf16",
    "sampling",
]


@pytest.mark.parametrize(
    ("symbols", "glibc"),
    [
        (b"", 17),
        (b"GLIBC_2.2.5\0GLIBC_2.14", 17),
        (b"GLIBC_2.32\0GLIBC_2.5", 32),
        (b"GLIBC_2.5\0GLIBCXX_3.4.21", 24),
        (b"GLIBC_2.32\0GLIBCXX_3.4.29", 34),
        (b"GLIBC_2.38\0GLIBCXX_3.4.29", 38),
    ],
)
def test_wheel_tag_names_the_oldest_glibc(symbols, glibc):
    assert oldest_glibc(symbols) == glibc


def test_unknown_glibcxx_versions_are_rejected():
    with pytest.raises(ValueError, match="GLIBCXX_3.4.99"):
        oldest_glibc(b"GLIBCXX_3.4.99")


@pytest.fixture
def pure_wheel(tmp_path):
    path = tmp_path / "quire-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in PURE_WHEEL_FILES.items():
            file.writestr(name, text)
    return path


def elf_header(number: int, symbols: bytes = b"") -> bytes:
    """The beginning of an ELF library for the machine of this number."""
    return b"\x7fELF\x02\x01" + bytes(12) + number.to_bytes(2, "little") + symbols


@pytest.mark.parametrize(("number", "kind"), [(62, "x86_64"), (183, "aarch64")])
def test_platform_wheel_records_its_kernels(pure_wheel, tmp_path, number, kind):
    """The record has the digest and size of every file and library."""
    folder = tmp_path / "kernels" / "avx2-0123"
    folder.mkdir(parents=True)
    (folder / "pack.so").write_bytes(elf_header(number, b" GLIBC_2.27\0"))
    out = platform_wheel(pure_wheel, folder.parent)
    assert out.name == f"quire-1-py3-none-manylinux_2_27_{kind}.whl"
    with zipfile.ZipFile(out) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    assert {*contents} == {*PURE_WHEEL_FILES, "quire/ops/native/built/avx2-0123/pack.so"}
    about = contents["quire-1.dist-info/WHEEL"].decode()
    assert (
        f"Tag: {'-'.join(out.stem.split('-')[2:])}" in about and "Root-Is-Purelib: false" in about
    )
    rows = {
        name: (digest, size)
        for name, digest, size in csv.reader(
            io.StringIO(contents["quire-1.dist-info/RECORD"].decode())
        )
    }
    assert {*rows} == {*contents}
    for name, (digest, size) in rows.items():
        if not name.endswith("RECORD"):
            encoded = (
                base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest())
                .rstrip(b"=")
                .decode()
            )
            assert (digest, int(size)) == (f"sha256={encoded}", len(contents[name]))


def test_invalid_wheels_and_kernels_are_rejected(pure_wheel, tmp_path):
    with pytest.raises(ValueError, match="holds no"):
        platform_wheel(pure_wheel, tmp_path / "nothing")
    (tmp_path / "k.so").write_bytes(b"")
    with pytest.raises(ValueError, match="is no wheel for all platforms"):
        platform_wheel(tmp_path / "quire-1-cp311-cp311-linux_x86_64.whl", tmp_path)
    for content in (b"", elf_header(40), b"\x7fELF\x01" + elf_header(62)[5:]):
        (tmp_path / "k.so").write_bytes(content)
        with pytest.raises(ValueError, match="no ELF of 64 bits for x86_64 or aarch64"):
            platform_wheel(pure_wheel, tmp_path)
    (tmp_path / "k.so").write_bytes(elf_header(62))
    (tmp_path / "other.so").write_bytes(elf_header(183))
    with pytest.raises(ValueError, match="holds libraries for aarch64 and x86_64"):
        platform_wheel(pure_wheel, tmp_path)


@pytest.mark.nightly  # builds and installs a wheel, and compiles the kernels of the bundled model
def test_installed_wheel_runs_without_a_compiler(tmp_path):
    """The kernels of an installed wheel are used where PATH has no compiler."""
    try:
        command = build.compiler()
        isa = build.choices()[0]
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    kernels = build.private(tmp_path / "kernels")
    with ThreadPoolExecutor(2) as threads:
        libraries = list(
            threads.map(
                lambda name: build.built(command, isa, name, build.prebuilt(kernels, isa)),
                BUNDLED_MODEL_KERNELS,
            )
        )
    assert all(path.exists() for path in libraries)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    source = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, files):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [*pip, "wheel", "--no-deps", "-w", tmp_path, source], check=True, capture_output=True
    )
    (pure_wheel,) = tmp_path.glob("*-py3-none-any.whl")
    wheel = platform_wheel(pure_wheel, kernels)
    site = tmp_path / "site"
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", site, wheel],
        check=True,
        capture_output=True,
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CXX", "QUIRE_KERNELS")
    }
    environment |= {
        "PATH": str(tmp_path),
        "PYTHONPATH": str(site),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    code = (
        "import quire, logging; logging.basicConfig(level=logging.WARNING)\n"
        "from quire.ops import native\n"
        "llm = quire.LLM()\n"
        "params = quire.SamplingParams(max_tokens=8, temperature=0)\n"
        "print(llm.generate('Once upon a time', params)[0].outputs[0].text)\n"
        "print(quire.__file__, native.instruction_set(), sorted(name for _, name in native.library_builds))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    text, about = completed.stdout.strip().splitlines()
    assert text and about.startswith(f"{site}/quire/__init__.py {isa} ") and "sampling" in about
    assert "native kernels are not in use" not in completed.stderr
    assert not (tmp_path / "cache" / "quire" / "native").exists()  # nothing was compiled


@pytest.mark.parametrize(("name", "kind"), [("KERNELS", "x86_64"), ("ARM_KERNELS", "aarch64")])
def test_makefile_builds_wheels_for_every_isa(name, kind):
    (listed,) = re.findall(rf"^{name} := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed.split() == [isa for isa in build.ISAS[kind] if "emulated" not in isa]


@pytest.mark.nightly  # it cross-compiles kernels
def test_cross_compiled_wheel_for_arm(pure_wheel, tmp_path):
    """Kernels of a cross compiler for every instruction set: machine, exported symbols and glibc."""
    needed(COMPILER)
    kernels = build.private(tmp_path / "kernels")
    offered = {
        "probe": {"quire_permitted"},
        "pack": {"quire_tile", "quire_tile_int4", "quire_tile_int5", "quire_tile_int6"},
    }
    offered |= {"blank": {"quire_kernel"}, "sampling": {"quire_kernel"}}
    for isa in build.ISAS["aarch64"]:
        for name, symbols in offered.items():
            path = build.built([COMPILER], isa, name, build.prebuilt(kernels, isa))
            assert machine(path.read_bytes()) == "aarch64"
            table = [
                "aarch64-linux-gnu-nm",
                "--dynamic",
                "--defined-only",
                "--format=just-symbols",
                str(path),
            ]
            exported = subprocess.run(
                table, capture_output=True, text=True, check=True
            ).stdout.split()
            assert {symbol for symbol in exported if symbol.startswith("quire_")} == symbols
    out = platform_wheel(pure_wheel, kernels)
    assert re.fullmatch(r"quire-1-py3-none-manylinux_2_\d\d_aarch64\.whl", out.name)
    with zipfile.ZipFile(out) as file:
        libraries = {name for name in file.namelist() if name.endswith(".so")}
    folders = {
        isa: f"quire/ops/native/built/{isa}-{build.source_hash()}" for isa in build.ISAS["aarch64"]
    }
    # the folders that `build.ready` reads
    assert libraries == {f"{folders[isa]}/{name}.so" for isa in folders for name in offered}
