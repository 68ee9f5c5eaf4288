"""How many pages there are: what the memory holds beside the weights and a step's own arrays."""

import os

import jax

from ..model.config import ModelConfig, ModelError
from .batcher import Batcher
from .group import Group, largest
from .options import EngineOptions
from .scheduler import Limits
from .step import empty_state, page_bytes, step


def cache_budget(options: EngineOptions) -> int | None:
    """Bytes for the KV cache as far as they do not depend on the model: as given, or of a CPU a part of what is free.

    None where they are what the weights leave: on an accelerator, or when a share of the memory was asked for.
    """
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    if options.gpu_memory_utilization is not None or device_memory() is not None:
        return None
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free // 4, 8 << 30)


def device_memory() -> int | None:
    """What an accelerator's memory holds; None for a CPU, which has that of the machine."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def usable_memory(options: EngineOptions) -> int:
    """The share of the memory that may be used for everything."""
    whole = device_memory() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(whole * (0.9 if options.gpu_memory_utilization is None else options.gpu_memory_utilization))


def working_bytes(config: ModelConfig, weights, limits: Limits, page_size: int) -> int:
    """What the largest step takes beside weights and state, as its compiler says; nothing is run."""
    groups = len(config.windows)
    size, layout = max(Batcher(limits, groups, page_size, -(-config.max_len // page_size)).layouts.items())
    state = jax.eval_shape(lambda: empty_state(config, (2,) * groups, page_size, limits.max_seqs))
    used = step.lower(weights, state, layout.padding, layout, config).compile().memory_analysis()
    results = used.output_size_in_bytes - used.alias_size_in_bytes
    return used.temp_size_in_bytes + used.generated_code_size_in_bytes + 2 * results  # of two steps at a time


def size_cache(config: ModelConfig, options: EngineOptions, budget: int) -> tuple[int, tuple[int, ...]]:
    """(max_model_len, pages a cache group): enough for every sequence at full length, or what the budget holds.

    It is split so that all groups run out together when as many sequences as may run are as long as fits: shorter ones
    then always find a page, and of longer ones each group still holds one at least.
    """
    S, chunk = options.block_size, options.max_num_batched_tokens
    groups = [Group(1, S, window) for window in config.windows]
    costs = [page_bytes(config, group, S) for group in range(len(config.windows))]

    def needs(length: int) -> list[int]:
        return [group.most_pages(length, chunk) for group in groups]

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

    def split(count: int) -> list[int]:
        """Pages for so many sequences of equal length, and what is left over in the same proportion."""
        length = largest(lambda length: count * bytes_for(length) <= room, longest)
        spare = room / max(bytes_for(length), 1)
        return [int(need * min(spare, options.max_num_seqs)) for need in needs(length)]

    def serves(count: int) -> bool:
        return all(pages >= need for pages, need in zip(split(count), needs(longest), strict=True))

    return longest, tuple(pages + 1 for pages in split(max(1, largest(serves, options.max_num_seqs))))
