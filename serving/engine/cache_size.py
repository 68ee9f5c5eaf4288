"""Sizes the KV cache: as many pages as fit beside the weights and a step's working memory."""

import math
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from ...model.checkpoint.placement import HOST
from ...model.config import ModelConfig, ModelError
from ...model.expert_copies import redundancy_of
from ...model.partition import local_config
from ...model.planning.cost import state_bytes
from ...ops.gpu.graphs import compile_step
from ...sharding.mesh import device_axes
from ..api.options import CPU_CACHE, PARALLEL, SHARE, EngineOptions, SizedOptions
from ..api.sizes import amount
from ..cache.page_pool import PagePool, largest
from ..device.expert_loads import ExpertLoads
from ..device.expert_rebalancer import ExpertRebalancer
from ..device.pipeline import Pipeline
from ..device.state import owners, page_bytes, stored_page_bytes
from ..device.step import model_of
from ..device.step_shape import StepShape
from ..speculative.on_device.drafting import DeviceDrafter
from .batch_builder import BatchBuilder

# what JAX takes of a GPU; the latter is older
FRACTIONS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
TAKEN = 0.75  # where neither is set
SNAPSHOTS = 8  # of the cache's memory this part is for states of sequences
MOST_SNAPSHOTS = 1024
GAPS = 1 / 32  # of what JAX has of a GPU: left free, since arrays do not lie without gaps


