"""From options to a ready engine: model, tokenizer, the size of the cache, and every step compiled."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from ..model import checkpoint, hub
from ..model.config import ModelConfig, ModelError
from ..model.tokenizer import Tokenizer
from ..ops import native
from ..ops.native.choice import of_model
from ..sharding.spec import nbytes
from .batch import Size
from .disk import DiskPages
from .engine import Engine
from .options import DISK, HOST, EngineOptions
from .pages import PageTable
from .runner import Runner
from .scheduler import Limits
from .sizing import cache_budget, size_cache, usable_memory, working_bytes
from .step import page_bytes
from .tiers import Tiers
from .trace import Trace
from .watchers import watch


def make_engine(options: EngineOptions, progress: Callable[[str], None] = lambda note: None) -> Engine:
    """Load, size and compile; `progress` hears one short note a stage."""
    use_compile_cache()
    folder = hub.resolve(options.model)
    trace = make_trace(options.trace)
    progress("reading config")
    wish = options.max_model_len
    formats = options.quantization, options.kv_cache_dtype
    config = checkpoint.read_config(folder, options.dtype, None if wish in (None, -1) else wish, *formats)
    native.prepare(of_model(config.dtype, config.quant, config.kv_dtype))
    tokenizer = None
    if not options.skip_tokenizer_init:
        tokenizer = Tokenizer(hub.resolve(options.tokenizer) if options.tokenizer else folder)
    limits = Limits(options.max_num_seqs, options.max_num_batched_tokens, max(options.max_num_seqs, 16))
    load_weights, weights = partial(checkpoint.load, folder, config), None
    budget = cache_budget(options)
    if budget is None:  # what the weights and a step leave
        progress("loading weights")
        weights = load_weights()
        progress("measuring a step")
        taken = nbytes(weights) + working_bytes(config, weights, limits, options.block_size)
        budget = max(0, usable_memory(options) - taken)
    max_len, num_pages = size_cache(config, options, budget)
    if wish == -1:
        config = checkpoint.read_config(folder, options.dtype, max_len, *formats)
    if weights is None:
        progress("loading weights")
        weights = load_weights()
    tiers = make_tiers(folder, config, options)
    runner = Runner(config, weights, limits, num_pages, options.block_size, max_len, tiers is not None, load_weights)

    def note(size: Size) -> None:
        progress(f"compiling the step for {size.rows} rows")

    runner.warm_up(note)
    pages = PageTable(num_pages, options.block_size, config.windows, options.enable_prefix_caching, tiers)
    seed, queued = options.seed, options.max_queued_requests
    engine = Engine(runner, tokenizer, pages, max_len, seed, queued, pooling=options.pooling)
    watch(engine, trace)
    return engine


def make_trace(file: str | None) -> Trace | None:
    try:
        return None if file is None else Trace(Path(file).expanduser(), time.monotonic)
    except OSError as error:
        raise ModelError(f"trace is {file!r}: {error.strerror}") from None


def make_tiers(folder: Path, config: ModelConfig, options: EngineOptions) -> Tiers | None:
    """Host memory and disk for pages that the cache has no room for, where there are to be any."""
    sizes = [page_bytes(config, group, options.block_size) for group in range(len(config.windows))]
    host = options.kv_cache_host_bytes
    if host is None:
        host = HOST if options.kv_cache_disk else 0
    if options.kv_cache_disk is None:
        return Tiers(sizes, host) if host else None
    if host < max(sizes):
        raise ModelError(
            f"kv_cache_host_bytes is {host}; the way to the disk leads through host memory, which must hold a page: "
            f"{max(sizes)} bytes at least"
        )
    path = Path(options.kv_cache_disk).expanduser()
    try:
        disk = DiskPages(path, DISK if options.kv_cache_disk_bytes is None else options.kv_cache_disk_bytes)
    except OSError as error:
        raise ModelError(f"kv_cache_disk is {str(path)!r}: {error.strerror}") from None
    return Tiers(sizes, host, disk, identity(folder, config, options))


def identity(folder: Path, config: ModelConfig, options: EngineOptions) -> bytes:
    """A digest of everything that a page's bytes depend on, beside its tokens."""
    device = jax.local_devices()[0]
    kernels = (native.instruction_set(), native.build.source_hash()) if native.serves() else "xla"
    model = replace(config, max_len=0)  # what it changes is in the rotary tables
    what = [model, options.block_size, jax.__version__, device.platform, device.device_kind, kernels]
    found = hashlib.blake2b(repr(what).encode(), digest_size=32)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        stat = path.stat()
        found.update(repr((path.name, stat.st_size, stat.st_mtime_ns)).encode())
    return found.digest()


def use_compile_cache() -> None:
    """Keep compiled steps between runs, unless the user has chosen a place (or none) himself."""
    if jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "quire" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def on_host() -> bool:
    """Whether the device's memory is the host's."""
    return jax.default_backend() == "cpu"
