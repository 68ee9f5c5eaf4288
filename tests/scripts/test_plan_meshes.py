"""`quire plan --devices`: its arithmetic by hand, properties of any model, and the command."""

import json
import math
import random

import pytest
from typer.testing import CliRunner

from quire.__main__ import app, main
from quire.model.config import Attention, Layer, Mlp, ModelConfig, Moe
from quire.model.partition import check
from quire.model.planning import meshes
from quire.model.planning.cost import DEVICES, Device, weight_bytes
from quire.model.planning.meshes import LATENCY, Planner, Workload
from quire.model.planning.traffic import Collective, traffic
from quire.tests.support.plan_configs import LLAMA, PUBLISHED, random_config

ALONE = {"data": 1, "pipe": 1, "context": 1, "tensor": 1, "expert": 1}
SMALL = ModelConfig("llama", 64, 16, (Layer(Attention(4, 2, 4, 1.0), Mlp(32)),) * 2, 128)
DEVICE = Device(20000, 1e6, 1e7, 1e5, 1e3)
# bytes of a layer: query, key and value; output; gate, up and down matrices
LAYER = 16 * (4 + 2 + 2) * 4 + 4 * 4 * 16 + 3 * 16 * 32
NORMS = 2 * 16 * 4


def test_tensor_parallel_cost_by_hand():
    choice = Planner(SMALL, DEVICE, Workload(4, 8, 6)).evaluate(ALONE | {"tensor": 2})
    embedding_bytes = 32 * 16 * 2
    weight_bytes = 2 * (LAYER // 2 * 2 + NORMS) + 2 * embedding_bytes + 16 * 4
    assert choice.weight_bytes == weight_bytes
    # tokens * layers * (keys and values) * one head of 4 * two bytes
    assert choice.sequence_bytes == 8 * 2 * 2 * 1 * 4 * 2
    assert choice.sequences == (20000 - weight_bytes) // choice.sequence_bytes
    assert choice.decode.read == pytest.approx(
        (weight_bytes - embedding_bytes + 4 * choice.sequence_bytes) / 1e6
    )
    token_operations = 2 * (2 * (LAYER // 2 + 8 * 2 * 4 * 2) + 16 * 32)
    assert choice.decode.compute == pytest.approx(4 * token_operations / 1e7)
    # five all-reduces of four tokens: each of two devices sends as much as it has
    assert choice.decode.sent == 5 * 4 * 16 * 2
    assert choice.decode.send == pytest.approx(choice.decode.sent / 1e5 + 5 * LATENCY)
    assert choice.decode.total == choice.decode.slowest == choice.decode.read + choice.decode.send
    assert choice.tokens_a_second == 4 / choice.decode.total
    # A prompt of eight tokens, with half of its KV read on average: six tokens, one of them
    # sampled.
    prompt_operations = 2 * (6 * 2 * (LAYER // 2 + 4 * 2 * 4 * 2) + 16 * 32)
    assert choice.prompt.compute == pytest.approx(prompt_operations / 1e7)
    assert choice.prompt.read == pytest.approx(
        (weight_bytes - embedding_bytes + choice.sequence_bytes / 2) / 1e6
    )
    assert choice.prompt.sent == 5 * 6 * 16 * 2


def test_pipeline_cost_by_hand():
    choice = Planner(SMALL, DEVICE, Workload(4, 8, 6)).evaluate(ALONE | {"pipe": 2})
    layer_bytes = 2 * LAYER + NORMS
    embedding_bytes = 64 * 16 * 2
    cache_bytes = 2 * 8 * 2 * 2 * 4 * 2
    assert (
        choice.weight_bytes == layer_bytes + embedding_bytes + 16 * 4
    )  # of the last stage, which also has the final norm
    # the first stage also sends the hidden states of two sequences to the next
    first_seconds = (layer_bytes + cache_bytes) / 1e6 + 2 * 16 * 2 / 1e5 + LATENCY
    last_seconds = (layer_bytes + embedding_bytes + 16 * 4 + cache_bytes) / 1e6
    assert choice.decode.total == pytest.approx(first_seconds + last_seconds)
    assert choice.decode.slowest == pytest.approx(last_seconds)
    assert choice.tokens_a_second == pytest.approx(2 / last_seconds)


@pytest.mark.parametrize(
    ("sizes", "collective", "bytes_within", "bytes_across"),
    [
        ({"tensor": 8}, Collective("all-reduce", ("tensor",), 800), 2 * 700, 0),
        (
            {"tensor": 4, "expert": 2},
            Collective(
                "all-reduce",
                (
                    "tensor",
                    "expert",
                ),
                800,
            ),
            2 * 700,
            0,
        ),
        ({"tensor": 8, "expert": 2}, Collective("all-reduce", ("tensor",), 800), 2 * 700, 0),
        ({"tensor": 8, "expert": 2}, Collective("all-reduce", ("expert",), 800), 0, 2 * 400),
        (
            {"tensor": 4, "expert": 4},
            Collective("all-reduce", ("expert",), 800),
            2 * 400,
            2 * 200,
        ),  # two of the experts' devices on each of two hosts
        (
            {"tensor": 2, "expert": 2, "data": 4},
            Collective(
                "all-to-all",
                (
                    "data",
                    "expert",
                ),
                800,
            ),
            300,
            400,
        ),
        ({"tensor": 8, "context": 2}, Collective("all-gather", ("context",), 800), 0, 400),
        ({"expert": 16}, Collective("all-reduce", ("expert",), 800), 2 * 700, 2 * 50),
        ({"context": 16}, Collective("all-to-all", ("context",), 1600), 700, 800),
    ],
)
def test_collective_bytes_within_and_across_hosts(sizes, collective, bytes_within, bytes_across):
    nbytes, seconds = Planner(SMALL, DEVICE, Workload(4, 8, 6)).collective_cost(
        collective, ALONE | sizes
    )
    assert nbytes == pytest.approx(bytes_within + bytes_across)
    assert seconds == pytest.approx(bytes_within / 1e5 + bytes_across / 1e3 + LATENCY)


def test_only_chosen_experts_are_read():
    config = ModelConfig(
        "llama", 64, 16, (Layer(Attention(4, 2, 4, 1.0), None, Moe(8, 2, 6)),), 128
    )
    read_of_one, read_of_two = (
        Planner(config, DEVICE, Workload(batch, 1, 6)).evaluate(ALONE).decode.read
        for batch in (1, 2)
    )
    expert_bytes = 8 * 3 * 16 * 6 * 2
    expected = (
        1 - 0.75**2 - 0.25
    ) * expert_bytes + 2 * 2 * 4 * 2  # and the KV of the second sequence's token
    assert (read_of_two - read_of_one) * 1e6 == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(12))
def test_meshes_of_random_models_are_valid(seed):
    """Every mesh passes the engine's check; more devices never need more memory each; one device
    sends nothing.
    """
    config = random_config(random.Random(seed))
    work = Workload(8, 64, 16)
    planner = Planner(config, DEVICES["h100"], work)
    least = math.inf
    alone = planner.evaluate(ALONE)
    assert alone.weight_bytes == weight_bytes(config)
    assert alone.decode.sent == alone.prompt.sent == 0
    for devices in (1, 2, 4, 8):
        mesh_sizes = meshes.meshes(config, devices)
        assert len({tuple(sizes.items()) for sizes in mesh_sizes}) == len(mesh_sizes)
        required = []
        for sizes in mesh_sizes:
            assert math.prod(sizes.values()) == devices
            check(
                config,
                sizes["tensor"],
                sizes["expert"],
                sizes["pipe"],
                sizes["data"],
                sizes["context"],
            )
            choice = planner.evaluate(sizes)
            required.append(meshes.required_bytes(choice, work))
            if sizes["pipe"] == 1:
                times = {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}
                sent = sum(
                    times[collective.kind]
                    * collective.nbytes
                    * (1 - 1 / math.prod(sizes[name] for name in collective.axes))
                    for collective in traffic(config, sizes, -(-8 // sizes["data"]), False)
                )
                assert choice.decode.sent == pytest.approx(sent)
        assert min(required, default=least) <= least
        least = min(required, default=least)


def run(tmp_path, name: str, *arguments: str):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | PUBLISHED[name][0]))
    return CliRunner().invoke(app, ["plan", str(tmp_path), *arguments])


def test_plan_command_proposes_meshes(tmp_path):
    options = ("--devices", "8", "--device", "h200", "--length", "4K")
    data = json.loads(run(tmp_path, "70B", *options, "--json").stdout)["meshes"]
    rates = [choice["tokens_a_second"] for choice in data["choices"]]
    assert data["choices"][0]["sizes"] == ALONE | {"tensor": 8}
    assert rates == sorted(rates, reverse=True)
    assert all(choice["sequences"] >= 64 for choice in data["choices"])
    lines = run(tmp_path, "70B", *options).stdout.splitlines()
    assert max(map(len, lines)) <= 100 + len(str(tmp_path))
    assert any(line.startswith("tensor 8*") for line in lines)
    assert any("--tensor-parallel-size 8" in line for line in lines)
    prompts = json.loads(run(tmp_path, "70B", *options, "--json", "--best", "prompts").stdout)[
        "meshes"
    ]["choices"]
    assert prompts[0]["prompt_tokens_a_second"] == max(
        choice["prompt_tokens_a_second"] for choice in prompts
    )


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("70B", ["--batch", "4"], "--batch is 4; it needs --devices"),
        ("70B", ["--devices", "8", "--best", "price"], "--best is 'price'; it can be throughput"),
        pytest.param("70B", ["--devices", "83"], "use --devices 64", marks=pytest.mark.nightly),
        pytest.param(
            "70B",
            ["--devices", "2", "--device", "l4"],
            "use --devices 16",
            marks=pytest.mark.nightly,
        ),
        ("7B", ["--devices", "2", "--batch", "500"], "use --batch 65 or less or --devices 16"),
        ("7B", ["--devices", "2", "--length", "8K"], "at most 4096 positions"),
    ],
)
def test_plan_usage_errors_are_one_line(tmp_path, monkeypatch, capsys, name, arguments, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | PUBLISHED[name][0]))
    monkeypatch.setattr("sys.argv", ["quire", "plan", str(tmp_path), *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
