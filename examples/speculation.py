"""Plain decoding compared with speculative decoding, which generates several tokens per step if
drafts are accepted.

Prints the tokens per second of both, and the number of accepted draft tokens. Checks that the
answers are identical. The speedup depends on text and model: large models gain where drafts are
accepted; the bundled model is so small that its steps are cheap anyway.

    python examples/speculation.py [MODEL]      # without MODEL: the bundled one
"""

import sys
import time

from quire import LLM, SamplingParams

# repeated text, which n-gram drafts predict well
PROMPT = "Remember this list.\n- Ravi: snow\n- Ella: farm\n- Emma: glass\n" * 6
PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def decode(**options) -> list[int]:
    """Return the tokens of the answer, and print the speed."""
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


plain_tokens = decode()
speculative_tokens = decode(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
assert plain_tokens == speculative_tokens
print("the answers are the same")
