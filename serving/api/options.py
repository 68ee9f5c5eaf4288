"""The options of an engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ...model.config import ModelError

Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
HOST = 256 << 20  # bytes of host memory that buffer pages for the disk
DISK = 8 << 30
PARALLEL = {  # axes of the mesh
    "tensor": "tensor_parallel_size", "expert": "expert_parallel_size", "context": "context_parallel_size",
    "pipe": "pipeline_parallel_size", "data": "data_parallel_size",
}  # fmt: skip


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine; the names are those of the flags."""

    model: str | None = None  # None: the bundled model
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    quantization: str | None = None  # int8, int4 or a variant, to which weights are rounded while they are loaded
    max_model_len: int | None = None  # None: the model's own; -1: the longest that fits
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    tensor_parallel_size: int = 1  # devices that share every layer
    expert_parallel_size: int = 1  # groups of devices that each hold some of the experts
    context_parallel_size: int = 1  # groups that each hold some positions of every page and compute some tokens
    pipeline_parallel_size: int = 1  # groups that each hold some of the layers
    data_parallel_size: int = 1  # groups with sequences and pages of their own; they share the experts
    expert_redundancy: int = 0  # copies of the busiest experts, in every layer
    expert_rebalance_steps: int = 3000  # rebalance every N steps; 0: only on request
    shard_weights: bool = False  # a context group's devices share every layer, gathered when it is used
    weights_host_bytes: int | None = (
        None  # bytes of layers that stay in host memory and are copied in when they are used
    )
    coordinator_address: str | None = None  # HOST:PORT of process 0
    num_processes: int = 1  # one a host, each with its own devices
    process_id: int = 0  # 0 leads, the others follow
    kv_cache_dtype: str = "auto"  # or bfloat16, or int8 or fp8 with a scale a position and head
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = (
        None  # share for weights and cache; None: 0.9, and on a CPU a part of what is free
    )
    enable_prefix_caching: bool = True
    kv_cache_host_bytes: int | None = None  # for evicted pages; None: 0, or HOST where there is a disk
    kv_cache_disk: str | None = None  # a folder for pages that the host evicts
    kv_cache_disk_bytes: int | None = None  # the most that the folder may hold; None: DISK
    max_queued_requests: int | None = None  # more are refused; None: no bound
    pooling: Pooling = "last"  # a prompt's embedding is its last hidden state, or the mean of all
    trace: str | None = None  # a file for the timeline of steps and requests
    seed: int = 0

    @property
    def most_running(self) -> int:
        """Sequences that can run at a time."""
        return self.max_num_seqs * self.data_parallel_size

    def __post_init__(self):
        sizes = "block_size", "max_num_seqs", "max_num_batched_tokens", "num_processes", *PARALLEL.values()
        counts = "expert_redundancy", "expert_rebalance_steps", "process_id"
        for name, low in (dict.fromkeys(sizes, 1) | dict.fromkeys(counts, 0)).items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ModelError(f"{name} is {value!r}; it must be an integer of at least {low}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ModelError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence gets a token a step"
            )
        length = self.max_model_len
        if length is not None and (not isinstance(length, int) or (length < 2 and length != -1)):
            raise ModelError(f"max_model_len is {length!r}; it must be at least 2, or -1 for the longest that fits")
        queued = self.max_queued_requests
        if queued is not None and (not isinstance(queued, int) or isinstance(queued, bool) or queued < 1):
            raise ModelError(f"max_queued_requests is {queued!r}; it must be an integer of at least 1, or None")
        if self.pooling not in POOLINGS:
            raise ModelError(f"pooling is {self.pooling!r}; it must be one of {', '.join(POOLINGS)}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ModelError(f"enable_prefix_caching is {self.enable_prefix_caching!r}; it must be True or False")
        if not isinstance(self.shard_weights, bool):
            raise ModelError(f"shard_weights is {self.shard_weights!r}; it must be True or False")
        for name in ("kv_cache_host_bytes", "kv_cache_disk_bytes", "weights_host_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ModelError(f"{name} is {value!r}; it must be a number of bytes, 0 or more")
        if (self.kv_cache_host_bytes or self.kv_cache_disk) and not self.enable_prefix_caching:
            name = "kv_cache_disk" if self.kv_cache_disk else "kv_cache_host_bytes"
            raise ModelError(f"{name} keeps pages for prompts that begin alike: it needs enable_prefix_caching")
        if self.kv_cache_disk_bytes is not None and self.kv_cache_disk is None:
            raise ModelError("kv_cache_disk_bytes is given and no folder: kv_cache_disk names it")
        self.check_processes()
        share = self.gpu_memory_utilization
        if share is not None and self.kv_cache_memory_bytes is not None:
            raise ModelError("gpu_memory_utilization and kv_cache_memory_bytes both size the cache: leave one out")
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            raise ModelError(f"gpu_memory_utilization is {share!r}; it must be above 0 and at most 1")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ModelError(f"kv_cache_memory_bytes is {self.kv_cache_memory_bytes}; it must be positive")

    def check_processes(self) -> None:
        """What must be given so that several processes find each other, and what they cannot do."""
        if self.process_id >= self.num_processes:
            raise ModelError(
                f"process_id is {self.process_id}; with num_processes {self.num_processes} it must be at most "
                f"{self.num_processes - 1}"
            )
        if self.num_processes == 1:
            return
        host, _, port = (self.coordinator_address or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65535:
            raise ModelError(
                f"coordinator_address is {self.coordinator_address!r}; with num_processes {self.num_processes} it must "
                "be HOST:PORT of process 0, with a port of at most 65534 (the next one is used too)"
            )
        for name in ("kv_cache_host_bytes", "kv_cache_disk"):
            if getattr(self, name):
                raise ModelError(
                    f"{name} is given, and pages that lie on several hosts cannot leave them: leave it out, or serve "
                    "on one host (num_processes 1)"
                )
        if self.pipeline_parallel_size > 1:
            raise ModelError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size} with num_processes {self.num_processes}: "
                "stages lie on the devices of one process; use tensor_parallel_size or context_parallel_size"
            )
        if self.expert_redundancy:
            raise ModelError(
                f"expert_redundancy is {self.expert_redundancy} with num_processes {self.num_processes}: experts move "
                "between the devices of one process only; leave it out"
            )


def options_of(model: str | Path | None, **options) -> EngineOptions:
    """The options as a caller gave them; one that does not exist is named."""
    try:
        return EngineOptions(model=None if model is None else str(model), **options)
    except TypeError as error:
        names = ", ".join(EngineOptions.__dataclass_fields__)
        raise TypeError(f"{str(error).split('__init__() ')[-1]}; the options are {names}") from None
