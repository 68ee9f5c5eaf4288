"""Measure the speedup of speculative decoding with an oracle drafter of a chosen acceptance rate:
`python -m tools.peers.oracle`.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import checkpoint

PROMPT = 32  # random tokens


class Oracle:
    """A drafter that proposes the tokens of plain decoding, each made wrong with probability
    1 - `rate`.
    """

    def __init__(self, answers: dict[tuple[int, ...], list[int]], vocab: int):
        self.answers = answers
        self.vocab = vocab
        self.rate = 0.0
        self.rng = random.Random(0)

    def propose(self, seq, max_tokens: int) -> list[int]:
        truth = self.answers[tuple(seq.tokens[: seq.num_prompt])][seq.num_output :][:max_tokens]
        return [t if self.rng.random() < self.rate else (t + 1) % self.vocab for t in truth]

    def end(self, seq) -> None:
        pass


def main(
    size: Annotated[str, typer.Option(help=f"Model: {', '.join(checkpoint.SIZES)}.")] = "400m",
    folder: Annotated[
        Path | None, typer.Option(help="Folder for the checkpoint with random weights.")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="Acceptance rate of draft tokens; repeatable.")
    ] = None,
    drafts: Annotated[int, typer.Option(min=1, help="Draft tokens per step.")] = 4,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens per answer.")] = 96,
    rounds: Annotated[
        int, typer.Option(min=1, help="Answers with and without drafts; reports the median.")
    ] = 5,
):
    """Print the speedup of one request over plain decoding, with the predictions by the acceptance
    formula and by step times.
    """
    from quire import LLM, SamplingParams
    from quire.serving.engine.snapshot import take_snapshot

    if size not in checkpoint.SIZES:
        raise typer.BadParameter(
            f"{size!r} is none of {', '.join(checkpoint.SIZES)}", param_hint="--size"
        )
    model_folder = folder or Path(tempfile.gettempdir()) / f"quire-{size}"
    checkpoint.write(model_folder, checkpoint.SIZES[size])
    common = {
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": False,
    }
    config = {"method": "ngram", "num_speculative_tokens": drafts, "adapts": False}
    plain_llm = LLM(str(model_folder), **common)
    drafting_llm = LLM(str(model_folder), **common, speculative_config=config)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [[rng.randrange(3, checkpoint.VOCAB) for _ in range(PROMPT)] for _ in range(rounds)]

    def ask(llm, prompt: list[int]) -> tuple[list[int], float]:
        began = time.perf_counter()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        return list(output.outputs[0].token_ids), time.perf_counter() - began

    answers = {tuple(prompt): ask(plain_llm, prompt)[0] for prompt in prompts}
    oracle = Oracle(answers, checkpoint.VOCAB)
    speculator = drafting_llm.engine.speculator
    assert speculator is not None
    speculator.host_drafter = oracle
    runner = drafting_llm.engine.runner
    table = Table(
        "a",
        "tokens/s",
        "times plain",
        "tokens a step",
        "by the formula",
        "step, times plain",
        "foretold",
        "of it",
    )
    ask(drafting_llm, prompts[0])
    for acceptance_rate in rate or [0.7, 0.9]:
        oracle.rate = acceptance_rate
        speeds = []
        gains = []
        drafts_before = take_snapshot(drafting_llm.engine).drafts
        for prompt in prompts:
            expected, seconds_before = ask(plain_llm, prompt)
            draft_tokens, draft_seconds = ask(drafting_llm, prompt)
            _, seconds_after = ask(plain_llm, prompt)
            assert draft_tokens == expected, "drafts have changed an answer"
            speeds.append(tokens / draft_seconds)
            gains.append((seconds_before + seconds_after) / 2 / draft_seconds)
        drafts_after = take_snapshot(drafting_llm.engine).drafts
        assert drafts_before is not None and drafts_after is not None
        length = 1 + (sum(drafts_after.accepted) - sum(drafts_before.accepted)) / (
            drafts_after.proposals - drafts_before.proposals
        )
        runner.measure()
        steps = runner.seconds(1 + drafts, 1) / runner.seconds(1, 1)
        formula = (1 - acceptance_rate ** (drafts + 1)) / (1 - acceptance_rate)
        gain = statistics.median(gains)
        table.add_row(
            f"{acceptance_rate}",
            f"{statistics.median(speeds):.1f}",
            f"{gain:.2f}",
            f"{length:.2f}",
            f"{formula:.2f}",
            f"{steps:.2f}",
            f"{formula / steps:.2f}",
            f"{gain / (formula / steps):.0%}",
        )
    Console(width=110).print(table)
    plain_llm.close()
    drafting_llm.close()


if __name__ == "__main__":
    typer.run(main)
