"""Recurrent-state snapshots over several devices leave outputs unchanged; run by
test_eight_devices.py.
"""

import random

import jax
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.serving.engine.snapshot import take_snapshot
from quire.tests.support import staggered_requests
from quire.tests.support.cases import thinned
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden

pytestmark = pytest.mark.usefixtures("few_programs")
assert len(jax.devices()) == 8

MESHES = {
    "replicas": {"data": 2},
    "stages": {"pipeline": 2},
    "stages of replicas, split by heads": {"data": 2, "pipeline": 2, "tensor": 2},
}
GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=1, ignore_eos=True)


def equal_outputs(request, expected_request) -> bool:
    """Equal tokens with nearly equal scores, since XLA's sums depend on the number of rows."""
    completion, expected = (item.output().outputs[0] for item in (request, expected_request))
    scores = (
        [[entry.logprob for entry in entries.values()] for entries in item.logprobs]
        for item in (completion, expected)
    )
    return completion.token_ids == expected.token_ids and np.allclose(*scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", thinned(MESHES, ["stages of replicas, split by heads"]))
def test_chats_resume_from_state_snapshots(name, tmp_path):
    """More chats, in turns, than the device has snapshots for: they resume from device, host, and
    disk after a restart.
    """
    mesh = MESHES[name]
    rng = random.Random(5)
    folder = Golden(
        next(variant for variant in VARIANTS if variant.name == "qwen3-5"), tmp_path / "model"
    ).folder
    options = {f"{axis}_parallel_size": size for axis, size in mesh.items()} | {
        "model": str(folder), "skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 4,
        "max_num_batched_tokens": 40, "kv_cache_memory_bytes": 2 << 20,
    }  # fmt: skip
    uncached_llm = LLM(**options, enable_prefix_caching=False)
    llm = None
    options |= {"kv_cache_host_bytes": 16 << 20, "kv_cache_disk": str(tmp_path / "disk")}
    chats = [[rng.randrange(160) for _ in range(rng.randint(30, 120))] for _ in range(8)]
    for turn in range(3):
        if llm is not None and turn == 2:
            llm.close()
            llm = None
        if llm is None:
            llm = LLM(**options)
            for table in llm.engine.tables:
                table.snapshots.distance = 32
        requests = {str(number): (list(chat), GREEDY) for number, chat in enumerate(chats)}
        cached = 0
        arrivals = {name: rng.randint(0, 20) for name in requests}
        finished = staggered_requests.serve(llm.engine, requests, arrivals)
        expected = staggered_requests.serve(uncached_llm.engine, requests, arrivals)
        for name, chat in zip(requests, chats, strict=True):
            assert equal_outputs(finished[name], expected[name]), f"turn {turn}, chat {name}"
            num_cached = finished[name].output().num_cached_tokens
            assert not turn or "data" in mesh or len(chat) - num_cached < 20 + 20 + 32, (
                f"turn {turn}, chat {name}"
            )
            cached += num_cached
            chat += [
                *finished[name].output().outputs[0].token_ids,
                *(rng.randrange(160) for _ in range(rng.randint(1, 20))),
            ]
        assert cached or not turn
    assert take_snapshot(llm.engine).recompiles == 0
    llm.close()
