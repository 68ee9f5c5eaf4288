"""The names of what is counted, what they mean, and what is read off an engine at any moment."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..engine.engine import Engine
from .histogram import Reading, one_two_five

# Bounds are vLLM's: boards and alerts are made for them.
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
         160.0, 640.0, 2560.0)  # fmt: skip
NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
SPAN = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
        1920.0, 7680.0)  # fmt: skip
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
SHORT = one_two_five(1e-5, 10)

PHASES = ("schedule", "launch", "collect", "update")
COUNTERS = {
    "prompt_tokens_total": "Tokens of the prompts that were read to their end",
    "prompt_tokens_cached_total": "Of these, tokens that were found computed",
    "generation_tokens_total": "Tokens written",
    "prefix_cache_queries_total": "Tokens that were looked for in the prefix cache",
    "prefix_cache_hits_total": "Of these, tokens that were there",
    "num_preemptions_total": "Sequences that had to give way and were begun again, or ended",
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...] | None]] = {  # None: as many tokens as a sequence may have
    "time_to_first_token_seconds": ("From arrival to the first token", FIRST),
    "inter_token_latency_seconds": ("From each token of a sequence to the next", NEXT),
    "request_time_per_output_token_seconds": ("The mean of these, by request", NEXT),
    "e2e_request_latency_seconds": ("From arrival to the end, whatever it was", SPAN),
    "request_queue_time_seconds": ("From arrival to the first step", SPAN),
    "request_prefill_time_seconds": ("From the first step to the first token", SPAN),
    "request_decode_time_seconds": ("From the first token to the last", SPAN),
    "request_inference_time_seconds": ("From the first step to the last token", SPAN),
    "request_prompt_tokens": ("Tokens of the prompt, by request", None),
    "request_generation_tokens": ("Tokens of all answers, by request", None),
    "request_max_num_generation_tokens": ("Tokens of the longest answer, by request", None),
    "request_params_max_tokens": ("Tokens asked for at most, by request", None),
    "request_params_n": ("Answers asked for, by request", CHOICES),
    "iteration_tokens_total": ("Rows of a step: tokens that are read or written", ROWS),
}


class Family(NamedTuple):
    """All values of one name; each has its labels."""

    name: str
    kind: str  # counter, gauge, histogram, or info: a gauge whose labels say all
    help: str
    samples: list[tuple[dict[str, str], Any]]


def labelled(name: str, kind: str, text: str, label: str, values: Mapping[str, Any]) -> Family:
    return Family(name, kind, text, [({label: key}, value) for key, value in values.items()])


def plain(family: Family) -> Any:
    """A number, or a dict by label value; of a histogram its count, sum and buckets."""
    found = {}
    for labels, value in family.samples:
        if family.kind == "info":
            return labels
        if isinstance(value, Reading):
            value = {"count": value.total, "sum": value.sum, "buckets": dict(value.cumulative())}
        if not labels:
            return value
        found[next(iter(labels.values()))] = value
    return found


def states(engine: Engine) -> list[Family]:
    """What an engine is like now: lengths and flags, which any thread may look at."""
    running, all_of_them = len(engine.scheduler.running), len(engine.request_of)
    asleep, dropped = engine.asleep, engine.runner.weights is None
    sleeping = {"awake": not asleep, "weights_offloaded": asleep and not dropped, "discard_all": asleep and dropped}
    free = cached = used = 0
    for pool in (pool for table in engine.tables for pool in table.pools):
        blank, kept = len(pool.blank), len(pool.cached)
        free, cached, used = free + blank, cached + kept, used + pool.num_pages - 1 - blank - kept
    found = [
        ("vllm:num_requests_running", "gauge", "Sequences that have a place in the batch", running),
        ("vllm:num_requests_waiting", "gauge", "Sequences that wait for one", max(0, all_of_them - running)),
        (
            "vllm:kv_cache_usage_perc",
            "gauge",
            "The share of the pages in use: 1 is all",
            max(table.used() for table in engine.tables),
        ),
        ("quire:recompiles_total", "counter", "Compilations in service", max(0, engine.runner.compiles.recompiles)),
    ]
    return [
        *(Family(name, kind, text, [({}, value)]) for name, kind, text, value in found),
        *expert_states(engine),
        labelled("quire:pages", "gauge", "Pages of the KV cache, of all its groups", "state",
                 {"free": free, "running": used, "cached": cached}),
        labelled("vllm:engine_sleep_state", "gauge", "1: the engine is in this state", "sleep_state",
                 {name: int(on) for name, on in sleeping.items()}),
        Family("vllm:cache_config_info", "info", "The KV cache", [(cache_config(engine), 1)]),
    ]  # fmt: skip


def expert_states(engine: Engine) -> list[Family]:
    """How evenly rows fall on the experts, where a model has any."""
    experts = engine.runner.experts
    if experts is None:
        return []
    rows = int(experts.rows_LE.sum())
    return [
        Family("quire:expert_rows_total", "counter", "Rows that experts got, of all layers", [({}, rows)]),
        labelled("quire:expert_skew", "gauge", "Lately, the rows of the busiest expert against the mean", "layer",
                 {str(layer): value for layer, value in experts.skew().items()}),
        labelled("quire:expert_device_skew", "gauge", "Lately, the rows of the busiest device against the mean",
                 "layer", {str(layer): value for layer, value in experts.device_skew().items()}),
        Family("quire:expert_moves_total", "counter", "Places that got another expert", [({}, experts.moved)]),
    ]  # fmt: skip


def cache_config(engine: Engine) -> dict[str, str]:
    """The group that sees everything says how many tokens there is room for."""
    table = engine.tables[0]
    pool = next((pool for pool in table.pools if pool.window is None), table.pools[0])
    return {
        "block_size": str(table.page_size),
        "num_gpu_blocks": str(pool.num_pages - 1),
        "cache_dtype": engine.runner.config.kv_dtype,
        "enable_prefix_caching": str(table.keeps_prefixes),
    }
