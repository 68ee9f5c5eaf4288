"""Adapters as PEFT writes them: equal to the model that they are merged into, and refused by name
where they are not.

The reference is numpy's: W + scale * B A in the checkpoint's own tensors, and that model loaded.
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
from quire.ops.adapter import stacks_of, with_rows, with_stacks, write_slot
from quire.tests.support import peft, tiny, tiny_moe, tiny_qwen, uncached
from quire.tests.support.golden.families import VARIANTS

pytestmark = pytest.mark.usefixtures("few_programs")
TOKENS = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
# of each type of model
FIRST = {variant.config["model_type"]: variant for variant in reversed(VARIANTS)}


def logits_of(folder, adapter=None, slots: int = 3, most: int = 8, slot: int = 1, modules=()):
    """The logits of a folder's model, with an adapter in one of several slots or without any."""
    config = loader.read_config(folder)
    weights = loader.load(folder, config)
    if adapter is not None:
        found = read_adapter(adapter, config, list_targets(config, modules), most, folder)
        weights = add_adapter_stacks(
            weights, config, slots, adapters.stack_rank(most), modules=modules
        )
        stacks = write_slot(stacks_of(weights), slot, found.matrices)
        weights = with_rows(
            with_stacks(weights, stacks), jnp.full(TOKENS.size, slot, jnp.int32), slots
        )
    return np.asarray(jax.jit(uncached.forward, static_argnums=2)(weights, TOKENS, config))


