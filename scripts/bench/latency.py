"""`quire bench latency`: the same batch of equal requests, several times."""

from time import perf_counter
from typing import Annotated, Any

from ...serving.progress import bar
from .. import options as o
from ..loading import load as load_model
from . import load as load
from . import report as reports
from .engine import LoadRun, serve
from .metrics import flat, milliseconds

NAMES = {"batch": "whole batch", "ttft": "first token", "itl": "each token after"}


@reports.takes_report()
@o.takes_engine()
def main(
    model: o.Model = None,
    batch_size: Annotated[int, o.sized("Requests that start together.", load.DATA, "N")] = 8,
    input_len: Annotated[int, o.sized("Prompt length of each.", load.DATA, "TOKENS")] = 32,
    output_len: Annotated[int, o.sized("Answer length of each.", load.DATA, "TOKENS")] = 128,
    num_iters: Annotated[int, o.sized("Batches to measure.", load.DATA, "N")] = 10,
    num_iters_warmup: Annotated[int, o.sized("Batches to run before those.", load.DATA, "N")] = 2,
    seed: load.Seed = 0,
    temperature: load.Temperature = 0.0,
    *,
    engine: dict[str, Any],
    report: reports.ResultFiles,
) -> None:
    """Answer batches of a fixed shape. Prints the times of a batch, of first tokens and between tokens."""
    load.above_zero(batch_size=batch_size, input_len=input_len, output_len=output_len, num_iters=num_iters)
    if num_iters_warmup < 0:
        raise o.UsageError(f"--num-iters-warmup is {num_iters_warmup}; it must be at least 0")
    shape = load.dataset("random", random_input_len=input_len, random_output_len=output_len)
    runs = []
    with (
        load_model(model, **{"max_num_seqs": batch_size, **engine}) as llm,
        bar(num_iters_warmup + num_iters, True) as advance,
    ):
        tokenizer, vocab = llm.engine.tokenizer, llm.engine.config.vocab_size
        for turn in range(num_iters_warmup + num_iters):
            samples = shape.samples(batch_size, tokenizer, f"{seed} {turn}", vocab)
            runs.append(serve(llm, samples, batch_size, temperature, perf_counter))
            advance(1, batch_size * output_len)
    values = measured(runs[num_iters_warmup:])
    name = model or "quill"
    heading = (
        f"{name}: {num_iters} batches of {batch_size} requests, {input_len} prompt and {output_len} output tokens each"
    )
    result: dict[str, Any] = {"model": name} | flat(values) | {"batches_ms": values["batch"]}
    report.write(
        result,
        f"{heading}\n\n{reports.latency_table(values, NAMES)}",
        lambda plot, figure: plot.distributions(figure, values, NAMES, {}, heading),
    )


def measured(runs: list[LoadRun]) -> dict[str, list[float]]:
    """Milliseconds of the batches, of all first tokens, and between the tokens after."""
    each = milliseconds(answer for run in runs for answer in run.answers)
    return {"batch": [run.seconds * 1000 for run in runs], "ttft": each["ttft"], "itl": each["itl"]}
