"""`quire bench latency`: latency of a fixed-size batch, repeated several times."""

from functools import reduce
from time import perf_counter
from typing import Annotated, Any

from ...serving.progress import bar
from .. import options as o
from ..loading import load as load_model
from . import load as load
from . import report as reports
from .drafts import Drafts, drafts_table
from .engine import LoadRun, serve
from .metrics import flat, milliseconds

NAMES = {"batch": "whole batch", "ttft": "first token", "itl": "each token after"}
# A step may generate several tokens.
WITH_DRAFTS = {"itl": "each step after", "tpot": "a token of an answer"}


@reports.takes_report()
@o.takes_engine()
def main(
    model: o.Model = None,
    batch_size: Annotated[
        int, o.size_option("Number of requests in the batch.", load.DATA, "N")
    ] = 8,
    input_len: Annotated[
        int, o.size_option("Prompt length of each request.", load.DATA, "TOKENS")
    ] = 32,
    output_len: Annotated[
        int, o.size_option("Output length of each request.", load.DATA, "TOKENS")
    ] = 128,
    num_iters: Annotated[int, o.size_option("Number of batches to measure.", load.DATA, "N")] = 10,
    num_iters_warmup: Annotated[
        int, o.size_option("Number of warm-up batches.", load.DATA, "N")
    ] = 2,
    seed: load.Seed = 0,
    temperature: load.Temperature = 0.0,
    *,
    engine: dict[str, Any],
    report: reports.ResultFiles,
) -> None:
    """Measure the latency of a batch of equal requests. Prints the time of a batch, the time to
    first token and the inter-token latency.
    """
    load.above_zero(
        batch_size=batch_size, input_len=input_len, output_len=output_len, num_iters=num_iters
    )
    if num_iters_warmup < 0:
        raise o.UsageError(f"--num-iters-warmup is {num_iters_warmup}; it must be at least 0")
    shape = load.dataset("random", random_input_len=input_len, random_output_len=output_len)
    runs = []
    with (
        load_model(model, **{"max_num_seqs": batch_size, **engine}) as llm,
        bar(num_iters_warmup + num_iters, True) as advance,
    ):
        tokenizer = llm.engine.tokenizer
        vocab = llm.engine.config.vocab_size
        for turn in range(num_iters_warmup + num_iters):
            samples = shape.samples(batch_size, tokenizer, f"{seed} {turn}", vocab)
            runs.append(serve(llm, samples, batch_size, temperature, perf_counter))
            advance(1, batch_size * output_len)
    runs = runs[num_iters_warmup:]
    values = latency_milliseconds(runs)
    drafts = total_drafts(runs)
    names = NAMES if drafts is None else NAMES | WITH_DRAFTS
    name = model or "quill"
    heading = (
        f"{name}: {num_iters} batches of {batch_size} requests, {input_len} prompt and "
        f"{output_len} output tokens each"
    )
    result: dict[str, Any] = {"model": name} | flat(values) | {"batches_ms": values["batch"]}
    paragraphs = [heading, reports.latency_table(values, names)]
    if drafts is not None:
        result |= drafts.result()
        paragraphs.append(drafts_table("batches", [(num_iters, drafts)]))
    report.write(
        result,
        "\n\n".join(paragraphs),
        lambda plot, figure: plot.distributions(figure, values, names, {}, heading),
    )


def latency_milliseconds(runs: list[LoadRun]) -> dict[str, list[float]]:
    """Milliseconds of batches, TTFT and ITL; with speculative decoding also TPOT."""
    by_metric = milliseconds(answer for run in runs for answer in run.answers)
    result = {
        "batch": [run.seconds * 1000 for run in runs],
        "ttft": by_metric["ttft"],
        "itl": by_metric["itl"],
    }
    return result if total_drafts(runs) is None else result | {"tpot": by_metric["tpot"]}


def total_drafts(runs: list[LoadRun]) -> Drafts | None:
    """The draft counts of all batches; None without speculative decoding."""
    drafts = [run.drafts for run in runs if run.drafts is not None]
    return reduce(Drafts.joined, drafts) if drafts else None
