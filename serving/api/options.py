"""The options of an engine."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, fields
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, cast, get_args

from ...model.checkpoint.embedder import Pooling
from ...model.config import ModelError
from ..speculative.config import SpeculativeConfig, parse_speculative_config
from .flags import ADAPTERS, DEVICES, MEMORY, MODEL, OUTPUT, PREFIXES, SPECULATION, flag, no_flag
from .image_options import check_image_options
from .other_engines import suggest_name
from .sizes import FORM, parse_size
from .validation import shown
from .vllm_names import ENGINE, drop_idle_arguments

P = ParamSpec("P")
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)[:-1]
LOAD_FORMATS = ("auto", "safetensors", "dummy")
HOST = 256 << 20  # bytes of host memory that buffer pages on their way to the disk
DISK = 8 << 30
SHARE = 0.9  # share of a device's memory for weights, KV cache and everything else
CPU_CACHE = 8 << 30  # default limit of the KV cache in a CPU's memory
STEPS = {"cpu": (32, 512), "gpu": (256, 8192)}  # default limits of sequences and tokens per step
PARALLEL = {  # axes of the mesh
    "tensor": "tensor_parallel_size",
    "expert": "expert_parallel_size",
    "context": "context_parallel_size",
    "pipe": "pipeline_parallel_size",
    "data": "data_parallel_size",
}
MAX_ADAPTERS = 1024
MAX_ADAPTER_RANK = 256


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine: the flags of the commands, and keyword arguments in Python."""

    model: str | None = no_flag(
        None, "Model folder or Hugging Face model ID; None: the bundled model."
    )
    _: KW_ONLY
    tokenizer: str | None = flag(
        None,
        MODEL,
        "Folder or Hugging Face model ID of the tokenizer.",
        default_text="the model's own",
    )
    skip_tokenizer_init: bool = no_flag(
        False, "Load no tokenizer; prompts and outputs are token IDs only."
    )
    language_model_only: bool = flag(
        False, MODEL, "Serve only the text model of a model that reads images."
    )
    limit_mm_per_prompt: dict[str, int] | None = flag(
        None,
        MODEL,
        "Maximum number of images of a prompt, as in '{\"image\": 4}'; 0 serves only the text "
        "model.",
        "JSON",
        '{"image": 16}',
    )
    mm_processor_kwargs: dict[str, Any] | None = flag(
        None,
        MODEL,
        "Overrides for keys of preprocessor_config.json that size images: min_pixels, max_pixels "
        "and size, as the model has them.",
        "JSON",
    )
    max_image_pixels: int = flag(
        50_000_000,
        MODEL,
        "Maximum number of pixels of an image; larger ones are refused before they are decoded.",
        "N",
    )
    allowed_media_domains: Sequence[str] | None = flag(
        None,
        MODEL,
        "Hosts from which images may be fetched (HOST or HOST:PORT); may be given several times.",
        "HOST",
        "none: only data: URLs",
    )
    allowed_local_media_path: str | None = flag(
        None, MODEL, "Folder from which file: URLs of images may be read.", "DIR", "none"
    )
    revision: str | None = flag(
        None, MODEL, "Branch, tag or commit of the model on Hugging Face.", "NAME", "main"
    )
    download_dir: str | None = flag(
        None, MODEL, "Folder for downloaded models.", "DIR", "the Hugging Face cache"
    )
    load_format: str = flag(
        "auto",
        MODEL,
        "Format of the weights: auto, safetensors, or dummy (random weights, for benchmarks).",
        "FORMAT",
    )
    weight_cache: bool = flag(
        True,
        MODEL,
        "On CPUs, cache the weights on disk in the layout of the kernels, and memory-map them at "
        "the next start.",
    )
    hf_overrides: dict[str, Any] | None = flag(
        None,
        MODEL,
        "Overrides for keys of config.json; null removes a key.",
        "JSON",
    )
    generation_config: str = flag(
        "auto",
        MODEL,
        "Source of default sampling parameters: auto (the model's generation_config.json), a "
        "folder with that file, or vllm (none).",
        "auto|vllm|DIR",
    )
    override_generation_config: dict[str, Any] | None = flag(
        None,
        MODEL,
        "Overrides for default sampling parameters, as in '{\"temperature\": 0.5}'.",
        "JSON",
    )
    dtype: str = flag(
        "auto",
        MODEL,
        "Data type of weights and activations: auto, float32, bfloat16, or float16 (computed in "
        "bfloat16).",
        default_text="auto: the model's",
    )
    quantization: str | None = flag(
        None,
        MODEL,
        "Quantise the model to int8 or fp8 (weights and activations), int8-weights, fp8-weights, "
        "int4-64-zero, mxfp4, e8p-2 and so on (docs/quantisation.md).",
        default_text="the checkpoint's format",
        short_name="q",
    )
    activation_dtype: str = flag(
        "auto",
        MODEL,
        "int8: quantise activations to int8 in groups for products with weights quantised in "
        "groups; CPUs only.",
        "auto|int8",
    )
    max_model_len: int | None = flag(
        None,
        MODEL,
        "Maximum context length: prompt and output tokens; -1 uses the longest that fits into "
        "memory.",
        "TOKENS",
        "the model's own",
    )
    block_size: int = flag(16, MEMORY, "KV cache page size in tokens.", "TOKENS")
    tensor_parallel_size: int = flag(
        1, DEVICES, "Tensor parallelism: number of devices that split every layer.", short_name="tp"
    )
    expert_parallel_size: int = flag(
        1, DEVICES, "Expert parallelism: number of device groups that divide the experts."
    )
    context_parallel_size: int = flag(
        1,
        DEVICES,
        "Context parallelism: number of device groups that divide the KV cache by position, and "
        "the tokens of long prefill steps.",
    )
    pipeline_parallel_size: int = flag(
        1,
        DEVICES,
        "Pipeline parallelism: number of device groups that divide the layers.",
        short_name="pp",
    )
    data_parallel_size: int = flag(
        1,
        DEVICES,
        "Data parallelism: number of device groups with separate sequences and KV caches; they "
        "share the experts.",
        short_name="dp",
    )
    shard_weights: bool = flag(
        False,
        DEVICES,
        "Shard every layer's weights over the devices of --context-parallel-size, as in FSDP; they "
        "are gathered for each use.",
    )
    weights_host_bytes: int | None = flag(
        None,
        MEMORY,
        "Weights to offload to host memory; they are copied to the device layer by layer in every "
        "step.",
        "BYTES",
    )
    expert_redundancy: int = flag(
        0, DEVICES, "Number of redundant expert slots per layer, for copies of the busiest experts."
    )
    expert_rebalance_steps: int = flag(
        3000,
        DEVICES,
        "Number of steps between rebalancings of the experts over devices; 0: only on request.",
    )
    coordinator_address: str | None = flag(
        None,
        DEVICES,
        "Address on which process 0 listens for the other processes; the next port is used too.",
        "HOST:PORT",
    )
    num_processes: int = flag(
        1, DEVICES, "Number of processes (one per host) that serve the model together."
    )
    process_id: int = flag(
        0,
        DEVICES,
        "Index of this process; process 0 serves requests, the others only run its steps.",
    )
    kv_cache_dtype: str = flag(
        "auto",
        MEMORY,
        "Data type of the KV cache: auto, bfloat16, int8, fp8 or int4.",
        default_text="auto: the model's dtype",
    )
    kv_cache_dtype_skip_layers: Sequence[str] = flag(
        (),
        MEMORY,
        "Layers whose KV cache is not quantised: layer indices separated by commas, and "
        "sliding_window for all layers with a window. By default, layers with very large key "
        "biases.",
        "LAYERS",
        "none",
    )
    kv_cache_memory_bytes: int | None = flag(
        None, MEMORY, "Memory for the KV cache, as in 2G.", "BYTES", "a part of the free memory"
    )
    gpu_memory_utilization: float | None = flag(
        None,
        MEMORY,
        "Fraction of the device's memory to use for weights, activations and KV cache; the KV "
        "cache gets what the others leave.",
        "SHARE",
        f"{SHARE}; on a CPU the KV cache gets up to a quarter of the free memory, at most "
        f"{CPU_CACHE >> 30}G",
    )
    enable_prefix_caching: bool = flag(
        True, PREFIXES, "Reuse cached KV pages for prompts with a common prefix."
    )
    kv_cache_host_bytes: int | None = flag(
        None,
        PREFIXES,
        "Host memory for prefix cache pages that are evicted from the device.",
        "BYTES",
        f"0, or {HOST >> 20}M with --kv-cache-disk",
    )
    kv_cache_disk: str | None = flag(
        None,
        PREFIXES,
        "Folder for prefix cache pages that are evicted from host memory; they survive restarts.",
        "DIR",
    )
    kv_cache_disk_bytes: int | None = flag(
        None, PREFIXES, "Maximum size of the --kv-cache-disk folder.", "BYTES", f"{DISK >> 30}G"
    )
    max_num_seqs: int | None = flag(
        None,
        MEMORY,
        "Maximum number of sequences per step.",
        "N",
        f"{STEPS['cpu'][0]}; on a GPU {STEPS['gpu'][0]}",
    )
    max_num_batched_tokens: int | None = flag(
        None,
        MEMORY,
        "Maximum number of tokens per step.",
        "TOKENS",
        f"{STEPS['cpu'][1]}; on a GPU {STEPS['gpu'][1]}",
    )
    max_steps_per_launch: int = flag(
        8,
        MEMORY,
        "Multi-step decoding on CPUs: maximum number of decode steps to fuse into one launch, if "
        "no request waits and they take at most 20 ms (100 ms if no answer is streamed); 1 turns "
        "it off.",
        "N",
    )
    speculative_config: dict[str, Any] | None = flag(
        None,
        SPECULATION,
        'Speculative decoding, as in \'{"method": "ngram", "num_speculative_tokens": 4}\' '
        "(docs/speculation.md).",
        "JSON",
        "off",
    )
    enable_lora: bool = flag(
        False, ADAPTERS, "Enable LoRA adapters, which requests select by name."
    )
    max_loras: int = flag(
        1,
        ADAPTERS,
        "Maximum number of different adapters per step; requests with others wait.",
        "N",
    )
    max_lora_rank: int = flag(
        16, ADAPTERS, "Maximum rank of an adapter; rounded up to 8, 16, 32 and so on.", "N"
    )
    max_cpu_loras: int | None = flag(
        None,
        ADAPTERS,
        "Maximum number of adapters in host memory; others are read from their folders again.",
        "N",
        "--max-loras",
    )
    lora_target_modules: Sequence[str] = flag(
        (),
        ADAPTERS,
        "Modules that accept adapters, by their names in the checkpoint, separated by commas; "
        "experts for MoE experts. By default, all but experts and routers.",
        "NAMES",
        "none",
    )
    max_queued_requests: int | None = no_flag(
        None, "Maximum number of waiting requests; further ones are rejected. None: no limit."
    )
    pooling: Pooling | None = flag(
        None,
        MODEL,
        "Pooling of hidden states for embeddings: last token, mean, or first token (cls).",
        "last|mean|cls",
        "the model's own, or last",
    )
    require_invariance: bool = flag(
        False,
        DEVICES,
        "Require batch invariance: refuse to start if results may depend on the rest of the batch.",
    )
    trace: str | None = flag(
        None,
        OUTPUT,
        "Write a timeline of the engine's steps, for ui.perfetto.dev or chrome://tracing.",
        "FILE",
    )
    max_logprobs: int = flag(
        20,
        MEMORY,
        "Maximum number of log-probabilities per position that a request may ask for, at least 20; "
        "-1: the whole vocabulary, for which every step then reserves memory.",
        "N",
    )
    seed: int = no_flag(0, "Sampling seed for requests without one.")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        return parse_speculative_config(self.speculative_config)

    @property
    def adapted_modules(self) -> tuple[str, ...]:
        """Names of modules that take adapters; empty for the default ones."""
        return tuple(
            name.strip() for names in self.lora_target_modules or () for name in names.split(",")
        )

    def on(self, platform: str) -> "SizedOptions":
        """Return the options with the step limits filled in for JAX's `platform`."""
        values = {field.name: getattr(self, field.name) for field in fields(EngineOptions)}
        seqs, tokens = STEPS.get(platform, STEPS["cpu"])
        if self.max_num_seqs is None:
            values["max_num_seqs"] = seqs
        if self.max_num_batched_tokens is None:
            values["max_num_batched_tokens"] = tokens
        return SizedOptions(**values)

    def __post_init__(self):
        sizes = (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_steps_per_launch",
            "max_image_pixels",
            "num_processes",
            *PARALLEL.values(),
        )
        counts = "expert_redundancy", "expert_rebalance_steps", "process_id"
        for name, minimum in (dict.fromkeys(sizes, 1) | dict.fromkeys(counts, 0)).items():
            value = getattr(self, name)
            if value is None and name in ("max_num_seqs", "max_num_batched_tokens"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ModelError(
                    f"{name} is {value!r}; it must be an integer of at least {minimum}"
                )
        rows = self.max_num_batched_tokens
        seqs = self.max_num_seqs
        if rows is not None and seqs is not None and rows < seqs:
            raise ModelError(
                f"max_num_batched_tokens is {rows}; it must be at least max_num_seqs ({seqs}), so "
                "that every running sequence gets a token a step"
            )
        if (
            (speculation := self.speculation) is not None
            and rows is not None
            and 1 + speculation.num_speculative_tokens > rows
        ):
            raise ModelError(
                "speculative_config.num_speculative_tokens is "
                f"{speculation.num_speculative_tokens}; with the token before them they must "
                f"fit into max_num_batched_tokens, {rows}"
            )
        length = self.max_model_len
        if length is not None and (not isinstance(length, int) or (length < 2 and length != -1)):
            raise ModelError(
                f"max_model_len is {length!r}; it must be at least 2, or -1 for the longest "
                "that fits"
            )
        if type(self.max_logprobs) is not int or self.max_logprobs < -1:
            raise ModelError(
                f"max_logprobs is {self.max_logprobs!r}; it must be an integer, or -1 for all "
                "of them"
            )
        queued = self.max_queued_requests
        if queued is not None and (
            not isinstance(queued, int) or isinstance(queued, bool) or queued < 1
        ):
            raise ModelError(
                f"max_queued_requests is {queued!r}; it must be an integer of at least 1, or None"
            )
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise ModelError(
                f"pooling is {self.pooling!r}; it must be one of {', '.join(POOLINGS)}"
            )
        self.check_adapters()
        for name in (
            "enable_prefix_caching",
            "shard_weights",
            "require_invariance",
            "enable_lora",
            "weight_cache",
        ):
            if not isinstance(value := getattr(self, name), bool):
                raise ModelError(f"{name} is {value!r}; it must be True or False")
        lowest = dict.fromkeys(
            ("kv_cache_host_bytes", "kv_cache_disk_bytes", "weights_host_bytes"), 0
        )
        for name, minimum in (lowest | {"kv_cache_memory_bytes": 1}).items():
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < minimum
            ):
                raise ModelError(
                    f"{name} is {value!r}; it must be a number of bytes, {minimum} or more"
                )
        if (self.kv_cache_host_bytes or self.kv_cache_disk) and not self.enable_prefix_caching:
            name = "kv_cache_disk" if self.kv_cache_disk else "kv_cache_host_bytes"
            raise ModelError(
                f"{name} keeps pages for prompts that begin alike: it needs enable_prefix_caching"
            )
        if self.kv_cache_disk_bytes is not None and self.kv_cache_disk is None:
            raise ModelError("kv_cache_disk_bytes is given and no folder: kv_cache_disk names it")
        self.check_sources()
        self.check_processes()
        share = self.gpu_memory_utilization
        if share is not None and self.kv_cache_memory_bytes is not None:
            raise ModelError(
                "gpu_memory_utilization and kv_cache_memory_bytes both size the cache: leave "
                "one out"
            )
        if share is not None and (
            isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1
        ):
            raise ModelError(
                f"gpu_memory_utilization is {share!r}; it must be above 0 and at most 1"
            )

    def check_adapters(self) -> None:
        """Check the adapter options and their combinations with others."""
        for name, limit in {
            "max_loras": MAX_ADAPTERS,
            "max_lora_rank": MAX_ADAPTER_RANK,
            "max_cpu_loras": 1 << 20,
        }.items():
            value = getattr(self, name)
            if value is None and name == "max_cpu_loras":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise ModelError(f"{name} is {value!r}; it must be an integer from 1 to {limit}")
        modules = self.lora_target_modules
        if isinstance(modules, str) or not all(
            isinstance(name, str) and name for name in modules or ()
        ):
            raise ModelError(
                f"lora_target_modules is {modules!r:.80}; it must be a list, as in ['q_proj', "
                "'experts']"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ModelError(
                f"max_cpu_loras is {self.max_cpu_loras}; it must be at least max_loras, "
                f"{self.max_loras}"
            )
        if not self.enable_lora:
            return
        for name in (*PARALLEL.values(), "num_processes"):
            if (value := getattr(self, name)) != 1 and name != "tensor_parallel_size":
                raise ModelError(
                    f"enable_lora is set and {name} is {value}: with adapters a model is split by "
                    "tensor_parallel_size alone so far"
                )
        for name in ("shard_weights", "weights_host_bytes"):
            if getattr(self, name):
                raise ModelError(
                    f"enable_lora is set, and so is {name}: weights that have adapters stay on "
                    "the device"
                )

    def check_sources(self) -> None:
        """Check the sources of the model and of its defaults."""
        if self.load_format not in LOAD_FORMATS:
            raise ModelError(
                f"load_format is {self.load_format!r}; it can be {', '.join(LOAD_FORMATS)}"
            )
        for name in ("hf_overrides", "override_generation_config", "mm_processor_kwargs"):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
            ):
                raise ModelError(f"{name} is {value!r:.80}; it must map names to values")
        check_image_options(
            self.limit_mm_per_prompt, self.allowed_media_domains, self.allowed_local_media_path
        )
        if not isinstance(self.generation_config, str):
            raise ModelError(
                f"generation_config is {self.generation_config!r}; it can be auto, vllm or a folder"
            )

    def check_processes(self) -> None:
        """Check the options of several processes and their combinations with others."""
        if self.process_id >= self.num_processes:
            raise ModelError(
                f"process_id is {self.process_id}; with num_processes {self.num_processes} it must "
                f"be at most {self.num_processes - 1}"
            )
        if self.num_processes == 1:
            return
        host, _, port = (self.coordinator_address or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65535:
            raise ModelError(
                f"coordinator_address is {self.coordinator_address!r}; with num_processes "
                f"{self.num_processes} it must be HOST:PORT of process 0, with a port of at most "
                "65534 (the next one is used too)"
            )
        for name in ("kv_cache_host_bytes", "kv_cache_disk"):
            if getattr(self, name):
                raise ModelError(
                    f"{name} is given, and pages that lie on several hosts cannot leave them: "
                    "leave it out, or serve on one host (num_processes 1)"
                )
        if self.pipeline_parallel_size > 1:
            raise ModelError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size} with num_processes "
                f"{self.num_processes}: stages lie on the devices of one process; use "
                "tensor_parallel_size or context_parallel_size"
            )
        if self.expert_redundancy:
            raise ModelError(
                f"expert_redundancy is {self.expert_redundancy} with num_processes "
                f"{self.num_processes}: experts move between the devices of one process only; "
                "leave it out"
            )


