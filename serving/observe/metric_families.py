"""Names and descriptions of the metrics, and the families that follow from an engine snapshot."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..engine.snapshot import Snapshot
from .histogram import Buckets, one_two_five

# The bounds are vLLM's, because dashboards and alerts are made for them.
FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
NEXT = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
SPAN = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
SHORT = one_two_five(1e-5, 10)

PHASES = ("schedule", "launch", "collect", "update")
COUNTERS = {
    "prompt_tokens_total": "Prompt tokens of the requests whose prompt was computed",
    "prompt_tokens_cached_total": "Of these, tokens from the prefix cache",
    "generation_tokens_total": "Tokens generated",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits_total": "Of these, tokens found",
    "num_preemptions_total": "Preemptions of sequences",
}
# None: up to the maximum length of a sequence.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...] | None]] = {
    "time_to_first_token_seconds": ("From arrival to the first token", FIRST),
    "inter_token_latency_seconds": ("From each token of a sequence to the next", NEXT),
    "request_time_per_output_token_seconds": (
        "Mean time from each token to the next, by request",
        NEXT,
    ),
    "e2e_request_latency_seconds": (
        "From arrival to the end of the request, however it ended",
        SPAN,
    ),
    "request_queue_time_seconds": ("From arrival to the first step", SPAN),
    "request_prefill_time_seconds": ("From the first step to the first token", SPAN),
    "request_decode_time_seconds": ("From the first token to the last", SPAN),
    "request_inference_time_seconds": ("From the first step to the last token", SPAN),
    "request_prompt_tokens": ("Tokens of the prompt, by request", None),
    "request_generation_tokens": ("Tokens of all answers, by request", None),
    "request_max_num_generation_tokens": ("Tokens of the longest answer, by request", None),
    "request_params_max_tokens": ("max_tokens, by request", None),
    "request_params_n": ("n, by request", CHOICES),
    "iteration_tokens_total": (
        (
            "Tokens that a step brought: all of the prompts that were read to their ends, and "
            "those generated"
        ),
        ROWS,
    ),
}


class Family(NamedTuple):
    """All samples of a name, each with its labels."""

    name: str
    # Counter, gauge, histogram, or info (a gauge of value 1 whose labels are the information).
    kind: str
    help: str
    samples: list[tuple[dict[str, str], Any]]


def labelled_family(
    name: str, kind: str, text: str, label: str, values: Mapping[Any, Any]
) -> Family:
    return Family(name, kind, text, [({label: key}, value) for key, value in values.items()])


def to_plain_value(family: Family) -> Any:
    """Return a number, or a dict by label value; a histogram has its count, sum and buckets."""
    values_by_label = {}
    for labels, value in family.samples:
        if family.kind == "info":
            return labels
        if isinstance(value, Buckets):
            value = {"count": value.total, "sum": value.sum, "buckets": dict(value.cumulative())}
        if not labels:
            return value
        values_by_label[next(iter(labels.values()))] = value
    return values_by_label


def states(now: Snapshot) -> list[Family]:
    """Return the families that describe an engine's current state."""
    sleeping = {
        "awake": not now.asleep,
        "weights_offloaded": now.asleep and not now.weights_dropped,
        "discard_all": now.asleep and now.weights_dropped,
    }
    gauges = [
        ("vllm:num_requests_running", "gauge", "Sequences with a slot in the batch", now.running),
        ("vllm:num_requests_waiting", "gauge", "Sequences that wait for a slot", now.waiting),
        (
            "vllm:kv_cache_usage_perc",
            "gauge",
            "The share of the pages in use: 1 is all",
            now.pages_used,
        ),
        (
            "quire:batch_invariant",
            "gauge",
            "1: a request's bits do not depend on the rest of its batch",
            int(now.invariant),
        ),
        ("quire:recompiles_total", "counter", "Compilations in service", now.recompiles),
    ]
    if now.images_encoded is not None:
        text = "Images that the vision tower encoded; others were in its store"
        gauges.append(("quire:images_encoded_total", "counter", text, now.images_encoded))
    pages = {
        "free": sum(group.free_pages for group in now.pages),
        "running": sum(group.used for group in now.pages),
        "cached": sum(group.cached for group in now.pages),
    }
    # A sequence waits only for a slot or for pages.
    reasons = {"capacity": now.waiting, "deferred": 0}
    return [
        *(Family(name, kind, text, [({}, value)]) for name, kind, text, value in gauges),
        labelled_family(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            "Sequences that wait, by what for",
            "reason",
            reasons,
        ),
        *expert_states(now),
        *draft_states(now),
        labelled_family(
            "quire:pages", "gauge", "Pages of the KV cache, of all its groups", "state", pages
        ),
        labelled_family(
            "vllm:engine_sleep_state",
            "gauge",
            "1: the engine is in this state",
            "sleep_state",
            {name: int(on) for name, on in sleeping.items()},
        ),
        Family("vllm:cache_config_info", "info", "The KV cache", [(cache_config(now), 1)]),
    ]


def draft_states(now: Snapshot) -> list[Family]:
    """Return the families about draft tokens, if the engine drafts."""
    if (drafts := now.drafts) is None:
        return []
    counts = {
        "num_drafts": ("Times that a sequence brought drafts to a step", drafts.proposals),
        "num_draft_tokens": ("Tokens drafted and verified", drafts.drafts),
        "num_accepted_tokens": ("Of these, tokens that answers took over", sum(drafts.accepted)),
    }
    positions = {str(position): count for position, count in enumerate(drafts.accepted)}
    return [
        *(
            Family(f"vllm:spec_decode_{name}_total", "counter", text, [({}, n)])
            for name, (text, n) in counts.items()
        ),
        labelled_family(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "The same by their places among the drafts of a step; 0 is the first",
            "position",
            positions,
        ),
    ]


def expert_states(now: Snapshot) -> list[Family]:
    """Return the families about the balance of experts, if the model has experts."""
    if (experts := now.experts) is None:
        return []
    return [
        Family(
            "quire:expert_rows_total",
            "counter",
            "Tokens that experts got, in all layers",
            [({}, experts.tokens)],
        ),
        labelled_family(
            "quire:expert_skew",
            "gauge",
            "Lately, the tokens of the busiest expert against the mean",
            "layer",
            {str(layer): value for layer, value in experts.skew.items()},
        ),
        labelled_family(
            "quire:expert_device_skew",
            "gauge",
            "Lately, the tokens of the busiest device against the mean",
            "layer",
            {str(layer): value for layer, value in experts.device_skew.items()},
        ),
        Family(
            "quire:expert_moves_total",
            "counter",
            "Places that got another expert",
            [({}, experts.moved)],
        ),
    ]


def cache_config(now: Snapshot) -> dict[str, str]:
    """Return the cache configuration; the group without a window determines its size in tokens."""
    group = next(
        (group for group in now.pages if group.window is None), next(iter(now.pages), None)
    )
    return {
        "block_size": str(now.page_size),
        "num_gpu_blocks": str(0 if group is None else group.total),
        "cache_dtype": now.kv_dtype,
        "enable_prefix_caching": str(now.caches_prefixes),
    }
