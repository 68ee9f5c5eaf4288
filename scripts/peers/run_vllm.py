"""vLLM on the CPU. int8 and int4 are compressed-tensors checkpoints, written here: its own tool is another package.

int8 is W8A8: a scale a row, activations scaled a token as they come. int4 is W4A16 in groups of 128. The embedding,
which is also the head, stays bf16.
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Callable
from pathlib import Path

from .loop import LoadSettings, TimedPrompt, TimedTokens, drive

GROUP = 128
WHOLE = {"type": "int", "symmetric": True, "dynamic": False}
WEIGHTS = {
    "int8": WHOLE | {"num_bits": 8, "strategy": "channel"},
    "int4": WHOLE | {"num_bits": 4, "strategy": "group", "group_size": GROUP},
}
ACTIVATIONS = WHOLE | {"num_bits": 8, "strategy": "token", "dynamic": True}


def prepare(settings: LoadSettings) -> None:
    folder = Path(settings.prepared) / settings.weights
    if settings.weights != "bf16" and not (folder / "model.safetensors").is_file():
        quantise(Path(settings.model), folder, settings.weights)


def quantise(model: Path, folder: Path, weights: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    found = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if tensor.ndim == 1 or "embed" in name or name.endswith("moe.gate.weight"):
            found[name] = tensor
            continue
        stem, (rows, columns) = name.removesuffix(".weight"), tensor.shape
        parts = tensor.float().reshape(rows, 1 if weights == "int8" else columns // GROUP, -1)
        top = 127 if weights == "int8" else 7
        scale = (parts.abs().amax(-1, keepdim=True) / top).clamp(min=1e-8).bfloat16()
        whole = (parts / scale.float()).round().clamp(-top, top).reshape(rows, columns)
        found[f"{stem}.weight_scale"] = scale.squeeze(-1)
        if weights == "int8":
            found[name] = whole.to(torch.int8)
            continue
        nibbles = (whole.long() + 8).reshape(rows, -1, 8) << torch.arange(0, 32, 4)  # eight in a word, the first lowest
        words = nibbles.sum(-1)
        found[f"{stem}.weight_packed"] = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        found[f"{stem}.weight_shape"] = torch.tensor([rows, columns])
    group: dict = {"targets": ["Linear"], "weights": WEIGHTS[weights]}
    if weights == "int8":
        group["input_activations"] = ACTIVATIONS
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*moe.gate"],
        "format": "int-quantized" if weights == "int8" else "pack-quantized", "config_groups": {"group_0": group},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(found, folder / "model.part", metadata={"format": "pt"})
    (folder / "model.part").rename(folder / "model.safetensors")


def load(settings: LoadSettings) -> Callable[[list[TimedPrompt]], list[TimedTokens]]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    model = settings.model if settings.weights == "bf16" else str(Path(settings.prepared) / settings.weights)
    engine = LLM(
        model, dtype="bfloat16", max_model_len=settings.max_len, max_num_seqs=settings.max_seqs,
        skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=True,
    ).llm_engine  # fmt: skip

    def serve(requests: list[TimedPrompt]) -> list[TimedTokens]:
        def add(index: int, request: TimedPrompt) -> None:
            params = SamplingParams(
                temperature=0.0, max_tokens=request.count, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            engine.add_request(str(index), {"prompt_token_ids": request.prompt}, params)

        def step():
            for output in engine.step():
                yield int(output.request_id), list(output.outputs[0].token_ids)

        return drive(requests, add, step)

    return serve
