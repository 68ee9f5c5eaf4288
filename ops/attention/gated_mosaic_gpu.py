"""The kernel for NVIDIA GPUs, for the kinds of attention in which it passed a self-test on this card.

Cards, drivers and compilers differ. So before the kernel serves a kind of attention, a process of its own, which may
crash or hang, tests it against float64. A pass is remembered on disk; a kind that fails is left to XLA, and the log
says why. `QUIRE_MOSAIC=off` turns the kernel off, `QUIRE_MOSAIC=trusted` uses it without the test.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock

import jax

from . import mosaic, mosaic_gpu
from .accuracy_trial import LARGEST_ERROR, Trial, error

SECONDS = 240  # for a test: it starts JAX and compiles a few kernels
HERE = Path(__file__).parent
SOURCES = (
    *(HERE / f"{name}.py" for name in ("gated_mosaic_gpu", "accuracy_trial", "mosaic_gpu", "xla")),
    *Path(mosaic.__file__).parent.glob("*.py"),
)
PACKAGES = "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc"
TASKS = 400  # of a trial: about three for each processor, so that each runs several in turn
log = logging.getLogger("quire")
lock = Lock()


def paged_attention(q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim):
    """See `quire.ops.attention.paged_attention`."""
    try:
        mosaic_gpu.require(q_TNH, pages, value_dim)
        page = pages.k_PSKH
        kind = {
            "heads": q_TNH.shape[1], "kv_heads": page.shape[2], "width": q_TNH.shape[2], "window": window,
            "soft_cap": soft_cap, "sinks": sinks_N is not None, "page": page.shape[1],
            "codes": None if pages.k_scale_PKS is None else page.dtype.name, "values": value_dim,
            "dtype": q_TNH.dtype.name,
        }  # fmt: skip
        with lock:  # others wait until the test is done
            reason = refusal(json.dumps(kind), os.environ.get("QUIRE_MOSAIC", ""))
        if reason is not None:
            raise NotImplementedError(reason)
    except NotImplementedError as reason:
        if mosaic_gpu.has_gpu():
            warn_once(str(reason))
        raise
    return mosaic_gpu.paged_attention(
        q_TNH, k_TKH, v_TKH, pages, rows,
        scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N, value_dim=value_dim,
    )  # fmt: skip


@cache
def warn_once(reason: str) -> None:
    log.warning("attention runs in XLA on this GPU, which is slow: its kernel is not in use: %s", reason)


@cache
def refusal(kind: str, setting: str) -> str | None:
    """Why the kernel must not serve this kind of attention; None if it may."""
    if setting == "off":
        return "QUIRE_MOSAIC is off"
    if setting not in ("", "trusted"):
        return f"QUIRE_MOSAIC is {setting!r}, and can be off or trusted"
    passed = folder() / f"{digest(kind)}.json"
    if setting == "trusted" or os.path.exists(passed):  # Path.exists raises where reading is not allowed
        return None
    log.info("trying the attention kernel on this GPU, once: %s", kind)
    try:
        errors = test(kind)
    except OSError as failure:
        return f"it could not be tried: {failure}"
    except TrialFailed as failure:
        return f"its trial on this GPU failed: {failure}"
    if wrong := [f"{name} by {found:.1e}" for name, found in errors.items() if not found < LARGEST_ERROR]:
        return f"it is wrong on this GPU: {', '.join(wrong)}, where {LARGEST_ERROR:.0e} is allowed"
    with suppress(OSError):  # where it cannot be written, the next process tests again
        write(passed, {"kind": json.loads(kind), "errors": errors, "card": card()})
    return None


class TrialFailed(Exception):
    """The test did not finish."""


def test(kind: str) -> dict[str, float]:
    """The error of each trial, from a process of its own. It preallocates no memory: this one has most."""
    command = [sys.executable, "-P", "-m", __spec__.name, kind]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    env = {
        "JAX_PLATFORMS": "cuda",  # without a GPU it fails and says why, in place of falling back to the CPU
        **os.environ,
        "PYTHONPATH": path,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise TrialFailed(f"it took longer than {SECONDS} s") from None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        raise TrialFailed(f"it ended with status {done.returncode}: {lines[-1] if lines else 'it said nothing'}")
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise TrialFailed(f"it said {done.stdout[-200:]!r}") from None


def trials(kind: dict) -> list[Trial]:
    """Trials of each way in which the kernel is compiled for a kind, and each path through it: single and merged
    spans, more tasks than processors, padding rows, sequences without rows."""
    parts = max(kind["kv_heads"], kind["heads"] // 64)  # tasks of a row
    many = -(-TASKS // parts)
    return [
        Trial("decoding", many, 150, 1, 3, **kind),
        Trial("decoding, with room for spans", many, 150, 1, 3, 9000, **kind),
        Trial("decoding over spans", 3, 8200, **kind),
        Trial("a chunk", 3, 500, 200, 5, **kind),
        Trial("a chunk over spans", 1, 4150, 100, **kind),
    ]


def folder() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "quire" / "proven"


def digest(kind: str) -> str:
    """A hash of everything on which a result depends."""
    found = hashlib.sha256(json.dumps([card(), kind]).encode())
    for path in sorted(SOURCES):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def card() -> dict[str, str]:
    device = jax.local_devices()[0]
    return {
        "device": str(device.device_kind),
        "processors": str(getattr(device, "core_count", "")),  # CPUs do not have it
        "driver": driver(),
        "platform": " ".join(str(getattr(device.client, "platform_version", "")).split()),
        "jax": jax.__version__,
        **{name: version(name) for name in PACKAGES if has(name)},
    }


def has(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def driver() -> str:
    """The version of the NVIDIA driver; empty without one."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.exists() else ""


def write(path: Path, found: dict) -> None:
    """Replace the file at once, since other processes may read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(found, file, indent=1)
    os.replace(file.name, path)


def main() -> None:
    """The process that tests."""
    kind = json.loads(sys.argv[1])
    try:
        found = {trial.name: error(trial, mosaic_gpu.paged_attention, seed=0) for trial in trials(kind)}
    except Exception as failure:
        first, *_ = str(failure).splitlines() or [""]
        sys.exit(f"{type(failure).__name__}: {first}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
