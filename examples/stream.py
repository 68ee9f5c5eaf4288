"""Stream two answers at the same time with `AsyncLLM`.

Prints each piece of text as it arrives with the name of its answer, and finally both answers.

    python examples/stream.py [MODEL]      # without MODEL: the bundled one
"""

import asyncio
import sys

from quire import AsyncLLM, SamplingParams
from quire import RequestOutputKind as Kind

PROMPTS = {"fox": "One day, a fox", "sea": "Far out at sea"}


async def read(llm: AsyncLLM, name: str) -> str:
    """Print an answer as it is generated; with DELTA each result has only the new text."""
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
