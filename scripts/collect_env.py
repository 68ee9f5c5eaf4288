"""`quire collect-env`: describe the environment, for bug reports."""

import importlib
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .. import __version__

PACKAGES = (
    "jax",
    "jaxlib",
    "orbax-checkpoint",
    "numpy",
    "ml_dtypes",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "minijinja",
    "typer",
    "rich",
    "matplotlib",
    "absl-py",
    "flashinfer-python",
    "jax-tvm-ffi",
)
CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
VARIABLES = (
    "JAX_",
    "XLA_",
    "QUIRE_",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME",
)


def main() -> None:
    """Print versions, hardware, caches, kernels in use and batch invariance, for bug reports."""
    from ..ops.errors import MissingLibrary

    for title, rows in (
        ("versions", versions()),
        ("machine", machine()),
        ("devices", devices()),
        ("caches", caches()),
        ("environment", environment()),
        ("kernels", kernels()),
        ("attention", attention()),
        ("the same bits in any batch", invariance()),
    ):
        print(f"{title}:")
        try:
            for name, value in rows:
                print(f"  {name}: {value}")
        except MissingLibrary as error:  # a server would exit with this error
            print(f"  error: {error}")


def versions():
    yield "quire", __version__
    yield "python", sys.version.split()[0]
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def machine():
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "cores", cores()
    if "SC_PHYS_PAGES" in os.sysconf_names:
        yield (
            "memory",
            f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        )
    info = Path("/proc/cpuinfo")
    fields = (
        dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        if info.exists()
        else {}
    )
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    yield "cpu", fields.get("model name") or platform.processor() or "unknown"
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    yield "cpu flags", " ".join(flag for flag in CPU_FLAGS if flag in flags) or "none known"


def cores() -> int:
    """The number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices():
    import jax

    yield "backend", jax.default_backend()
    for device in jax.devices():
        yield str(device), device.device_kind


def caches():
    import jax
    from huggingface_hub.constants import HF_HUB_CACHE

    from ..serving.build import use_compile_cache

    use_compile_cache()
    cache_dir = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    yield "compiled programs", cache_dir or "off"
    yield "hugging face", HF_HUB_CACHE


def environment():
    """The environment variables that affect Quire; others are left out: they may hold secrets."""
    names = sorted(name for name in os.environ if name.startswith(VARIABLES))
    return [(name, os.environ[name]) for name in names] or [("set", "none that matter here")]


def kernels():
    """The native CPU kernels in use, or the reason that there are none."""
    from ..ops import native
    from ..ops.native import build, kernel_names

    try:
        isa = native.instruction_set()
        folder = build.library(isa, "probe").parent
    except NotImplementedError as reason:
        yield "native", f"not in use: {reason}"
        return
    alternatives = [name for name in build.isas() if name != isa]
    yield "native", f"{isa} (QUIRE_NATIVE can choose {', '.join([*alternatives, 'off'])})"
    yield "sampling", "native" if native.has(kernel_names.SAMPLING) else "XLA's; the log says why"
    yield "libraries", folder
    yield (
        "built so far",
        ", ".join(name for name in build.VARIANTS if (folder / f"{name}.so").exists()),
    )


def attention():
    """The attention implementation chosen for each kind of attention, and why others are not."""
    from ..ops.gpu.device import is_gpu

    if is_gpu():
        print(
            "(a GPU's kernels are tried the first time that they are asked for: some minutes)",
            file=sys.stderr,
        )
    for case, trace in cases():
        name, rejections = first_supported(trace)
        yield case, "; ".join((name, *rejections))


def invariance():
    """Whether the bundled model's compiled steps are batch-invariant, and the reasons if not."""
    from ..model.checkpoint import hub, loader
    from ..serving.device.pipeline import Pipeline
    from ..serving.device.step_shape import StepShape
    from ..serving.engine.batch_builder import BatchBuilder

    folder = hub.resolve(None)
    page = 16
    config = loader.read_config(folder, "bfloat16", 256)
    pipeline = Pipeline(config, None)
    groups = len(config.windows)
    builder = BatchBuilder(StepShape.largest(4, 16, 16).with_cache(groups, page, 256))
    weights = loader.load(folder, config)
    state = pipeline.abstract_state((2,) * groups, page, 4)
    for layout in builder.layouts.values():
        pipeline.lower(weights, state, layout)
    yield "the bundled model", "no" if pipeline.variance else "yes"
    for reason in sorted(pipeline.variance):
        yield "because", reason


def first_supported(run):
    """(first attention implementation with which `run` succeeds, or "none"; reasons of those
    before it).
    """
    from ..ops import attention as op

    rejections = []
    for name, module in op.IMPLEMENTATIONS.items():
        try:
            run(importlib.import_module(module, op.__name__).BACKEND)
        except NotImplementedError as reason:
            rejections.append(f"{name} declines: {reason}")
        else:
            return name, rejections
    return "none", rejections


def cases():
    """(kind of attention, function that traces an implementation on a tiny example of it)."""
    import jax
    import jax.numpy as jnp

    from ..ops.attention import KVPages, QueryRows, uses_paired_pages
    from ..ops.attention.backend import AttentionParams

    T = 4
    N = 4
    K = 2
    H = 128
    P = 8
    S = 16

    def array(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def trace(latent=False, sinks=False, **options):
        params = AttentionParams(1.0, value_dim=H // 2 if latent else None, **options)
        heads = 1 if latent else K
        if uses_paired_pages(jnp.bfloat16) and not latent:
            pages = KVPages(kv_PSYH=array((P, S, 2 * heads, H)))
        else:
            pages = KVPages(array((P, S, heads, H)), None if latent else array((P, S, heads, H)))
        ints = jnp.int32
        rows = QueryRows(
            array((T,), ints), array((T + 1,), ints), array((T, 2), ints), array((T,), ints)
        )

        def call(implementation):
            return jax.eval_shape(
                lambda q_TNH, k_TKH, v_TKH, pages, rows, sinks_N: implementation(
                    q_TNH, k_TKH, v_TKH, pages, rows, params, sinks_N
                ),
                array((T, N, H)),
                array((T, heads, H)),
                None if latent else array((T, heads, H)),
                pages,
                rows,
                array((N,), jnp.float32) if sinks else None,
            )

        return call

    return [
        ("full", trace()),
        ("window", trace(window=32)),
        ("soft cap", trace(soft_cap=50.0)),
        ("sinks", trace(sinks=True)),
        ("latent", trace(latent=True)),
    ]
