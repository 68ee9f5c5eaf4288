"""`quire plan` against published figures, brute-force counts and the engine's cache."""

import json
import math
import random
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from quire.__main__ import app, main
from quire.model.checkpoint.loader import family_for
from quire.model.config import Attention, LatentAttention, Layer, ModelConfig, Moe
from quire.model.planning import cost
from quire.serving.device.state import page_bytes
from quire.sharding.spec import nbytes
from quire.tests.support import tiny_vision
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.plan_configs import LLAMA, PUBLISHED, random_config
from quire.tests.support.published_more import PUBLISHED_MORE


def published(name: str) -> ModelConfig:
    hf = LLAMA | PUBLISHED[name][0]
    return family_for(hf).config(hf)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_and_kv_bytes_match_published_figures(name):
    config = published(name)
    parameters, token, at_4k = PUBLISHED[name][1]
    # norms are stored in float32
    assert cost.weight_bytes(config) == pytest.approx(2 * parameters, rel=1e-4)
    assert cost.kv_bytes(config, 1) == pytest.approx(token, rel=0.01)
    assert cost.kv_bytes(config, 4096) == pytest.approx(at_4k, rel=0.02)
    assert cost.kv_bytes(config, 4096) == cost.kv_read_bytes(config, 4096)


def test_dense_model_needs_two_operations_per_weight():
    config = published("7B")
    norms = 4096 * (2 * 32 + 1)
    multiplied = 6_738_415_616 - 32000 * 4096 - norms  # all weights but the embedding table
    assert cost.operations(config, 0) == 2 * multiplied
    assert cost.operations(config, 100) == 2 * multiplied + 32 * 32 * 4 * 128 * 100  # Q·K and P·V


def test_balance_batch_on_h100_is_the_roofline_ridge():
    """Without a cache, two operations for each two-byte weight: FLOP/s over bytes/s."""
    h100 = cost.DEVICES["h100"]
    assert cost.balance_batch(published("7B"), 0, h100) == pytest.approx(
        h100.flops / h100.bandwidth, rel=1e-3
    )


@pytest.mark.parametrize("seed", range(40))
def test_kv_bytes_equal_counting_each_position(seed):
    rng = random.Random(seed)
    config = random_config(rng)
    length = rng.randint(1, 100)
    width = {"bfloat16": 2, "float32": 4}[config.dtype]
    cache_bytes = read_bytes = 0
    for layer in config.layers:
        attention = layer.attention
        for position in range(length):
            if attention.window is not None and position < length - attention.window:
                continue
            latent = isinstance(attention, LatentAttention)
            size = (
                attention.kv_rank + attention.rope_dim
                if latent
                else 2 * attention.kv_heads * attention.head_dim
            ) * width
            read_bytes += size
            cache_bytes += 0 if attention.kv_source is not None else size
    assert cost.kv_bytes(config, length) == cache_bytes
    assert cost.kv_read_bytes(config, length) == read_bytes
    assert sum(kind.layers for kind in cost.cache_kinds(config)) == len(config.layers)


@pytest.mark.parametrize("seed", range(20))
def test_engine_page_bytes_equal_the_plan(seed):
    config = random_config(random.Random(seed))
    pages = [page_bytes(config, group, 16) for group in range(len(config.windows))]
    assert sum(pages) == 16 * cost.kv_bytes(config, 1)


@pytest.mark.parametrize("seed", range(20))
def test_balance_batch_separates_memory_and_compute_bound(seed):
    rng = random.Random(seed)
    config = random_config(rng)
    length = rng.randint(0, 100)
    device = cost.Device(1e9, rng.uniform(1e8, 1e10), rng.uniform(1e8, 1e12), 1e9, 1e8)

    def is_memory_bound(batch: float) -> bool:
        reading = cost.read_weight_bytes(config) + batch * cost.kv_read_bytes(config, length)
        return reading / device.bandwidth > batch * cost.operations(config, length) / device.flops

    batch = cost.balance_batch(config, length, device)
    if math.isinf(batch):
        assert all(is_memory_bound(10.0**power) for power in range(9))
    else:
        assert is_memory_bound(batch * 0.999)
        assert not is_memory_bound(batch * 1.001)


@pytest.mark.parametrize("seed", range(10))
def test_sequences_that_fit_is_the_largest_number(seed):
    rng = random.Random(seed)
    config = random_config(rng)
    length = rng.randint(1, 100)
    memory = rng.uniform(0, 1e6)
    count = cost.sequences_that_fit(config, length, memory)
    used_bytes = cost.weight_bytes(config) + count * cost.kv_bytes(config, length)
    assert used_bytes <= memory or count == 0
    assert used_bytes + cost.kv_bytes(config, length) > memory


