"""Generate text for many prompts at once, each with its own sampling parameters.

Prints the beginning of a story for each prompt, in the order of the prompts, and the total tokens
per second.

    python examples/batch.py [MODEL]      # without MODEL: the bundled one
"""

import sys
import time

from quire import LLM, SamplingParams

PROMPTS = ["Once upon a time", "Long ago", "One day, a fox", "In a small village"]

llm = LLM(*sys.argv[1:])
greedy = SamplingParams(temperature=0, max_tokens=32)
lively = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=32)

start = time.perf_counter()
results = llm.generate(PROMPTS, [greedy, greedy, lively, lively], use_tqdm=False)
seconds = time.perf_counter() - start

for result in results:
    print(f"{result.prompt}|{result.outputs[0].text}")
tokens = sum(len(result.outputs[0].token_ids) for result in results)
print(f"{len(results)} answers, {tokens} tokens, {tokens / seconds:.0f} tokens a second")
