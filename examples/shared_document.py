"""Several questions about one long document, which prefix caching computes only once.

Prints for each question the number of cached prompt tokens, the time to first token, and the
answer. The first question finds nothing in the cache; later ones find the document.

    python examples/shared_document.py [MODEL]      # without MODEL: the bundled one
"""

import sys

from quire import LLM, SamplingParams

LIST = {
    "Mia": "apple",
    "Leo": "key",
    "Ella": "farm",
    "Ravi": "snow",
    "Nora": "glass",
    "Theo": "moon",
}
STORY = """Once upon a time, there was a brave bear named Tom. Tom lived near the lake. One sunny day he found a drum.
"Who does this belong to?" he asked. Tom took it to the village, and a shy girl said it was hers. They were friends from
then on. """
DOCUMENT = (
    "Remember this list.\n"
    + "\n".join(f"- {name}: {item}" for name, item in LIST.items())
    + f"\n\n{STORY * 4}"
)

llm = LLM(*sys.argv[1:])
for name in ("Ella", "Theo", "Leo"):
    messages = [{"role": "user", "content": f"{DOCUMENT}\n\nWhat does {name} have?"}]
    (result,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    milliseconds = 1000 * (result.metrics.time_to_first_token or 0)
    cache_hits = f"{result.num_cached_tokens:4} of {len(result.prompt_token_ids)} tokens cached"
    print(f"{name:6} {cache_hits}, {milliseconds:6.1f} ms   {result.outputs[0].text}")
