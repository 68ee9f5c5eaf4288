"""Compare Quire and llama.cpp on a GGUF file: `python -m tools.peers.gguf model.gguf`.

Prints how many greedy tokens agree before the first difference, and each engine's decode rate for
one request. With quantised weights, llama.cpp quantises activations to eight bits and Quire does
not, so answers differ where two tokens are almost equally likely.
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
ROUNDS = 3  # timed answers
FEW = 8  # tokens of a short answer; the difference to a long one gives the decode time


def main(
    file: Annotated[Path, typer.Argument(help="A GGUF file.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompt; repeatable. Four built-in ones by default.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=FEW + 1, help="Number of tokens per answer.")] = 96,
    dtype: Annotated[
        str, typer.Option(help="Quire's compute dtype: auto, float32 or bfloat16.")
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
    process = subprocess.run(
        [str(python), str(child), str(file.resolve()), json.dumps(prompts), str(tokens)],
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(f"llama.cpp failed: {process.stderr.strip()[-2000:]}")
    llama_cpp_result = json.loads(process.stdout.splitlines()[-1])
    quire_result = run(file, prompts, tokens, dtype)
    print(
        "prompt".ljust(28), "its tokens".ljust(10), f"of {tokens} greedy tokens the same", sep="  "
    )
    for at, text in enumerate(prompts):
        tokenization = (
            "the same" if quire_result["asked"][at] == llama_cpp_result["asked"][at] else "others"
        )
        print(
            f"{text!r:.28}".ljust(28),
            tokenization.ljust(10),
            alike(quire_result["answers"][at], llama_cpp_result["answers"][at]),
            sep="  ",
        )
    for name, result in (("Quire", quire_result), (ENGINE, llama_cpp_result)):
        print(
            f"{name}: {result['pace']:.1f} tokens/s for one request, ready after "
            f"{result['start']:.1f} s"
        )


def alike(tokens: list[int], other_tokens: list[int]) -> int:
    """The number of equal tokens before the first difference."""
    return next(
        (at for at, (a, b) in enumerate(zip(tokens, other_tokens, strict=True)) if a != b),
        len(tokens),
    )


def run(file: Path, prompts: list[str], count: int, dtype: str) -> dict:
    """Run Quire: prompt tokens, answers, decode rate and startup time."""
    from quire import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(str(file), max_num_seqs=1, dtype=dtype)
    start = time.perf_counter() - started

    def answer(prompt: str, tokens: int) -> tuple[list[int], list[int], float]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        llm.reset_prefix_cache()
        started = time.perf_counter()
        (result,) = llm.generate([prompt], params, use_tqdm=False)
        return (
            list(result.prompt_token_ids),
            list(result.outputs[0].token_ids),
            time.perf_counter() - started,
        )

    answers = [answer(prompt, count) for prompt in prompts]
    pace = max(
        (count - FEW) / (answer(prompts[0], count)[2] - answer(prompts[0], FEW)[2])
        for _ in range(ROUNDS)
    )
    return {
        "asked": [answered[0] for answered in answers],
        "answers": [answered[1] for answered in answers],
        "pace": pace,
        "start": start,
    }


if __name__ == "__main__":
    typer.run(main)
