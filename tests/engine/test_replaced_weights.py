"""Weights that change on disk while the engine sleeps: no page of the old ones is found again."""

import pytest

from quire import LLM, SamplingParams
from quire.tests.support import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False)
PROMPT = {"prompt_token_ids": [(7 * at) % 90 for at in range(40)]}
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "kv_cache_memory_bytes": 1 << 20,
}


def answer(llm: LLM):
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return output.num_cached_tokens, output.outputs[0].token_ids, output.outputs[0].logprobs


def write_weights(folder, seed: int) -> None:
    tiny.write(folder, tensors=tiny.even(tiny.shapes(tiny.LLAMA), seed=seed))


def evict(llm: LLM) -> None:
    """Fill the cache with other prompts, so that the pages of this one go to the host."""
    others = [{"prompt_token_ids": [start] * 40} for start in range(8)]
    llm.generate(others, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_pages_of_weights_that_were_replaced_in_sleep_are_not_found(tmp_path, tier):
    folder = tmp_path / "model"
    write_weights(folder, seed=1)
    options = {"kv_cache_memory_bytes": 1 << 15, "kv_cache_host_bytes": 8 << 20}
    if tier == "disk":
        options["kv_cache_disk"] = str(tmp_path / "pages")
    options = OPTIONS | (options if tier != "device" else {})
    llm = LLM(str(folder), **options)
    _, *old = answer(llm)
    # the second time after a sleep with the same weights, whose pages are still good
    for _ in range(2):
        if tier != "device":
            evict(llm)
        num_cached, *again = answer(llm)
        assert again == old and num_cached >= 32
        llm.engine.sleep(2, keep_pages=tier == "device")
        llm.engine.lifecycle.wake_up()
    if tier != "device":
        evict(llm)
    llm.engine.sleep(2, keep_pages=tier == "device")
    write_weights(folder, seed=2)
    llm.engine.lifecycle.wake_up()
    num_cached, *new = answer(llm)
    llm.engine.scheduler.check()
    llm.close()
    cold = LLM(str(folder), **OPTIONS)
    assert (num_cached, *new) == answer(cold) and new != old
    if tier == "disk":
        again = LLM(str(folder), **options)
        assert answer(again) == (32, *new)  # whole pages, of the new weights
