"""`python -m tools.release.wheel WHEEL KERNELS`: build a platform wheel with compiled CPU kernels
from the pure Python wheel.

KERNELS is a folder that `quire build-kernels` has filled. The wheel's manylinux tag has the
libraries' architecture and the oldest glibc (and libstdc++) with all symbols that they need. So pip
installs this wheel where the libraries load, and the pure wheel elsewhere.
"""

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

PLACE = "quire/ops/native/built"
# glibc 2.N -> newest libstdc++ symbol version (GLIBCXX_3.4.N) on systems with it. Needed because
# manylinux tags (PEP 600) only state the glibc version.
LIBSTDCXX = {19: 17, 22: 24, 24: 27, 26: 30, 28: 31, 29: 34, 30: 35, 33: 39}
OLDEST = 17  # glibc 2.17 is the oldest version with a manylinux tag
MACHINES = {62: "x86_64", 183: "aarch64"}  # ELF machine number -> architecture in tags


def machine(library: bytes) -> str:
    """The architecture of a library, as in platform tags."""
    number = int.from_bytes(library[18:20], "little") if library[:6] == b"\x7fELF\x02\x01" else None
    if number not in MACHINES:
        raise ValueError(f"a library is no ELF of 64 bits for {' or '.join(MACHINES.values())}")
    return MACHINES[number]


def oldest_glibc(library: bytes) -> int:
    """The minor version N of the oldest glibc 2.N on systems with all symbols of a library."""
    needed = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)]
    for minor in map(int, re.findall(rb"GLIBCXX_3\.4\.(\d+)", library)):
        glibc_minor = next((glibc for newest, glibc in LIBSTDCXX.items() if minor <= newest), None)
        if glibc_minor is None:
            raise ValueError(
                f"a library needs GLIBCXX_3.4.{minor}, and no system is known that has it"
            )
        needed.append(glibc_minor)
    return max([OLDEST, *needed])


def platform_wheel(pure: Path, kernels: Path) -> Path:
    """Write the platform wheel to the folder of the pure wheel; returns its path."""
    libraries = {path: path.read_bytes() for path in sorted(kernels.rglob("*.so"))}
    if not libraries:
        raise ValueError(
            f"{kernels} holds no *.so: fill it with `quire build-kernels --out {kernels}`"
        )
    if not pure.name.endswith("-py3-none-any.whl"):
        raise ValueError(
            f"{pure} is no wheel for all platforms, whose name ends in -py3-none-any.whl"
        )
    machines = {machine(library) for library in libraries.values()}
    if len(machines) > 1:
        raise ValueError(
            f"{kernels} holds libraries for {' and '.join(sorted(machines))}: a wheel is for one"
        )
    tag = f"py3-none-manylinux_2_{max(map(oldest_glibc, libraries.values()))}_{machines.pop()}"
    out = pure.with_name(pure.name.replace("py3-none-any", tag))
    lines: list[str] = []
    with zipfile.ZipFile(pure) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:

        def put(name: str, data: bytes) -> None:
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            target.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}")

        names = source.namelist()
        (record,) = [name for name in names if name.endswith(".dist-info/RECORD")]
        for name in names:
            data = source.read(name)
            if name.endswith(".dist-info/WHEEL"):
                text = data.decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
                data = text.replace("Tag: py3-none-any", f"Tag: {tag}").encode()
            if name != record:
                put(name, data)
        for path, data in libraries.items():
            put(f"{PLACE}/{path.relative_to(kernels).as_posix()}", data)
        target.writestr(record, "\n".join([*lines, f"{record},,", ""]))
    return out


if __name__ == "__main__":
    try:
        print(platform_wheel(Path(sys.argv[1]), Path(sys.argv[2])))
    except IndexError:
        sys.exit(f"usage: python -m {__spec__.name} WHEEL KERNELS")
    except ValueError as error:
        sys.exit(f"error: {error}")
