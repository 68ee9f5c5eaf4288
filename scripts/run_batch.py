"""`quire run-batch`: process OpenAI batch files offline, with all requests queued at once."""

import json
import sys
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Any

from .. import __version__
from ..serving.api.errors import RequestError
from ..serving.api.validation import shown
from ..serving.http.settings import Formats
from ..serving.progress import bar
from ..serving.protocol.answers import chat as chat_answer
from ..serving.protocol.answers import completion as completion_answer
from ..serving.protocol.answers.answer import ChatRequest, ResponseHead, Usage
from ..serving.protocol.answers.choices import Choices
from ..serving.protocol.batch_file import BatchLine, error_line, parse_lines, result_line
from . import options as o
from .loading import load


@dataclass
class LineJob:
    """A line of the batch file with its engine requests, one per prompt, or its error."""

    line: BatchLine
    requests: list[Any] = field(default_factory=list)
    prepared: Any = None
    error: RequestError | None = None

    @property
    def done(self) -> bool:
        return all(request.finished for request in self.requests)


@o.takes_engine()
def main(
    model: o.Model = None,
    input_file: Annotated[
        Path | None,
        o.option(
            "Batch input file (JSONL), one request per line; - reads stdin.",
            o.OUTPUT,
            name="--input-file -i",
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        o.option(
            "Output file (JSONL), results in the order of the requests; - writes to stdout.",
            o.OUTPUT,
            name="--output-file -o",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        o.option(
            "Model name that requests may use in their model field.",
            o.MODEL,
            default_text="MODEL",
        ),
    ] = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Process a file of requests in OpenAI's batch format. An invalid line yields an error result
    and does not affect the others.
    """
    if input_file is None or output_file is None:
        raise o.UsageError(
            "-i and -o are both needed: quire run-batch [MODEL] -i requests.jsonl -o results.jsonl"
        )
    if (
        str(input_file) != "-"
        and input_file.exists()
        and input_file.resolve() == output_file.resolve()
    ):
        raise o.UsageError(
            f"{input_file} is given as input and as output; the results need a file of their own"
        )
    if not output_file.parent.is_dir():
        raise o.UsageError(f"cannot write {output_file}: there is no folder {output_file.parent}")
    # Split as bytes, so that a line that is not UTF-8 does not affect others.
    lines = list(parse_lines(o.read_bytes(input_file).split(b"\n")))
    local_names = "quill" if model is None else model
    names = (served_model_name,) if served_model_name else (local_names, Path(local_names).name)
    with load(model, **engine) as llm:
        if str(output_file) == "-":
            answer(llm, lines, sys.stdout, names)
            return
        try:
            output = output_file.open("w", encoding="utf-8")
        except OSError as error:
            raise o.UsageError(f"cannot write {output_file}: {error.strerror}") from None
        with output:
            answer(llm, lines, output, names)


def answer(llm, lines: list[BatchLine], output: IO[str], names: tuple[str, ...]) -> None:
    """Process all lines, and write results in input order as soon as they are available."""
    started = time.perf_counter()
    written = 0
    refused = 0
    tokens = 0
    jobs = [start(llm, line, names) for line in lines]

    def write(job: LineJob) -> None:
        nonlocal written, refused, tokens
        result = job_result(job, names[0])
        output.write(json.dumps(result, ensure_ascii=False) + "\n")
        written += 1
        refused += result["error"] is not None
        tokens += sum(
            len(completion.token_ids)
            for request in job.requests
            for completion in request.output().outputs
        )

    try:
        with bar(sum(len(job.requests) for job in jobs), True) as advance:
            while True:
                while written < len(jobs) and jobs[written].done:
                    write(jobs[written])
                output.flush()
                if not llm.engine.busy:
                    break
                finished = [request for request in llm.engine.step() if request.finished]
                advance(
                    len(finished),
                    sum(
                        len(completion.token_ids)
                        for request in finished
                        for completion in request.output().outputs
                    ),
                )
    finally:  # also after Ctrl-C: write finished results, although earlier ones are missing
        for job in jobs[written:]:
            if job.done:
                write(job)
        output.flush()
        seconds = time.perf_counter() - started
        remaining = f", {len(jobs) - written} left" if written < len(jobs) else ""
        print(
            f"{written - refused} answered, {refused} refused{remaining}: {tokens} tokens in "
            f"{seconds:.2f} s, {tokens / seconds:.1f} tokens/s",
            file=sys.stderr,
        )


def start(llm, line: BatchLine, names: tuple[str, ...]) -> LineJob:
    """Queue the requests of a line, or none if one of them is invalid."""
    body = line.request
    if isinstance(body, RequestError):
        return LineJob(line, error=body)
    from ..serving.defaults import with_defaults  # not at the top: `--help` must not wait for JAX
    from ..serving.http import prompting

    requests: list[Any] = []
    try:
        if body.model is not None and body.model not in names:
            raise RequestError(
                "body.model",
                f"must be {names[0]!r}, which --served-model-name can change, got "
                f"{shown(body.model)}",
            )
        params = with_defaults(body.params, body.explicit_params, llm.engine.defaults)
        if isinstance(body, ChatRequest):
            prepared = prompting.chat(llm.engine, replace(body, params=params), Formats())
        else:
            prepared = prompting.completion(llm.engine, replace(body, params=params), Formats())
        for prompt in prepared.engine_requests:
            request_id = str(next(llm.ids))
            requests.append(
                llm.engine.add(
                    request_id,
                    prompt.tokens,
                    prompt.params,
                    prompt.text,
                    prompt.request_options,
                    media=prompt.media,
                )
            )
    except RequestError as error:
        for request in requests:
            llm.engine.abort(request.request_id)
        return LineJob(line, error=error)
    return LineJob(line, requests, prepared)


def job_result(job: LineJob, model: str) -> dict[str, Any]:
    """The output line of a finished job."""
    name = uuid.uuid4().hex
    request_id = f"batch_req_{name}"
    if job.error is not None:
        return error_line(job.line, request_id, job.error)
    outputs = [request.output() for request in job.requests]
    if any(answer.finish_reason == "error" for output in outputs for answer in output.outputs):
        return error_line(
            job.line, request_id, RuntimeError("the engine failed on this request"), "server_error"
        )
    body = job.line.request
    assert not isinstance(body, RequestError)
    is_chat = isinstance(body, ChatRequest)
    prompts = [
        replace(prompt, logprobs=output.prompt_logprobs)
        for prompt, output in zip(job.prepared.prompts, outputs, strict=True)
    ]
    head = ResponseHead(
        id=f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        model=body.model or model,
        created=int(time.time()),
        system_fingerprint=f"quire-{__version__}",
        prompts=prompts,
    )
    choices = Choices(job.prepared.parser, body.params.n, job.prepared.max_calls)
    answers = choices.answers(outputs)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    usage = Usage(prompt_tokens, choices.num_tokens, cached, choices.num_reasoning_tokens)
    response = (
        chat_answer.response(head, body, None, answers, usage)
        if is_chat
        else completion_answer.response(head, body, None, answers, usage)
    )
    return result_line(job.line, request_id, response)
