"""`quire bench throughput`: offline throughput, and decode steps against the memory roofline."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

from ...serving.api.sizes import amount
from ...serving.progress import bar
from .. import options as o
from ..loading import load as load_model
from ..tables import table
from . import load as load
from . import report as reports
from .adapters import random_adapters
from .drafts import Drafts, drafts_table
from .engine import LoadRun, Roof, decode_milliseconds, engine_roof, read_bandwidth, serve
from .metrics import flat, milliseconds, percentile, totals

WARM_UP = load.Sample([0], 8)


@reports.takes_report()
@load.takes_dataset
@o.takes_engine()
def main(
    model: o.Model = None,
    num_prompts: load.NumPrompts = 64,
    concurrency: Annotated[
        list[int] | None,
        o.size_option(
            "Maximum number of concurrent requests; one run for each value.",
            load.DATA,
            "N ...",
            "the engine's maximum",
        ),
    ] = None,
    *,
    dataset: load.Dataset,
    in_batches: Annotated[
        bool,
        o.option(
            "Use static batching (add requests only when all current ones have finished), to "
            "measure the gain of continuous batching.",
            load.DATA,
            name="--in-batches",
        ),
    ] = False,
    adapters: Annotated[
        int | None,
        o.size_option(
            "Number of random LoRA adapters, assigned to the requests in turn.",
            load.DATA,
            "N",
            "none",
        ),
    ] = None,
    adapter_rank: Annotated[
        int, o.size_option("Rank of the random LoRA adapters.", load.DATA, "N")
    ] = 16,
    seed: load.Seed = 0,
    temperature: load.Temperature = 0.0,
    engine: dict[str, Any],
    report: reports.ResultFiles,
) -> None:
    """Measure offline throughput. Prints token rates, and decode step times relative to the memory
    bandwidth.
    """
    load.above_zero(
        num_prompts=num_prompts,
        concurrency=min(concurrency or [1]),
        adapters=adapters,
        adapter_rank=adapter_rank,
    )
    if adapters is not None:
        engine |= {"enable_lora": True, "max_loras": adapters, "max_lora_rank": adapter_rank}
    from ...serving.engine.snapshot import take_snapshot

    if concurrency:
        max_num_seqs = engine.setdefault("max_num_seqs", max(concurrency))
        if max(concurrency) > max_num_seqs:
            raise o.UsageError(
                f"--concurrency {max(concurrency)} is more than --max-num-seqs {max_num_seqs}: "
                "raise that too"
            )
    bandwidth = read_bandwidth()  # before the model allocates memory
    with load_model(model, **engine) as llm, tempfile.TemporaryDirectory() as folder:
        max_num_seqs = take_snapshot(llm.engine).max_seqs
        serve(llm, [WARM_UP], 1, temperature)  # warm up
        random = random_adapters(llm, adapters, adapter_rank, Path(folder)) if adapters else (None,)
        points = []
        drafts = []
        for level in sorted(set(concurrency or [max_num_seqs])):
            # Each level has other requests, so that none hit the prefixes cached by another level.
            samples = dataset.samples(
                num_prompts, llm.engine.tokenizer, f"{seed} {level}", llm.engine.config.vocab_size
            )
            with bar(num_prompts, True) as advance:
                run = serve(
                    llm,
                    samples,
                    level,
                    temperature,
                    advance=advance,
                    in_batches=in_batches,
                    adapters=random,
                )
            points.append(point(level, run, engine_roof(llm, run, bandwidth)))
            if run.drafts is not None:
                drafts.append((level, run.drafts))
    name = model or "quill"
    result = {"model": name, "read_bandwidth": bandwidth, "points": points}
    report.write(
        result,
        text(name, num_prompts, points, bandwidth, drafts),
        lambda plot, figure: plot.throughput(figure, points, name, bandwidth),
    )


def point(concurrency: int, run: LoadRun, roof: Roof | None) -> dict[str, Any]:
    """The results of one level of concurrency."""
    result: dict[str, Any] = {"concurrency": concurrency} | totals(run.answers, run.seconds)
    result |= flat(milliseconds(run.answers)) | {"steps": len(run.steps), "decode": None}
    result |= {} if run.drafts is None else run.drafts.result()
    if roof is not None:
        steps = sorted(decode_milliseconds(run))
        result["decode"] = {
            "steps": roof.steps,
            "sequences": roof.sequences,
            "tokens": roof.tokens,
            "weight_bytes": roof.weight_bytes,
            "cache_bytes": roof.cache_bytes,
            "mean_ms": roof.step_seconds * 1000,
            **{f"p{percent}_ms": percentile(steps, percent) for percent in (10, 50, 90, 99)},
            "roof_ms": roof.seconds * 1000,
            "roof_share": roof.share,
            "steps_ms": [round(step, 4) for step in decode_milliseconds(run)],
        }
    return result


def text(
    name: str,
    num_prompts: int,
    points: list[dict[str, Any]],
    bandwidth: float,
    drafts: list[tuple[int, Drafts]],
) -> str:
    """The results as text."""
    rates = table(
        (
            "at once",
            "seconds",
            "prompt tokens",
            "output tokens",
            "requests/s",
            "output tokens/s",
            ("total tokens/s"),
            "TPOT, ms",
        ),
        [
            (
                p["concurrency"],
                f"{p['duration']:,.2f}",
                *(f"{p[key]:,}" for key in ("total_input_tokens", "total_output_tokens")),
                f"{p['request_throughput']:,.2f}",
                *(f"{p[key]:,.1f}" for key in ("output_throughput", "total_token_throughput")),
                f"{p['median_tpot_ms']:,.2f}" if "median_tpot_ms" in p else "-",
            )
            for p in points
        ],
    )
    paragraphs = [
        f"{name}: {num_prompts} requests",
        rates,
        *([drafts_table("at once", drafts)] if drafts else []),
    ]
    return "\n\n".join((*paragraphs, roof_text(points, bandwidth)))


def roof_text(points: list[dict[str, Any]], bandwidth: float) -> str:
    """A table with the bytes that a decode step reads, the minimum time for that, and the measured
    time.
    """
    rows = [
        (
            p["concurrency"],
            f"{d['sequences']:.1f}",
            f"{d['tokens']:.1f}",
            amount(d["weight_bytes"]),
            amount(d["cache_bytes"]),
            *(f"{d[key]:,.3f}" for key in ("roof_ms", "mean_ms", "p50_ms", "p99_ms")),
            f"{d['roof_share']:.1%}",
        )
        for p in points
        if (d := p["decode"]) is not None
    ]
    if not rows:
        return (
            "No step only decoded, so there is none to compare with the memory's speed: ask "
            "for longer answers."
        )
    head = (
        "at once",
        "sequences",
        "tokens",
        "weights",
        "KV cache",
        "roof, ms",
        "mean, ms",
        "median",
        "P99",
        "reached",
    )
    return (
        "A decode step reads all weights once and the KV cache of its sequences; at "
        f"{bandwidth / 1e9:.1f} GB/s, which this machine reads, that is the "
        f"roof:\n\n{table(head, rows)}"
    )
