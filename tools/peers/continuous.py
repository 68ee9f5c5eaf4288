"""Runs transformers' continuous batching on a GPU, with and without torch.compile, on a model with
random weights.
"""

# pyright: reportMissingImports=false

from collections.abc import Iterable, Iterator

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
)

WARM_UP = 8  # tokens


def has_card() -> bool:
    return torch.cuda.is_available()


def run(
    hf: dict,
    prompts: list[list[int]],
    answer: int,
    streams: int,
    device: str = "cuda",
    levels: Iterable[int] = (0, 1),
) -> Iterator[dict]:
    """Yield the throughput and TTFT for each compile level; level 0 is without torch.compile.

    Throughput is output tokens per second from the first request to the last token.
    """
    names = {
        name: value for name, value in hf.items() if name not in ("architectures", "torch_dtype")
    }
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**names), dtype=torch.bfloat16).eval()
    for level in levels:
        settings = ContinuousBatchingConfig(
            max_requests_per_batch=streams, default_compile_level=level
        )
        generate(model, settings, prompts[:streams], WARM_UP)
        outputs = generate(model, settings, prompts, answer)
        first = min(output.created_time for output in outputs)
        last = max(output.timestamps[-1] for output in outputs)
        ttft_seconds = sorted(output.timestamps[0] - output.created_time for output in outputs)
        yield {
            "what": (
                f"transformers {transformers.__version__}, torch {torch.__version__}, compile "
                f"level {level}"
            ),
            "output_throughput": len(prompts) * answer / (last - first),
            "median_ttft_ms": 1000 * ttft_seconds[len(ttft_seconds) // 2],
        }


def generate(
    model, settings: ContinuousBatchingConfig, prompts: list[list[int]], answer: int
) -> list:
    """Generate `answer` tokens for each prompt; raises RuntimeError if any are missing."""
    config = GenerationConfig(
        max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    outputs = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=settings,
        record_timestamps=True,
    )
    outputs_list = list(outputs.values())
    if len(outputs_list) != len(prompts) or any(
        len(output.generated_tokens) != answer for output in outputs_list
    ):
        raise RuntimeError(
            f"{len(outputs_list)} of {len(prompts)} prompts were answered, or not in full length"
        )
    return outputs_list
