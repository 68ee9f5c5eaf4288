"""`quire bench simulate`: the scheduler and the page table under a load of chats, without a model."""

from statistics import fmean
from typing import Annotated, Any

import typer

from .. import options as o
from ..plan.command import table
from . import load as load
from . import report as reports
from .metrics import Answer, flat, milliseconds
from .simulation import Cost, Policy, Simulation, conversations, reasons

NAMES = {"wait": "in the queue", "ttft": "first token", "itl": "each token after", "e2el": "whole request"}


def main(
    context: typer.Context,
    num_prompts: Annotated[int, o.sized("--num-prompts", "Requests.", "N", load.DATA)] = 2000,
    request_rate: Annotated[float, typer.Option(help="Requests a second, on average; they come in bursts.")] = 20.0,
    longest: Annotated[int, o.sized("--longest", "Longest prompt and longest answer.", "TOKENS", load.DATA)] = 2000,
    shared_prefix: Annotated[int, o.sized("--shared-prefix", "System prompt of all.", "TOKENS", load.DATA)] = 0,
    max_num_seqs: Annotated[int, o.sized("--max-num-seqs", "Most sequences in one step.", "N", o.ENGINE)] = 32,
    max_num_batched_tokens: Annotated[
        int, o.sized("--max-num-batched-tokens", "Most tokens in one step.", "TOKENS", o.ENGINE)
    ] = 512,
    num_pages: Annotated[int, o.sized("--num-pages", "Pages of 16 tokens.", "N", o.ENGINE)] = 6000,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Keep computed pages.")] = True,
    policy: Annotated[
        Policy,
        typer.Option(help="Let requests in at every step; or, when the last batch is over, a full one or what came."),
    ] = Policy.continuous,
    delay_ms: Annotated[
        float | None, typer.Option(help="How long a dynamic batch waits to be full.", show_default="100")
    ] = None,
    step_ms: Annotated[float, typer.Option(help="What every step takes.")] = 8.0,
    row_us: Annotated[float, typer.Option(help="What each of its rows adds.")] = 20.0,
    seed: load.Seed = 0,
    as_json: reports.Json = None,
    save_result: reports.SaveResult = False,
    plot: reports.Plot = None,
) -> None:
    """Schedule chats on a pretended device. Prints waits, latencies, and how well batch and pages are filled."""
    from ...serving.cache.page_table import PageTable
    from ...serving.engine.scheduler import Limits

    report = reports.report(context, as_json, save_result, plot)
    load.above_zero(
        num_prompts=num_prompts, request_rate=request_rate, longest=longest, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, num_pages=num_pages, step_ms=step_ms,
    )  # fmt: skip
    if delay_ms is not None and policy is not Policy.dynamic:
        raise o.UsageError(f"--delay-ms is for --policy dynamic; with {policy} batches leave it out")
    delay_ms = 100.0 if delay_ms is None else delay_ms
    for name, value in (("--row-us", row_us), ("--delay-ms", delay_ms)):
        if value < 0:
            raise o.UsageError(f"{name} is {value:g}; it must be at least 0")
    if max_num_batched_tokens < max_num_seqs:
        raise o.UsageError(f"--max-num-batched-tokens is {max_num_batched_tokens}; it must be at least --max-num-seqs")
    pages = PageTable((num_pages,), 16, (None,), enable_prefix_caching)
    most = shared_prefix + 2 * longest
    if not pages.fits(most, max_num_batched_tokens):
        raise o.UsageError(f"--num-pages is {num_pages}; a request of {most} tokens needs {-(-most // 16) + 1}")
    limits = Limits(max_num_seqs, max_num_batched_tokens, max(max_num_seqs, 16))
    simulation = Simulation(pages, limits, Cost(step_ms / 1e3, row_us / 1e6), policy, delay_ms / 1e3)
    fates = simulation.run(conversations(num_prompts, request_rate, seed, longest, shared_prefix))

    answers = [Answer(f.job.arrival, f.tokens, len(f.job.prompt), len(f.tokens)) for f in fates if f.tokens]
    each = milliseconds(answers)
    values = {
        "wait": [(f.started - f.job.arrival) * 1e3 for f in fates if f.started is not None],
        **{name: each[name] for name in ("ttft", "itl", "e2el")},
    }
    tokens, looks = sum(len(f.tokens) for f in fates), simulation.looks
    held = fmean(f.seq.num_tokens / most for f in fates)
    figures = {
        "seconds": simulation.now,
        "steps": simulation.steps,
        "rows": simulation.rows,
        "tokens_s": tokens / simulation.now,
        "running": fmean(look.running for look in looks) if looks else 0.0,
        "pages_filled": fmean(look.filled for look in looks) if looks else 1.0,
        "contiguous_filled": held,
        "preemptions": simulation.preemptions,
        "cached_tokens": sum(f.seq.cache.num_cached for f in fates),
    }
    head = ("seconds", "steps", "rows", "tokens/s", "running", "pages filled", "cached tokens", "preemptions")
    row = (
        f"{figures['seconds']:,.1f}", f"{figures['steps']:,}", f"{figures['rows']:,}", f"{figures['tokens_s']:,.0f}",
        f"{figures['running']:.1f} of {max_num_seqs}", f"{figures['pages_filled']:.1%}",
        f"{figures['cached_tokens']:,}", f"{figures['preemptions']:,}",
    )  # fmt: skip
    heading = f"{num_prompts} chats, {request_rate:g} a second, {policy} batches"
    footing = f"Room for the longest request in one piece would be filled to {held:.1%} when each ends."

    def draw(figure) -> None:
        from . import plot

        plot.simulation(figure, looks, max_num_seqs, heading)

    result: dict[str, Any] = figures | {"ended": dict(reasons(fates))} | flat(values)
    text = f"{heading}\n\n{table(head, [row])}\n\n{reports.latency_table(values, NAMES)}\n\n{footing}"
    report.write(result, text, draw)
