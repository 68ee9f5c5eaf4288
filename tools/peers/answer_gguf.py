"""llama.cpp on one GGUF file, in its own environment: greedy tokens of prompts, and the pace of one
answer.

Its arguments are the file, the prompts as JSON, and how many tokens; it prints one line of JSON.
"""

# pyright: reportMissingImports=false

import json
import os
import sys
import time

from llama_cpp import Llama

ROUNDS = 3


def main(file: str, prompts: list[str], count: int) -> None:
    begun = time.perf_counter()
    threads = len(os.sched_getaffinity(0))  # its own default is half of them
    llm = Llama(file, n_ctx=0, verbose=False, n_threads=threads, n_threads_batch=threads)
    start = time.perf_counter() - begun

    def answer(tokens: list[int]) -> tuple[list[int], float]:
        """The greedy tokens after a prompt, and the seconds from the first to the last."""
        found = []
        times = []
        for token in llm.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
            found.append(token)
            times.append(time.perf_counter())
            if len(found) == count:
                break
        return found, times[-1] - times[0]

    asked = [llm.tokenize(prompt.encode(), add_bos=True) for prompt in prompts]
    answers = [answer(tokens)[0] for tokens in asked]
    pace = max((count - 1) / answer(asked[0])[1] for _ in range(ROUNDS))
    print(json.dumps({"asked": asked, "answers": answers, "pace": pace, "start": start}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
