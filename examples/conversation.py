"""A chat of several turns.

Prints each question with its answer, and how many tokens of the conversation so far were found in
the prefix cache: all turns before are, so each turn computes only what is new.

    python examples/conversation.py [MODEL]      # without MODEL: the bundled one
"""

import sys

from quire import LLM, SamplingParams

QUESTIONS = [
    "Sort: 52 31 90",
    "What is 34 + 57?",
    "Reverse: a b c",
    "Give JSON for: Anna is 31 and lives in Oslo",
]

llm = LLM(*sys.argv[1:])
params = SamplingParams(temperature=0, max_tokens=64)
messages = []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    (result,) = llm.chat(messages, params, use_tqdm=False)
    answer = result.outputs[0].text
    messages.append({"role": "assistant", "content": answer})
    print(
        f"{question} -> {answer}    [{result.num_cached_tokens} of "
        f"{len(result.prompt_token_ids)} tokens cached]"
    )
