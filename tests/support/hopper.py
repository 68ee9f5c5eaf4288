"""Compiles Mosaic GPU kernels to what an H100 runs, without one: by JAX's CUDA plugin, which asks a driver made here.

What it needs: `pip install --no-deps jax-cuda12-plugin==J jax-cuda12-pjrt==J nvidia-cuda-nvcc-cu12`, where J is jax's
version, and a C compiler. Run as a program, it compiles each `*.mlirbc` of a folder.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# The plugin finds this before a driver, by its name, and learns that the card is of compute capability 9.0.
DRIVER = """
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "there is no card"; return 0; }
"""


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of a kernel."""

    registers: int  # of a thread, before warpgroups trade theirs
    stored: int  # bytes that are spilled
    loaded: int
    shared: int  # bytes of shared memory
    log: str


def compile_all(modules: list[bytes], folder: Path) -> list[Compiled]:
    """In a process of its own, since there the driver is not the machine's."""
    for n, module in enumerate(modules):
        (folder / f"{n}.mlirbc").write_bytes(module)
    done = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    return [read(folder / str(n), done.stderr) for n in range(len(modules))]


def read(folder: Path, errors: str) -> Compiled:
    logs = list(folder.glob("*.ptxas"))
    assert logs, errors
    log, passes = logs[0].read_text(), next(folder.glob("*.mlir-passes.log")).read_text()
    stored, loaded = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)[-1]
    registers, shared = re.findall(r"Used (\d+) registers", log), re.findall(r"mosaic_gpu\.smem_bytes = (\d+)", passes)
    return Compiled(int(registers[-1]), int(stored), int(loaded), int(shared[-1]), log)


def plugin() -> Path | None:
    """The library with the compiler."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    names = (f"jax_plugins.xla_cuda{version}" for version in (13, 12))
    specs = [spec for name in names if (spec := importlib.util.find_spec(name)) is not None]
    return Path(specs[0].submodule_search_locations[0]) / "xla_cuda_plugin.so" if specs else None


def ptxas() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else []
    return next((path for place in places for path in sorted(Path(place).glob("*/bin/ptxas"))), None)


def missing() -> str | None:
    """What there is not here of what is needed."""
    if plugin() is None:
        return "JAX's CUDA plugin, which has the compiler, is not installed"
    if ptxas() is None:
        return "ptxas is not installed"
    return None if shutil.which("cc") else "there is no C compiler"


def main() -> None:
    folder = Path(sys.argv[1])
    source, driver = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", driver], check=True)
    ctypes.CDLL(str(driver), ctypes.RTLD_GLOBAL)
    os.environ["PATH"] = f"{ptxas().parent}:{os.environ['PATH']}"
    compiler = ctypes.CDLL(str(plugin())).MosaicGpuCompile
    compiler.argtypes, compiler.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for path in folder.glob("*.mlirbc"):
        logs = folder / path.stem
        logs.mkdir()
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(logs)
        module = path.read_bytes()
        compiler(module, len(module))  # it returns nothing, since no card can load what was compiled


if __name__ == "__main__":
    main()
