"""Flags of other engines: accepted ones without effect, and the names of their equivalents.

The names are those of `vllm serve`, `vllm bench serve`, llama-server, llama-cli and ollama, with
underscores. Names that are also arguments of vLLM's `LLM` are in `vllm_names.py`.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Final

from .vllm_names import COMPILED, ENGINE, NO_MEDIA, ORDER

TYPES = "the model's folder determines the task: generate, embed, classify or rank"
NO_TEXT = "requests are logged without their text"
STEPS = "scheduling is always asynchronous"

# name -> why it has no effect
FLAGS: Final = {
    "task": TYPES,
    "O0": COMPILED,
    "O1": COMPILED,
    "O2": COMPILED,
    "O3": COMPILED,
    "cuda_graph_sizes": COMPILED,
    "max_seq_len_to_capture": COMPILED,
    "enable_flashinfer_autotune": COMPILED,
    "moe_backend": COMPILED,
    "disable_async_output_proc": STEPS,
    "num_scheduler_steps": STEPS,
    "num_lookahead_slots": STEPS,
    "multi_step_stream_outputs": "every token is sent as soon as it is generated",
    "preemption_mode": "preempted sequences are recomputed",
    "scheduler_delay_factor": ORDER,
    "use_v2_block_manager": "there is one page table",
    "disable_log_requests": NO_TEXT,
    "max_log_len": NO_TEXT,
    "disable_uvicorn_access_log": "--log-level warning omits the access log",
    "guided_decoding_backend": "llguidance compiles all structured outputs",
    "guided_decoding_disable_fallback": "llguidance compiles all structured outputs",
    "chat_template_content_format": "the chat template determines it",
    "response_role": "the role of answers is always assistant",
    "allowed_methods": "CORS allows every method for --allowed-origin",
    "allowed_headers": "CORS allows every header for --allowed-origin",
    "enable_request_id_headers": "every response has the header X-Request-Id",
    "enable_server_load_tracking": "/load always counts the requests in flight",
    "disable_frontend_multiprocessing": "the server and its engines are one process",
    "api_server_count": "the server and its engines are one process",
    "disable_mm_preprocessor_cache": NO_MEDIA,
    "percentile_metrics": "all of TTFT, TPOT, ITL and E2E are printed",
    "metric_percentiles": "the median, P90 and P99 are printed",
    "save_detailed": "result files always list every request",
    "disable_tqdm": "progress is shown only in a terminal",
}
# Short names of some of these.
SHORT: Final = {"O": "optimization_level", "asc": "api_server_count"}
SWITCHES: Final = {  # flags without a value, besides all that start with `enable_` and the like
    "O0",
    "O1",
    "O2",
    "O3",
    "aggregate_engine_logging",
    "allow_deprecated_quantization",
    "async_scheduling",
    "calculate_kv_scales",
    "cudagraph_metrics",
    "enforce_eager",
    "fail_on_environ_validation",
    "fully_sharded_loras",
    "interleave_mm_strings",
    "kv_cache_metrics",
    "kv_sharing_fast_prefill",
    "multi_step_stream_outputs",
    "ray_workers_use_nsight",
    "save_detailed",
    "specialize_active_lora",
    "trust_remote_code",
}

SPECULATIVE = "--speculative-config"
TLS = "the server speaks HTTP; use a reverse proxy for TLS"
FORM = "use structured_outputs or response_format in the request"
HOSTS = "configure several hosts with --num-processes, --process-id and --coordinator-address"

# name -> an equivalent option, or a sentence. Short names stand without their dash.
MEANING: Final = {
    # vLLM
    "model": "the model is an argument: `quire serve MODEL`",
    "cpu_offload_gb": "--weights-host-bytes",
    "kv_offloading_size": "--kv-cache-host-bytes",
    "kv_offloading_backend": "--kv-cache-host-bytes",
    "num_gpu_blocks_override": "--kv-cache-memory-bytes",
    "enable_expert_parallel": "--expert-parallel-size",
    "decode_context_parallel_size": "--context-parallel-size",
    "prefill_context_parallel_size": "--context-parallel-size",
    "dcp": "--context-parallel-size",
    "num_redundant_experts": "--expert-redundancy",
    "enable_eplb": "--expert-redundancy",
    "eplb_step_interval": "--expert-rebalance-steps",
    "uvicorn_log_level": "--log-level",
    "allowed_origins": "--allowed-origin",
    "shutdown_timeout": "--shutdown-grace",
    "collect_detailed_traces": "--trace",
    "headless": HOSTS,
    "device": "set the environment variable JAX_PLATFORMS to cpu, cuda or tpu",
    "lora": "--lora-modules",
    "lora_scaled": "--lora-modules",
    "speculative_model": SPECULATIVE,
    "num_speculative_tokens": SPECULATIVE,
    "model_draft": SPECULATIVE,
    "md": SPECULATIVE,
    "draft_max": SPECULATIVE,
    "ssl_keyfile": TLS,
    "ssl_certfile": TLS,
    "ssl_ca_certs": TLS,
    "ssl_key_file": TLS,
    "ssl_cert_file": TLS,
    # vllm bench serve
    "endpoint_type": "--backend",
    "num_prompt": "--num-prompts",
    "result_dir": "--result-filename",
    "input_len": "--random-input-len",
    "output_len": "--random-output-len",
    # llama.cpp
    "m": "the model is an argument: `quire serve MODEL`",
    "hf": "the model is an argument: `quire serve MODEL`",
    "hf_repo": "the model is an argument: `quire serve MODEL`",
    "c": "--max-model-len",
    "ctx_size": "--max-model-len",
    "max_context_len": "--max-model-len",
    "n_ctx": "--max-model-len",
    "num_ctx": "--max-model-len",
    "max_seq_len": "--max-model-len",
    "max_total_tokens": "--max-model-len",
    "context_length": "--max-model-len",
    "n": "--max-tokens",
    "predict": "--max-tokens",
    "n_predict": "--max-tokens",
    "max_new_tokens": "--max-tokens",
    "num_predict": "--max-tokens",
    "np": "--max-num-seqs",
    "parallel": "--max-num-seqs",
    "max_running_requests": "--max-num-seqs",
    "max_concurrent_requests": "--max-num-seqs",
    "max_batch_size": "--max-num-seqs",
    "b": "--max-num-batched-tokens",
    "batch_size": "--max-num-batched-tokens",
    "ub": "--max-num-batched-tokens",
    "ubatch_size": "--max-num-batched-tokens",
    "chunked_prefill_size": "--max-num-batched-tokens",
    "ctk": "--kv-cache-dtype",
    "cache_type_k": "--kv-cache-dtype",
    "ctv": "--kv-cache-dtype",
    "cache_type_v": "--kv-cache-dtype",
    "temp": "--temperature",
    "repeat_penalty": "--repetition-penalty",
    "p": "--prompt",
    "f": "--prompt-file",
    "file": "--prompt-file",
    "sys": "--system",
    "system_prompt": "--system",
    "s": "--seed",
    "a": "--served-model-name",
    "alias": "--served-model-name",
    "chat_template_file": "--chat-template",
    "reasoning_format": "--reasoning-parser",
    "slot_save_path": "--kv-cache-disk",
    "prompt_cache": "--kv-cache-disk",
    "to": "--request-seconds",
    "ts": "--tensor-parallel-size",
    "tensor_split": "--tensor-parallel-size",
    "sm": "--tensor-parallel-size",
    "split_mode": "--tensor-parallel-size",
    "tp_size": "--tensor-parallel-size",
    "num_gpus": "--tensor-parallel-size",
    "mem_fraction_static": "--gpu-memory-utilization",
    "cache_prompt": "prefix caching is always on: leave it out",
    "ebnf": FORM,
    "regex": FORM,  # SGLang's
    "grammar": FORM,
    "grammar_file": FORM,
    "json_schema": FORM,
    "json_schema_file": FORM,
    "j": FORM,
    "format": FORM,
    "ngl": "every layer is on the device: leave it out",
    "gpu_layers": ("every layer is on the device: leave it out"),
    "n_gpu_layers": "every layer is on the device: leave it out",
    "num_gpu": "every layer is on the device: leave it out",
    "fa": "attention is always fused: leave it out",
    "flash_attn": "attention is always fused: leave it out",
    "cb": "batching is always continuous: leave it out",
    "cont_batching": ("batching is always continuous: leave it out"),
    "t": "all available cores are used; restrict them with `taskset`",
    "threads": "all available cores are used; restrict them with `taskset`",
    "mlock": "leave it out",
    "no_mmap": "leave it out",
    "jinja": ("chat templates are always Jinja: leave it out"),
    "metrics": "/metrics is always served: leave it out",
    "embedding": "/v1/embeddings is always served: leave it out",
    "embeddings": "/v1/embeddings is always served: leave it out",
    "cnv": "use `quire chat` for a conversation",
    "conversation": "use `quire chat` for a conversation",
    "i": "use `quire chat` for a conversation",
    "interactive": "use `quire chat` for a conversation",
    "v": "--log-level",
    "verbose": "--log-level",
    # Ollama
    "keepalive": "models stay loaded until --max-loaded others are requested",
}

# Flags that are accepted with a warning, also after `--no-`: name -> reason. For the names in
# VALUES only the listed values have no effect.
NO_EFFECT: Final[Mapping[str, str]] = FLAGS | {
    name: entry if isinstance(entry, str) else entry.reason
    for name, entry in ENGINE.items()
    if name not in MEANING and (isinstance(entry, str) or entry.harmless)
}
VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "task": ("auto", "generate", "embed", "embedding", "score"),
    "chat_template_content_format": ("auto",),
    "response_role": ("assistant",),
    "metric_percentiles": ("50", "90", "99", "50,90", "50,99", "90,99", "50,90,99"),
} | {
    name: tuple(map(str, entry.harmless))
    for name, entry in ENGINE.items()
    if name in NO_EFFECT and not isinstance(entry, str)
}


def is_switch(name: str) -> bool:
    return name in SWITCHES or name.startswith(
        ("enable_", "disable_", "skip_", "use_", "guided_decoding_disable_")
    )


def suggest_name(name: str, known_names: Collection[str]) -> str:
    """Explain an unknown field or argument: its equivalent if another engine has it, or a similar
    name.
    """
    meaning = MEANING.get(name)
    if meaning is not None and not meaning.startswith("--"):
        return meaning
    option = None if meaning is None else meaning.removeprefix("--").replace("-", "_")
    if option in known_names:
        return f"here it is {option!r}"
    similar = difflib.get_close_matches(name, known_names, n=1)
    return f"did you mean {similar[0]!r}?" if similar else ""


# command of another engine -> its equivalent
COMMANDS: Final = {
    "cli": "chat",
    "complete": "generate",
    "completion": "generate",
    "api-server": "serve",
    "server": "serve",
    "start": "serve",
    "benchmark": "bench",
    "ls": "list",
    "delete": "rm",
    "remove": "rm",
    "download": "pull",
    "ps": "/api/ps of a server lists the models that are awake",
    "stop": "Ctrl-C or SIGTERM ends a server",
    "show": "`quire plan MODEL` describes a model",
    "create": (
        "a model is a folder with config.json, tokenizer.json and *.safetensors: `quire "
        "serve FOLDER`"
    ),
    "cp": "--served-model-name gives a model another name",
    "push": "`hf upload` puts a folder on the Hub",
    "embed": "/v1/embeddings of a server embeds texts",
    "embedding": ("/v1/embeddings of a server embeds texts"),
    "help": "`quire --help` lists the commands, and `quire COMMAND --help` explains one",
    "version": "`quire --version`",
}
