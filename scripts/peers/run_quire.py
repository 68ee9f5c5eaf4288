"""Quire, in the environment that runs the comparison."""

from collections.abc import Callable
from typing import Any

from ... import LLM, SamplingParams
from .loop import LoadSettings, TimedPrompt, TimedTokens, drive


def prepare(settings: LoadSettings) -> None:
    """Nothing: it reads the checkpoint, and quantises as it loads."""


def load(settings: LoadSettings) -> Callable[[list[TimedPrompt]], list[TimedTokens]]:
    options: dict[str, Any] = {} if settings.weights == "bf16" else {"quantization": settings.weights}
    options |= {"max_model_len": settings.max_len, "max_num_seqs": settings.max_seqs, "enable_prefix_caching": False}
    if settings.drafts:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": settings.drafts}
    llm = LLM(settings.model, **options)

    def serve(requests: list[TimedPrompt]) -> list[TimedTokens]:
        handles: dict[str, list] = {}

        def add(index: int, request: TimedPrompt) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=request.count, ignore_eos=True, detokenize=False)
            handle = llm.add({"prompt_token_ids": request.prompt}, params)
            handles[handle.request_id] = [index, 0]

        def step():
            for handle in llm.engine.step():
                entry, seq = handles[handle.request_id], handle.sequences[0]
                tokens = seq.tokens[seq.num_prompt + entry[1] :]
                entry[1] += len(tokens)
                if handle.finished and entry[1] != requests[entry[0]].count:
                    raise RuntimeError(f"a request ended after {entry[1]} tokens")
                yield entry[0], tokens

        return drive(requests, add, step)

    return serve
