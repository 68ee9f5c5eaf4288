"""Adapters in PEFT's format match the merged model; errors name unsupported options and tensors.

The reference merges W + scale * B A into the checkpoint's tensors in numpy and loads the result.
"""

import json
import math
import shutil
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.model.checkpoint import adapters, loader
from quire.model.checkpoint.adapter_targets import add_adapter_stacks, all_targets, list_targets
from quire.model.checkpoint.adapters import read_adapter
from quire.model.checkpoint.safetensors import Tensor, read_header
from quire.model.config import ModelError
from quire.ops.adapter import adapter_stacks, with_rows, with_stacks, write_slot
from quire.tests.support import peft, tiny, tiny_moe, tiny_qwen, uncached
from quire.tests.support.golden.families import VARIANTS

pytestmark = pytest.mark.usefixtures("few_programs")
TOKENS = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
# the first golden variant of each type of model
VARIANT_BY_MODEL_TYPE = {variant.config["model_type"]: variant for variant in reversed(VARIANTS)}


def logits_of(folder, adapter=None, slots: int = 3, max_rank: int = 8, slot: int = 1, modules=()):
    """The logits of a folder's model, with an adapter in one of several slots or without any."""
    config = loader.read_config(folder)
    weights = loader.load(folder, config)
    if adapter is not None:
        adapter_weights = read_adapter(
            adapter, config, list_targets(config, modules), max_rank, folder
        )
        weights = add_adapter_stacks(
            weights, config, slots, adapters.stack_rank(max_rank), modules=modules
        )
        stacks = write_slot(adapter_stacks(weights), slot, adapter_weights.matrices)
        weights = with_rows(
            with_stacks(weights, stacks), jnp.full(TOKENS.size, slot, jnp.int32), slots
        )
    return np.asarray(jax.jit(uncached.forward, static_argnums=2)(weights, TOKENS, config))


