"""A chat of several turns with prefix caching.

Prints each question with its answer and the number of prompt tokens found in the prefix cache. All
previous turns are cached, so each turn computes only its new tokens.

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
