"""Reference results of transformers: float32, eager attention, no cache."""

import copy
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch.overrides import TorchFunctionMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.tests.support.golden.families import Variant

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Double(TorchFunctionMode):
    """Replace float32 by float64 in torch calls."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        float64_kwargs = {
            key: torch.float64 if value == torch.float32 else value
            for key, value in (kwargs or {}).items()
        }
        return (torch.Tensor.double if func is torch.Tensor.float else func)(
            *args, **float64_kwargs
        )


def rounded_once(rule):
    """Compute RoPE frequencies in float64 and round once.

    transformers rounds at each step of scaling; an error in a frequency's last bit, times a
    position, exceeds all other float32 errors of a model.
    """

    def frequencies(*args, **kwargs):
        with Double():
            inv_freq, factor = rule(*args, **kwargs)
        return inv_freq.float(), factor

    return frequencies


ROPE_INIT_FUNCTIONS.update({kind: rounded_once(rule) for kind, rule in ROPE_INIT_FUNCTIONS.items()})


def auto_class(config):
    """The auto class for a config: image-text models are not causal LMs, encoders end in "Model"."""
    if str((config.architectures or [None])[0]).endswith("Model"):
        return transformers.AutoModel
    causal = transformers.AutoModelForCausalLM
    return (
        causal
        if type(config) in causal._model_mapping
        else transformers.AutoModelForImageTextToText
    )


def built(config):
    """A model with random weights."""
    return auto_class(config).from_config(config)


def tensor_shapes(variant: Variant) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that transformers saves, under the names of the variant's checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(variant.config))
        config = transformers.AutoConfig.from_pretrained(folder)
        built(config).save_pretrained(folder)
        shapes = {}
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                shapes[rename(name, variant.renames)] = tuple(file.get_slice(name).get_shape())
        return pack(shapes) if "quantization_config" in variant.config else shapes


def pack(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes with gpt-oss's experts in MXFP4, which transformers dequantises as it loads."""
    packed = {}
    for name, shape in shapes.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            E, into, out = shape
            packed |= {
                f"{name}_blocks": (E, out, into // 32, 16),
                f"{name}_scales": (E, out, into // 32),
            }
        else:
            packed[name] = shape
    return packed


def rename(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for old, new in renames:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def load(folder: Path):
    """Load the model of a folder; no tensor may be missing or left over."""
    model, info = auto_class(transformers.AutoConfig.from_pretrained(folder)).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def logits(model, ids: list[int]) -> np.ndarray:
    """[T, V] for one sequence."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


@torch.no_grad()
def hidden(model, ids: list[int]) -> np.ndarray:
    """[T, D] for one sequence of an encoder."""
    return model(torch.tensor([ids])).last_hidden_state[0].numpy()


def float32_error(model, ids: list[int]) -> float:
    """The largest difference of float32 and float64 logits: large if the choice of experts is
    nearly a tie.
    """
    single = logits(model, ids)
    double = logits(model.double(), ids)
    model.float()
    return float(np.abs(single - double).max())


def logit_sensitivity(model, ids: list[int]) -> np.ndarray:
    """[T]: the largest change of a token's logits if all weights and buffers change by half of
    their last bit.
    """
    expected = logits(model, ids)
    max_differences = np.zeros(len(ids), np.float32)
    for seed in range(4):
        perturbed = copy.deepcopy(model)
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for x in (*perturbed.parameters(), *perturbed.buffers()):
                if x.is_floating_point():
                    x.mul_(1 + torch.randn(x.shape, generator=random) * 2**-24)
        max_differences = np.maximum(
            max_differences, np.abs(logits(perturbed, ids) - expected).max(axis=1)
        )
    return max_differences


def greedy(model, ids: list[int], count: int) -> tuple[list[int], float]:
    """(next tokens, the smallest lead of any of them over the second best token)."""
    ids = list(ids)
    min_lead = float("inf")
    for _ in range(count):
        row = logits(model, ids)[-1]
        runner_up, best = np.sort(row)[-2:]
        min_lead = min(min_lead, float(best - runner_up))
        ids.append(int(row.argmax()))
    return ids[len(ids) - count :], min_lead