LORA_CONFIGS = {
    "plain": ({}, None),
    "rslora": ({"use_rslora": True}, None),
    "patterns": (
        {
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 4, "down_proj": 3},
            "alpha_pattern": {
                "model.layers.0.self_attn.v_proj": 1,
                "^model.layers.1.self_attn.k_proj": 3,
            },
        },
        {"q_proj": 2, "down_proj": 3},
    ),
}


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("name", LORA_CONFIGS)
def test_adapter_matches_merged_model(name, tmp_path):
    lora_config, ranks = LORA_CONFIGS[name]
    tensors = tiny.write(tmp_path / "base", tensors=tiny.even(tiny.shapes(tiny.LLAMA)))
    adapter = peft.draw(tensors, ranks=ranks)
    if name == "patterns":  # the longer pattern has precedence: rank 4
        prefix = "base_model.model.model.layers.1.mlp.down_proj.lora_"
        rng = np.random.default_rng(5)
        adapter[prefix + "A.weight"] = rng.standard_normal((4, 48)).astype(np.float32) / 7
        adapter[prefix + "B.weight"] = rng.standard_normal((32, 4)).astype(np.float32) / 4
    peft.write(tmp_path / "adapter", adapter, lora_config)
    tiny.write(tmp_path / "merged", tensors=peft.merged(tensors, adapter, lora_config))
    logits = logits_of(tmp_path / "base", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(logits, logits_of(tmp_path / "merged"), atol=2e-4)
    assert np.abs(logits - logits_of(tmp_path / "base")).max() > 0.1


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("tied", [False, True])
def test_adapted_head_leaves_the_tied_embedding_unchanged(tied, tmp_path):
    """A tied model with an adapted head behaves as an untied one.

    PEFT also saves the original head (`base_layer`).
    """
    config = tiny.LLAMA | {"tie_word_embeddings": tied}
    tensors = tiny.write(tmp_path / "base", config, tiny.even(tiny.shapes(config)))
    untied = {"lm_head.weight": tensors["model.embed_tokens.weight"]} | tensors
    adapter = peft.draw(untied, ("q_proj", "lm_head"))
    base_head = {"base_model.model.lm_head.base_layer.weight": untied["lm_head.weight"]}
    peft.write(tmp_path / "adapter", adapter | base_head)
    tiny.write(tmp_path / "merged", tensors=peft.merged(untied, adapter))
    layers = {name: value for name, value in adapter.items() if "lm_head" not in name}
    peft.write(tmp_path / "layers", layers)
    logits = logits_of(tmp_path / "base", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(logits, logits_of(tmp_path / "merged"), atol=2e-4)
    assert np.abs(logits - logits_of(tmp_path / "base", adapter=tmp_path / "layers")).max() > 0.1


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.slow
def test_adapter_of_recurrent_and_gated_attention_layers(tmp_path):
    tensors = tiny_qwen.write(tmp_path / "base")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp")}
    names = (*peft.EVERY, "in_proj_qkvz", "out_proj")
    adapter = peft.draw(
        {name: tensor for name, tensor in tensors.items() if "expert" not in name}, names
    )
    peft.write(tmp_path / "adapter", adapter)
    tiny.write(tmp_path / "merged", tiny_qwen.CONFIG, peft.merged(tensors, adapter))
    logits = logits_of(tmp_path / "base", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(logits, logits_of(tmp_path / "merged"), atol=1e-3)


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("name", tiny_moe.CONFIGS)
@pytest.mark.slow
def test_adapted_experts_and_router_match_merged_model(name, tmp_path):
    """Every expert except one has its own matrices, of different ranks."""
    tensors = tiny_moe.write(tmp_path / "base", name)
    first, *_, last = tiny_moe.EXPERTS[name]
    names = (*peft.EVERY, *tiny_moe.EXPERTS[name], "gate", "lm_head")
    ranks = {first: 3, last: 6}
    lora_config = {"rank_pattern": ranks}
    adapted = {
        tensor_name: tensor
        for tensor_name, tensor in tensors.items()
        if ".experts.1." not in tensor_name
    }
    adapter = peft.draw(adapted, names, ranks=ranks)
    peft.write(tmp_path / "adapter", adapter, lora_config)
    tiny.write(
        tmp_path / "merged", tiny_moe.CONFIGS[name], peft.merged(tensors, adapter, lora_config)
    )
    logits = logits_of(
        tmp_path / "base", adapter=tmp_path / "adapter", modules=tiny_moe.MODULES[name]
    )
    np.testing.assert_allclose(logits, logits_of(tmp_path / "merged"), atol=1e-3)
    attention_adapter = {
        tensor_name: matrix
        for tensor_name, matrix in adapter.items()
        if ".experts." not in tensor_name
    }
    peft.write(tmp_path / "others", attention_adapter, lora_config)
    attention_logits = logits_of(
        tmp_path / "base", adapter=tmp_path / "others", modules=tiny_moe.MODULES[name]
    )
    assert np.abs(logits - attention_logits).max() > 0.1


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("name", ["biases", "tied", "mixtral"])
def test_dora_adapter_matches_merged_model(name, tmp_path):
    """DoRA rescales the weight's rows to the adapter's magnitudes; biases do not change."""
    base = tmp_path / "base"
    modules = tiny_moe.MODULES[name] if name == "mixtral" else ()
    if name == "mixtral":
        config = tiny_moe.MIXTRAL
        tensors = tiny_moe.write(base, name)
    else:
        config = tiny.LLAMA | {
            "attention_bias": name == "biases",
            "tie_word_embeddings": name == "tied",
        }
        shapes = tiny.shapes(config)
        sizes = {
            tensor_name.replace("weight", "bias"): shape[:1]
            for tensor_name, shape in shapes.items()
            if "self_attn" in tensor_name
        }
        tensors = tiny.write(base, config, tiny.even(shapes | (sizes if name == "biases" else {})))
    untied_tensors = {"lm_head.weight": tensors["model.embed_tokens.weight"]} | tensors
    adapter = peft.draw(untied_tensors, (*peft.EVERY, "w1", "w2", "w3", "gate", "lm_head"))
    adapter |= peft.magnitude_vectors(untied_tensors, adapter)
    peft.write(tmp_path / "adapter", adapter, {"use_dora": True})
    untied = config | {"tie_word_embeddings": False}
    tiny.write(tmp_path / "merged", untied, peft.merged(untied_tensors, adapter))
    without_magnitudes = {
        tensor_name: tensor
        for tensor_name, tensor in adapter.items()
        if "magnitude" not in tensor_name
    }
    peft.write(tmp_path / "plain", without_magnitudes)
    logits = logits_of(base, adapter=tmp_path / "adapter", modules=modules)
    np.testing.assert_allclose(logits, logits_of(tmp_path / "merged"), atol=1e-3)
    assert np.abs(logits - logits_of(base, adapter=tmp_path / "plain", modules=modules)).max() > 0.1


@pytest.mark.parametrize(
    "variant", VARIANT_BY_MODEL_TYPE.values(), ids=lambda variant: variant.config["model_type"]
)
def test_adapter_follows_the_weight_layout_of_every_family(variant, tmp_path):
    """The product of the stacked matrices equals B A in the loader's layout, also for experts."""
    (tmp_path / "config.json").write_text(json.dumps(variant.config))
    config = loader.read_config(tmp_path)
    rng = np.random.default_rng(0)
    checked_kinds = set()
    for target in jax.tree.leaves(all_targets(config)):
        for element_matrix in target.element_matrices:
            kind = (
                element_matrix.source.name.rpartition("layers.")[2].partition(".")[2],
                element_matrix.shape,
            )
            if kind in checked_kinds:
                continue
            checked_kinds.add(kind)
            outputs, inputs = element_matrix.shape
            rank = 2
            down_RI = rng.standard_normal((rank, inputs))
            up_OR = rng.standard_normal((outputs, rank))
            in_I, out_O = element_matrix.permutations(target.into)
            leaf = np.zeros((*target.into, *target.out))
            leaf[element_matrix.source.at] = element_matrix.source.transform(up_OR @ down_RI)
            product = np.zeros((math.prod(target.into), math.prod(target.out)))
            product[:, element_matrix.first : element_matrix.last] = (
                down_RI.T[in_I] @ up_OR.T[:, out_O]
            )
            np.testing.assert_allclose(product.reshape(leaf.shape), leaf, atol=1e-12)
    encoders = ("bert", "modernbert", "roberta", "xlm-roberta")
    assert checked_kinds or variant.config["model_type"] in encoders


@pytest.mark.slow
def test_logits_do_not_depend_on_the_adapter_slot(tmp_path):
    """A higher maximum rank changes at most the last bits, as XLA may sum in another order."""
    tensors = tiny.write(tmp_path / "base", tensors=tiny.even(tiny.shapes(tiny.LLAMA)))
    peft.write(tmp_path / "adapter", peft.draw(tensors))
    reference = logits_of(tmp_path / "base", adapter=tmp_path / "adapter")
    other_slot = logits_of(tmp_path / "base", adapter=tmp_path / "adapter", slots=9, slot=7)
    np.testing.assert_array_equal(reference, other_slot)
    higher_max_rank = logits_of(tmp_path / "base", adapter=tmp_path / "adapter", max_rank=64)
    np.testing.assert_allclose(reference, higher_max_rank, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tensors = tiny.write(folder, tensors=tiny.even(tiny.shapes(tiny.LLAMA)))
    config = loader.read_config(folder)
    return SimpleNamespace(
        folder=folder, tensors=tensors, config=config, targets=list_targets(config)
    )


UNSUPPORTED_CONFIGS = {
    "dora without lengths": (
        {"use_dora": True},
        ("lacks lora_magnitude_vector of 'model.layers.0.mlp.down_proj'"),
    ),
    "dora": ({"use_dora": "yes"}, "use_dora = 'yes'; it must be true or false"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "bias": ({"bias": "all"}, "bias = 'all'"),
    "kind": ({"peft_type": "IA3"}, "'IA3'; it must be 'LORA'"),
    "rank": ({"r": 0}, "r = 0; it must be a whole number"),
    "another rank": ({"r": 5}, "want [5, 48] and [32, 5]"),
    "alpha": ({"lora_alpha": None}, "lora_alpha = None; it must be a number"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "changes the model's weights too"),
    "a heavy pattern": ({"rank_pattern": {"(a+)+b": 4}}, "pattern '(a+)+b' is not read"),
    "no table": ({"alpha_pattern": [3]}, "a pattern is [3]"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
}


@pytest.mark.parametrize("name", UNSUPPORTED_CONFIGS)
def test_error_names_the_unsupported_adapter_option(name, base, tmp_path):
    lora_config, message = UNSUPPORTED_CONFIGS[name]
    peft.write(tmp_path, peft.draw(base.tensors), lora_config)
    with pytest.raises(ModelError) as error:
        read_adapter(tmp_path, base.config, base.targets, 16)
    assert message in str(error.value)


def lora_pair(module: str, inputs: int = 32, outputs: int = 32) -> dict[str, np.ndarray]:
    return {f"{module}.lora_A.weight": np.ones((4, inputs), np.float32),
            f"{module}.lora_B.weight": np.ones((outputs, 4), np.float32)}  # fmt: skip


Q = "base_model.model.model.layers.0.self_attn.q_proj"
UNSUPPORTED_TENSORS = {
    "the embedding as a layer": (
        lora_pair("base_model.model.model.embed_tokens", 32, 96),
        "adapts 'model.embed_tokens', which cannot be adapted",
    ),
    "another head": (lora_pair("base_model.model.lm_head", 32, 97), "want [4, 32] and [96, 4]"),
    "an unknown layer": (
        lora_pair(Q.replace("layers.0", "layers.7")),
        ("adapts 'model.layers.7.self_attn.q_proj'"),
    ),
    "the embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 96), np.float32)},
        "embed_tokens.lora_embedding_A",
    ),
    "a whole head": (
        lora_pair(Q)
        | {"base_model.model.lm_head.base_layer.weight": np.ones((96, 32), np.float32)},
        "holds the tensor 'base_model.model.lm_head.base_layer.weight'",
    ),
    "a magnitude": (
        {f"{Q}.lora_magnitude_vector.weight": np.ones(32, np.float32)},
        "lora_magnitude_vector",
    ),
    "one half": ({f"{Q}.lora_A.weight": np.ones((4, 32), np.float32)}, "lacks lora_B of"),
    "a wrong shape": (lora_pair(Q, 31), "have shapes [4, 31] and [32, 4]"),
    "no number": (
        {name: np.full_like(x, np.nan) for name, x in lora_pair(Q).items()},
        "not finite",
    ),
    "none": ({}, "holds no tensors"),
}


@pytest.mark.parametrize("name", UNSUPPORTED_TENSORS)
def test_error_names_the_unsupported_adapter_tensor(name, base, tmp_path):
    tensors, message = UNSUPPORTED_TENSORS[name]
    peft.write(tmp_path, tensors)
    with pytest.raises(ModelError) as error:
        read_adapter(tmp_path, base.config, base.targets, 16)
    assert message in str(error.value)


def test_folder_without_a_valid_adapter_is_rejected(base, tmp_path):
    for case, message in {
        "nothing": "holds no adapter_config.json",
        "about": "holds no adapter_model.safetensors",
        "bytes": "truncated or not a safetensors file",
    }.items():
        if case == "about":
            (tmp_path / "adapter_config.json").write_text(json.dumps(peft.ABOUT))
        if case == "bytes":
            (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
        with pytest.raises(ModelError, match=message):
            read_adapter(tmp_path, base.config, base.targets, 16)


def test_expert_modules_must_be_listed_as_lora_targets(tmp_path):
    """Experts and routers must be listed; a list excludes the modules that it does not name."""
    tensors = tiny_moe.write(tmp_path / "base", "mixtral")
    config = loader.read_config(tmp_path / "base")
    peft.write(tmp_path / "experts", peft.draw(tensors, ("w1",)))
    peft.write(tmp_path / "router", peft.draw(tensors, ("gate",)))
    peft.write(tmp_path / "attention", peft.draw(tensors, ("o_proj",)))
    for name, modules, missing_module in (
        ("experts", (), "experts"),
        ("router", ("experts",), "gate"),
        ("attention", ("experts", "gate"), "o_proj"),
    ):
        with pytest.raises(
            ModelError,
            match=f"cannot be adapted: name it in lora_target_modules, as {missing_module}",
        ):
            read_adapter(tmp_path / name, config, list_targets(config, modules), 16)
        read_adapter(tmp_path / name, config, list_targets(config, (*modules, missing_module)), 16)
    with pytest.raises(
        ModelError,
        match="names 'w1'; of mixtral models these take adapters: experts, gate, k_proj, lm",
    ):
        list_targets(config, ("w1",))
    stacks = {target.stack for target in list_targets(config)}
    assert stacks == {()} and {target.stack for target in list_targets(config, ("experts",))} == {
        (4,)
    }


def test_dora_magnitudes_must_match_the_model_tensors(base, tmp_path):
    """Magnitudes of a wrong shape, and of experts that the model's files fuse into one tensor."""
    adapter_tensors = peft.draw(base.tensors, ("q_proj",))
    wrong = {
        name: length[1:]
        for name, length in peft.magnitude_vectors(base.tensors, adapter_tensors).items()
    }
    peft.write(tmp_path / "short", adapter_tensors | wrong, {"use_dora": True})
    with pytest.raises(
        ModelError, match=r"lora_magnitude_vector of .* has shape \[31\]; the model wants \[32\]"
    ):
        read_adapter(tmp_path / "short", base.config, base.targets, 16, base.folder)
    tensors = tiny_moe.write(tmp_path / "base", "qwen3_moe")
    adapter_tensors = peft.draw(tensors, ("gate_proj", "down_proj"))
    peft.write(
        tmp_path / "experts",
        adapter_tensors | peft.magnitude_vectors(tensors, adapter_tensors),
        {"use_dora": True},
    )
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    expert_weights = {
        projection: [
            tensors[f"model.layers.0.mlp.experts.{e}.{projection}_proj.weight"] for e in range(6)
        ]
        for projection in ("gate", "up", "down")
    }
    fused["model.layers.0.mlp.experts.gate_up_proj"] = np.concatenate(
        [expert_weights["gate"], expert_weights["up"]], axis=1
    )
    fused["model.layers.0.mlp.experts.down_proj"] = np.stack(expert_weights["down"])
    tiny.write(tmp_path / "base", tiny_moe.QWEN3_MOE, fused)
    config = loader.read_config(tmp_path / "base")
    with pytest.raises(
        ModelError,
        match="the model's files hold no 'model.layers.0.mlp.experts.0.down_proj.weight'",
    ):
        read_adapter(
            tmp_path / "experts",
            config,
            list_targets(config, ("experts", "gate_proj")),
            16,
            tmp_path / "base",
        )


def test_rank_above_max_lora_rank_is_rejected(base, tmp_path):
    peft.write(tmp_path, peft.draw(base.tensors, rank=9), {"r": 9})
    with pytest.raises(ModelError, match="has rank 9; max_lora_rank is 8"):
        read_adapter(tmp_path, base.config, base.targets, 8)
    assert adapters.stack_rank(9) == 16
    assert read_adapter(tmp_path, base.config, base.targets, 9).matrices[0][1].shape == (16, 8, 8)


def test_adapter_key_depends_on_the_content(base, tmp_path):
    original, copy = (peft.write(tmp_path / name, peft.draw(base.tensors)) for name in "ab")
    other_matrices = peft.write(tmp_path / "c", peft.draw(base.tensors, seed=1))
    scaled = peft.write(tmp_path / "d", peft.draw(base.tensors), {"lora_alpha": 9})
    keys = [
        read_adapter(folder, base.config, base.targets, 8).key
        for folder in (original, copy, other_matrices, scaled)
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_key_of_adapter_replaced_during_the_read_matches_its_matrices(base, tmp_path, monkeypatch):
    """A wrong key would let requests that read the new files reuse the old adapter's KV pages."""
    old, new = (
        peft.write(tmp_path / name, peft.draw(base.tensors, seed=i)) for i, name in enumerate("ab")
    )
    keys, matrices = zip(
        *((x.key, x.matrices) for x in map(partial(read, base), (old, new))), strict=True
    )
    read_tensor = Tensor.read
    tensors = [*read_header(old / adapters.FILE)]

    def read_and_replace(tensor):
        matrix = read_tensor(tensor)
        tensors.remove(tensor.name)
        if not tensors:
            shutil.copytree(new, old, dirs_exist_ok=True)
        return matrix

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "read", read_and_replace)
        adapter = read(base, old)
    assert not tensors
    version = keys.index(adapter.key)
    for actual, expected in zip(adapter.matrices, matrices[version], strict=True):
        np.testing.assert_array_equal(actual[0], expected[0])
        np.testing.assert_array_equal(actual[1], expected[1])
    assert read(base, old).key == keys[1]


def read(base, folder):
    return read_adapter(folder, base.config, base.targets, 8)


def test_adapter_tensor_names_with_adapter_name_or_without_prefix(base, tmp_path):
    adapter_tensors = peft.draw(base.tensors)
    reference = read_adapter(
        peft.write(tmp_path / "a", adapter_tensors), base.config, base.targets, 8
    )
    for folder, change in {
        "b": (".weight", ".default.weight"),
        "c": ("base_model.model.", ""),
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_config.json").write_text(json.dumps(peft.ABOUT))
        renamed = {name.replace(*change): x for name, x in adapter_tensors.items()}
        save_file(renamed, tmp_path / folder / "adapter_model.safetensors")
        adapter = read_adapter(tmp_path / folder, base.config, base.targets, 8)
        for expected, actual in zip(reference.matrices, adapter.matrices, strict=True):
            np.testing.assert_array_equal(expected[0], actual[0])
            np.testing.assert_array_equal(expected[1], actual[1])
