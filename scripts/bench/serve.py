"""`quire bench serve`: benchmark an OpenAI-compatible server with streamed requests."""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ...serving.progress import bar
from .. import options as o
from . import load as load
from . import report as reports
from .drafts import Drafts, drafts_table
from .metrics import METRICS, RequestTimes, flat, goodput, milliseconds, totals

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
BACKENDS = {"openai": ENDPOINTS[0], "vllm": ENDPOINTS[0], "openai-chat": ENDPOINTS[1]}
HOST = "127.0.0.1"
PORT = 8000
GOALS = ("ttft", "tpot", "e2el")  # metrics of a single request
SERVER = "The server"
TRAFFIC = "The traffic"
TOKENIZER_FILES = ["*.json", "*.jinja"]
SPARE_FILES = 64  # file descriptors for other uses than connections


@reports.takes_report(excluded=())
@load.takes_dataset
def main(
    base_url: Annotated[
        str | None, o.option("URL of the server.", SERVER, "URL", f"http://{HOST}:{PORT}")
    ] = None,
    host: Annotated[
        str | None, o.option("Server host, instead of --base-url.", SERVER, "HOST", HOST)
    ] = None,
    port: Annotated[
        int | None, o.option("Server port, instead of --base-url.", SERVER, "PORT", f"{PORT}")
    ] = None,
    backend: Annotated[
        str | None,
        o.option(f"Backend type: {', '.join(BACKENDS)}.", SERVER, "KIND", "openai"),
    ] = None,
    endpoint: Annotated[
        str | None,
        o.option(
            f"API endpoint: {' or '.join(ENDPOINTS)}.", SERVER, "PATH", "the endpoint of --backend"
        ),
    ] = None,
    model: Annotated[
        str | None,
        o.option(
            "Model name to request.",
            SERVER,
            default_text="the first model that the server lists",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        o.option(
            "Folder or Hugging Face model ID of the tokenizer, to generate prompts and count "
            "tokens.",
            SERVER,
            default_text="the model's name",
        ),
    ] = None,
    timeout: Annotated[
        float, o.option("Request timeout; requests that exceed it fail.", SERVER, "SECONDS")
    ] = 600.0,
    num_prompts: load.NumPrompts = 100,
    *,
    dataset: load.Dataset,
    seed: load.Seed = 0,
    request_rate: Annotated[
        float, o.option("Requests per second; inf sends all at once.", TRAFFIC, "N")
    ] = math.inf,
    burstiness: Annotated[
        float | None,
        o.option(
            "Shape of the gamma distribution of request intervals: below 1 is burstier, above 1 is "
            "steadier.",
            TRAFFIC,
            "SHAPE",
            "1, a Poisson process",
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        o.size_option("Maximum number of concurrent requests.", TRAFFIC, "N", "no limit"),
    ] = None,
    ignore_eos: Annotated[
        bool,
        o.option(
            "Send ignore_eos, so that answers have their full length.", TRAFFIC, name="--ignore-eos"
        ),
    ] = False,
    temperature: Annotated[float, o.option("Sampling temperature of all requests.", TRAFFIC)] = 0.0,
    goals: Annotated[
        list[str] | None,
        o.option(
            f"Report goodput: requests per second that meet these limits ({', '.join(GOALS)}).",
            TRAFFIC,
            "METRIC:MS ...",
            name="--goodput",
        ),
    ] = None,
    report: reports.ResultFiles,
) -> None:
    """Benchmark a running OpenAI-compatible server with streamed requests. Uses OPENAI_API_KEY if
    it is set.
    """
    base_url = base_address(base_url, host, port)
    endpoint = chosen_endpoint(backend, endpoint)
    load.above_zero(
        num_prompts=num_prompts, timeout=timeout, request_rate=request_rate, burstiness=burstiness,
        max_concurrency=max_concurrency,
    )  # fmt: skip
    if burstiness is not None and math.isinf(request_rate):
        raise o.UsageError(
            "--burstiness needs a finite --request-rate: without one all requests go at once"
        )
    limits = parse_goals(goals or [])

    import asyncio  # not at the top: `--help` must not wait for it

    from . import client as client
    from . import server_stats

    try:
        server = client.ServerAddress.parse(base_url, os.environ.get("OPENAI_API_KEY"))
    except ValueError as error:
        raise o.UsageError(f"--base-url: {error}") from None
    name = find_model(server, base_url, model, timeout)
    vocabulary = find_tokenizer(server, name, tokenizer) if dataset.needs_tokenizer else None
    try:
        samples = dataset.samples(num_prompts, vocabulary, seed)
    except (client.Failure, OSError, EOFError) as error:
        reason = client.reason(error)
        raise o.UsageError(
            f"the server's tokenizer cannot be asked ({reason}): --tokenizer FOLDER has another"
        ) from None
    chat = endpoint == ENDPOINTS[1]
    options = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
    bodies = [request_body(sample, name, chat, vocabulary) | options for sample in samples]
    delays = load.arrivals(
        num_prompts, request_rate, 1.0 if burstiness is None else burstiness, seed
    )
    allow_connections(min(num_prompts, max_concurrency or num_prompts))

    with bar(num_prompts, True) as advance:

        async def send(index: int) -> RequestTimes:
            answer = await client.ask(server, endpoint, bodies[index], timeout, time.perf_counter)
            advance(1, answer.output_tokens)
            prompt = samples[index].prompt
            num_known = len(prompt) if isinstance(prompt, list) else 0
            return replace(answer, prompt_tokens=answer.prompt_tokens or num_known)

        stats_before = server_stats.read_stats(server, name, timeout)
        answers, duration = asyncio.run(send_requests(send, delays, max_concurrency))
        stats_after = server_stats.read_stats(server, name, timeout)

    result = {"model": name, **result_values(answers, duration, limits)}
    drafts = None
    if stats_before is not None and stats_after is not None:
        if stats_after.delays:
            result["server"] = stats_after.since(stats_before)
        if stats_before.drafts is not None and stats_after.drafts is not None:
            drafts = stats_after.drafts.since(stats_before.drafts)
            result |= drafts.result()
    values = milliseconds(answers)
    heading = f"{name} at {base_url}, {endpoint}"
    report.write(
        result,
        "\n\n".join((heading, *paragraphs(result, values, answers, limits, drafts))),
        lambda plot, figure: plot.distributions(figure, values, METRICS, limits, heading),
    )
    if not result["completed"]:
        raise typer.Exit(1)


def base_address(base_url: str | None, host: str | None, port: int | None) -> str:
    if base_url is not None and (host is not None or port is not None):
        raise o.UsageError(
            f"--base-url is {base_url!r}, which says host and port: leave out --host and --port"
        )
    host = host or HOST
    port = PORT if port is None else port
    return f"http://{f'[{host}]' if ':' in host else host}:{port}" if base_url is None else base_url


def chosen_endpoint(backend: str | None, endpoint: str | None) -> str:
    if backend is not None and backend not in BACKENDS:
        raise o.UsageError(f"--backend is {backend!r}; it can be {', '.join(BACKENDS)}")
    if endpoint is None:
        return BACKENDS[backend or "openai"]
    if endpoint not in ENDPOINTS:
        raise o.UsageError(f"--endpoint is {endpoint!r}; it can be {' or '.join(ENDPOINTS)}")
    if backend is not None and endpoint != BACKENDS[backend]:
        raise o.UsageError(
            f"--backend {backend} has the endpoint {BACKENDS[backend]}, not {endpoint}: leave "
            "one out"
        )
    return endpoint


def parse_goals(goals: Sequence[str]) -> dict[str, float]:
    """Parse limits: `ttft:500` is at most 500 milliseconds."""
    limits: dict[str, float] = {}
    for goal in goals:
        metric, _, limit = goal.partition(":")
        try:
            limits[metric] = float(limit)
        except ValueError:
            limits[metric] = math.nan
        if metric not in GOALS or not 0 < limits[metric] < math.inf:
            raise o.UsageError(
                f"--goodput is {goal!r}; write a metric and milliseconds, as in ttft:500 "
                f"({', '.join(GOALS)})"
            )
    return limits


def find_model(server, base_url: str, model: str | None, timeout: float) -> str:
    """The model's name on the server; raises UsageError if no server answers."""
    import asyncio

    from . import client as client

    try:
        listed = asyncio.run(client.models(server, timeout))
        return model or listed[0]
    except (client.Failure, IndexError) as error:
        if model:
            return model
        reason = "it lists no model" if isinstance(error, IndexError) else client.reason(error)
        raise o.UsageError(
            f"{base_url} does not say what its model is called ({reason}): name it with --model"
        ) from None
    except (OSError, EOFError) as error:
        raise o.UsageError(f"no server answers at {base_url}: {client.reason(error)}") from None


def find_tokenizer(server, model: str, chosen: str | None) -> Any:
    """Load the chosen tokenizer or a local model's, or use the server's tokenizer over HTTP."""
    from ...model.checkpoint.hub import BUNDLED
    from . import client as client
    from .server_tokenizer import ServerTokenizer

    if chosen is not None or model in BUNDLED or Path(model).exists():
        return read_tokenizer(chosen or model)
    tokenizer = ServerTokenizer(server, model)
    try:
        count = len(tokenizer.ordinary)
    except (client.Failure, OSError, EOFError) as error:
        print(
            f"note: the server's tokenizer cannot be asked: {client.reason(error)}", file=sys.stderr
        )
        return read_tokenizer(model)
    print(f"note: prompts are drawn from {count} tokens of the server's tokenizer", file=sys.stderr)
    return tokenizer


def read_tokenizer(name: str):
    from ...model.checkpoint import hub
    from ...model.config import ModelError
    from ...model.text.tokenizer import Tokenizer

    try:
        return Tokenizer(hub.resolve(name, TOKENIZER_FILES))
    except ModelError as error:
        raise o.UsageError(f"prompts need a tokenizer, --tokenizer FOLDER: {error}") from None


def request_body(sample: load.Sample, model: str, chat: bool, tokenizer) -> dict[str, Any]:
    """The body of a request. Random prompts are sent as token ids, which keeps their exact length;
    the chat endpoint accepts only text.
    """
    request = {
        "model": model,
        "max_tokens": sample.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not chat:
        return request | {"prompt": sample.prompt}
    text = sample.prompt
    if not isinstance(text, str):
        if tokenizer is None:
            raise o.UsageError(
                f"a prompt of token ids cannot go to {ENDPOINTS[1]}: use {ENDPOINTS[0]}"
            )
        text = tokenizer.decode(text)
    return request | {"messages": [{"role": "user", "content": text}]}


def allow_connections(count: int) -> None:
    """Raise the limit of open files (usually 1024), because each connection takes one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < num_files:
        if hard != resource.RLIM_INFINITY and hard < num_files:
            raise o.UsageError(
                f"{count} connections at once are more open files than allowed ({hard}): use "
                "--max-concurrency"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


async def send_requests(
    send: Callable[[int], Awaitable[RequestTimes]],
    delays: Sequence[float],
    max_concurrency: int | None,
) -> tuple[list[RequestTimes], float]:
    """Send each request after its delay, subject to the concurrency limit. Returns (answers in
    order, duration in seconds).
    """
    import asyncio

    loop = asyncio.get_running_loop()
    gate = asyncio.Semaphore(max_concurrency or max(len(delays), 1))

    async def send_one(index: int) -> RequestTimes:
        async with gate:
            return await send(index)

    begin = loop.time()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for index, delay in enumerate(delays):
            if (wait := begin + delay - loop.time()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(send_one(index)))
    return [task.result() for task in tasks], loop.time() - begin


def result_values(
    answers: Sequence[RequestTimes], duration: float, limits: dict[str, float]
) -> dict[str, Any]:
    """The results by the keys of vLLM's benchmark results, and the times of each request."""
    results: dict[str, Any] = totals(answers, duration) | flat(milliseconds(answers))
    if limits:
        results |= {
            "request_goodput": goodput(answers, duration, limits),
            "goodput_limits_ms": limits,
        }
    results["errors"] = dict(
        Counter(answer.error for answer in answers if answer.error is not None).most_common()
    )
    begin = min(answer.sent for answer in answers)
    results["requests"] = [
        {
            "sent_s": answer.sent - begin,
            "prompt_tokens": answer.prompt_tokens,
            "output_tokens": answer.output_tokens,
            "times_ms": [(moment - answer.sent) * 1000 for moment in answer.times],
            "error": answer.error,
        }
        for answer in answers
    ]
    return results


def paragraphs(
    result: dict[str, Any],
    values: dict[str, list[float]],
    answers: Sequence[RequestTimes],
    limits: dict[str, float],
    drafts: Drafts | None,
) -> list[str]:
    """The results as paragraphs of text."""
    texts = [reports.rates_table(result), reports.latency_table(values)]
    if drafts is not None:
        texts.append(drafts_table("requests", [(len(answers), drafts)]))
    if limits:
        num_good = sum(answer.error is None and answer.meets(limits) for answer in answers)
        named = ", ".join(f"{METRICS[metric]} {limit:g} ms" for metric, limit in limits.items())
        texts.append(
            f"goodput: {result['request_goodput']:.2f} requests/s, {num_good} of "
            f"{len(answers)}, kept {named}"
        )
    if "server" in result:
        from . import server_stats

        texts.append(server_stats.sentence(result["server"]))
    if result["errors"]:
        lines = [f"{count} x {error}" for error, count in result["errors"].items()]
        texts.append(f"{result['failed']} failed:\n  " + "\n  ".join(lines[:10]))
    return texts
