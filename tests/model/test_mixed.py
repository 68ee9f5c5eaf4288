"""A format for each matrix under a budget of bits."""

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.model.checkpoint.loader import read_config
from quire.model.checkpoint.safetensors import find_tensors, read_header
from quire.model.config import ModelError
from quire.model.quantize import mixed, sensitivity, session
from quire.model.quantize.mixed import FormatChoice, best_choices
from quire.model.quantize.source import CheckpointSource
from quire.tests.support import tiny
from quire.tests.support.cases import cases

CONFIG = tiny.LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}


@settings(max_examples=cases(30))
@given(st.data())
def test_no_other_choice_is_better(data):
    """Against all choices there are, with budgets of a whole number of shares."""
    count = data.draw(st.integers(1, 5))
    numbers = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=4)
    each = [
        [FormatChoice(None, float(b), float(loss)) for b, loss in data.draw(numbers)]
        for _ in range(count)
    ]
    budget = data.draw(st.integers(1, 120))
    fits = [some for some in itertools.product(*each) if sum(way.bits for way in some) <= budget]
    found = best_choices(budget * (1 + 1e-3), each)
    if not fits:
        assert found is None
        return
    assert found is not None and sum(way.bits for way in found) <= budget
    assert sum(way.loss for way in found) == min(sum(way.loss for way in some) for some in fits)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    tensors = tiny.draw(CONFIG)
    tiny.write(
        folder,
        CONFIG,
        {name: tensor if tensor.ndim < 2 else tensor / 10 for name, tensor in tensors.items()},
    )
    return folder


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    return [rng.integers(0, CONFIG["vocab_size"], 24).tolist() for _ in range(4)]


def bits_of(folder):
    """What the matrices of a folder take, bits a weight, and the format of each module."""
    tensors = find_tensors(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    formats = {
        module: (group["weights"]["num_bits"], group["weights"].get("group_size"))
        for group in config["config_groups"].values()
        for module in group["targets"]
    }
    modules = [
        name.removesuffix(".weight")
        for name in find_tensors(folder)
        if re.search(r"_proj\.weight$", name)
    ]
    modules += list(formats)
    taken = sum(
        8 * tensor.nbytes
        for name, tensor in tensors.items()
        if re.search(r"_proj\.", name) and not name.endswith("_shape")
    )
    return taken, formats, modules


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("bits", [4.3, 6])
@pytest.mark.slow
def test_a_folder_of_several_formats(dense, samples, tmp_path, method, bits):
    """It takes no more than was asked for, is served, and its wide matrices are those that the loss
    hears of.
    """
    out = tmp_path / "out"
    config = read_config(dense, quantization=mixed.ANY)
    session.save(dense, out, config, method, samples, bits=bits)
    taken, formats, modules = bits_of(out)
    weights = sum(
        np.prod(t.shape)
        for name, t in find_tensors(dense).items()
        if re.search(r"_proj\.weight$", name)
    )
    assert bits - 0.5 < taken / weights <= bits
    assert len(modules) == 7 * 3
    for layer in range(3):  # what is one weight has one format
        for together in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
            assert len({formats.get(f"model.layers.{layer}.{name}_proj") for name in together}) == 1
    assert not (tmp_path / ".out.layers").exists()
    with LLM(
        str(out),
        skip_tokenizer_init=True,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=64,
    ) as llm:
        (answer,) = llm.generate(
            [{"prompt_token_ids": samples[0]}], SamplingParams(max_tokens=4, ignore_eos=True)
        )
        assert len(answer.outputs[0].token_ids) == 4


def test_the_choice_is_the_same_when_it_goes_on(dense, samples, tmp_path):
    config = read_config(dense, quantization=mixed.ANY)
    source = CheckpointSource.open(dense, config, mixed.stored_format(mixed.ANY))
    first = mixed.choose(source, samples, tmp_path, 4.3, lambda done: None)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(before) == 3
    assert mixed.choose(source, samples, tmp_path, 4.3, lambda done: None) == first
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


def test_costs_are_the_gradients_times_the_changes(dense, samples, tmp_path):
    config = read_config(dense, quantization=mixed.ANY)
    source = CheckpointSource.open(dense, config, mixed.stored_format(mixed.ANY))
    sensitivity.write(source, samples, tmp_path)
    leaf = source.leaves(1)["mlp.down_FD"]
    stored = read_header(sensitivity.gradients_file(tmp_path, 1))
    name = "model.layers.1.mlp.down_proj.weight"
    W = source.tensors[name].read().astype(np.float64)
    squares = stored[name].read().astype(np.float64)
    by_quant = {way.quant: way for way in mixed.format_choices(source, leaf, stored)}
    assert by_quant[None].loss == 0
    groups = W.reshape(64, -1, 32)
    top = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)
    scale = (top / -8).astype(np.float16).astype(np.float64)
    nearest = np.clip(np.rint(groups / scale), -8, 7) * scale
    exact = 0.5 * (squares.reshape(groups.shape) * np.square(nearest - groups)).sum()
    assert by_quant["int4-32"].loss == pytest.approx(exact, rel=1e-3)
    assert by_quant["int4-32"].bits == W.size * 4.5
    assert by_quant["int8-weights"].loss < by_quant["int4-32"].loss < by_quant["int3-32"].loss
    assert "int4-64" not in by_quant  # 96 inputs do not divide by 64


@pytest.mark.parametrize(
    ("bits", "method", "message"),
    [(3, "rtn", "bits is 3; the matrices of this model can be 3.* bits a weight at the least"),
     (4.5, "awq", "method is 'awq' with bits; it can be rtn or gptq")],
)  # fmt: skip
def test_refused(dense, samples, tmp_path, bits, method, message):
    config = read_config(dense, quantization=mixed.ANY)
    with pytest.raises(ModelError, match=message):
        session.save(dense, tmp_path / "out", config, method, samples, bits=bits)
    assert not (tmp_path / "out").exists()
