"""`quire search`: generate several candidate answers to a prompt and print the best one."""

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from . import options as o
from .generate import read_prompt
from .loading import load

MAX_TOKENS = 256
SEARCH = "Search"


@o.takes_engine()
@o.takes_sampling(MAX_TOKENS)
def main(
    model: o.Model = None,
    prompt: Annotated[str | None, o.option("Prompt text.", o.OUTPUT)] = None,
    prompt_file: Annotated[
        Path | None, o.option("File with the prompt; - reads stdin.", o.OUTPUT)
    ] = None,
    chat: Annotated[
        bool,
        o.option(
            "Send the prompt as a user message, formatted by the chat template.",
            o.OUTPUT,
            name="--chat",
        ),
    ] = False,
    as_json: Annotated[
        bool, o.option("Print all candidates as one JSON object.", o.OUTPUT, name="--json")
    ] = False,
    method: Annotated[
        str, o.option("Search method: best_of_n, majority (vote) or beam.", SEARCH)
    ] = "best_of_n",
    n: Annotated[
        int, o.option("Candidates to generate; for beam, partial answers per step.", SEARCH)
    ] = 8,
    reward_model: Annotated[
        str | None,
        o.option(
            "Reward model (sequence classifier with one label) that scores candidates.",
            SEARCH,
            "MODEL",
        ),
    ] = None,
    width: Annotated[
        int, o.option("For beam: beam width, the partial answers kept after each step.", SEARCH)
    ] = 2,
    step: Annotated[
        str, o.option(r"For beam: text that ends a step; \n is a newline.", SEARCH)
    ] = r"\n",
    max_steps: Annotated[
        int, o.option("For beam: maximum number of steps per answer.", SEARCH)
    ] = 16,
    answer: Annotated[
        str | None,
        o.option(
            "For majority: regular expression that extracts the final answer to vote on (the last "
            "match, or its first group).",
            SEARCH,
            "PATTERN",
            "the whole text",
        ),
    ] = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Generate several candidates and print the best: by reward model score, or by majority vote.

    Prints the token counts to stderr.
    """
    text = read_prompt(prompt, prompt_file)
    prompt_or_messages: Any = [{"role": "user", "content": text}] if chat else text

    # Not at the top: `--help` must not wait for it.
    from .. import RequestError, SamplingParams, SearchParams

    defaults: dict[str, Any] = {"max_tokens": MAX_TOKENS, "seed": 0}
    try:
        params = SearchParams(
            method.replace("-", "_"),
            n,
            width,
            step.encode().decode("unicode_escape"),
            max_steps,
            answer,
            SamplingParams(**defaults | sampling),
        )
    except RequestError as error:
        raise o.UsageError(f"--{error.param.replace('_', '-')}: {error.message}") from None
    if params.method != "majority" and reward_model is None:
        raise o.UsageError(f"--method {params.method} needs --reward-model")
    with ExitStack() as stack:
        llm = stack.enter_context(load(model, **engine))
        # Imports JAX, so it waits for `load`, where Ctrl-C works.
        from ..serving.defaults import with_defaults

        params = replace(
            params, sampling=with_defaults(params.sampling, sampling, llm.engine.defaults)
        )
        reward = None if reward_model is None else stack.enter_context(load(reward_model))
        (result,) = llm.search(prompt_or_messages, params, reward=reward)
    if as_json:
        print(json.dumps(asdict(result), ensure_ascii=False))
    else:
        print(result.text)
    summary = f"{len(result.candidates)} candidates, {result.num_generated_tokens} tokens written"
    if reward_model is not None:
        summary += (
            f", {result.num_scored_tokens} read by the reward model; the best has "
            f"{result.best.reward:.4g}"
        )
    print(summary, file=sys.stderr)
