"""The wheel with compiled kernels: honest tags, a true record, and an environment without a
compiler that it serves.
"""

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
PURE = {
    "quire/__init__.py": "x = 1\n",
    "quire-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "quire-1.dist-info/RECORD": "quire/__init__.py,,\n",
}
QUILL = [
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
    ("needs", "glibc"),
    [
        (b"", 17),
        (b"GLIBC_2.2.5\0GLIBC_2.14", 17),
        (b"GLIBC_2.32\0GLIBC_2.5", 32),
        (b"GLIBC_2.5\0GLIBCXX_3.4.21", 24),
        (b"GLIBC_2.32\0GLIBCXX_3.4.29", 34),
        (b"GLIBC_2.38\0GLIBCXX_3.4.29", 38),
    ],
)
def test_tag(needs, glibc):
    assert oldest_glibc(needs) == glibc


def test_unknown_symbols_are_refused():
    with pytest.raises(ValueError, match="GLIBCXX_3.4.99"):
        oldest_glibc(b"GLIBCXX_3.4.99")


@pytest.fixture
def pure(tmp_path):
    path = tmp_path / "quire-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in PURE.items():
            file.writestr(name, text)
    return path


def elf(number: int, needs: bytes = b"") -> bytes:
    """What looks like a library for a kind of machine."""
    return b"\x7fELF\x02\x01" + bytes(12) + number.to_bytes(2, "little") + needs


@pytest.mark.parametrize(("number", "kind"), [(62, "x86_64"), (183, "aarch64")])
def test_wheel(pure, tmp_path, number, kind):
    """All files and the libraries, each in the record with its digest and size."""
    folder = tmp_path / "kernels" / "avx2-0123"
    folder.mkdir(parents=True)
    (folder / "pack.so").write_bytes(elf(number, b" GLIBC_2.27\0"))
    out = platform_wheel(pure, folder.parent)
    assert out.name == f"quire-1-py3-none-manylinux_2_27_{kind}.whl"
    with zipfile.ZipFile(out) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    assert {*contents} == {*PURE, "quire/ops/native/built/avx2-0123/pack.so"}
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
            found = (
                base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest())
                .rstrip(b"=")
                .decode()
            )
            assert (digest, int(size)) == (f"sha256={found}", len(contents[name]))


def test_what_is_no_wheel_and_no_kernels(pure, tmp_path):
    with pytest.raises(ValueError, match="holds no"):
        platform_wheel(pure, tmp_path / "nothing")
    (tmp_path / "k.so").write_bytes(b"")
    with pytest.raises(ValueError, match="is no wheel for all platforms"):
        platform_wheel(tmp_path / "quire-1-cp311-cp311-linux_x86_64.whl", tmp_path)
    for other in (b"", elf(40), b"\x7fELF\x01" + elf(62)[5:]):
        (tmp_path / "k.so").write_bytes(other)
        with pytest.raises(ValueError, match="no ELF of 64 bits for x86_64 or aarch64"):
            platform_wheel(pure, tmp_path)
    (tmp_path / "k.so").write_bytes(elf(62))
    (tmp_path / "other.so").write_bytes(elf(183))
    with pytest.raises(ValueError, match="holds libraries for aarch64 and x86_64"):
        platform_wheel(pure, tmp_path)


@pytest.mark.nightly  # it builds a wheel, installs it, and compiles what the bundled model calls
def test_installed_without_a_compiler(tmp_path):
    """A wheel of this tree with kernels for this machine: installed, with nothing on PATH, it
    generates with them.
    """
    try:
        command = build.compiler()
        isa = build.choices()[0]
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    kernels = build.private(tmp_path / "kernels")
    with ThreadPoolExecutor(2) as threads:
        made = list(
            threads.map(
                lambda name: build.built(command, isa, name, build.prebuilt(kernels, isa)), QUILL
            )
        )
    assert all(path.exists() for path in made)
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
    (pure,) = tmp_path.glob("*-py3-none-any.whl")
    wheel = platform_wheel(pure, kernels)
    place = tmp_path / "site"
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", place, wheel],
        check=True,
        capture_output=True,
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CXX", "QUIRE_KERNELS")
    }
    environment |= {
        "PATH": str(tmp_path),
        "PYTHONPATH": str(place),
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
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    text, about = done.stdout.strip().splitlines()
    assert text and about.startswith(f"{place}/quire/__init__.py {isa} ") and "sampling" in about
    assert "native kernels are not in use" not in done.stderr
    assert not (tmp_path / "cache" / "quire" / "native").exists()  # nothing was compiled


@pytest.mark.parametrize(("name", "kind"), [("KERNELS", "x86_64"), ("ARM_KERNELS", "aarch64")])
def test_every_instruction_set_is_in_a_wheel(name, kind):
    (listed,) = re.findall(rf"^{name} := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed.split() == [isa for isa in build.ISAS[kind] if "emulated" not in isa]


@pytest.mark.nightly  # it compiles
def test_wheel_for_arm(pure, tmp_path):
    """What a cross compiler makes for each instruction set: what it is, what it offers, and what it
    needs.
    """
    needed(COMPILER)
    kernels = build.private(tmp_path / "kernels")
    offered = {
        "probe": {"quire_permitted"},
        "pack": {"quire_tile", "quire_tile_int4", "quire_tile_int6"},
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
            found = subprocess.run(table, capture_output=True, text=True, check=True).stdout.split()
            assert {symbol for symbol in found if symbol.startswith("quire_")} == symbols
    out = platform_wheel(pure, kernels)
    assert re.fullmatch(r"quire-1-py3-none-manylinux_2_\d\d_aarch64\.whl", out.name)
    with zipfile.ZipFile(out) as file:
        held = {name for name in file.namelist() if name.endswith(".so")}
    folders = {
        isa: f"quire/ops/native/built/{isa}-{build.source_hash()}" for isa in build.ISAS["aarch64"]
    }
    # where `build.ready` looks
    assert held == {f"{folders[isa]}/{name}.so" for isa in folders for name in offered}
