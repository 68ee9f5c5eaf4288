"""What drafts gain that are right as often as one wishes: `python -m tools.peers.oracle`."""

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
    """Drafts what plain decoding said; each token is another one with a chance of 1 - `rate`."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], vocab: int):
        self.answers, self.vocab, self.rate, self.rng = answers, vocab, 0.0, random.Random(0)

    def propose(self, seq, most: int) -> list[int]:
        truth = self.answers[tuple(seq.tokens[: seq.num_prompt])][seq.num_output :][:most]
        return [t if self.rng.random() < self.rate else (t + 1) % self.vocab for t in truth]

    def end(self, seq) -> None:
        pass


def main(
    size: Annotated[
        str, typer.Option(help=f"shape of the model: {', '.join(checkpoint.SIZES)}")
    ] = "400m",
    folder: Annotated[Path | None, typer.Option(help="where its random weights are kept")] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="share of drafts that is right; may be repeated")
    ] = None,
    drafts: Annotated[int, typer.Option(min=1, help="of a step")] = 4,
    tokens: Annotated[int, typer.Option(min=8, help="of an answer")] = 96,
    rounds: Annotated[
        int, typer.Option(min=1, help="answers of each kind, in turns; the median counts")
    ] = 5,
):
    """Print tokens a second of one request against plain decoding, beside what the formula and the
    step times say.
    """
    from quire import LLM, SamplingParams
    from quire.serving.engine.snapshot import take_snapshot

    if size not in checkpoint.SIZES:
        raise typer.BadParameter(
            f"{size!r} is none of {', '.join(checkpoint.SIZES)}", param_hint="--size"
        )
    own = folder or Path(tempfile.gettempdir()) / f"quire-{size}"
    checkpoint.write(own, checkpoint.SIZES[size])
    common = {
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": False,
    }
    config = {"method": "ngram", "num_speculative_tokens": drafts, "adapts": False}
    plain = LLM(str(own), **common)
    drafting = LLM(str(own), **common, speculative_config=config)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [[rng.randrange(3, checkpoint.VOCAB) for _ in range(PROMPT)] for _ in range(rounds)]

    def ask(llm, prompt: list[int]) -> tuple[list[int], float]:
        began = time.perf_counter()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        return list(output.outputs[0].token_ids), time.perf_counter() - began

    answers = {tuple(prompt): ask(plain, prompt)[0] for prompt in prompts}
    drafting.engine.speculator.host_drafter = oracle = Oracle(answers, checkpoint.VOCAB)
    runner = drafting.engine.runner
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
    ask(drafting, prompts[0])
    for wanted in rate or [0.7, 0.9]:
        oracle.rate, speeds, gains, before = wanted, [], [], take_snapshot(drafting.engine).drafts
        for prompt in prompts:
            expected, one = ask(plain, prompt)
            found, own_seconds = ask(drafting, prompt)
            _, other = ask(plain, prompt)
            assert found == expected, "drafts have changed an answer"
            speeds.append(tokens / own_seconds)
            gains.append((one + other) / 2 / own_seconds)
        after = take_snapshot(drafting.engine).drafts
        length = 1 + (sum(after.accepted) - sum(before.accepted)) / (
            after.proposals - before.proposals
        )
        runner.measure()
        steps = runner.seconds(1 + drafts, 1) / runner.seconds(1, 1)
        formula = (1 - wanted ** (drafts + 1)) / (1 - wanted)
        gain = statistics.median(gains)
        table.add_row(
            f"{wanted}",
            f"{statistics.median(speeds):.1f}",
            f"{gain:.2f}",
            f"{length:.2f}",
            f"{formula:.2f}",
            f"{steps:.2f}",
            f"{formula / steps:.2f}",
            f"{gain / (formula / steps):.0%}",
        )
    Console(width=110).print(table)
    plain.close()
    drafting.close()


if __name__ == "__main__":
    typer.run(main)
