"""LoRA adapters over eight simulated CPU devices; run by test_eight_devices.py in a process of its
own.
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

VARIANT_BY_NAME = {variant.name: variant for variant in VARIANTS}
SLOTS = 3
SLOT = 1


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(VARIANT_BY_NAME[name], tmp_path_factory.mktemp("g")))


def random_adapter(config, rank: int = 4) -> dict[str, np.ndarray]:
    """Random LoRA matrices for every adaptable weight."""
    rng = np.random.default_rng(0)
    tensors = {}
    for matrix in (matrix for target in list_targets(config) for matrix in target.matrices):
        module = matrix.source.name.removesuffix(".weight")
        outputs, inputs = matrix.shape
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            value = rng.standard_normal(shape) * 0.4 / shape[1] ** 0.5
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = value.astype(np.float32)
    return tensors


def compute_logits(folder, config, adapter, tokens, mesh=None, modules=()) -> np.ndarray:
    """Logits of every row with the adapter in one of several slots, on one device or over a
    mesh.
    """
    weights = add_adapter_stacks(
        loader.load(folder, config, Placement(mesh)), config, SLOTS, 8, mesh, modules
    )
    if adapter is not None:
        adapter_weights = read_adapter(adapter, config, list_targets(config, modules), 8, folder)
        matrices = (
            adapter_weights.matrices if mesh is None else shard_adapter(adapter_weights, mesh)
        )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, adapter_stacks(weights))
        stacks = jax.device_put(write_slot(adapter_stacks(weights), SLOT, matrices), shardings)
        weights = with_stacks(weights, stacks)

    def run(weights, tokens):
        weights = with_rows(weights, jnp.full(tokens.size, SLOT), SLOTS)
        return uncached.forward(weights, tokens, local_config(config, mesh), device_axes(mesh))

    if mesh is not None:
        shardings = jax.tree.map(lambda leaf: leaf.sharding.spec, weights)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(shardings, P()),
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
def test_adapter_logits_equal_one_device(name, golden, tmp_path):
    """With every adaptable matrix adapted."""
    golden_case = golden(name)
    config = loader.read_config(golden_case.folder, "float32", VARIANT_BY_NAME[name].max_len)
    adapter = peft.write(tmp_path, random_adapter(config))
    tokens = jnp.array([golden_case.prompts[0][:24]])
    expected = compute_logits(golden_case.folder, config, adapter, tokens)
    assert np.abs(expected - compute_logits(golden_case.folder, config, None, tokens)).max() > 0.1
    sizes = [size for size in (2, 4) if splits(config, tensor=size)]
    assert sizes
    for size in sizes:
        logits = compute_logits(golden_case.folder, config, adapter, tokens, make_mesh(tensor=size))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3, err_msg=str(size))


@pytest.mark.parametrize("name", thinned(tiny_moe.CONFIGS, ["qwen3_moe"]))
def test_expert_adapters_equal_one_device(name, tmp_path):
    """Each device has its own columns of every expert; DoRA norms are of the device's own outputs
    or partial sums.
    """
    tensors = tiny_moe.write(tmp_path / "base", name)
    config = loader.read_config(tmp_path / "base")
    modules = tiny_moe.MODULES[name]
    tokens = jnp.arange(24)[None]
    adapter_tensors = peft.draw(tensors, (*peft.EVERY, *tiny_moe.EXPERTS[name], "gate", "lm_head"))
    adapter = peft.write(
        tmp_path / "adapter",
        adapter_tensors | peft.magnitude_vectors(tensors, adapter_tensors),
        {"use_dora": True},
    )
    expected = compute_logits(tmp_path / "base", config, adapter, tokens, modules=modules)
    assert np.abs(expected - compute_logits(tmp_path / "base", config, None, tokens)).max() > 0.1
    for size in (2, 4):
        logits = compute_logits(
            tmp_path / "base", config, adapter, tokens, make_mesh(tensor=size), modules
        )
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3, err_msg=str(size))


def test_adapter_ranges_of_a_fused_weight():
    """If each matrix is split separately, every device has a range of each; otherwise the ranges
    would be unequal.
    """
    matrices = tuple(
        AdaptedMatrix((4, 8), SourceTensor(f"part {n}", (4, 8)), n, 4 * n, 4 * n + 4)
        for n in range(2)
    )
    mesh = make_mesh(tensor=2)
    fused = AdapterTarget((8,), (8,), (None, Interleaved("heads", (4, 4))), matrices)
    assert fused.ranges(None) == ((0, 4), (4, 8)) and fused.ranges(mesh) == ((0, 2), (2, 4))
    assert AdapterTarget((8,), (2, 4), (None, None, "ffn"), matrices).ranges(mesh) == (
        (0, 2),
        (2, 4),
    )
    with pytest.raises(ModelError, match="the devices have unequal parts of part 0"):
        AdapterTarget((8,), (8,), (None, "heads"), matrices).ranges(mesh)


NUM_ADAPTERS = 9
CONFIG = tiny.LLAMA | {
    "intermediate_size": 64,
    "vocab_size": 97,
}  # a vocabulary that no device count divides
OPTIONS = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 22,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "enable_lora": True,
    "max_loras": SLOTS,
    "max_lora_rank": 8,
    "max_cpu_loras": NUM_ADAPTERS,
}
PARAMS = SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with tied and untied output heads, and adapters for all of their matrices."""
    root = tmp_path_factory.mktemp("adapters")
    tensors = tiny.write(root / "own", CONFIG, tiny.even(tiny.shapes(CONFIG)))
    tied_config = CONFIG | {"tie_word_embeddings": True}
    tiny.write(root / "tied", tied_config, tiny.even(tiny.shapes(tied_config)))
    for number in range(NUM_ADAPTERS):
        rank = 1 + number % 8
        peft.write(
            root / str(number),
            peft.draw(tensors, (*peft.EVERY, "lm_head"), rank, seed=number),
            {"r": rank},
        )
    return root