@dataclass(frozen=True)
class SizedOptions(EngineOptions):
    """Options whose step limits are set."""

    _: KW_ONLY
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0

    def max_positions(self, longest: int) -> int:
        """Positions that a request may have, given the model's limit `longest`."""
        return longest if self.max_model_len in (None, -1) else min(self.max_model_len, longest)

    @property
    def max_running(self) -> int:
        """Maximum number of sequences that run at a time."""
        return self.max_num_seqs * self.data_parallel_size


def refuse(name: str, value: Any, reason: str) -> NoReturn:
    raise ModelError(f"{name} is {shown(value)}, which has no place here: {reason}")


def make_options(model: str | Path | None, **options) -> EngineOptions:
    """Make options from keyword arguments; sizes may be numbers or texts. Unknown names raise."""
    options = drop_idle_arguments(options, ENGINE, refuse)
    declared = EngineOptions.__dataclass_fields__
    for name in options:
        if name not in declared:
            hint = suggest_name(name, declared) or f"the options are {', '.join(declared)}"
            raise TypeError(f"got an unexpected keyword argument {name!r}; {hint}")
    sizes = {
        name: size_of(name, value)
        for name, value in options.items()
        if takes_size(declared[name], value)
    }
    values: dict[str, Any] = options | sizes
    return EngineOptions(model=None if model is None else str(model), **values)


def takes_size(option: Field, value: Any) -> bool:
    """Whether a value is the text of an option that the commands parse as a size."""
    return (
        isinstance(value, str)
        and bool(option.metadata.get("metavar"))
        and option.type in (int, int | None)
    )


def size_of(name: str, text: str) -> int:
    value = parse_size(text)
    if value is None:
        raise ModelError(f"{name} is {text!r}; it must be {FORM}")
    return value


def takes_options(
    make: Callable[P, EngineOptions],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an `__init__` the parameters and documentation of `make`, for editors and `help()`."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = inspect.signature(make).parameters.values()
        init.__signature__ = inspect.Signature([self_parameter, *parameters])  # type: ignore[attr-defined]
        init.__doc__ = "\n".join(
            ["The options of the engine:", "", *map(describe_option, fields(cast(Any, make)))]
        )
        return init

    return decorate


def describe_option(option: Field) -> str:
    """Return a line about a field, with Python's names for flags."""
    text = re.sub(
        r"--([a-z-]+)", lambda flag: f"`{flag[1].replace('-', '_')}`", option.metadata["help"]
    )
    default = option.metadata.get("default_text")
    return f"{option.name}: {text}" + (f" Not given: {default}." if default else "")
