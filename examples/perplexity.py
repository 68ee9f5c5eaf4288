"""How well a model knows a text, and where it is surprised.

Prints the perplexity of each text (e to the mean of minus the log-probabilities of its tokens; 1
would be certainty), and the token that the model expected least, with what it would have written
there.

    python examples/perplexity.py [MODEL]      # without MODEL: the bundled one
"""

import math
import sys

from quire import LLM, SamplingParams

TEXTS = [
    "Once upon a time, there was a little fox. The fox lived in a small house near the forest.",
    "Once upon a time, the committee published its quarterly report on interest rates.",
]

llm = LLM(*sys.argv[1:])
# the token that is there, and the likeliest
params = SamplingParams(max_tokens=1, prompt_logprobs=1)
for text, result in zip(TEXTS, llm.generate(TEXTS, params, use_tqdm=False), strict=True):
    there = []
    for token, entry in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
        best = min(entry.values(), key=lambda one: one.rank)
        there.append((entry[token].logprob, entry[token].decoded_token, best.decoded_token))
    perplexity = math.exp(-sum(logprob for logprob, *_ in there) / len(there))
    _, least, likeliest = min(there)
    print(
        f"{perplexity:8.1f}  {text}\n          least expected: {least!r}, in place of {likeliest!r}"
    )
