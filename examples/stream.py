"""Two answers that are written at the same time, by `AsyncLLM`.

Prints each piece of text when it comes, with the name of the answer it belongs to, and at last both
answers whole.

    python examples/stream.py [MODEL]      # without MODEL: the bundled one
"""

import asyncio
import sys

from quire import AsyncLLM, SamplingParams
from quire import RequestOutputKind as Kind

PROMPTS = {"fox": "One day, a fox", "sea": "Far out at sea"}


async def read(llm: AsyncLLM, name: str) -> str:
    """Print an answer as it grows; DELTA: each result has only what is new."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, output_kind=Kind.DELTA)
    pieces = []
    async for result in llm.generate(PROMPTS[name], params):
        pieces.append(result.outputs[0].text)
        print(f"{name}: {pieces[-1]!r}", flush=True)
    return "".join(pieces)


async def main() -> None:
    llm = AsyncLLM(*sys.argv[1:])
    try:
        answers = await asyncio.gather(*(read(llm, name) for name in PROMPTS))
    finally:
        llm.close()
    for name, answer in zip(PROMPTS, answers, strict=True):
        print(f"{PROMPTS[name]}{answer}")


asyncio.run(main())
