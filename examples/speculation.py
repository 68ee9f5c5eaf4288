"""Plain decoding beside speculative decoding: several tokens a step where they can be guessed.

Prints for both the tokens a second, and for the second how many drafts were right. The answers are
the same, token by token, and that is checked. How much it gains depends on the text and on the
model: a large model gains, where the drafts are right; the bundled one is so small that its steps
cost little to begin with.

    python examples/speculation.py [MODEL]      # without MODEL: the bundled one
"""

import sys
import time

from quire import LLM, SamplingParams

# what is repeated is easily guessed
PROMPT = "Remember this list.\n- Ravi: snow\n- Ella: farm\n- Emma: glass\n" * 6
PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def decode(**options) -> list[int]:
    """The tokens of the answer; prints how fast they came."""
    llm = LLM(*sys.argv[1:], max_num_seqs=1, **options)
    llm.generate("Once", SamplingParams(max_tokens=8), use_tqdm=False)  # the first steps are slower
    start = time.perf_counter()
    (result,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    seconds = time.perf_counter() - start
    spent = result.metrics
    name = "speculative" if options else "plain"
    drafts = (
        f", {spent.num_accepted_tokens} of {spent.num_draft_tokens} drafts were right"
        if options
        else ""
    )
    print(f"{name:12} {len(result.outputs[0].token_ids) / seconds:6.0f} tokens a second{drafts}")
    return list(result.outputs[0].token_ids)


plain = decode()
guessed = decode(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
assert plain == guessed
print("the answers are the same")
