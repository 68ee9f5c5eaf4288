"""Compares counts of tokens per expert with the routing of a forward pass without a KV cache."""

import http.client
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.model import decoder
from quire.model.checkpoint import loader
from quire.model.mixers import LayerHooks
from quire.serving.api.errors import RequestError
from quire.serving.device import expert_loads
from quire.serving.device.expert_loads import ExpertLoads
from quire.serving.device.state import State
from quire.serving.observe.metrics import render
from quire.tests.support import uncached
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden
from quire.tests.support.served import model_of, served

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make_llm(folder, **options) -> LLM:
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        **options,
    )


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The folder of a model with experts in some layers, and its LLM."""
    golden = Golden(
        next(v for v in VARIANTS if v.name == "qwen3-moe"), tmp_path_factory.mktemp("g")
    )
    return golden.folder, make_llm(golden.folder)


def reference_counts(folder, sequences: list[list[int]]) -> dict[int, np.ndarray]:
    """Returns, by layer, how often each expert is chosen for the sequences' tokens."""
    config = loader.read_config(folder, "float32")
    weights = loader.load(folder, config)

    @jax.jit
    def chosen_experts(weights, tokens_T):
        def record_experts(index, experts_TX, cache):
            return {**cache, "chosen": cache["chosen"] | {index: experts_TX}}

        T = len(tokens_T)
        hooks = LayerHooks(uncached.attention(config, 1, T), record_experts=record_experts)
        return decoder.forward(weights, {"chosen": {}}, tokens_T, jnp.arange(T), config, hooks)[1][
            "chosen"
        ]

    counts_by_layer = {}
    for tokens in sequences:
        for index, experts_TX in chosen_experts(weights, jnp.array(tokens)).items():
            counts = np.bincount(np.asarray(experts_TX).reshape(-1), minlength=8)
            counts_by_layer[index] = counts_by_layer.get(index, 0) + counts
    return counts_by_layer


@pytest.mark.slow
def test_expert_counts_match_reference_routing(mixture):
    """With chunked prompts, decoding and padding, every real token counts once."""
    folder, llm = mixture
    counts_before = {
        layer: np.array(layer_loads["rows"]) for layer, layer_loads in llm.expert_loads().items()
    }
    prompts = [[(7 * i + 3 * j) % 160 for j in range(n)] for i, n in enumerate((41, 5, 18))]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS, use_tqdm=False)
    assert llm.engine.runner.compiles.recompiles == 0
    expected = reference_counts(
        folder,
        [
            ids + output.outputs[0].token_ids[:-1]
            for ids, output in zip(prompts, outputs, strict=True)
        ],
    )
    loads = llm.expert_loads()
    assert list(loads) == sorted(expected) != list(range(6))
    for layer, counts in expected.items():
        assert (np.array(loads[layer]["rows"]) - counts_before[layer]).tolist() == counts.tolist()
    text = render({"m": llm.metrics})[0].decode()
    total_count = sum(sum(layer_loads["rows"]) for layer_loads in loads.values())
    assert f'quire:expert_rows_total{{model_name="m"}} {float(total_count)}' in text
    assert f'quire:expert_skew{{layer="{next(iter(expected))}",model_name="m"}}' in text
    assert llm.get_metrics()["quire:expert_rows_total"] == total_count


def test_expert_counts_survive_a_reset(mixture):
    _, llm = mixture
    count_before = llm.get_metrics()["quire:expert_rows_total"]
    llm.engine.runner.reset()
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], PARAMS, use_tqdm=False)
    counts_per_token = 3 * len(llm.expert_loads())
    assert (
        llm.get_metrics()["quire:expert_rows_total"]
        == count_before + (3 + 8 - 1) * counts_per_token
    )


def test_expert_load_endpoints(mixture):
    engine = mixture[1].engine

    def request_json(server, method: str, path: str) -> tuple[int, dict]:
        connection = http.client.HTTPConnection(
            *server.url.removeprefix("http://").split(":"), timeout=120
        )
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    with served(model_of(engine), admin=True) as server:
        status, body = request_json(server, "GET", "/expert_loads")
        assert (status, body["layers"]) == (
            200,
            json.loads(json.dumps(engine.runner.expert_loads.loads())),
        )
        status, body = request_json(server, "POST", "/rebalance_experts")
        assert status == 400 and "expert_redundancy: is 0" in body["error"]["message"]


class PendingArray:
    """An array that is being copied from a device."""

    def __init__(self, values):
        self.values = values
        self.ready = False

    def is_ready(self) -> bool:
        return self.ready

    def copy_to_host_async(self) -> None: ...

    def __array__(self, dtype=None, copy=None):
        assert self.ready, "waited"
        return np.asarray(self.values)


def test_expert_counters_may_wrap_and_arrive_late(mixture):
    """Counters are fetched every EVERY steps, added once they arrive, and wrap at 2^32."""
    config = mixture[1].engine.runner.config
    host = ExpertLoads(config)
    state = State({}, loads_nLE="loads")
    pending_arrays = []
    shape = host.rows_LE.shape
    count = 0

    def start_fetch(loads):
        assert loads == "loads"
        pending_arrays.append(PendingArray(np.full(shape, count % (1 << 32), np.uint32)))
        return pending_arrays[-1]

    host.program = start_fetch
    for step in range(1, 12 * expert_loads.EVERY + 1):
        count += (1 << 30) // expert_loads.EVERY
        if step % (2 * expert_loads.EVERY) == 5:
            for pending_array in pending_arrays:
                pending_array.ready = True
        host.launched(state)
        assert len(pending_arrays) <= step // expert_loads.EVERY
    for pending_array in pending_arrays:
        pending_array.ready = True
    host.since = 0
    host.settle(state)
    assert (host.rows_LE == host.rows_LE[0, 0]).all() and host.rows_LE[0, 0] > 1 << 33
    assert int(host.rows_LE[0, 0]) % (1 << 32) == int(pending_arrays[-1].values[0, 0])
    assert set(host.skew().values()) == {1.0}


def test_model_without_experts_has_no_expert_loads():
    llm = LLM(
        max_num_seqs=2, max_num_batched_tokens=16, kv_cache_memory_bytes=64 << 20, max_model_len=64
    )
    with pytest.raises(RequestError, match="model: has no experts"):
        llm.expert_loads()
    assert not [name for name in llm.get_metrics() if "expert" in name]
