"""A GGUF file in Quire and in llama.cpp: `python -m tools.peers.gguf model.gguf`.

Prints how many greedy tokens are the same, up to the first that is not, and the pace of one answer
in each. Where weights are quantised llama.cpp rounds the rows that meet them to eight bits, and
Quire does not: answers part where two tokens are nearly as likely.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Annotated

import typer

from . import envs

PROMPTS = ["Once upon a time", "The capital of France is", "1 2 3 4", "def add(a, b):"]
ENGINE = "llama.cpp"
ROUNDS = 3  # answers that are timed, and the tokens of a short one
FEW = 8


def main(
    file: Annotated[Path, typer.Argument(help="A GGUF file.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Repeatable; four of ours without one.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=FEW + 1, help="Tokens of each answer.")] = 96,
    dtype: Annotated[
        str, typer.Option(help="What Quire computes in: auto, float32 or bfloat16.")
    ] = "auto",
    place: Annotated[
        Path | None, typer.Option("--envs", help="Folder of the peers' environments.")
    ] = None,
) -> None:
    """Compare the answers of both engines."""
    if not file.is_file():
        raise SystemExit(f"{file} is no file")
    prompts = prompt or PROMPTS
    python = envs.make(place or envs.default_place(), ENGINE, lambda line: print(line, flush=True))
    child = Path(__file__).with_name("answer_gguf.py")
    done = subprocess.run(
        [str(python), str(child), str(file.resolve()), json.dumps(prompts), str(tokens)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"llama.cpp failed: {done.stderr.strip()[-2000:]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = run(file, prompts, tokens, dtype)
    print(
        "prompt".ljust(28), "its tokens".ljust(10), f"of {tokens} greedy tokens the same", sep="  "
    )
    for at, text in enumerate(prompts):
        asked = "the same" if ours["asked"][at] == theirs["asked"][at] else "others"
        print(
            f"{text!r:.28}".ljust(28),
            asked.ljust(10),
            alike(ours["answers"][at], theirs["answers"][at]),
            sep="  ",
        )
    for name, found in (("Quire", ours), (ENGINE, theirs)):
        print(
            f"{name}: {found['pace']:.1f} tokens/s for one request, ready after "
            f"{found['start']:.1f} s"
        )


def alike(mine: list[int], other: list[int]) -> int:
    """How many tokens are the same before the first that is not."""
    return next(
        (at for at, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), len(mine)
    )


def run(file: Path, prompts: list[str], count: int, dtype: str) -> dict:
    """What Quire answers."""
    from quire import LLM, SamplingParams

    begun = time.perf_counter()
    llm = LLM(str(file), max_num_seqs=1, dtype=dtype)
    start = time.perf_counter() - begun

    def answer(prompt: str, tokens: int) -> tuple[list[int], list[int], float]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        llm.reset_prefix_cache()
        begun = time.perf_counter()
        (found,) = llm.generate([prompt], params, use_tqdm=False)
        return (
            list(found.prompt_token_ids),
            list(found.outputs[0].token_ids),
            time.perf_counter() - begun,
        )

    every = [answer(prompt, count) for prompt in prompts]
    pace = max(
        (count - FEW) / (answer(prompts[0], count)[2] - answer(prompts[0], FEW)[2])
        for _ in range(ROUNDS)
    )
    return {
        "asked": [one[0] for one in every],
        "answers": [one[1] for one in every],
        "pace": pace,
        "start": start,
    }


if __name__ == "__main__":
    typer.run(main)
