"""Adapters over several devices, which a CPU pretends to have: run by test_eight_devices.py, in its
own process.
"""

import random
import re
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from quire import LLM, LoRARequest, SamplingParams
from quire.model.checkpoint import loader
from quire.model.checkpoint.adapter_targets import (
    AdaptedMatrix,
    AdapterTarget,
    add_adapter_stacks,
    list_targets,
)
from quire.model.checkpoint.adapters import read_adapter, shard_adapter
from quire.model.checkpoint.placement import Placement
from quire.model.config import ModelError
from quire.model.families.common import SourceTensor
from quire.model.partition import local_config, splits
from quire.ops.adapter import adapter_stacks, with_rows, with_stacks, write_slot
from quire.serving.engine.cache_size import held_bytes
from quire.serving.engine.snapshot import take_snapshot
from quire.sharding.mesh import device_axes, make_mesh
from quire.sharding.spec import Interleaved
from quire.tests.support import peft, tiny, tiny_moe, uncached
from quire.tests.support.cases import nightly_from, thinned
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden

pytestmark = pytest.mark.usefixtures("few_programs")
assert len(jax.devices()) == 8

NAMED = {variant.name: variant for variant in VARIANTS}
SLOTS = 3
SLOT = 1


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(NAMED[name], tmp_path_factory.mktemp("g")))


def drawn(config, rank: int = 4) -> dict[str, np.ndarray]:
    """Random matrices for all that takes an adapter."""
    rng = np.random.default_rng(0)
    found = {}
    for part in (part for target in list_targets(config) for part in target.matrices):
        module = part.source.name.removesuffix(".weight")
        outputs, inputs = part.shape
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            value = rng.standard_normal(shape) * 0.4 / shape[1] ** 0.5
            found[f"base_model.model.{module}.lora_{half}.weight"] = value.astype(np.float32)
    return found


def logits_of(folder, config, adapter, tokens, mesh=None, modules=()) -> np.ndarray:
    """The logits of every row with the adapter in one of several slots, on one device or over a
    mesh.
    """
    weights = add_adapter_stacks(
        loader.load(folder, config, Placement(mesh)), config, SLOTS, 8, mesh, modules
    )
    if adapter is not None:
        found = read_adapter(adapter, config, list_targets(config, modules), 8, folder)
        matrices = found.matrices if mesh is None else shard_adapter(found, mesh)
        places = jax.tree.map(lambda leaf: leaf.sharding, adapter_stacks(weights))
        stacks = jax.device_put(write_slot(adapter_stacks(weights), SLOT, matrices), places)
        weights = with_stacks(weights, stacks)

    def run(weights, tokens):
        weights = with_rows(weights, jnp.full(tokens.size, SLOT), SLOTS)
        return uncached.forward(weights, tokens, local_config(config, mesh), device_axes(mesh))

    if mesh is not None:
        places = jax.tree.map(lambda leaf: leaf.sharding.spec, weights)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(places, P()),
            out_specs=P(None, None, "tensor"),
            check_vma=False,
        )
    return np.asarray(jax.jit(run)(weights, tokens))[..., : config.vocab_size]


FAMILIES = [
    "llama",
    "mistral",
    "gemma2",
    "qwen3-5",
    "deepseek-v3",
    "nemotron-h",
    "granite-hybrid",
    "falcon-h1",
    "lfm2",
    "phi3",
]


@pytest.mark.parametrize("name", thinned(FAMILIES, ["deepseek-v3"]))
def test_logits(name, golden, tmp_path):
    """With every matrix adapted that can be: those of one device."""
    made = golden(name)
    config = loader.read_config(made.folder, "float32", NAMED[name].max_len)
    adapter = peft.write(tmp_path, drawn(config))
    tokens = jnp.array([made.prompts[0][:24]])
    one = logits_of(made.folder, config, adapter, tokens)
    assert np.abs(one - logits_of(made.folder, config, None, tokens)).max() > 0.1
    sizes = [size for size in (2, 4) if splits(config, tensor=size)]
    assert sizes
    for size in sizes:
        many = logits_of(made.folder, config, adapter, tokens, make_mesh(tensor=size))
        np.testing.assert_allclose(many, one, rtol=0, atol=1e-3, err_msg=str(size))


@pytest.mark.parametrize("name", thinned(tiny_moe.CONFIGS, ["qwen3_moe"]))
def test_experts(name, tmp_path):
    """Of every expert each device has its own columns; of DoRA the lengths of its own outputs, or
    of its own sums.
    """
    tensors = tiny_moe.write(tmp_path / "base", name)
    config = loader.read_config(tmp_path / "base")
    modules = tiny_moe.MODULES[name]
    tokens = jnp.arange(24)[None]
    own = peft.draw(tensors, (*peft.EVERY, *tiny_moe.EXPERTS[name], "gate", "lm_head"))
    adapter = peft.write(
        tmp_path / "adapter", own | peft.magnitude_vectors(tensors, own), {"use_dora": True}
    )
    one = logits_of(tmp_path / "base", config, adapter, tokens, modules=modules)
    assert np.abs(one - logits_of(tmp_path / "base", config, None, tokens)).max() > 0.1
    for size in (2, 4):
        many = logits_of(
            tmp_path / "base", config, adapter, tokens, make_mesh(tensor=size), modules
        )
        np.testing.assert_allclose(many, one, rtol=0, atol=1e-3, err_msg=str(size))