def test_all_experts_take_memory_but_only_chosen_ones_compute():
    base = ModelConfig("llama", 50, 16, (Layer(Attention(2, 1, 8, 1.0), None, Moe(8, 2, 6)),), 128)
    more_experts = replace(base, layers=(replace(base.layers[0], moe=Moe(16, 2, 6)),))
    router_operations = 2 * 16 * 8
    assert (
        cost.weight_bytes(more_experts) - cost.weight_bytes(base) == 8 * 3 * 16 * 6 * 2 + 16 * 8 * 2
    )
    assert cost.operations(more_experts, 0) - cost.operations(base, 0) == router_operations


def test_read_weight_bytes_leave_out_only_the_embedding_lookup():
    untied = published("7B")
    tied = replace(untied, tied=True)
    assert cost.weight_bytes(untied) - cost.read_weight_bytes(untied) == 32000 * 4096 * 2
    assert cost.weight_bytes(tied) == cost.read_weight_bytes(tied)
    assert nbytes(None) == 0


def run(tmp_path, *arguments: str):
    """`quire plan` on a folder that holds nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | PUBLISHED["7B"][0]))
    return CliRunner().invoke(app, ["plan", str(tmp_path), *arguments])


def test_plan_command_prints_the_figures(tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["full", "32", "512", "KiB", "all"] in lines
    assert ["4K", "2", "GiB", "29", "never"] in lines  # (0.9 * 79.6 - 12.55) / 2


@pytest.mark.parametrize(
    ("arguments", "usable"),
    [
        (["--device", "h100"], 0.9 * 79.6),  # the engine's default
        (["--device", "h100", "--gpu-memory-utilization", "0.5"], 0.5 * 79.6),
        (["--memory", "20G"], 20.0),
        # of 16 GiB: 12.55 for the weights, and 4 (a quarter) for the cache
        (["--device", "cpu"], 16.0),
        (["--device", "cpu", "--quantization", "int8"], None),
        (["--device", "cpu", "--gpu-memory-utilization", "1"], 16.0),
    ],
)
def test_plan_command_uses_the_engines_memory_fraction(tmp_path, arguments, usable):
    data = json.loads(run(tmp_path, "--length", "4K", "--json", *arguments).stdout)
    usable = data["weight_bytes"] / 2**30 + 4 if usable is None else usable
    assert data["usable_memory"] == pytest.approx(usable * 2**30)
    fit = int((usable * 2**30 - data["weight_bytes"]) // 2**31)
    assert data["lengths"][0]["sequences_that_fit"] == fit


def test_plan_help_and_text_name_every_device_and_column(tmp_path):
    help_text = " ".join(CliRunner().invoke(app, ["plan", "--help"]).stdout.split())
    assert all(re.search(rf"[ :]{name}[,. ]", help_text) for name in cost.DEVICES)
    text = run(tmp_path, "--device", "tpu-v7x").stdout
    assert "tpu-v7x, a chip of Google's TPU7x, Ironwood: 192 GiB, 7,380 GB/s, 2,307 TFLOP/s" in text
    assert "used: 172.8 GiB (0.9 of it, --gpu-memory-utilization)" in text
    heads = (
        "bytes a token",
        "tokens kept",
        "length",
        "KV a sequence",
        "sequences that fit",
        "batch where compute",
    )
    for head in heads:
        assert re.search(rf"^{head}.*: ", text, re.M), head
    meshes = run(tmp_path, "--devices", "2").stdout
    for head in ("weights", "fit", "step", "tok/s", "prompts"):
        assert re.search(rf"^{head}: ", meshes, re.M), head
    assert max(map(len, text.splitlines()[1:])) <= 105  # the first line names the folder


def test_device_speeds_match_the_vendors_figures():
    """Peak operations of a GPU are clock * cores * operations of a core in a cycle."""
    ada = 128 * 4 * 128 * 2 * 2.52e9
    blackwell = 170 * 4 * 128 * 2 * 2.407e9
    # half of that with float32 accumulation
    assert cost.DEVICES["rtx-4090"].flops == pytest.approx(ada / 2, rel=0.01)
    assert cost.DEVICES["rtx-5090"].flops == pytest.approx(blackwell / 2, rel=0.01)
    assert (
        cost.DEVICES["rtx-4090"].bandwidth == 384 / 8 * 21e9
        and cost.DEVICES["rtx-5090"].bandwidth == 512 / 8 * 28e9
    )
    assert cost.DEVICES["tpu-v5e"].flops == pytest.approx(4 * 128 * 128 * 2 * 1.5e9, rel=0.01)


def test_plan_command_shows_the_cache_split_by_group():
    """The bundled model has layers with and without a sliding window."""
    result = CliRunner().invoke(app, ["plan", "--device", "cpu", "--memory", "16M", "--json"])
    data = json.loads(result.stdout)
    assert {group["window"] for group in data["split"]} == {None, 64}
    cache_bytes = sum(group["pages"] * group["page_bytes"] for group in data["split"])
    available = (16 << 20) - data["weight_bytes"]
    assert 0.9 * available < cache_bytes <= available
    assert sum(group["share"] for group in data["split"]) == pytest.approx(1)
    text = CliRunner().invoke(app, ["plan", "--device", "cpu", "--memory", "16M"]).stdout
    assert "of the memory" in text and f"{data['split'][0]['pages']:,}" in text
    assert (
        json.loads(CliRunner().invoke(app, ["plan", "--memory", "1M", "--json"]).stdout)["split"]
        == []
    )


def test_plan_command_device_and_length_options(tmp_path):
    result = run(
        tmp_path,
        "--json",
        "--device",
        "l4",
        "--memory",
        "40G",
        "--bandwidth",
        "1000",
        "--flops",
        "200",
        "--length",
        "2K",
        "--length",
        "100",
        "--dtype",
        "float32",
    )
    data = json.loads(result.stdout)
    expected = {
        "name": "l4",
        "memory": 22.5 * 2**30,
        "bandwidth": 1e12,
        "flops": 200e12,
        "link": 32e9,
        "network": 12.5e9,
    }
    assert (
        data["device"] == expected | {"about": "NVIDIA L4, PCIe 4"}
        and data["usable_memory"] == 40 * 2**30
    )
    assert [row["length"] for row in data["lengths"]] == [100, 2048]
    assert data["kv_bytes_a_token"] == 2**20
    available = 40 * 2**30 - data["weight_bytes"]
    assert data["lengths"][1]["sequences_that_fit"] == available // 2**31


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "abacus"], "h100"),
        (["--length", "0"], "at least 1"),
        (["--length", "many"], "32K"),
        (["--bandwidth", "0"], "0.001"),
        (["--gpu-memory-utilization", "1.5"], "above 0 and at most 1"),
        (["--gpu-memory-utilization", "0.5", "--memory", "8G"], "leave one out"),
    ],
)
def test_plan_usage_errors_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.argv", ["quire", "plan", str(tmp_path), *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_recurrent_state_bytes_do_not_depend_on_length(tmp_path):
    """Mamba 2: reading the state takes longer than its arithmetic at any batch size."""
    config = next(variant.config for variant in VARIANTS if variant.name == "mamba2")
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--json"])
    rows = json.loads(result.stdout)["lengths"]
    tail = 3 * (128 + 2 * 2 * 24)
    memory = 8 * 16 * 24
    assert {row["kv_bytes"] for row in rows} == {4 * 4 * (tail + memory)} and len(rows) > 1
    assert "never" in CliRunner().invoke(app, ["plan", str(tmp_path)]).stdout


def test_plan_of_an_encoder_has_no_kv_cache(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_MORE["ModernBERT-base"].config))
    result = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert (
        result.exit_code == 0 and "22 layers, 568.4 MiB of weights in float32" in result.output
    ), result.output
    assert "it reads each text in one step, and keeps no KV cache" in result.output
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--devices", "2"])
    assert "--devices proposes meshes for models that write" in str(result.exception)


def test_plan_leaves_out_images_that_are_not_read_or_not_understood(tmp_path):
    tiny_vision.write(tmp_path, "gemma4_spans")
    result = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert "images are left out: images whose tokens attend to later ones" in result.stdout
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--device", "cpu"])
    assert "pixels takes 63 tokens" in result.stdout
    tiny_vision.write(tmp_path, "mistral3")
    (tmp_path / "tokenizer.json").unlink()  # is not fetched for a plan
    result = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert result.exit_code == 0 and "pixels takes " in result.stdout
    settings = tiny_vision.PREPROCESSORS["mistral3"] | {"do_pan_and_scan": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    result = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert "images are left out: do_pan_and_scan is True" in result.stdout


def test_plan_of_a_model_that_reads_images_counts_its_tower(tmp_path):
    config = PUBLISHED_MORE["Qwen3-VL-4B-Instruct"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    text_only = json.loads(CliRunner().invoke(app, ["plan", str(tmp_path), "--json"]).stdout)
    assert text_only["images"] is None
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "merge_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--json"])
    images = json.loads(result.stdout)["images"]
    D, F, patches, rows = 1024, 4096, 3072, 768
    layers = 24 * patches * (4 * D * D + 2 * D * F + 2 * patches * D)
    mergers = 4 * rows * (4 * D * 4 * D + 4 * D * 2560)  # one, and three of the deepstack
    operations = 2 * (patches * 3 * 16 * 16 * D + layers + mergers)
    assert (images["tokens"], images["max_tokens"]) == (rows, 4096)
    assert images["seconds"] == pytest.approx(operations / cost.DEVICES["h100"].flops)
    store = 8192 * 4 * 2560 * 2
    matrices = 24 * (4 * D * D + 2 * D * F) + 4 * (16 * D * D + 4 * D * 2560)
    assert images["bytes"] == pytest.approx(store + 2 * matrices, rel=0.02)
    text = CliRunner().invoke(app, ["plan", str(tmp_path)]).stdout
    assert "1024 x 768\npixels takes 768 tokens" in text
    fits = text_only["lengths"][0]["sequences_that_fit"]
    assert json.loads(result.stdout)["lengths"][0]["sequences_that_fit"] < fits
