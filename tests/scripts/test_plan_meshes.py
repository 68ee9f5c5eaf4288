"""`quire plan --devices`: its arithmetic by hand, what must hold of any model, and the command."""

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
# queries, keys, values; out; gate, up and down
LAYER = 16 * (4 + 2 + 2) * 4 + 4 * 4 * 16 + 3 * 16 * 32
NORMS = 2 * 16 * 4


def test_heads_in_two_parts_by_hand():
    found = Planner(SMALL, DEVICE, Workload(4, 8, 6)).evaluate(ALONE | {"tensor": 2})
    words = 32 * 16 * 2
    held = 2 * (LAYER // 2 * 2 + NORMS) + 2 * words + 16 * 4
    assert found.weight_bytes == held
    # tokens, layers, keys and values, one head of 4, two bytes
    assert found.sequence_bytes == 8 * 2 * 2 * 1 * 4 * 2
    assert found.sequences == (20000 - held) // found.sequence_bytes
    assert found.decode.read == pytest.approx((held - words + 4 * found.sequence_bytes) / 1e6)
    a_row = 2 * (2 * (LAYER // 2 + 8 * 2 * 4 * 2) + 16 * 32)
    assert found.decode.compute == pytest.approx(4 * a_row / 1e7)
    # five sums of four rows: of two devices each sends as much
    assert found.decode.sent == 5 * 4 * 16 * 2
    assert found.decode.send == pytest.approx(found.decode.sent / 1e5 + 5 * LATENCY)
    assert found.decode.total == found.decode.slowest == found.decode.read + found.decode.send
    assert found.tokens_a_second == 4 / found.decode.total
    # A prompt of eight, half of it read: six rows, of which one is sampled.
    in_prompt = 2 * (6 * 2 * (LAYER // 2 + 4 * 2 * 4 * 2) + 16 * 32)
    assert found.prompt.compute == pytest.approx(in_prompt / 1e7)
    assert found.prompt.read == pytest.approx((held - words + found.sequence_bytes / 2) / 1e6)
    assert found.prompt.sent == 5 * 6 * 16 * 2


def test_layers_in_two_stages_by_hand():
    found = Planner(SMALL, DEVICE, Workload(4, 8, 6)).evaluate(ALONE | {"pipe": 2})
    layer = 2 * LAYER + NORMS  # cache of two sequences
    words = 64 * 16 * 2
    cache = 2 * 8 * 2 * 2 * 4 * 2
    assert found.weight_bytes == layer + words + 16 * 4  # of the last, which has a norm more
    # and the rows of two sequences to the next
    first = (layer + cache) / 1e6 + 2 * 16 * 2 / 1e5 + LATENCY
    last = (layer + words + 16 * 4 + cache) / 1e6
    assert found.decode.total == pytest.approx(first + last)
    assert found.decode.slowest == pytest.approx(last)
    assert found.tokens_a_second == pytest.approx(2 / last)


@pytest.mark.parametrize(
    ("sizes", "one", "within", "across"),
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
        ),  # two here, two machines
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
def test_what_a_collective_moves(sizes, one, within, across):
    nbytes, seconds = Planner(SMALL, DEVICE, Workload(4, 8, 6)).collective_cost(one, ALONE | sizes)
    assert nbytes == pytest.approx(within + across)
    assert seconds == pytest.approx(within / 1e5 + across / 1e3 + LATENCY)


def test_only_experts_that_are_chosen_are_read():
    config = ModelConfig(
        "llama", 64, 16, (Layer(Attention(4, 2, 4, 1.0), None, Moe(8, 2, 6)),), 128
    )
    one, many = (
        Planner(config, DEVICE, Workload(batch, 1, 6)).evaluate(ALONE).decode.read
        for batch in (1, 2)
    )
    experts = 8 * 3 * 16 * 6 * 2
    another = (1 - 0.75**2 - 0.25) * experts + 2 * 2 * 4 * 2  # and the second sequence's token
    assert (many - one) * 1e6 == pytest.approx(another)


@pytest.mark.parametrize("seed", range(12))
def test_of_any_model(seed):
    """Each mesh passes the check of the engine; more devices never need more of each; one alone
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
        found = meshes.meshes(config, devices)
        assert len({tuple(sizes.items()) for sizes in found}) == len(found)
        needs = []
        for sizes in found:
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
            needs.append(meshes.required_bytes(choice, work))
            if sizes["pipe"] == 1:
                times = {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}
                sent = sum(
                    times[one.kind]
                    * one.nbytes
                    * (1 - 1 / math.prod(sizes[name] for name in one.axes))
                    for one in traffic(config, sizes, -(-8 // sizes["data"]), False)
                )
                assert choice.decode.sent == pytest.approx(sent)
        assert min(needs, default=least) <= least
        least = min(needs, default=least)


def run(tmp_path, name: str, *arguments: str):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | PUBLISHED[name][0]))
    return CliRunner().invoke(app, ["plan", str(tmp_path), *arguments])


def test_command_proposes(tmp_path):
    asked = ("--devices", "8", "--device", "h200", "--length", "4K")
    data = json.loads(run(tmp_path, "70B", *asked, "--json").stdout)["meshes"]
    rates = [choice["tokens_a_second"] for choice in data["choices"]]
    assert data["choices"][0]["sizes"] == ALONE | {"tensor": 8}
    assert rates == sorted(rates, reverse=True)
    assert all(choice["sequences"] >= 64 for choice in data["choices"])
    lines = run(tmp_path, "70B", *asked).stdout.splitlines()
    assert max(map(len, lines)) <= 100 + len(str(tmp_path))
    assert any(line.startswith("tensor 8*") for line in lines)
    assert any("--tensor-parallel-size 8" in line for line in lines)
    prompts = json.loads(run(tmp_path, "70B", *asked, "--json", "--best", "prompts").stdout)[
        "meshes"
    ]["choices"]
    assert prompts[0]["prompt_tokens_a_second"] == max(
        choice["prompt_tokens_a_second"] for choice in prompts
    )


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
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
def test_command_refuses(tmp_path, monkeypatch, capsys, name, arguments, says):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | PUBLISHED[name][0]))
    monkeypatch.setattr("sys.argv", ["quire", "plan", str(tmp_path), *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