ABOUTS = {
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
@pytest.mark.parametrize("name", ABOUTS)
def test_an_adapter_is_the_model_that_it_is_merged_into(name, tmp_path):
    about, ranks = ABOUTS[name]
    tensors = tiny.write(tmp_path / "base", tensors=tiny.even(tiny.shapes(tiny.LLAMA)))
    adapter = peft.draw(tensors, ranks=ranks)
    if name == "patterns":  # the longer name comes first, and says 4
        part = "base_model.model.model.layers.1.mlp.down_proj.lora_"
        rng = np.random.default_rng(5)
        adapter[part + "A.weight"] = rng.standard_normal((4, 48)).astype(np.float32) / 7
        adapter[part + "B.weight"] = rng.standard_normal((32, 4)).astype(np.float32) / 4
    peft.write(tmp_path / "adapter", adapter, about)
    tiny.write(tmp_path / "merged", tensors=peft.merged(tensors, adapter, about))
    found = logits_of(tmp_path / "base", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(found, logits_of(tmp_path / "merged"), atol=2e-4)
    assert np.abs(found - logits_of(tmp_path / "base")).max() > 0.1


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_adapted_and_not_the_embedding(tied, tmp_path):
    """A tied model with an adapted head is one whose head is its own.

    PEFT saves the head as it was beside it.
    """
    config = tiny.LLAMA | {"tie_word_embeddings": tied}
    tensors = tiny.write(tmp_path / "base", config, tiny.even(tiny.shapes(config)))
    whole = {"lm_head.weight": tensors["model.embed_tokens.weight"]} | tensors
    adapter = peft.draw(whole, ("q_proj", "lm_head"))
    saved = {"base_model.model.lm_head.base_layer.weight": whole["lm_head.weight"]}
    peft.write(tmp_path / "adapter", adapter | saved)
    tiny.write(tmp_path / "merged", tensors=peft.merged(whole, adapter))
    layers = {name: value for name, value in adapter.items() if "lm_head" not in name}
    peft.write(tmp_path / "layers", layers)
    found = logits_of(tmp_path / "base", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(found, logits_of(tmp_path / "merged"), atol=2e-4)
    assert np.abs(found - logits_of(tmp_path / "base", adapter=tmp_path / "layers")).max() > 0.1


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.slow
def test_a_model_whose_layers_keep_states_and_gate_their_heads(tmp_path):
    tensors = tiny_qwen.write(tmp_path / "base")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp")}
    names = (*peft.EVERY, "in_proj_qkvz", "out_proj")
    adapter = peft.draw(
        {name: tensor for name, tensor in tensors.items() if "expert" not in name}, names
    )
    peft.write(tmp_path / "adapter", adapter)
    tiny.write(tmp_path / "merged", tiny_qwen.CONFIG, peft.merged(tensors, adapter))
    found = logits_of(tmp_path / "base", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(found, logits_of(tmp_path / "merged"), atol=1e-3)


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("name", tiny_moe.CONFIGS)
@pytest.mark.slow
def test_experts_and_their_router(name, tmp_path):
    """Every expert has matrices of its own, of ranks that differ, and one has none."""
    tensors = tiny_moe.write(tmp_path / "base", name)
    first, *_, last = tiny_moe.EXPERTS[name]
    names = (*peft.EVERY, *tiny_moe.EXPERTS[name], "gate", "lm_head")
    ranks = {first: 3, last: 6}
    about = {"rank_pattern": ranks}
    adapted = {each: tensor for each, tensor in tensors.items() if ".experts.1." not in each}
    adapter = peft.draw(adapted, names, ranks=ranks)
    peft.write(tmp_path / "adapter", adapter, about)
    tiny.write(tmp_path / "merged", tiny_moe.CONFIGS[name], peft.merged(tensors, adapter, about))
    found = logits_of(
        tmp_path / "base", adapter=tmp_path / "adapter", modules=tiny_moe.MODULES[name]
    )
    np.testing.assert_allclose(found, logits_of(tmp_path / "merged"), atol=1e-3)
    others = {each: matrix for each, matrix in adapter.items() if ".experts." not in each}
    peft.write(tmp_path / "others", others, about)
    without = logits_of(
        tmp_path / "base", adapter=tmp_path / "others", modules=tiny_moe.MODULES[name]
    )
    assert np.abs(found - without).max() > 0.1


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("name", ["biases", "tied", "mixtral"])
def test_dora_is_the_model_that_it_is_merged_into(name, tmp_path):
    """Its rows get the adapter's lengths; biases stay as they are."""
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
            each.replace("weight", "bias"): shape[:1]
            for each, shape in shapes.items()
            if "self_attn" in each
        }
        tensors = tiny.write(base, config, tiny.even(shapes | (sizes if name == "biases" else {})))
    whole = {"lm_head.weight": tensors["model.embed_tokens.weight"]} | tensors
    adapter = peft.draw(whole, (*peft.EVERY, "w1", "w2", "w3", "gate", "lm_head"))
    adapter |= peft.lengths(whole, adapter)
    peft.write(tmp_path / "adapter", adapter, {"use_dora": True})
    untied = config | {"tie_word_embeddings": False}
    tiny.write(tmp_path / "merged", untied, peft.merged(whole, adapter))
    plain = {each: tensor for each, tensor in adapter.items() if "magnitude" not in each}
    peft.write(tmp_path / "plain", plain)
    found = logits_of(base, adapter=tmp_path / "adapter", modules=modules)
    np.testing.assert_allclose(found, logits_of(tmp_path / "merged"), atol=1e-3)
    assert np.abs(found - logits_of(base, adapter=tmp_path / "plain", modules=modules)).max() > 0.1


@pytest.mark.parametrize(
    "variant", FIRST.values(), ids=lambda variant: variant.config["model_type"]
)
def test_every_family_turns_an_adapter_as_it_turns_its_weights(variant, tmp_path):
    """The product of what lies in the stacks is what the loader makes of B A; of experts too."""
    (tmp_path / "config.json").write_text(json.dumps(variant.config))
    config = loader.read_config(tmp_path)
    rng = np.random.default_rng(0)
    seen = set()
    for target in jax.tree.leaves(all_targets(config)):
        for part in target.element_matrices:
            kind = part.source.name.rpartition("layers.")[2].partition(".")[2], part.shape
            if kind in seen:
                continue
            seen.add(kind)
            outputs, inputs = part.shape
            rank = 2
            down_RI = rng.standard_normal((rank, inputs))
            up_OR = rng.standard_normal((outputs, rank))
            in_I, out_O = part.permutations(target.into)
            leaf = np.zeros((*target.into, *target.out))
            leaf[part.source.at] = part.source.transform(up_OR @ down_RI)
            whole = np.zeros((math.prod(target.into), math.prod(target.out)))
            whole[:, part.first : part.last] = down_RI.T[in_I] @ up_OR.T[:, out_O]
            np.testing.assert_allclose(whole.reshape(leaf.shape), leaf, atol=1e-12)
    encoders = ("bert", "modernbert", "roberta", "xlm-roberta")
    assert seen or variant.config["model_type"] in encoders


@pytest.mark.slow
def test_slots_change_no_bit_and_a_higher_rank_at_most_the_last(tmp_path):
    """Zeros beyond an adapter's rank are no part of its sums, which XLA may add in another order
    for another rank.
    """
    tensors = tiny.write(tmp_path / "base", tensors=tiny.even(tiny.shapes(tiny.LLAMA)))
    peft.write(tmp_path / "adapter", peft.draw(tensors))
    once = logits_of(tmp_path / "base", adapter=tmp_path / "adapter")
    elsewhere = logits_of(tmp_path / "base", adapter=tmp_path / "adapter", slots=9, slot=7)
    np.testing.assert_array_equal(once, elsewhere)
    wider = logits_of(tmp_path / "base", adapter=tmp_path / "adapter", most=64)
    np.testing.assert_allclose(once, wider, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tensors = tiny.write(folder, tensors=tiny.even(tiny.shapes(tiny.LLAMA)))
    config = loader.read_config(folder)
    return SimpleNamespace(
        folder=folder, tensors=tensors, config=config, targets=list_targets(config)
    )


REFUSED = {
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


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_is_not_served_is_named(name, base, tmp_path):
    about, why = REFUSED[name]
    peft.write(tmp_path, peft.draw(base.tensors), about)
    with pytest.raises(ModelError) as error:
        read_adapter(tmp_path, base.config, base.targets, 16)
    assert why in str(error.value)


def halves(module: str, inputs: int = 32, outputs: int = 32) -> dict[str, np.ndarray]:
    return {f"{module}.lora_A.weight": np.ones((4, inputs), np.float32),
            f"{module}.lora_B.weight": np.ones((outputs, 4), np.float32)}  # fmt: skip


Q = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS = {
    "the embedding as a layer": (
        halves("base_model.model.model.embed_tokens", 32, 96),
        "adapts 'model.embed_tokens', which cannot be adapted",
    ),
    "another head": (halves("base_model.model.lm_head", 32, 97), "want [4, 32] and [96, 4]"),
    "an unknown layer": (
        halves(Q.replace("layers.0", "layers.7")),
        ("adapts 'model.layers.7.self_attn.q_proj'"),
    ),
    "the embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 96), np.float32)},
        "embed_tokens.lora_embedding_A",
    ),
    "a whole head": (
        halves(Q) | {"base_model.model.lm_head.base_layer.weight": np.ones((96, 32), np.float32)},
        "holds the tensor 'base_model.model.lm_head.base_layer.weight'",
    ),
    "a magnitude": (
        {f"{Q}.lora_magnitude_vector.weight": np.ones(32, np.float32)},
        "lora_magnitude_vector",
    ),
    "one half": ({f"{Q}.lora_A.weight": np.ones((4, 32), np.float32)}, "lacks lora_B of"),
    "a wrong shape": (halves(Q, 31), "have shapes [4, 31] and [32, 4]"),
    "no number": ({name: np.full_like(x, np.nan) for name, x in halves(Q).items()}, "not finite"),
    "none": ({}, "holds no tensors"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_has_no_place_is_named(name, base, tmp_path):
    tensors, why = TENSORS[name]
    peft.write(tmp_path, tensors)
    with pytest.raises(ModelError) as error:
        read_adapter(tmp_path, base.config, base.targets, 16)
    assert why in str(error.value)


def test_what_is_no_adapter(base, tmp_path):
    for make, why in {
        "nothing": "holds no adapter_config.json",
        "about": "holds no adapter_model.safetensors",
        "bytes": "truncated or not a safetensors file",
    }.items():
        if make == "about":
            (tmp_path / "adapter_config.json").write_text(json.dumps(peft.ABOUT))
        if make == "bytes":
            (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
        with pytest.raises(ModelError, match=why):
            read_adapter(tmp_path, base.config, base.targets, 16)


def test_modules_that_are_not_named_take_none(tmp_path):
    """Experts and routers must be named; others are left out where only some are named."""
    tensors = tiny_moe.write(tmp_path / "base", "mixtral")
    config = loader.read_config(tmp_path / "base")
    peft.write(tmp_path / "experts", peft.draw(tensors, ("w1",)))
    peft.write(tmp_path / "router", peft.draw(tensors, ("gate",)))
    peft.write(tmp_path / "attention", peft.draw(tensors, ("o_proj",)))
    for name, modules, why in (("experts", (), "experts"), ("router", ("experts",), "gate"),
                               ("attention", ("experts", "gate"), "o_proj")):  # fmt: skip
        with pytest.raises(
            ModelError, match=f"cannot be adapted: name it in lora_target_modules, as {why}"
        ):
            read_adapter(tmp_path / name, config, list_targets(config, modules), 16)
        read_adapter(tmp_path / name, config, list_targets(config, (*modules, why)), 16)
    with pytest.raises(
        ModelError,
        match="names 'w1'; of mixtral models these take adapters: experts, gate, k_proj, lm",
    ):
        list_targets(config, ("w1",))
    stacks = {target.stack for target in list_targets(config)}
    assert stacks == {()} and {target.stack for target in list_targets(config, ("experts",))} == {
        (4,)
    }


def test_lengths_need_the_weights_that_they_are_for(base, tmp_path):
    """Of wrong shape, and of experts that the model's files hold in one tensor."""
    drawn = peft.draw(base.tensors, ("q_proj",))
    wrong = {name: length[1:] for name, length in peft.lengths(base.tensors, drawn).items()}
    peft.write(tmp_path / "short", drawn | wrong, {"use_dora": True})
    with pytest.raises(
        ModelError, match=r"lora_magnitude_vector of .* has shape \[31\]; the model wants \[32\]"
    ):
        read_adapter(tmp_path / "short", base.config, base.targets, 16, base.folder)
    tensors = tiny_moe.write(tmp_path / "base", "qwen3_moe")
    drawn = peft.draw(tensors, ("gate_proj", "down_proj"))
    peft.write(tmp_path / "experts", drawn | peft.lengths(tensors, drawn), {"use_dora": True})
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    own = {
        part: [tensors[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"] for e in range(6)]
        for part in ("gate", "up", "down")
    }
    fused["model.layers.0.mlp.experts.gate_up_proj"] = np.concatenate(
        [own["gate"], own["up"]], axis=1
    )
    fused["model.layers.0.mlp.experts.down_proj"] = np.stack(own["down"])
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


def test_a_rank_above_the_limit_is_refused(base, tmp_path):
    peft.write(tmp_path, peft.draw(base.tensors, rank=9), {"r": 9})
    with pytest.raises(ModelError, match="has rank 9; max_lora_rank is 8"):
        read_adapter(tmp_path, base.config, base.targets, 8)
    assert adapters.stack_rank(9) == 16
    assert read_adapter(tmp_path, base.config, base.targets, 9).matrices[0][1].shape == (16, 8, 8)


def test_the_key_is_of_the_content(base, tmp_path):
    one, same = (peft.write(tmp_path / name, peft.draw(base.tensors)) for name in "ab")
    other = peft.write(tmp_path / "c", peft.draw(base.tensors, seed=1))
    scaled = peft.write(tmp_path / "d", peft.draw(base.tensors), {"lora_alpha": 9})
    keys = [
        read_adapter(folder, base.config, base.targets, 8).key
        for folder in (one, same, other, scaled)
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_adapter_that_is_replaced_while_it_is_read_has_the_digest_of_its_matrices(
    base, tmp_path, monkeypatch
):
    """Its pages would be taken for those of the new files, which another process or a later request
    reads.
    """
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
        found = read(base, old)
    assert not tensors
    which = keys.index(found.key)
    for one, other in zip(found.matrices, matrices[which], strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
    assert read(base, old).key == keys[1]


def read(base, folder):
    return read_adapter(folder, base.config, base.targets, 8)


def test_names_with_the_adapters_own_and_without_a_prefix(base, tmp_path):
    drawn = peft.draw(base.tensors)
    plain = read_adapter(peft.write(tmp_path / "a", drawn), base.config, base.targets, 8)
    for folder, change in {
        "b": (".weight", ".default.weight"),
        "c": ("base_model.model.", ""),
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_config.json").write_text(json.dumps(peft.ABOUT))
        renamed = {name.replace(*change): x for name, x in drawn.items()}
        save_file(renamed, tmp_path / folder / "adapter_model.safetensors")
        again = read_adapter(tmp_path / folder, base.config, base.targets, 8)
        for one, other in zip(plain.matrices, again.matrices, strict=True):
            np.testing.assert_array_equal(one[0], other[0])
            np.testing.assert_array_equal(one[1], other[1])
