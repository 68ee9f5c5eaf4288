"""Runs llama.cpp on a GGUF file in llama.cpp's own environment: greedy tokens of prompts, and the
decode rate of one answer.

Arguments are the file, the prompts as JSON, and the number of tokens. Prints one line of JSON.
"""

# pyright: reportMissingImports=false

import json
import os
import sys
import time

from llama_cpp import Llama

ROUNDS = 3


def main(file: str, prompts: list[str], count: int) -> None:
    started = time.perf_counter()
    threads = len(os.sched_getaffinity(0))  # llama.cpp's default is half of the cores
    llm = Llama(file, n_ctx=0, verbose=False, n_threads=threads, n_threads_batch=threads)
    start = time.perf_counter() - started

    def answer(tokens: list[int]) -> tuple[list[int], float]:
        """(greedy tokens after a prompt, seconds from the first to the last of them)."""
        answer_tokens = []
        times = []
        for token in llm.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
            answer_tokens.append(token)
            times.append(time.perf_counter())
            if len(answer_tokens) == count:
                break
        return answer_tokens, times[-1] - times[0]

    prompt_tokens = [llm.tokenize(prompt.encode(), add_bos=True) for prompt in prompts]
    answers = [answer(tokens)[0] for tokens in prompt_tokens]
    pace = max((count - 1) / answer(prompt_tokens[0])[1] for _ in range(ROUNDS))
    print(json.dumps({"asked": prompt_tokens, "answers": answers, "pace": pace, "start": start}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
