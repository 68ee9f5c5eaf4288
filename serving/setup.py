"""From options to a ready engine: model, tokenizer, the size of the cache, and every step compiled."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from ..model import checkpoint, hub
from ..model.config import ModelConfig, ModelError
from ..model.tokenizer import Tokenizer
from ..ops import native
from ..ops.native.choice import of_model
from .batch import Size
from .engine import Engine
from .pages import PageTable, largest
from .runner import Runner
from .scheduler import Limits
from .step import page_bytes


@dataclass(frozen=True)
class EngineOptions:
    """What a user can choose; the names are those of the flags."""

    model: str | None = None  # None: the bundled model
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    quantization: str | None = None  # int8, int4 and their variants: weights are rounded while they are loaded
    max_model_len: int | None = None  # None: the model's own; -1: the longest that fits
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    kv_cache_dtype: str = "auto"  # or bfloat16, or int8 with a scale a position and head
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    max_queued_requests: int | None = None  # more are refused; None: as many as come
    seed: int = 0

    def __post_init__(self):
        for name, low in (("block_size", 1), ("max_num_seqs", 1), ("max_num_batched_tokens", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ModelError(f"{name} is {value!r}; it must be an integer of at least {low}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ModelError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence gets its row"
            )
        length = self.max_model_len
        if length is not None and (not isinstance(length, int) or (length < 2 and length != -1)):
            raise ModelError(f"max_model_len is {length!r}; it must be at least 2, or -1 for the longest that fits")
        queued = self.max_queued_requests
        if queued is not None and (not isinstance(queued, int) or isinstance(queued, bool) or queued < 1):
            raise ModelError(f"max_queued_requests is {queued!r}; it must be an integer of at least 1, or None")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ModelError(f"enable_prefix_caching is {self.enable_prefix_caching!r}; it must be True or False")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ModelError(f"kv_cache_memory_bytes is {self.kv_cache_memory_bytes}; it must be positive")


def options_of(model: str | Path | None, **options) -> EngineOptions:
    """The options as a caller gave them; one that does not exist is named."""
    try:
        return EngineOptions(model=None if model is None else str(model), **options)
    except TypeError as error:
        names = ", ".join(EngineOptions.__dataclass_fields__)
        raise TypeError(f"{str(error).split('__init__() ')[-1]}; the options are {names}") from None


def make_engine(options: EngineOptions, progress: Callable[[str], None] = lambda note: None) -> Engine:
    """Load, size and compile; `progress` hears one short note a stage."""
    use_compile_cache()
    folder = hub.resolve(options.model)
    progress("reading config")
    wish = options.max_model_len
    formats = options.quantization, options.kv_cache_dtype
    config = checkpoint.read_config(folder, options.dtype, None if wish in (None, -1) else wish, *formats)
    native.prepare(of_model(config.dtype, config.quant, config.kv_dtype))
    tokenizer = None
    if not options.skip_tokenizer_init:
        tokenizer = Tokenizer(hub.resolve(options.tokenizer) if options.tokenizer else folder)
    budget = options.kv_cache_memory_bytes or default_cache_bytes()
    max_len, num_pages = size_cache(config, options, budget)
    if wish == -1:
        config = checkpoint.read_config(folder, options.dtype, max_len, *formats)
    progress("loading weights")
    weights = checkpoint.load(folder, config)
    limits = Limits(options.max_num_seqs, options.max_num_batched_tokens, max(options.max_num_seqs, 16))
    runner = Runner(config, weights, limits, num_pages, options.block_size, max_len)

    def note(size: Size) -> None:
        progress(f"compiling the step for {size.rows} rows")

    runner.warm_up(note)
    pages = PageTable(num_pages, options.block_size, config.windows, options.enable_prefix_caching)
    return Engine(runner, tokenizer, pages, max_len, options.seed, options.max_queued_requests)


def size_cache(config: ModelConfig, options: EngineOptions, budget: int) -> tuple[int, tuple[int, ...]]:
    """(max_model_len, pages a cache group): enough for every sequence at full length, or what the budget holds.

    The budget is split so that all groups run out together: each gets pages for the same number of sequences.
    """
    S, chunk = options.block_size, options.max_num_batched_tokens
    sizer = PageTable([1] * len(config.windows), S, config.windows)
    costs = [page_bytes(config, group, S) for group in range(len(config.windows))]

    def needs(length: int) -> list[int]:
        return [sizer.most_pages(group, length, chunk) for group in sizer.groups]

    def bytes_for(length: int) -> int:
        return sum(need * cost for need, cost in zip(needs(length), costs, strict=True))

    room = budget - sum(costs)  # the dummy pages
    longest = config.max_len if options.max_model_len in (None, -1) else options.max_model_len
    if longest > config.max_len:
        raise ModelError(f"max_model_len is {longest}; the model was made for at most {config.max_len} positions")
    if bytes_for(longest) > room:
        fitting = largest(lambda length: bytes_for(length) <= room, longest)
        if options.max_model_len != -1 or fitting < 2:
            raise ModelError(
                f"max_model_len {longest} needs {bytes_for(longest) / 2**20:.0f} MiB of KV cache and "
                f"{budget / 2**20:.0f} MiB are there; use --max-model-len {max(fitting, 2)} or less, or give more with "
                "--kv-cache-memory-bytes"
            )
        longest = fitting
    sequences = min(float(options.max_num_seqs), room / bytes_for(longest))
    return longest, tuple(int(need * sequences) + 1 for need in needs(longest))


def default_cache_bytes() -> int:
    """On an accelerator most of what is free; on a CPU a quarter of the memory that is free, at most 8 GiB."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] * 0.9) - stats.get("bytes_in_use", 0)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free // 4, 8 << 30)


def use_compile_cache() -> None:
    """Keep compiled steps between runs, unless the user has chosen a place (or none) himself."""
    if jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "quire" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
