"""`quire bench simulate`: simulate the scheduler and the page table under a chat load, without a
model.
"""

from statistics import fmean
from typing import Annotated, Any

from ...serving.api.options import EngineOptions
from .. import options as o
from ..tables import table
from . import load as load
from . import report as reports
from .metrics import RequestTimes, flat, milliseconds
from .simulation import Cost, Policy, Simulation, conversations, reasons

DEVICE = "The simulated device"
NAMES = {
    "wait": "in the queue",
    "ttft": "first token",
    "itl": "each token after",
    "e2el": "whole request",
}


@reports.takes_report()
@o.takes_engine(
    only=("block_size", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
)
def main(
    num_prompts: load.NumPrompts = 2000,
    request_rate: Annotated[
        float, o.option("Mean requests per second; arrivals are bursty.", load.DATA, "N")
    ] = 20.0,
    longest: Annotated[
        int, o.size_option("Maximum length of a prompt and of an output.", load.DATA, "TOKENS")
    ] = 2000,
    shared_prefix: Annotated[
        int,
        o.size_option("Length of the system prompt that all requests share.", load.DATA, "TOKENS"),
    ] = 0,
    seed: load.Seed = 0,
    num_pages: Annotated[
        int, o.size_option("Number of pages in the KV cache.", o.MEMORY, "N")
    ] = 6000,
    policy: Annotated[
        Policy,
        o.option(
            "Batching policy. continuous: admit requests at every step; static: admit a full batch "
            "when the previous one has finished; dynamic: like static, but start an incomplete "
            "batch after --delay-ms.",
            o.MEMORY,
            "POLICY",
        ),
    ] = Policy.continuous,
    delay_ms: Annotated[
        float | None,
        o.option("Maximum wait of a dynamic batch for more requests.", o.MEMORY, "MS", "100"),
    ] = None,
    step_ms: Annotated[float, o.option("Fixed time of a step.", DEVICE, "MS")] = 8.0,
    row_us: Annotated[float, o.option("Additional time per token in a step.", DEVICE, "US")] = 20.0,
    *,
    engine: dict[str, Any],
    report: reports.ResultFiles,
) -> None:
    """Simulate scheduling of a chat load without a model. Prints queue times, latencies, and how
    full the batch and the KV cache pages are.
    """
    from ...serving.cache.page_table import PageTable
    from ...serving.device.step_shape import StepShape

    load.above_zero(
        num_prompts=num_prompts,
        request_rate=request_rate,
        longest=longest,
        num_pages=num_pages,
        step_ms=step_ms,
    )
    options = EngineOptions(**engine).on("cpu")
    max_num_seqs = options.max_num_seqs
    token_budget = options.max_num_batched_tokens
    page = options.block_size
    if delay_ms is not None and policy is not Policy.dynamic:
        raise o.UsageError(
            f"--delay-ms is for --policy dynamic; with {policy} batches leave it out"
        )
    delay_ms = 100.0 if delay_ms is None else delay_ms
    for name, value in (("--row-us", row_us), ("--delay-ms", delay_ms)):
        if value < 0:
            raise o.UsageError(f"{name} is {value:g}; it must be at least 0")
    pages = PageTable((num_pages,), page, (None,), options.enable_prefix_caching)
    max_tokens = shared_prefix + 2 * longest
    if not pages.fits(max_tokens, token_budget):
        raise o.UsageError(
            f"--num-pages is {num_pages}; a request of {max_tokens} tokens needs "
            f"{-(-max_tokens // page) + 1}"
        )
    shape = StepShape.largest(max_num_seqs, token_budget, max(max_num_seqs, 16))
    simulation = Simulation(pages, shape, Cost(step_ms / 1e3, row_us / 1e6), policy, delay_ms / 1e3)
    outcomes = simulation.run(
        conversations(num_prompts, request_rate, seed, longest, shared_prefix)
    )

    answers = [
        RequestTimes(f.request.arrival, f.tokens, len(f.request.prompt), len(f.tokens))
        for f in outcomes
        if f.tokens
    ]
    latencies = milliseconds(answers)
    values = {
        "wait": [(f.started - f.request.arrival) * 1e3 for f in outcomes if f.started is not None],
        **{name: latencies[name] for name in ("ttft", "itl", "e2el")},
    }
    tokens = sum(len(f.tokens) for f in outcomes)
    looks = simulation.looks
    fill = fmean(f.seq.num_tokens / max_tokens for f in outcomes)
    figures = {
        "seconds": simulation.now,
        "steps": simulation.steps,
        "rows": simulation.rows,
        "tokens_s": tokens / simulation.now,
        "running": fmean(look.running for look in looks) if looks else 0.0,
        "pages_filled": fmean(look.filled for look in looks) if looks else 1.0,
        "contiguous_filled": fill,
        "preemptions": simulation.preemptions,
        "cached_tokens": sum(f.seq.cache.num_cached for f in outcomes),
    }
    head = (
        "seconds",
        "steps",
        "rows",
        "tokens/s",
        "running",
        "pages filled",
        "cached tokens",
        "preemptions",
    )
    row = (
        f"{figures['seconds']:,.1f}",
        f"{figures['steps']:,}",
        f"{figures['rows']:,}",
        f"{figures['tokens_s']:,.0f}",
        f"{figures['running']:.1f} of {max_num_seqs}",
        f"{figures['pages_filled']:.1%}",
        f"{figures['cached_tokens']:,}",
        f"{figures['preemptions']:,}",
    )
    heading = f"{num_prompts} chats, {request_rate:g} a second, {policy} batches"
    footing = (
        f"Room for the longest request in one piece would be filled to {fill:.1%} when each ends."
    )
    result: dict[str, Any] = figures | {"ended": dict(reasons(outcomes))} | flat(values)
    text = (
        f"{heading}\n\n{table(head, [row])}\n\n{reports.latency_table(values, NAMES)}\n\n{footing}"
    )
    report.write(
        result, text, lambda plot, figure: plot.simulation(figure, looks, max_num_seqs, heading)
    )
