"""Runner for transformers on CPUs, with static batching: requests that arrive during a batch wait
for its end.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .loop import LoadSettings, TimedPrompt, TimedTokens


class Clock(StoppingCriteria):
    """Records the time of each token; never stops the generation."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **options):
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def prepare(settings: LoadSettings) -> None:
    if settings.weights != "bf16":
        raise NotImplementedError(
            f"{settings.weights} weights need one more package, and are not compared"
        )
    if settings.drafts or settings.adapters:
        raise NotImplementedError("its drafts and adapters are not compared")


def dequantise(settings: LoadSettings) -> None:
    """Write the weights of the GGUF file as a float32 folder, unless it exists."""
    folder = Path(settings.model)
    if (folder / "model.safetensors").is_file():
        return
    file = Path(settings.file)
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # with it `save_pretrained` refuses
    (folder / "config.json").write_text(json.dumps(config, default=str))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    temporary_path = folder / "model.safetensors.part"
    save_file(tensors, temporary_path, metadata={"format": "pt"})
    temporary_path.replace(folder / "model.safetensors")


def score(settings: LoadSettings, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of the next token after each token, in float32: the reference."""
    torch.set_num_threads(settings.threads)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def load(settings: LoadSettings) -> Callable[[list[TimedPrompt]], list[TimedTokens]]:
    torch.set_num_threads(settings.threads)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # ignore EOS

    def batch(requests: list[TimedPrompt]) -> tuple[torch.Tensor, list[float]]:
        """Generate one batch, padded on the left; returns (tokens, time of each step)."""
        longest = max(len(r.prompt) for r in requests)
        count = max(r.count for r in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        clock = Clock()
        with torch.inference_mode():
            out = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=2,
                stopping_criteria=StoppingCriteriaList([clock]),
            )  # fmt: skip
        return out[:, longest:], clock.times

    def serve(requests: list[TimedPrompt]) -> list[TimedTokens]:
        answers = [TimedTokens() for _ in requests]
        waiting = sorted(range(len(requests)), key=lambda index: requests[index].arrival)
        start = time.perf_counter()
        while waiting:
            time.sleep(max(0.0, requests[waiting[0]].arrival - (time.perf_counter() - start)))
            now = time.perf_counter() - start
            arrived = [index for index in waiting if requests[index].arrival <= now][
                : settings.max_seqs
            ]
            waiting = [index for index in waiting if index not in arrived]
            tokens, times = batch([requests[index] for index in arrived])
            for row, index in enumerate(arrived):
                count = requests[index].count
                answers[index] = TimedTokens(
                    times[0] - start, times[count - 1] - start, tokens[row, :count].tolist()
                )
        return answers

    return serve
