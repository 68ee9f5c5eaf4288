"""Steps compiled ahead of time from shapes alone; run by test_eight_devices.py in a process of its
own.
"""

import json

import jax
import pytest

from quire.model.checkpoint import loader
from quire.model.checkpoint.placement import Placement, abstract_on_mesh
from quire.model.planning import cost
from quire.model.planning.meshes import Planner, Workload
from quire.scripts.plan import ahead
from quire.sharding.mesh import make_mesh
from quire.tests.support.cases import nightly_from
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden

assert len(jax.devices()) == 8

VARIANT_BY_NAME = {variant.name: variant for variant in VARIANTS}
LLAMA = ahead.LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 100,
}
DEEPSEEK = ahead.MODELS["deepseek-v3"] | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_attention_heads": 8,
    "n_routed_experts": 16,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 128,
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK_F32 = DEEPSEEK | {"torch_dtype": "float32"}  # XLA exchanges bfloat16 as float32 on a CPU
CASES = [
    (LLAMA | {"tie_word_embeddings": True}, {"tensor": 2, "pipe": 4}, None),
    (DEEPSEEK_F32, {"data": 2, "expert": 2, "tensor": 2}, None), (LLAMA, {"tensor": 4, "pipe": 2}, "int8"),
    (LLAMA, {"tensor": 8}, None),
    (DEEPSEEK, {"tensor": 2, "expert": 4}, None), (DEEPSEEK_F32, {"data": 4, "tensor": 2}, None),
]  # fmt: skip


@pytest.mark.parametrize(("hf", "sizes", "quant"), nightly_from(1, CASES))
def test_planned_memory_and_collectives(hf, sizes, quant, tmp_path):
    """Weights and collectives match the plan to the byte; besides weights and cache, a step's
    arguments are small.
    """
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config, specs = ahead.read(str(tmp_path), quant, "auto", 64)
    report = ahead.measure(config, sizes, 8, 64, specs=specs)
    assert report["sent"] == report["formula"]
    planner = Planner(config, cost.DEVICES["h200"], Workload(8, 64, 32), specs)
    choice = planner.evaluate(
        {"data": 1, "pipe": 1, "context": 1, "tensor": 1, "expert": 1} | sizes
    )
    assert report["weights"] == choice.weight_bytes
    assert report["cache"] == choice.sequence_bytes // 64 * (report["cache_tokens"] + ahead.PAGE)
    other_arguments = report["arguments"] - report["weights"] - report["cache"]
    assert other_arguments >= 0
    # per-token state of eight slots, and the batch
    assert other_arguments < 8 * config.vocab_size * 4 * 8


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("mistral", {"tensor": 4}), ("olmo2", {"tensor": 2}), ("qwen3", {"pipe": 2, "tensor": 2})],
)
def test_abstract_weights_match_loaded_weights(name, sizes, tmp_path):
    folder = Golden(VARIANT_BY_NAME[name], tmp_path).folder
    config = loader.read_config(folder, "float32", 64)
    mesh = make_mesh(**sizes)
    loaded = loader.load(folder, config, Placement(mesh))
    planned = abstract_on_mesh(config, mesh, loader.weight_specs(config))
    assert jax.tree.structure(loaded) == jax.tree.structure(planned)
    for planned_leaf, loaded_leaf in zip(
        jax.tree.leaves(planned), jax.tree.leaves(loaded), strict=True
    ):
        assert (planned_leaf.shape, planned_leaf.dtype, planned_leaf.sharding) == (
            loaded_leaf.shape,
            loaded_leaf.dtype,
            loaded_leaf.sharding,
        )


def test_ahead_command_simulates_its_devices(tmp_path, monkeypatch, capfd):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = [
        str(tmp_path),
        "--mesh",
        "tensor=2",
        "--batch",
        "4",
        "--length",
        "32",
        "--rows",
        "20",
    ]
    monkeypatch.setattr("sys.argv", ["ahead", *arguments])
    with pytest.raises(SystemExit, match="0"):
        ahead.main()
    report = json.loads(capfd.readouterr().out)
    assert (report["mesh"], report["rows"], report["cache_tokens"]) == ({"tensor": 2}, 20, 128)
    assert report["sent"] == report["formula"]


@pytest.mark.parametrize(
    "text", ["tensor", "tensor=0", "rows=2", "tensor=2,tensor=4", "tensor=2,", ""]
)
def test_invalid_meshes_are_rejected(text, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ahead", "llama-70b", "--mesh", text])
    with pytest.raises(SystemExit, match="2"):
        ahead.main()
    assert "as in tensor=8,pipe=2" in capsys.readouterr().err
