"""The kernel for NVIDIA GPUs, for kinds of attention that it was seen to get right on this very card.

Cards, drivers and compilers differ. So before it serves a kind of attention, a process of its own, which a crash or a
hang takes down alone, tries it there against float64. What passed is remembered; what did not is left to XLA, and the
log says why. `QUIRE_MOSAIC=off` leaves the kernel out, `QUIRE_MOSAIC=trusted` takes it untried.
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

from ...sharding.device_axes import UNSPLIT, Axis
from . import mosaic, mosaic_gpu, require_whole_pages
from .accuracy_trial import LARGEST_ERROR, Trial, error

SECONDS = 240  # that a trial may take: it starts JAX and compiles a handful of kernels
HERE = Path(__file__).parent
SOURCES = (
    *(HERE / f"{name}.py" for name in ("gated_mosaic_gpu", "accuracy_trial", "mosaic_gpu", "xla")),
    *Path(mosaic.__file__).parent.glob("*.py"),
)
PACKAGES = "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc"
TASKS = 400  # of a trial: three for each processor, so that they take one after the other
log = logging.getLogger("quire")
lock = Lock()


def paged_attention(
    q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim,
    context: Axis = UNSPLIT, split_rows=False,
):  # fmt: skip
    """See `quire.ops.attention.paged_attention`."""
    require_whole_pages(context)
    try:
        mosaic_gpu.require(q_TNH, pages, value_dim)
        page = pages.k_PSKH
        kind = {
            "heads": q_TNH.shape[1], "kv_heads": page.shape[2], "width": q_TNH.shape[2], "window": window,
            "soft_cap": soft_cap, "sinks": sinks_N is not None, "page": page.shape[1],
            "codes": None if pages.k_scale_PKS is None else page.dtype.name, "values": value_dim,
            "dtype": q_TNH.dtype.name,
        }  # fmt: skip
        with lock:  # who comes while it is found out waits
            doubt = doubts(json.dumps(kind), os.environ.get("QUIRE_MOSAIC", ""))
        if doubt is not None:
            raise NotImplementedError(doubt)
    except NotImplementedError as reason:
        if mosaic_gpu.has_gpu():
            explain(str(reason))
        raise
    return mosaic_gpu.paged_attention(
        q_TNH, k_TKH, v_TKH, pages, rows,
        scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N, value_dim=value_dim,
    )  # fmt: skip


@cache
def explain(reason: str) -> None:
    log.warning("attention is XLA's on this GPU, which is slow, for its kernel is not in use: %s", reason)


@cache
def doubts(kind: str, wish: str) -> str | None:
    """Why a kind must not be trusted; None if it may."""
    if wish == "off":
        return "QUIRE_MOSAIC is off"
    if wish not in ("", "trusted"):
        return f"QUIRE_MOSAIC is {wish!r}, and can be off or trusted"
    kept = folder() / f"{digest(kind)}.json"
    if wish == "trusted" or os.path.exists(kept):  # Path.exists raises where it may not look
        return None
    log.info("trying the attention kernel on this GPU, once: %s", kind)
    try:
        errors = try_apart(kind)
    except OSError as failure:
        return f"it could not be tried: {failure}"
    except TrialFailed as failure:
        return f"its trial on this GPU failed: {failure}"
    if wrong := [f"{name} by {found:.1e}" for name, found in errors.items() if not found < LARGEST_ERROR]:
        return f"it is wrong on this GPU: {', '.join(wrong)}, where {LARGEST_ERROR:.0e} is allowed"
    with suppress(OSError):  # where it cannot be kept, the next process tries again
        keep(kept, {"kind": json.loads(kind), "errors": errors, "card": card()})
    return None


class TrialFailed(Exception):
    """A trial did not come to an end."""


def try_apart(kind: str) -> dict[str, float]:
    """How far each trial was off, in a process of its own: it takes memory as it needs it, for most of it is ours."""
    command = [sys.executable, "-P", "-m", __spec__.name, kind]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    env = {
        "JAX_PLATFORMS": "cuda",  # so that it says why there is none, and does not go on without
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
    """Each way in which the kernel is compiled for a kind, and each way through it: spans that are alone and that are
    merged, more tasks than processors, rows and sequences that are not there."""
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
    """Of everything on which a result depends."""
    found = hashlib.sha256(json.dumps([card(), kind]).encode())
    for path in sorted(SOURCES):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def card() -> dict[str, str]:
    device = jax.local_devices()[0]
    return {
        "device": str(device.device_kind),
        "processors": str(getattr(device, "core_count", "")),  # a CPU does not tell
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
    """The version of the NVIDIA driver, or nothing."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.exists() else ""


def keep(path: Path, found: dict) -> None:
    """Whole or not at all, since another process may look."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(found, file, indent=1)
    os.replace(file.name, path)


def main() -> None:
    """In the process that tries."""
    kind = json.loads(sys.argv[1])
    try:
        found = {trial.name: error(trial, mosaic_gpu.paged_attention, seed=0) for trial in trials(kind)}
    except Exception as failure:
        first, *_ = str(failure).splitlines() or [""]
        sys.exit(f"{type(failure).__name__}: {first}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
