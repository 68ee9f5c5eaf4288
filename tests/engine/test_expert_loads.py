"""What is counted of a mixture's experts, against the routing of a pass without a cache."""

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


def make(folder, **options) -> LLM:
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
    """A folder with experts in some layers, and an engine."""
    made = Golden(next(v for v in VARIANTS if v.name == "qwen3-moe"), tmp_path_factory.mktemp("g"))
    return made.folder, make(made.folder)


def routed(folder, sequences: list[list[int]]) -> dict[int, np.ndarray]:
    """By layer, how often each expert was chosen when these were computed."""
    config = loader.read_config(folder, "float32")
    weights = loader.load(folder, config)

    @jax.jit
    def chosen(weights, tokens_T):
        def record_experts(index, experts_TX, cache):
            return {**cache, "chosen": cache["chosen"] | {index: experts_TX}}

        T = len(tokens_T)
        hooks = LayerHooks(uncached.attention(config, 1, T), record_experts=record_experts)
        return decoder.forward(weights, {"chosen": {}}, tokens_T, jnp.arange(T), config, hooks)[1][
            "chosen"
        ]

    found = {}
    for tokens in sequences:
        for index, experts_TX in chosen(weights, jnp.array(tokens)).items():
            counts = np.bincount(np.asarray(experts_TX).reshape(-1), minlength=8)
            found[index] = found.get(index, 0) + counts
    return found


@pytest.mark.slow
def test_rows_of_each_expert(mixture):
    """Prompts in chunks, decoding and padding: every live row counts once, no other does."""
    folder, llm = mixture
    before = {layer: np.array(own["rows"]) for layer, own in llm.expert_loads().items()}
    prompts = [[(7 * i + 3 * j) % 160 for j in range(n)] for i, n in enumerate((41, 5, 18))]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS, use_tqdm=False)
    assert llm.engine.runner.compiles.recompiles == 0
    wanted = routed(
        folder,
        [ids + out.outputs[0].token_ids[:-1] for ids, out in zip(prompts, outputs, strict=True)],
    )
    found = llm.expert_loads()
    assert list(found) == sorted(wanted) != list(range(6))
    for layer, counts in wanted.items():
        assert (np.array(found[layer]["rows"]) - before[layer]).tolist() == counts.tolist()
    text = render({"m": llm.metrics})[0].decode()
    total = sum(sum(own["rows"]) for own in found.values())
    assert f'quire:expert_rows_total{{model_name="m"}} {float(total)}' in text
    assert f'quire:expert_skew{{layer="{next(iter(wanted))}",model_name="m"}}' in text
    assert llm.get_metrics()["quire:expert_rows_total"] == total


def test_a_fresh_state_loses_no_count(mixture):
    _, llm = mixture
    before = llm.get_metrics()["quire:expert_rows_total"]
    llm.engine.runner.reset()
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], PARAMS, use_tqdm=False)
    per_row = 3 * len(llm.expert_loads())
    assert llm.get_metrics()["quire:expert_rows_total"] == before + (3 + 8 - 1) * per_row


def test_what_an_operator_sees(mixture):
    engine = mixture[1].engine

    def ask(server, method: str, path: str) -> tuple[int, dict]:
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
        status, found = ask(server, "GET", "/expert_loads")
        assert (status, found["layers"]) == (
            200,
            json.loads(json.dumps(engine.runner.expert_loads.loads())),
        )
        status, found = ask(server, "POST", "/rebalance_experts")
        assert status == 400 and "expert_redundancy: is 0" in found["error"]["message"]


class Late:
    """An array on its way from a device."""

    def __init__(self, values):
        self.values = values
        self.ready = False

    def is_ready(self) -> bool:
        return self.ready

    def copy_to_host_async(self) -> None: ...

    def __array__(self, dtype=None, copy=None):
        assert self.ready, "waited"
        return np.asarray(self.values)


def test_counters_that_wrap_and_come_late(mixture):
    """They are asked for every so often, taken when they are there, and may pass 2^32."""
    config = mixture[1].engine.runner.config
    host = ExpertLoads(config)
    state = State({}, loads_nLE="loads")
    asked = []
    shape = host.rows_LE.shape
    rows = 0

    def program(loads):
        assert loads == "loads"
        asked.append(Late(np.full(shape, rows % (1 << 32), np.uint32)))
        return asked[-1]

    host.program = program
    for step in range(1, 12 * expert_loads.EVERY + 1):
        rows += (1 << 30) // expert_loads.EVERY
        if step % (2 * expert_loads.EVERY) == 5:
            for late in asked:
                late.ready = True
        host.launched(state)
        assert len(asked) <= step // expert_loads.EVERY
    for late in asked:
        late.ready = True
    host.since = 0
    host.settle(state)
    assert (host.rows_LE == host.rows_LE[0, 0]).all() and host.rows_LE[0, 0] > 1 << 33
    assert int(host.rows_LE[0, 0]) % (1 << 32) == int(asked[-1].values[0, 0])
    assert set(host.skew().values()) == {1.0}


def test_a_model_without_experts():
    llm = LLM(
        max_num_seqs=2, max_num_batched_tokens=16, kv_cache_memory_bytes=64 << 20, max_model_len=64
    )
    with pytest.raises(RequestError, match="model: has no experts"):
        llm.expert_loads()
    assert not [name for name in llm.get_metrics() if "expert" in name]
