"""Runner for Quire, in the environment of the comparison itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, LoRARequest, SamplingParams
from quire.serving.request.logprobs import PromptLogprobs

from .loop import ADAPTER_RANK, LoadSettings, TimedPrompt, TimedTokens, drive

EIGHT = {"activation_dtype": "int8"}  # int8 activations, as in llama.cpp and OpenVINO
WEIGHTS = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"} | EIGHT,
    "q4_k_m": EIGHT,
    "gguf": {},  # as it runs without options
}


def prepare(settings: LoadSettings) -> None:
    """No-op: Quire quantises at load time; the Q4_K_M file is prepared by llama.cpp's runner."""


def score(settings: LoadSettings, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [T, V] of the next token after each token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1)
    prompt = [*tokens, 0]  # its last token has no next
    with LLM(settings.file, max_model_len=len(prompt) + 1, max_num_seqs=1, max_logprobs=-1) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert isinstance(output.prompt_logprobs, PromptLogprobs)
        return output.prompt_logprobs.to_array()


def load(settings: LoadSettings) -> Callable[[list[TimedPrompt]], list[TimedTokens]]:
    model = settings.file or settings.model
    options = dict[str, Any](WEIGHTS[settings.weights])
    if settings.weights == "q4_k_m":
        model = str(Path(settings.prepared).parent / "llama.cpp" / "q4_k_m.gguf")
    options |= {
        "max_model_len": settings.max_len,
        "max_num_seqs": settings.max_seqs,
        "enable_prefix_caching": False,
    }
    if settings.drafts:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": settings.drafts,
        }
    if settings.adapters:
        options |= {
            "enable_lora": True,
            "max_loras": len(settings.adapters),
            "max_lora_rank": ADAPTER_RANK,
        }
    llm = LLM(model, **options)
    adapters = [
        LoRARequest(str(n), n, folder) for n, folder in enumerate(settings.adapters, 1)
    ] or [None]

    def serve(requests: list[TimedPrompt]) -> list[TimedTokens]:
        handles: dict[str, list] = {}

        def add(index: int, request: TimedPrompt) -> None:
            params = SamplingParams(
                temperature=0.0, max_tokens=request.count, ignore_eos=True, detokenize=False
            )
            adapter = adapters[index % len(adapters)]
            handle = llm.add({"prompt_token_ids": request.prompt}, params, adapter=adapter)
            handles[handle.request_id] = [index, 0]

        def step():
            for handle in llm.engine.step():
                entry = handles[handle.request_id]
                seq = handle.sequences[0]
                tokens = seq.tokens[seq.num_prompt + entry[1] :]
                entry[1] += len(tokens)
                if handle.finished and entry[1] != requests[entry[0]].count:
                    raise RuntimeError(f"a request ended after {entry[1]} tokens")
                yield entry[0], tokens

        return drive(requests, add, step)

    return serve
