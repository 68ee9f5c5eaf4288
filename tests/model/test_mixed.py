"""Mixed precision: a format per matrix under a budget of bits."""

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
def test_best_choices_match_exhaustive_search(data):
    """With budgets that the search's discrete shares represent exactly."""
    count = data.draw(st.integers(1, 5))
    numbers = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=4)
    choices = [
        [FormatChoice(None, float(b), float(loss)) for b, loss in data.draw(numbers)]
        for _ in range(count)
    ]
    budget = data.draw(st.integers(1, 120))
    within_budget = [
        combination
        for combination in itertools.product(*choices)
        if sum(choice.bits for choice in combination) <= budget
    ]
    best = best_choices(budget * (1 + 1e-3), choices)
    if not within_budget:
        assert best is None
        return
    assert best is not None and sum(choice.bits for choice in best) <= budget
    assert sum(choice.loss for choice in best) == min(
        sum(choice.loss for choice in combination) for combination in within_budget
    )


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


def stored_formats(folder):
    """(total bits of the matrices, format of each quantised module, all modules)."""
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
    total_bits = sum(
        8 * tensor.nbytes
        for name, tensor in tensors.items()
        if re.search(r"_proj\.", name) and not name.endswith("_shape")
    )
    return total_bits, formats, modules


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("bits", [4.3, 6])
@pytest.mark.slow
def test_mixed_folder_fits_the_budget_and_is_served(dense, samples, tmp_path, method, bits):
    """Fused matrices have one format, and the engine loads the folder."""
    out = tmp_path / "out"
    config = read_config(dense, quantization=mixed.ANY)
    session.save(dense, out, config, method, samples, bits=bits)
    total_bits, formats, modules = stored_formats(out)
    weights = sum(
        np.prod(t.shape)
        for name, t in find_tensors(dense).items()
        if re.search(r"_proj\.weight$", name)
    )
    assert bits - 0.5 < total_bits / weights <= bits
    assert len(modules) == 7 * 3
    for layer in range(3):  # fused matrices have one format
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


def test_resumed_choice_is_the_same(dense, samples, tmp_path):
    config = read_config(dense, quantization=mixed.ANY)
    source = CheckpointSource.open(dense, config, mixed.stored_format(mixed.ANY))
    first = mixed.choose(source, samples, tmp_path, 4.3, lambda num_done: None)
    modified_times = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(modified_times) == 3
    assert mixed.choose(source, samples, tmp_path, 4.3, lambda num_done: None) == first
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == modified_times


def test_loss_is_half_the_squared_gradients_times_squared_changes(dense, samples, tmp_path):
    config = read_config(dense, quantization=mixed.ANY)
    source = CheckpointSource.open(dense, config, mixed.stored_format(mixed.ANY))
    sensitivity.write(source, samples, tmp_path)
    leaf = source.leaves(1)["mlp.down_FD"]
    stored = read_header(sensitivity.gradients_file(tmp_path, 1))
    name = "model.layers.1.mlp.down_proj.weight"
    W = source.tensors[name].read().astype(np.float64)
    squares = stored[name].read().astype(np.float64)
    by_quant = {choice.quant: choice for choice in mixed.format_choices(source, leaf, stored)}
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
    [
        (3, "rtn", "bits is 3; the matrices of this model can be 3.* bits a weight at the least"),
        (4.5, "awq", "method is 'awq' with bits; it can be rtn or gptq"),
    ],
)
def test_too_few_bits_and_unsupported_methods_are_rejected(
    dense, samples, tmp_path, bits, method, message
):
    config = read_config(dense, quantization=mixed.ANY)
    with pytest.raises(ModelError, match=message):
        session.save(dense, tmp_path / "out", config, method, samples, bits=bits)
    assert not (tmp_path / "out").exists()