def test_the_parts_of_a_fused_weight():
    """Where each run is split by itself every device has some of each part; where it is not, no
    ranges would do.
    """
    parts = tuple(
        AdaptedMatrix((4, 8), SourceTensor(f"part {n}", (4, 8)), n, 4 * n, 4 * n + 4)
        for n in range(2)
    )
    mesh = make_mesh(tensor=2)
    fused = AdapterTarget((8,), (8,), (None, Interleaved("heads", (4, 4))), parts)
    assert fused.ranges(None) == ((0, 4), (4, 8)) and fused.ranges(mesh) == ((0, 2), (2, 4))
    assert AdapterTarget((8,), (2, 4), (None, None, "ffn"), parts).ranges(mesh) == ((0, 2), (2, 4))
    with pytest.raises(ModelError, match="the devices have unequal parts of part 0"):
        AdapterTarget((8,), (8,), (None, "heads"), parts).ranges(mesh)


COUNT = 9
CONFIG = tiny.LLAMA | {"intermediate_size": 64, "vocab_size": 97}  # which divides over no devices
OPTIONS = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 22,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "enable_lora": True,
    "max_loras": SLOTS,
    "max_lora_rank": 8,
    "max_cpu_loras": COUNT,
}
PARAMS = SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models whose head is their own and is not, and adapters for all of their matrices."""
    root = tmp_path_factory.mktemp("adapters")
    tensors = tiny.write(root / "own", CONFIG, tiny.even(tiny.shapes(CONFIG)))
    tied = CONFIG | {"tie_word_embeddings": True}
    tiny.write(root / "tied", tied, tiny.even(tiny.shapes(tied)))
    for number in range(COUNT):
        rank = 1 + number % 8
        peft.write(
            root / str(number),
            peft.draw(tensors, (*peft.EVERY, "lm_head"), rank, seed=number),
            {"r": rank},
        )
    return root


def answers(llm, prompts, requests):
    """Tokens and log-probabilities."""
    outputs = [
        output.outputs[0]
        for output in llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests)
    ]
    return [
        (out.token_ids, [{t: e.logprob for t, e in step.items()} for step in out.logprobs])
        for out in outputs
    ]


def check(found, wanted, near: float = 2e-4) -> None:
    """The same tokens, and scores that are near."""
    for (tokens, scores), (own, others) in zip(found, wanted, strict=True):
        assert tokens == own
        for score, other in zip(scores, others, strict=True):
            assert score == pytest.approx(other, abs=near)


ENGINES = [
    ("tied", {"tensor_parallel_size": 4}),  # two devices have the same key-value head
    ("own", {"tensor_parallel_size": 2}),
    ("own", {"tensor_parallel_size": 2, "quantization": "int8-weights"}),
    ("tied", {"tensor_parallel_size": 2, "quantization": "int8-weights"}),
    (
        "own",
        {
            "tensor_parallel_size": 4,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        },
    ),
]


@pytest.mark.parametrize(("name", "many"), nightly_from(1, ENGINES), ids=str)
def test_many_at_once(name, many, folders):
    """More adapters than slots, and requests without any: the tokens of one device, each as if it
    were alone.
    """
    rng = random.Random(4)
    numbers = [*range(COUNT), None, 3, None]
    prompts = [[rng.randrange(97) for _ in range(rng.choice([1, 6, 17, 40]))] for _ in numbers]
    requests = [
        None if n is None else LoRARequest(f"a{n}", n + 1, str(folders / str(n))) for n in numbers
    ]
    alike = {option: value for option, value in many.items() if option == "quantization"}
    # kernels of rounded weights round rows too, and last bits of a mesh differ
    near = 2e-2 if alike else 2e-4
    with LLM(str(folders / name), **OPTIONS, **alike) as one:
        wanted = answers(one, prompts, requests)
        whole = held_bytes(adapter_stacks(one.engine.runner.weights))
    with LLM(str(folders / name), **OPTIONS, **many) as llm:
        found = answers(llm, prompts, requests)
        check(found, wanted, near)
        for i in (0, 4, 8, 9):
            llm.reset_prefix_cache()
            check(answers(llm, [prompts[i]], requests[i]), [found[i]], near)
        llm.sleep()
        llm.wake_up()
        check(answers(llm, prompts, requests), found, near)
        assert take_snapshot(llm.engine).recompiles == 0
        assert held_bytes(adapter_stacks(llm.engine.runner.weights)) < 0.8 * whole
    assert len({tuple(tokens) for tokens, _ in found}) > COUNT // 2


def test_adapters_send_nothing(folders):
    """A step with them sums over the devices what one without them does, and no more."""

    def sent(**options) -> list[tuple[str, str]]:
        with LLM(str(folders / "own"), tensor_parallel_size=2, **options) as llm:
            compiled = llm.engine.runner.compiled
            return sorted(
                re.findall(r"= (\w+\[[\d,]*\])\S* (all-\w+)\(", compiled[max(compiled)].as_text())
            )

    plain = {name: value for name, value in OPTIONS.items() if "lora" not in name}
    found = sent(**plain)
    assert sent(**OPTIONS) == found and any(kind == "all-reduce" for _, kind in found)
