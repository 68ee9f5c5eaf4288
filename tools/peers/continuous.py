"""transformers' continuous batching on a GPU, with torch.compile: the same shape and requests,
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
    """Output tokens a second from the first request sent to the last token, as it is and then with
    torch.compile.
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
        found = generate(model, settings, prompts, answer)
        first = min(output.created_time for output in found)
        last = max(output.timestamps[-1] for output in found)
        waits = sorted(output.timestamps[0] - output.created_time for output in found)
        yield {
            "what": (
                f"transformers {transformers.__version__}, torch {torch.__version__}, compile "
                f"level {level}"
            ),
            "output_throughput": len(prompts) * answer / (last - first),
            "median_ttft_ms": 1000 * waits[len(waits) // 2],
        }


def generate(
    model, settings: ContinuousBatchingConfig, prompts: list[list[int]], answer: int
) -> list:
    """An answer of full length to each."""
    config = GenerationConfig(
        max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    outputs = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=settings,
        record_timestamps=True,
    )
    found = list(outputs.values())
    if len(found) != len(prompts) or any(
        len(output.generated_tokens) != answer for output in found
    ):
        raise RuntimeError(
            f"{len(found)} of {len(prompts)} prompts were answered, or not in full length"
        )
    return found
