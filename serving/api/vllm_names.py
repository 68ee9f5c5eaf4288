"""Arguments of vLLM that do not exist here: those without effect, and equivalents of the others.

Names that are options or parameters here are in none of these tables. docs/vllm.md shows all of
them.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")
Refuse = Callable[[str, Any, str], NoReturn]  # (name, value, reason)
NOTHING = (None, False, 0, "", [], (), {})  # values that request nothing
COMPILED = "every step is compiled by XLA at startup"
EXCHANGE = "XLA implements the communication between devices"
LOADING = "weight files are memory-mapped, and each tensor is read once"
NO_MEDIA = "docs/images.md describes how images are read; video and audio are not supported"
NO_EMBEDS = "images are read from pixels, by the model's own tower without adapters"
STACKS = "the adapters of a weight are stored in one stack, in the model's dtype"
STATES = (
    "a recurrent layer keeps its state in a slot for each sequence, in one layout and dtype, "
    "without blocks"
)
ORDER = "it changes the order of computation and no answer"
METRICS = "metrics are always counted"
PROFILED = "`trace` writes a timeline of the steps"
RANKS = (
    "replicas are counted from `data_parallel_size`, or served by `quire serve --engine ray "
    "--replicas N`"
)
HOSTS = "several hosts are named by `num_processes`, `process_id` and `coordinator_address`"
PLUGIN = "plugins are not supported"
TRANSFER = "docs/scale-out.md describes the transfer of KV pages between replicas"
ROUTES = "the experts of each token are not returned"


@dataclass(frozen=True)
class UnsupportedArgument:
    """An argument that would change the result, except for its `harmless` values."""

    reason: str
    harmless: tuple[Any, ...] = ()


def unsupported(reason: str, *harmless: Any) -> UnsupportedArgument:
    return UnsupportedArgument(reason, harmless)


# A text is the reason why the argument has no effect.
ENGINE: Mapping[str, str | UnsupportedArgument] = {
    "additional_config": unsupported(PLUGIN),
    "aggregate_engine_logging": METRICS,
    "all2all_backend": EXCHANGE,
    "allow_deprecated_quantization": "no format is deprecated",
    "async_scheduling": "scheduling is always asynchronous",
    "attention_backend": COMPILED,
    "attention_config": COMPILED,
    "calculate_kv_scales": "a quantised KV cache has a scale for each position",
    "code_revision": "no code of a checkpoint is run",
    "collect_detailed_traces": PROFILED,
    "compilation_config": COMPILED,
    "config_format": unsupported("the configuration is Hugging Face's config.json", "auto", "hf"),
    "convert": unsupported(
        "the model's folder determines what it computes", "auto", "none", "embed"
    ),
    "cp_kv_cache_interleave_size": "the positions of every page are split",
    "cpu_offload_gb": unsupported("`weights_host_bytes` keeps weights in host memory"),
    "cudagraph_capture_sizes": COMPILED,
    "cudagraph_metrics": METRICS,
    "data_parallel_address": unsupported(RANKS),
    "data_parallel_backend": "the replicas are part of one program",
    "data_parallel_external_lb": unsupported(RANKS),
    "data_parallel_hybrid_lb": unsupported(RANKS),
    "data_parallel_rank": unsupported(RANKS),
    "data_parallel_rpc_port": unsupported(RANKS),
    "data_parallel_size_local": unsupported(RANKS),
    "data_parallel_start_rank": unsupported(RANKS),
    "dbo_decode_token_threshold": EXCHANGE,
    "dbo_prefill_token_threshold": EXCHANGE,
    "dcp_kv_cache_interleave_size": "the positions of every page are split",
    "decode_context_parallel_size": unsupported(
        "`context_parallel_size` splits the positions of every page", 1
    ),
    "default_mm_loras": unsupported(NO_EMBEDS),
    "disable_cascade_attn": COMPILED,
    "disable_chunked_mm_input": NO_MEDIA,
    "disable_custom_all_reduce": EXCHANGE,
    "disable_hybrid_kv_cache_manager": "sliding-window layers always have separate pages",
    "disable_log_stats": METRICS,
    "disable_nccl_for_dp_synchronization": EXCHANGE,
    "disable_sliding_window": unsupported(
        "`max_model_len` of at most the window has the same effect"
    ),
    "distributed_executor_backend": "one process drives all devices of a host",
    "ec_transfer_config": unsupported(NO_EMBEDS),
    "enable_chunked_prefill": "prefill is always chunked",
    "enable_dbo": EXCHANGE,
    "enable_eplb": unsupported("`expert_redundancy` replicates and rebalances the busiest experts"),
    "enable_expert_parallel": unsupported("`expert_parallel_size` splits the experts"),
    "enable_layerwise_nvtx_tracing": PROFILED,
    "enable_log_requests": "prompts are not logged",
    "enable_logging_iteration_details": METRICS,
    "enable_mfu_metrics": METRICS,
    "enable_mm_embeds": unsupported(NO_EMBEDS),
    "enable_mm_processor_stats": NO_MEDIA,
    "enable_prompt_embeds": unsupported("prompts are text or token ids"),
    "enable_return_routed_experts": unsupported(ROUTES),
    "enable_sleep_mode": "`sleep()` is always available",
    "enable_tower_connector_lora": NO_MEDIA,
    "enforce_eager": COMPILED,
    "eplb_config": unsupported("`expert_redundancy` and `expert_rebalance_steps` configure it"),
    "expert_placement_strategy": ORDER,
    "fail_on_environ_validation": "there are no environment variables to check",
    "fully_sharded_loras": STACKS,
    "gdn_prefill_backend": "the first kernel that supports this device is used",
    "hf_config_path": unsupported(
        "config.json is in the folder of the weights: use a copy of the folder with another one"
    ),
    "hf_token": unsupported("set HF_TOKEN in the environment"),
    "ignore_patterns": "only files that are needed are downloaded",
    "interleave_mm_strings": NO_MEDIA,
    "io_processor_plugin": unsupported(PLUGIN),
    "kv_cache_metrics": METRICS,
    "kv_cache_metrics_sample": METRICS,
    "kv_events_config": unsupported(TRANSFER),
    "kv_offloading_backend": "`kv_cache_host_bytes` and `kv_cache_disk` use Quire's own implementation",
    "kv_offloading_size": unsupported("`kv_cache_host_bytes` sets it, in bytes"),
    "kv_sharing_fast_prefill": COMPILED,
    "kv_transfer_config": unsupported(TRANSFER),
    "logits_processor_pattern": unsupported(PLUGIN),
    "logits_processors": unsupported(
        "logits stay on the device: `logit_bias`, `allowed_token_ids`, `bad_words` and "
        "`structured_outputs` of SamplingParams constrain the sampled tokens"
    ),  # fmt: skip
    "logprobs_mode": unsupported(
        "log-probabilities are computed from the raw logits", "raw_logprobs"
    ),
    "long_prefill_token_threshold": ORDER,
    "lora_dtype": unsupported(STACKS, "auto"),
    "mamba_block_size": STATES,
    "mamba_cache_dtype": STATES,
    "mamba_cache_mode": STATES,
    "mamba_ssm_cache_dtype": STATES,
    "master_addr": unsupported(HOSTS, "127.0.0.1"),
    "master_port": unsupported(HOSTS, 29501),
    "max_cudagraph_capture_size": COMPILED,
    "max_long_partial_prefills": ORDER,
    "max_num_partial_prefills": ORDER,
    "max_parallel_loading_workers": LOADING,
    "media_io_kwargs": NO_MEDIA,
    "mm_encoder_attn_backend": NO_MEDIA,
    "mm_encoder_only": unsupported(NO_EMBEDS),
    "mm_encoder_tp_mode": NO_MEDIA,
    "mm_processor_cache_gb": NO_MEDIA,
    "mm_processor_cache_type": NO_MEDIA,
    "mm_shm_cache_max_object_size_mb": NO_MEDIA,
    "model_impl": "there is one implementation of each model",
    "model_loader_extra_config": unsupported("loading has no further options"),
    "model_weights": unsupported("the weights are in the folder of config.json"),
    "nnodes": unsupported(HOSTS, 1),
    "node_rank": unsupported(HOSTS),
    "num_gpu_blocks_override": unsupported("`kv_cache_memory_bytes` sizes the KV cache"),
    "optimization_level": COMPILED,
    "otlp_traces_endpoint": unsupported("`quire serve` has it"),
    "override_attention_dtype": unsupported("attention is computed in the model's dtype", "auto"),
    "pooler_config": unsupported('`pooling` is "last", "mean" or "cls"'),
    "prefill_context_parallel_size": unsupported(
        "`context_parallel_size` splits the tokens of long steps", 1
    ),
    "prefix_caching_hash_algo": "prefixes are compared by their tokens",
    "profiler_config": unsupported(PROFILED),
    "pt_load_map_location": LOADING,
    "ray_workers_use_nsight": PROFILED,
    "reasoning_parser": unsupported(
        "`quire serve` has it; in Python the text is the model's unchanged output"
    ),
    "reasoning_parser_plugin": unsupported(PLUGIN),
    "runner": unsupported(
        "the model's folder determines what it computes", "auto", "generate", "pooling"
    ),
    "safetensors_load_strategy": LOADING,
    "scheduler_cls": unsupported(PLUGIN),
    "scheduling_policy": "`priority` always applies; requests without one are served in order of arrival",
    "served_model_name": "a model has no name in Python; `quire serve` has the flag",
    "show_hidden_metrics_for_version": METRICS,
    "shutdown_timeout": "`close()` ends running requests",
    "skip_mm_profiling": NO_MEDIA,
    "specialize_active_lora": STACKS,
    "stream_interval": "outputs are sent when they are ready",
    "structured_outputs_config": "llguidance compiles all structured outputs",
    "swap_space": "preempted requests are recomputed; `kv_cache_host_bytes` keeps their pages",
    "tokenizer_mode": unsupported("the tokenizer is tokenizer.json", "auto", "hf"),
    "tokenizer_revision": unsupported("`tokenizer` is a folder or a model id", "main"),
    "tokens_only": unsupported("`skip_tokenizer_init` uses token ids only"),
    "trust_remote_code": "no code of a checkpoint is run",
    "ubatch_size": EXCHANGE,
    "use_tqdm_on_load": "`progress` is called with each stage",
    "video_pruning_rate": NO_MEDIA,
    "weight_transfer_config": unsupported("weights are loaded from the checkpoint only"),
    "worker_cls": unsupported(PLUGIN, "auto"),
    "worker_extension_cls": unsupported(PLUGIN),
}
SAMPLING: Mapping[str, str | UnsupportedArgument] = {
    "extra_args": unsupported(PLUGIN),
    "guided_decoding": unsupported("is the old name of `structured_outputs`"),
    "logits_processors": ENGINE["logits_processors"],
    "output_text_buffer_length": "the text held back for stop strings is determined automatically",
    "prompt_logprob_start": unsupported("`prompt_logprobs` has all positions"),
    "prompt_logprob_token_ids": unsupported("`prompt_logprobs` returns the most likely tokens"),
    "repetition_detection": unsupported("`repetition_penalty` and `max_tokens` bound repetitions"),
    "routed_experts_prompt_start": unsupported(ROUTES),
    "skip_clone": "parameters are immutable and need no copies",
    "skip_reading_prefix_cache": unsupported(
        "a unique `cache_salt` in the prompt prevents the reuse of pages"
    ),
    "spaces_between_special_tokens": "text is decoded by the tokenizer's rules",
    "stream_interval": ENGINE["stream_interval"],
    "thinking_token_budget": unsupported("`max_tokens` bounds the whole answer"),
    "trace_decode_token_ids": unsupported("`prompt_logprobs` scores given tokens"),
    "truncate_prompt_tokens": unsupported("pass only the last token ids of the prompt"),
}


def drop_idle_arguments(
    arguments: Mapping[str, Any], table: Mapping[str, str | UnsupportedArgument], refuse: Refuse
) -> dict[str, Any]:
    """Return the arguments with Quire's names; warn once of those without effect, `refuse` the
    rest.
    """
    known_arguments = dict(arguments)
    idle = []
    for name in arguments.keys() & table.keys():
        value = known_arguments.pop(name)
        entry = table[name]
        if isinstance(entry, str):
            idle.append(f"{name} ({entry})")
        elif not any(
            value == harmless and type(value) is type(harmless)
            for harmless in (*NOTHING, *entry.harmless)
        ):
            refuse(name, value, entry.reason)
    if idle:
        warnings.warn(f"without effect: {', '.join(sorted(idle))}", stacklevel=callers())
    return known_arguments


def callers() -> int:
    """Return the number of frames above the caller's up to the first outside of Quire."""
    package = Path(__file__).parents[2]
    frame = inspect.currentframe()
    count = 0
    while frame is not None and package in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
        count = count + 1
    return count


def takes_vllm_names(
    table: Mapping[str, str | UnsupportedArgument],
    refuse: Refuse,
    suggest_name: Callable[[str, Collection[str]], str],
):
    """Let a frozen dataclass accept the arguments of the table. `suggest_name` explains unknown
    ones.
    """

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__
        known_fields = [field.name for field in fields(cast(Any, cls))]

        @functools.wraps(init)
        def checked(self, *args, **arguments):
            known_arguments = (
                drop_idle_arguments(arguments, table, refuse)
                if arguments.keys() & table.keys()
                else arguments
            )
            for name in known_arguments.keys() - set(known_fields):
                hint = (
                    suggest_name(name, known_fields) or f"the fields are {', '.join(known_fields)}"
                )
                raise TypeError(f"{cls.__name__} has no {name!r}; {hint}")
            init(self, *args, **known_arguments)

        def fixed(self, name: str, value: Any) -> NoReturn:
            change = f"dataclasses.replace(params, {name}=...)"
            raise FrozenInstanceError(
                f"cannot change {name!r}: {cls.__name__} is immutable; {change} makes another"
            )

        cls.__init__ = checked
        cls.__setattr__ = fixed
        return cls

    return decorate
