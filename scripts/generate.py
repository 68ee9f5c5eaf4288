"""`quire generate`: continue one prompt."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from ..serving.api.options import STEPS
from . import options as o
from .loading import load

MAX_TOKENS = 128


@dataclass(frozen=True)
class Timing:
    """Times in seconds since the command started, and token counts."""

    loaded: float  # when the model is loaded
    first: float  # when the first output arrives
    finished: float
    prompt_tokens: int
    first_tokens: int  # generated tokens in the first output: one per sequence without drafts
    tokens: int  # generated tokens in total
    cached_tokens: int = 0  # prompt tokens found in the prefix cache

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate: output tokens per second after the first output (excludes prefill)."""
        later = self.tokens - self.first_tokens
        return (
            later / (self.finished - self.first) if later and self.finished > self.first else None
        )

    def __str__(self) -> str:
        rate = (
            ""
            if self.tokens_per_second is None
            else f", then {self.tokens_per_second:.1f} tokens/s"
        )
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        return (
            f"{self.prompt_tokens} prompt tokens{cached}, {self.tokens} tokens: loaded in "
            f"{self.loaded:.2f} s, first token after {self.first - self.loaded:.2f} s{rate}"
        )


@o.takes_engine()
@o.takes_sampling(MAX_TOKENS)
def main(
    model: o.Model = None,
    prompt: Annotated[str | None, o.option("Prompt text.", o.OUTPUT)] = None,
    prompt_file: Annotated[
        Path | None, o.option("File with the prompt; - reads stdin.", o.OUTPUT)
    ] = None,
    image: o.Images = None,
    stream: Annotated[
        bool | None,
        o.option(
            "Print text as it is generated.",
            o.OUTPUT,
            default_text="on, except with --n or --json",
        ),
    ] = None,
    echo: Annotated[
        bool, o.option("Print the prompt before the generated text.", o.OUTPUT, name="--echo")
    ] = False,
    as_json: Annotated[
        bool, o.option("Print the result as one JSON object.", o.OUTPUT, name="--json")
    ] = False,
    *,
    sampling: dict[str, Any],
    n: Annotated[int, o.option("Number of sequences to generate.", o.SAMPLING)] = 1,
    engine: dict[str, Any],
) -> None:
    """Generate text from a prompt. Prints the text to stdout and timings to stderr."""
    started = perf_counter()
    if stream and (as_json or n > 1):
        raise o.UsageError("--stream prints one answer as text: leave out --json and --n")
    if echo and as_json:
        raise o.UsageError("--echo is for text: leave it out with --json, which has the prompt")
    text = read_prompt(prompt, prompt_file)
    images = [o.read_bytes(path) for path in image or ()]

    from .. import SamplingParams  # not at the top: `--help` must not wait for it

    defaults: dict[str, Any] = {"max_tokens": MAX_TOKENS}
    params = SamplingParams(**defaults | sampling, n=n)
    live = n == 1 and not as_json and stream is not False
    head = text if echo else ""
    first = 0.0
    first_tokens = 0
    num_printed = 0
    last = None
    batch_options = {"max_num_seqs": min(n, STEPS["cpu"][0])}  # fewer sizes to compile
    with load(model, **batch_options | engine) as llm:
        # Imports JAX, so it waits for `load`, where Ctrl-C works.
        from ..serving.defaults import with_defaults

        if live:
            sys.stdout.write(head)
            sys.stdout.flush()
        loaded = perf_counter() - started
        params = with_defaults(params, sampling, llm.engine.defaults)
        for last in llm.stream(with_images(llm, text, images), params):
            if not first_tokens and (first_tokens := count_tokens(last)):
                first = perf_counter() - started
            if live:
                sys.stdout.write(last.outputs[0].text[num_printed:])
                sys.stdout.flush()
                num_printed = len(last.outputs[0].text)
        total = perf_counter() - started
    assert last is not None  # a stream yields at least one result
    if any(output.finish_reason == "error" for output in last.outputs):
        print("error: the step failed; the log above says why", file=sys.stderr)
        raise typer.Exit(1)
    num_prompt_tokens = len(last.prompt_token_ids)
    num_output_tokens = count_tokens(last)
    timing = Timing(
        loaded,
        first or total,
        total,
        num_prompt_tokens,
        first_tokens,
        num_output_tokens,
        last.num_cached_tokens,
    )
    if as_json:
        print(json.dumps(as_dict(last, timing), ensure_ascii=False))
    elif live:
        print(flush=True)  # keeps the order where stdout and stderr are the same file
    else:
        print(*(head + output.text for output in last.outputs), sep="\n\n")
    print(timing, file=sys.stderr)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from exactly one of the option, the file or a pipe."""
    if prompt is not None and prompt_file is not None:
        raise o.UsageError("--prompt and --prompt-file are both given: leave one out")
    if prompt is not None:
        return prompt
    if prompt_file is None and sys.stdin.isatty():
        raise o.UsageError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in")
    return o.read_text(prompt_file or Path("-"))


def with_images(llm, text: str, images: list[bytes]) -> Any:
    """The prompt with its images, whose placeholders go before the text unless it has them."""
    if not images:
        return text
    if not llm.reads_images:
        raise o.UsageError("--image is given, and the model reads text only")
    placeholder = llm.image_placeholder()
    if placeholder not in text:
        text = placeholder * len(images) + text
    return {"prompt": text, "multi_modal_data": {"image": images}}


def count_tokens(result) -> int:
    return sum(len(output.token_ids) for output in result.outputs)


def as_dict(result, timing: Timing) -> dict:
    """The JSON object that `--json` prints."""
    return {
        "prompt": result.prompt,
        "prompt_token_ids": list(result.prompt_token_ids),
        "num_cached_tokens": result.num_cached_tokens,
        "outputs": [
            {
                "index": output.index,
                "text": output.text,
                "token_ids": list(output.token_ids),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }
            for output in result.outputs
        ],
        "timing": {
            "loaded_s": round(timing.loaded, 4),
            "first_token_s": round(timing.first - timing.loaded, 4),
            "total_s": round(timing.finished - timing.loaded, 4),
            "tokens_per_second": timing.tokens_per_second and round(timing.tokens_per_second, 2),
        },
    }
