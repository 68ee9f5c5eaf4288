"""Several questions about one long document: its pages of the KV cache are computed once.

Prints for each question how many of its tokens were found in the cache, the time to the first
token, and the answer. The first question finds nothing; each later one finds the document.

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
    + "\n".join(f"- {name}: {what}" for name, what in LIST.items())
    + f"\n\n{STORY * 4}"
)

llm = LLM(*sys.argv[1:])
for name in ("Ella", "Theo", "Leo"):
    asked = [{"role": "user", "content": f"{DOCUMENT}\n\nWhat does {name} have?"}]
    (result,) = llm.chat(asked, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    milliseconds = 1000 * (result.metrics.time_to_first_token or 0)
    found = f"{result.num_cached_tokens:4} of {len(result.prompt_token_ids)} tokens cached"
    print(f"{name:6} {found}, {milliseconds:6.1f} ms   {result.outputs[0].text}")
