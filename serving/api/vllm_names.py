"""Arguments of vLLM that have no place here: which of them change nothing, and what serves in place of the others.

A name that is an option or a parameter here is in none of these tables. docs/vllm.md shows all of them.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
Refuse = Callable[[str, Any, str], NoReturn]  # (name, value, why)
NOTHING = (None, False, 0, "", [], (), {})  # values that ask for nothing
COMPILED = "every step is compiled at the start, and how is XLA's choice"
EXCHANGE = "how devices exchange values is XLA's choice"
LOADING = "files are mapped, and each tensor is read once"
NO_MEDIA = "no model here takes images, video or sound"
STACKS = "adapters lie in one stack a weight, in the type of the model"
STATES = "a recurrent layer keeps its state in a slot for each sequence, in one layout and dtype, without blocks"
ORDER = "it changes who is computed when, and no answer"
METRICS = "metrics are always counted"
PROFILED = "`trace` writes a timeline of the steps"
RANKS = "replicas are counted from `data_parallel_size`, or served by `quire serve --engine ray --replicas N`"
HOSTS = "several hosts are named by `num_processes`, `process_id` and `coordinator_address`"
PLUGIN = "code that is not Quire's own is not run"
TRANSFER = "pages go between replicas as docs/scale-out.md says"
ROUTES = "which experts a token took is not given"


@dataclass(frozen=True)
class Refused:
    """An argument that would change the result; `harmless` values do not."""

    why: str
    harmless: tuple[Any, ...] = ()


def refused(why: str, *harmless: Any) -> Refused:
    return Refused(why, harmless)


ENGINE: Mapping[str, str | Refused] = {  # the reason, where the value does not matter
    "additional_config": refused(PLUGIN),
    "aggregate_engine_logging": METRICS,
    "all2all_backend": EXCHANGE,
    "allow_deprecated_quantization": "no format is deprecated",
    "allowed_local_media_path": NO_MEDIA,
    "allowed_media_domains": NO_MEDIA,
    "async_scheduling": "the host is always a step ahead",
    "attention_backend": COMPILED,
    "attention_config": COMPILED,
    "calculate_kv_scales": "each position of a rounded cache has a scale of its own",
    "code_revision": "no code of a checkpoint is run",
    "collect_detailed_traces": PROFILED,
    "compilation_config": COMPILED,
    "config_format": refused("the configuration is config.json, in Hugging Face's form", "auto", "hf"),
    "convert": refused("the model's folder says what it gives", "auto", "none", "embed"),
    "cp_kv_cache_interleave_size": "positions of every page are divided",
    "cpu_offload_gb": refused("`weights_host_bytes` keeps weights in host memory"),
    "cudagraph_capture_sizes": COMPILED,
    "cudagraph_metrics": METRICS,
    "data_parallel_address": refused(RANKS),
    "data_parallel_backend": "replicas are in one program",
    "data_parallel_external_lb": refused(RANKS),
    "data_parallel_hybrid_lb": refused(RANKS),
    "data_parallel_rank": refused(RANKS),
    "data_parallel_rpc_port": refused(RANKS),
    "data_parallel_size_local": refused(RANKS),
    "data_parallel_start_rank": refused(RANKS),
    "dbo_decode_token_threshold": EXCHANGE,
    "dbo_prefill_token_threshold": EXCHANGE,
    "dcp_kv_cache_interleave_size": "positions of every page are divided",
    "decode_context_parallel_size": refused("`context_parallel_size` divides the positions of every page", 1),
    "default_mm_loras": refused(NO_MEDIA),
    "disable_cascade_attn": COMPILED,
    "disable_chunked_mm_input": NO_MEDIA,
    "disable_custom_all_reduce": EXCHANGE,
    "disable_hybrid_kv_cache_manager": "layers with a window always have pages of their own",
    "disable_log_stats": METRICS,
    "disable_nccl_for_dp_synchronization": EXCHANGE,
    "disable_sliding_window": refused("`max_model_len` of at most the window has the same effect"),
    "distributed_executor_backend": "one process drives all devices of a host",
    "ec_transfer_config": refused(NO_MEDIA),
    "enable_chunked_prefill": "long prompts are always read in parts",
    "enable_dbo": EXCHANGE,
    "enable_eplb": refused("`expert_redundancy` has copies of the busiest experts, and moves them"),
    "enable_expert_parallel": refused("`expert_parallel_size` divides the experts"),
    "enable_layerwise_nvtx_tracing": PROFILED,
    "enable_log_requests": "prompts are not logged",
    "enable_logging_iteration_details": METRICS,
    "enable_mfu_metrics": METRICS,
    "enable_mm_embeds": refused(NO_MEDIA),
    "enable_mm_processor_stats": NO_MEDIA,
    "enable_prompt_embeds": refused("prompts are text or token ids"),
    "enable_return_routed_experts": refused(ROUTES),
    "enable_sleep_mode": "`sleep()` is always there",
    "enable_tower_connector_lora": NO_MEDIA,
    "enforce_eager": COMPILED,
    "eplb_config": refused("`expert_redundancy` and `expert_rebalance_steps` say it"),
    "expert_placement_strategy": ORDER,
    "fail_on_environ_validation": "there are no variables of the environment to check",
    "fully_sharded_loras": STACKS,
    "gdn_prefill_backend": "the kernel of the delta rule is the first that serves on this device",
    "hf_config_path": refused("config.json lies beside the weights: put the wanted one into a copy of the folder"),
    "hf_token": refused("HF_TOKEN in the environment has it"),
    "ignore_patterns": "only files that are needed are downloaded",
    "interleave_mm_strings": NO_MEDIA,
    "io_processor_plugin": refused(PLUGIN),
    "kv_cache_metrics": METRICS,
    "kv_cache_metrics_sample": METRICS,
    "kv_events_config": refused(TRANSFER),
    "kv_offloading_backend": "`kv_cache_host_bytes` and `kv_cache_disk` are Quire's own",
    "kv_offloading_size": refused("`kv_cache_host_bytes` says it, in bytes"),
    "kv_sharing_fast_prefill": COMPILED,
    "kv_transfer_config": refused(TRANSFER),
    "limit_mm_per_prompt": NO_MEDIA,
    "logits_processor_pattern": refused(PLUGIN),
    "logits_processors": refused(
        "logits stay on the device: `logit_bias`, `allowed_token_ids`, `bad_words` and "
        "`structured_outputs` of SamplingParams bound what is drawn"
    ),  # fmt: skip
    "logprobs_mode": refused("log-probabilities are those of the model, before any parameter", "raw_logprobs"),
    "long_prefill_token_threshold": ORDER,
    "lora_dtype": refused(STACKS, "auto"),
    "mamba_block_size": STATES,
    "mamba_cache_dtype": STATES,
    "mamba_cache_mode": STATES,
    "mamba_ssm_cache_dtype": STATES,
    "master_addr": refused(HOSTS, "127.0.0.1"),
    "master_port": refused(HOSTS, 29501),
    "max_cudagraph_capture_size": COMPILED,
    "max_long_partial_prefills": ORDER,
    "max_num_partial_prefills": ORDER,
    "max_parallel_loading_workers": LOADING,
    "media_io_kwargs": NO_MEDIA,
    "mm_encoder_attn_backend": NO_MEDIA,
    "mm_encoder_only": refused(NO_MEDIA),
    "mm_encoder_tp_mode": NO_MEDIA,
    "mm_processor_cache_gb": NO_MEDIA,
    "mm_processor_cache_type": NO_MEDIA,
    "mm_processor_kwargs": NO_MEDIA,
    "mm_shm_cache_max_object_size_mb": NO_MEDIA,
    "model_impl": "there is one implementation of each model",
    "model_loader_extra_config": refused("there is nothing to say of loading"),
    "model_weights": refused("the weights lie beside config.json"),
    "nnodes": refused(HOSTS, 1),
    "node_rank": refused(HOSTS),
    "num_gpu_blocks_override": refused("`kv_cache_memory_bytes` sizes the KV cache"),
    "optimization_level": COMPILED,
    "otlp_traces_endpoint": refused("`quire serve` has it"),
    "override_attention_dtype": refused("attention is computed in the type of the model", "auto"),
    "pooler_config": refused('`pooling` is "last", "mean" or "cls"'),
    "prefill_context_parallel_size": refused("`context_parallel_size` divides the tokens of long steps", 1),
    "prefix_caching_hash_algo": "the tokens themselves are compared",
    "profiler_config": refused(PROFILED),
    "pt_load_map_location": LOADING,
    "ray_workers_use_nsight": PROFILED,
    "reasoning_parser": refused("`quire serve` has it; in Python the text is as the model wrote it"),
    "reasoning_parser_plugin": refused(PLUGIN),
    "runner": refused("the model's folder says what it gives", "auto", "generate", "pooling"),
    "safetensors_load_strategy": LOADING,
    "scheduler_cls": refused(PLUGIN),
    "scheduling_policy": "`priority` is always kept, and who has none is served in the order of arrival",
    "served_model_name": "in Python a model needs no name; `quire serve` has it",
    "show_hidden_metrics_for_version": METRICS,
    "shutdown_timeout": "`close()` ends what runs",
    "skip_mm_profiling": NO_MEDIA,
    "specialize_active_lora": STACKS,
    "stream_interval": "results come when they are ready",
    "structured_outputs_config": "llguidance reads every form of an answer",
    "swap_space": "a request that has to wait is computed again; `kv_cache_host_bytes` keeps pages",
    "tokenizer_mode": refused("the tokenizer is tokenizer.json", "auto", "hf"),
    "tokenizer_revision": refused("`tokenizer` is a folder, or an id", "main"),
    "tokens_only": refused("`skip_tokenizer_init` takes and gives token ids only"),
    "trust_remote_code": "no code of a checkpoint is run",
    "ubatch_size": EXCHANGE,
    "use_tqdm_on_load": "`progress` is told each stage",
    "video_pruning_rate": NO_MEDIA,
    "weight_transfer_config": refused("weights are those of the checkpoint"),
    "worker_cls": refused(PLUGIN, "auto"),
    "worker_extension_cls": refused(PLUGIN),
}
SAMPLING: Mapping[str, str | Refused] = {
    "extra_args": refused(PLUGIN),
    "guided_decoding": refused("is the old name of `structured_outputs`"),
    "logits_processors": ENGINE["logits_processors"],
    "output_text_buffer_length": "text is held back for stop strings by itself",
    "prompt_logprob_start": refused("`prompt_logprobs` has all positions"),
    "prompt_logprob_token_ids": refused("`prompt_logprobs` has the likeliest tokens"),
    "repetition_detection": refused("`repetition_penalty` and `max_tokens` bound repetitions"),
    "routed_experts_prompt_start": refused(ROUTES),
    "skip_clone": "parameters do not change, and need no copies",
    "skip_reading_prefix_cache": refused("a `cache_salt` of its own beside a prompt shares no pages"),
    "spaces_between_special_tokens": "text is decoded as the tokenizer does it",
    "stream_interval": ENGINE["stream_interval"],
    "thinking_token_budget": refused("`max_tokens` bounds the whole answer"),
    "trace_decode_token_ids": refused("`prompt_logprobs` scores tokens that are given"),
    "truncate_prompt_tokens": refused("give the last of the prompt's token ids"),
}


def only_known(given: Mapping[str, Any], table: Mapping[str, str | Refused], refuse: Refuse) -> dict[str, Any]:
    """What is given under Quire's own names, with one warning for all that has no effect; `refuse` for the rest."""
    own, idle = dict(given), []
    for name in given.keys() & table.keys():
        value, entry = own.pop(name), table[name]
        if isinstance(entry, str):
            idle.append(f"{name} ({entry})")
        elif not any(value == harmless and type(value) is type(harmless) for harmless in (*NOTHING, *entry.harmless)):
            refuse(name, value, entry.why)
    if idle:
        warnings.warn(f"without effect: {', '.join(sorted(idle))}", stacklevel=callers())
    return own