def cache_budget(options: EngineOptions) -> int | None:
    """Bytes for the KV cache, if they do not depend on the weights: as configured, or a share of a
    CPU's free memory.

    None if the weights must be loaded first.
    """
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    if options.gpu_memory_utilization is not None or device_memory() is not None:
        return None
    return min(steady(free_memory() // 4), CPU_CACHE)


def check_memory(options: EngineOptions, weights: int) -> None:
    """Refuse cache sizes that exceed the machine's or the devices' memory, before weights are
    loaded.
    """
    device = options.kv_cache_memory_bytes or 0
    host = options.kv_cache_host_bytes or 0
    pool = device_memory()
    free = free_memory()
    if pool is not None and device > pool:
        raise ModelError(
            f"kv_cache_memory_bytes is {device} ({amount(device)}), and a device has "
            f"{amount(pool)}; give less, or leave it out: the cache then gets what the weights "
            "leave"
        )
    devices = (
        math.prod(getattr(options, name) for name in PARALLEL.values()) // options.num_processes
    )
    sizes = {
        "kv_cache_memory_bytes": device * devices if pool is None else 0,
        "kv_cache_host_bytes": host,
    }
    room = max(0, free - (weights if pool is None else 0))
    if sum(sizes.values()) > room:
        requested_sizes = [
            f"{name} is {getattr(options, name)} ({amount(size)})"
            for name, size in sizes.items()
            if size
        ]
        several = (
            f" for {devices} devices" if devices > 1 and sizes["kv_cache_memory_bytes"] else ""
        )
        raise ModelError(
            f"{' and '.join(requested_sizes)}{several}, and {amount(free)} of this machine's memory are "
            f"free, of which the weights take {amount(free - room)}; give at most {room >> 20}M, "
            "or leave it out"
        )


def free_memory() -> int:
    """Bytes of memory that are free or can be reclaimed."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def steady(size: int) -> int:
    """Round down to four significant bits, so that small changes do not recompile all programs."""
    num_dropped_bits = max(0, size.bit_length() - 4)
    return size >> num_dropped_bits << num_dropped_bits


def device_memory() -> int | None:
    """Bytes of an accelerator's memory; None for a CPU, which has the machine's."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def claim_memory(options: EngineOptions) -> None:
    """Set JAX's memory fraction to what the engine may use, unless the user has set it.

    It has no effect once JAX has used a GPU.
    """
    if not any(os.environ.get(name) for name in FRACTIONS):
        os.environ[FRACTIONS[0]] = str(share_of(options))


def share_of(options: EngineOptions) -> float:
    return SHARE if options.gpu_memory_utilization is None else options.gpu_memory_utilization


def usable_memory(options: EngineOptions) -> int:
    """Bytes for weights, cache and steps together."""
    pool = device_memory()
    share = share_of(options)
    if pool is None or jax.default_backend() != "gpu":
        return int((pool or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) * share)
    used_bytes = float(next(filter(None, map(os.environ.get, FRACTIONS)), TAKEN))
    return int(min(pool, pool / used_bytes * share) * (1 - GAPS))


def held_bytes(tree) -> int:
    """Bytes of these arrays on the device that holds most of them."""
    shard_bytes = Counter()
    for x in jax.tree.leaves(tree):
        if x.sharding.memory_kind == HOST:
            continue
        device_shards = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        shard_bytes.update(dict.fromkeys(x.sharding.device_set, device_shards))
    return max(shard_bytes.values())


class ProgramMemory(NamedTuple):
    """Bytes that a compiled program needs on a device."""

    arguments: int
    temporaries: int
    results: int  # but for those that take the place of an argument
    code: int


def memory_of(compiled: jax.stages.Compiled) -> ProgramMemory:
    used = compiled.memory_analysis()
    assert used is not None
    results = used.output_size_in_bytes - used.alias_size_in_bytes
    return ProgramMemory(
        used.argument_size_in_bytes,
        used.temp_size_in_bytes,
        results,
        used.generated_code_size_in_bytes,
    )


def working_bytes(
    config: ModelConfig,
    weights,
    shape: StepShape,
    page_size: int,
    mesh: Mesh | None = None,
    drafter: DeviceDrafter | None = None,
) -> int:
    """Bytes of the largest step on a device, beside weights and state; the compiler reports them."""
    groups = len(config.windows)
    stages = Pipeline(config, mesh, drafter)
    replicas = device_axes(mesh).data.size
    batch_builder = BatchBuilder(shape.with_cache(groups, page_size, config.max_len, replicas))
    _, layout = max(batch_builder.layouts.items())
    state = stages.abstract_state((2,) * groups, page_size, shape.max_seqs, shape.max_drafts)
    steps = [memory_of(compile_step(lowered)) for lowered in stages.lower(weights, state, layout)]
    # the results of two steps at a time
    sizes = [used.temporaries + used.code + 2 * used.results for used in steps]
    moving = [0]
    if mesh is not None and redundancy_of(config):
        balance = ExpertRebalancer(
            ExpertLoads(config, device_axes(mesh).experts.size), config, mesh, 0
        )
        moving = [
            memory_of(lowered.compile()).temporaries
            for _, lowered in balance.lower(model_of(weights))
        ]
    return max(sizes) + max(moving)


def whole_page_bytes(config: ModelConfig, group: int, page_size: int, mesh: Mesh | None) -> int:
    """Bytes of a page in host memory: the sum over all devices that hold a part of it."""
    abstract_state = Pipeline(config, mesh).abstract_state(
        (1,) * (len(config.windows) + 1), page_size, 1
    )
    if group == len(config.windows):  # snapshots
        return stored_page_bytes([*abstract_state.snapshots.values()])
    return stored_page_bytes(
        [abstract_state.pages[index] for index in owners(config, abstract_state.pages, group)]
    )


def size_cache(
    config: ModelConfig,
    options: SizedOptions,
    budget: int,
    mesh: Mesh | None = None,
    drafter: DeviceDrafter | None = None,
) -> tuple[int, tuple[int, ...]]:
    """(max_model_len, pages a cache group): enough for every sequence at full length, or what a
    device's budget holds.

    It is split so that all groups run out together when as many sequences as may run are as long as
    fits: shorter ones then always find a page, and of longer ones each group still holds one at
    least.
    """
    S = options.block_size
    chunk = options.max_num_batched_tokens
    groups = [PagePool(1, S, window) for window in config.windows]
    # positions of a page that a device has
    abstract_state = S if mesh is None else S // mesh.shape["context"]
    pipeline = Pipeline(config, mesh, drafter)
    local_kv_config = local_config(pipeline.kv_config, mesh)
    costs = [
        max(
            page_bytes(local_kv_config, group, abstract_state, owned)
            for owned in pipeline.page_owners(group)
        )
        for group in range(len(config.windows))
    ]

    def needs(length: int) -> list[int]:
        return [group.max_pages(length, chunk) for group in groups]

    def bytes_for(length: int) -> int:
        return sum(need * cost for need, cost in zip(needs(length), costs, strict=True))

    drafts = 0 if options.speculation is None else options.speculation.num_speculative_tokens
    recurrent_bytes = options.max_num_seqs * max(
        state_bytes(local_kv_config, stage.layers, drafts) for stage in pipeline.stages
    )
    if recurrent_bytes >= budget:
        raise ModelError(
            f"the layers of {options.max_num_seqs} sequences keep {recurrent_bytes / 2**20:.0f} MiB whatever "
            f"their length, and {budget / 2**20:.0f} MiB are there for the cache; lower "
            "--max-num-seqs, or give more with --kv-cache-memory-bytes"
        )
    snapshot_bytes = max(state_bytes(local_kv_config, stage.layers) for stage in pipeline.stages)
    snapshots = num_snapshots(snapshot_bytes, options, budget - recurrent_bytes)
    room = (
        budget - recurrent_bytes - snapshots * snapshot_bytes - sum(costs)
    )  # without the dummy pages
    longest = config.max_len if options.max_model_len in (None, -1) else options.max_model_len
    if longest > config.max_len:
        raise ModelError(
            f"max_model_len is {longest}; the model was made for at most {config.max_len} positions"
        )
    if bytes_for(longest) > room:
        fitting = largest(lambda length: bytes_for(length) <= room, longest)
        if options.max_model_len != -1 or fitting < 2:
            raise ModelError(
                f"max_model_len {longest} needs {bytes_for(longest) / 2**20:.0f} MiB of KV cache "
                f"and {budget / 2**20:.0f} MiB are there; use --max-model-len {max(fitting, 2)} or "
                "less, or give more with --kv-cache-memory-bytes"
            )
        longest = fitting

    def split(count: int) -> list[int]:
        """Pages for so many sequences of equal length, and what is left over in the same
        proportion.
        """
        length = largest(lambda length: count * bytes_for(length) <= room, longest)
        spare = room / max(bytes_for(length), 1)
        return [int(need * min(spare, options.max_num_seqs)) for need in needs(length)]

    def serves(count: int) -> bool:
        return all(pages >= need for pages, need in zip(split(count), needs(longest), strict=True))

    num_pages = tuple(pages + 1 for pages in split(max(1, largest(serves, options.max_num_seqs))))
    return longest, num_pages + ((snapshots,) if snapshots else ())


def num_snapshots(snapshot_bytes: int, options: SizedOptions, budget: int) -> int:
    """Number of recurrent-state snapshots for the prefix cache: an eighth of the memory, or none."""
    if not snapshot_bytes or not options.enable_prefix_caching:
        return 0
    count = budget // SNAPSHOTS // snapshot_bytes
    return 0 if count < 2 else min(count, MOST_SNAPSHOTS)  # the first is a dummy
