"""Weights replaced during a sleep: pages computed with the old weights are not used."""

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


def generate(llm: LLM):
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return output.num_cached_tokens, output.outputs[0].token_ids, output.outputs[0].logprobs


def write_weights(folder, seed: int) -> None:
    tiny.write(folder, tensors=tiny.even(tiny.shapes(tiny.LLAMA), seed=seed))


def evict(llm: LLM) -> None:
    """Fills the cache with other prompts, so that the pages of PROMPT are offloaded."""
    other_prompts = [{"prompt_token_ids": [start] * 40} for start in range(8)]
    llm.generate(other_prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_weights_replaced_during_sleep_invalidate_cached_pages(tmp_path, tier):
    folder = tmp_path / "model"
    write_weights(folder, seed=1)
    options = {"kv_cache_memory_bytes": 1 << 15, "kv_cache_host_bytes": 8 << 20}
    if tier == "disk":
        options["kv_cache_disk"] = str(tmp_path / "pages")
    options = OPTIONS | (options if tier != "device" else {})
    llm = LLM(str(folder), **options)
    _, *old_answer = generate(llm)
    # the second time after a sleep with unchanged weights, when cached pages are still valid
    for _ in range(2):
        if tier != "device":
            evict(llm)
        num_cached, *later_answer = generate(llm)
        assert later_answer == old_answer and num_cached >= 32
        llm.engine.sleep(2, keep_pages=tier == "device")
        llm.engine.lifecycle.wake_up()
    if tier != "device":
        evict(llm)
    llm.engine.sleep(2, keep_pages=tier == "device")
    write_weights(folder, seed=2)
    llm.engine.lifecycle.wake_up()
    num_cached, *new_answer = generate(llm)
    llm.engine.scheduler.check()
    llm.close()
    cold_llm = LLM(str(folder), **OPTIONS)
    assert (num_cached, *new_answer) == generate(cold_llm) and new_answer != old_answer
    if tier == "disk":
        later_answer = LLM(str(folder), **options)
        assert generate(later_answer) == (32, *new_answer)  # full pages of the new weights
