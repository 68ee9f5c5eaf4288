"""Perplexity of texts by prompt log-probabilities.

Prints the perplexity of each text (the exponential of the mean negative log-probability of its
tokens; 1 would be certainty), and its least expected token with the token that the model predicted
instead.

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
# log-probabilities of each prompt token and of the most likely token
params = SamplingParams(max_tokens=1, prompt_logprobs=1)
for text, result in zip(TEXTS, llm.generate(TEXTS, params, use_tqdm=False), strict=True):
    predictions = []
    for token, entry in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
        best = min(entry.values(), key=lambda candidate: candidate.rank)
        predictions.append((entry[token].logprob, entry[token].decoded_token, best.decoded_token))
    perplexity = math.exp(-sum(logprob for logprob, *_ in predictions) / len(predictions))
    _, least, likeliest = min(predictions)
    print(
        f"{perplexity:8.1f}  {text}\n          least expected: {least!r}, in place of {likeliest!r}"
    )