def generate_scores(llm, prompts, requests):
    """Token ids and logprobs of each completion."""
    outputs = [
        output.outputs[0]
        for output in llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests)
    ]
    return [
        (out.token_ids, [{t: e.logprob for t, e in step.items()} for step in out.logprobs])
        for out in outputs
    ]


def check_outputs(outputs, expected, tolerance: float = 2e-4) -> None:
    """Equal tokens, and scores within the tolerance."""
    for (tokens, scores), (expected_tokens, expected_scores) in zip(outputs, expected, strict=True):
        assert tokens == expected_tokens
        for score, expected_score in zip(scores, expected_scores, strict=True):
            assert score == pytest.approx(expected_score, abs=tolerance)


ENGINES = [
    ("tied", {"tensor_parallel_size": 4}),  # two devices share a key-value head
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


@pytest.mark.parametrize(("name", "options"), nightly_from(1, ENGINES), ids=str)
def test_many_adapters_equal_one_device(name, options, folders):
    """More adapters than slots, and requests without adapter; each request gives the tokens that it
    gives alone.
    """
    rng = random.Random(4)
    numbers = [*range(NUM_ADAPTERS), None, 3, None]
    prompts = [[rng.randrange(97) for _ in range(rng.choice([1, 6, 17, 40]))] for _ in numbers]
    requests = [
        None if n is None else LoRARequest(f"a{n}", n + 1, str(folders / str(n))) for n in numbers
    ]
    shared_options = {
        option: value for option, value in options.items() if option == "quantization"
    }
    # quantized kernels round activations too, and a mesh changes last bits
    tolerance = 2e-2 if shared_options else 2e-4
    with LLM(str(folders / name), **OPTIONS, **shared_options) as single_llm:
        expected = generate_scores(single_llm, prompts, requests)
        single_device_bytes = held_bytes(adapter_stacks(single_llm.engine.runner.weights))
    with LLM(str(folders / name), **OPTIONS, **options) as llm:
        outputs = generate_scores(llm, prompts, requests)
        check_outputs(outputs, expected, tolerance)
        for i in (0, 4, 8, 9):
            llm.reset_prefix_cache()
            check_outputs(generate_scores(llm, [prompts[i]], requests[i]), [outputs[i]], tolerance)
        llm.sleep()
        llm.wake_up()
        check_outputs(generate_scores(llm, prompts, requests), outputs, tolerance)
        assert take_snapshot(llm.engine).recompiles == 0
        assert held_bytes(adapter_stacks(llm.engine.runner.weights)) < 0.8 * single_device_bytes
    assert len({tuple(tokens) for tokens, _ in outputs}) > NUM_ADAPTERS // 2


def test_adapters_add_no_collectives(folders):
    """A step with adapters has the same collectives as one without."""

    def collectives(**options) -> list[tuple[str, str]]:
        with LLM(str(folders / "own"), tensor_parallel_size=2, **options) as llm:
            compiled = llm.engine.runner.compiled
            return sorted(
                re.findall(r"= (\w+\[[\d,]*\])\S* (all-\w+)\(", compiled[max(compiled)].as_text())
            )

    options_without_lora = {name: value for name, value in OPTIONS.items() if "lora" not in name}
    expected = collectives(**options_without_lora)
    assert collectives(**OPTIONS) == expected and any(kind == "all-reduce" for _, kind in expected)