def callers() -> int:
    """How many frames there are above the caller's until one that is no part of Quire."""
    package, frame, count = Path(__file__).parents[2], inspect.currentframe(), 0
    while frame is not None and package in Path(frame.f_code.co_filename).parents:
        frame, count = frame.f_back, count + 1
    return count


def takes_vllm_names(table: Mapping[str, str | Refused], refuse: Refuse, meant: Callable[[str, Collection[str]], str]):
    """A frozen dataclass whose arguments may also be those of the table; of others `meant` says what they are here."""

    def decorate(cls: type[T]) -> type[T]:
        init, known = cls.__init__, cls.__dataclass_fields__

        @functools.wraps(init)
        def checked(self, *args, **given):
            own = only_known(given, table, refuse) if given.keys() & table.keys() else given
            for name in own.keys() - known.keys():
                hint = meant(name, known) or f"the fields are {', '.join(known)}"
                raise TypeError(f"{cls.__name__} has no {name!r}; {hint}")
            init(self, *args, **own)

        def fixed(self, name: str, value: Any) -> NoReturn:
            change = f"dataclasses.replace(params, {name}=...)"
            raise FrozenInstanceError(
                f"cannot change {name!r}: {cls.__name__} stays as it was made; {change} makes another"
            )

        cls.__init__, cls.__setattr__ = checked, fixed
        return cls

    return decorate
