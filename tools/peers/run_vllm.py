"""Runner for vLLM on CPUs. int8 and int4 are compressed-tensors checkpoints by `quire quantize`.

int8 is W8A8 with per-channel weight scales and dynamic per-token activation scales; int4 is W4A16
with groups of 128, int4-32 of 32. The embedding, tied to the LM head, stays bf16.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable
from pathlib import Path

from .loop import ADAPTER_RANK, LoadSettings, TimedPrompt, TimedTokens, drive


def prepare(settings: LoadSettings) -> None:
    """Only check the format: `checkpoint.quantise` has written the checkpoint already."""
    if settings.weights not in ("bf16", "int8", "int4", "int4-32"):
        raise NotImplementedError(f"{settings.weights} is not compared")


def score(settings: LoadSettings, tokens: list[int]):
    """Log-probabilities [T, V] of the next token after each token."""
    import numpy as np
    from vllm import LLM, SamplingParams

    prompt = [*tokens, 0]  # its last token has no next
    llm = LLM(
        str(Path(settings.prepared) / settings.weights),
        dtype="bfloat16",
        max_model_len=len(prompt) + 1,
        max_num_seqs=1,
        max_logprobs=-1,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    flat = output.prompt_logprobs
    rows = []
    for start, end in zip(flat.start_indices[1:], flat.end_indices[1:], strict=True):
        token_ids = flat.token_ids[start:end]
        row = np.full(max(token_ids) + 1, -np.inf, np.float32)
        row[token_ids] = flat.logprobs[start:end]
        rows.append(row)
    return np.stack(rows)


def load(settings: LoadSettings) -> Callable[[list[TimedPrompt]], list[TimedTokens]]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    model = (
        settings.model
        if settings.weights == "bf16"
        else str(Path(settings.prepared) / settings.weights)
    )
    ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    adapters = [LoRARequest(str(n), n, folder) for n, folder in enumerate(settings.adapters, 1)]
    lora = (
        {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": ADAPTER_RANK}
        if adapters
        else {}
    )
    engine = LLM(
        model,
        dtype="bfloat16",
        max_model_len=settings.max_len,
        max_num_seqs=settings.max_seqs,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        speculative_config=ngram | {"num_speculative_tokens": settings.drafts}
        if settings.drafts
        else None,
        **lora,
    ).llm_engine

    def serve(requests: list[TimedPrompt]) -> list[TimedTokens]:
        def add(index: int, request: TimedPrompt) -> None:
            params = SamplingParams(
                temperature=0.0, max_tokens=request.count, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            adapter = adapters[index % len(adapters)] if adapters else None
            engine.add_request(
                str(index), {"prompt_token_ids": request.prompt}, params, lora_request=adapter
            )

        def step():
            for output in engine.step():
                yield int(output.request_id), list(output.outputs[0].token_ids)

        return drive(requests, add, step)

    return serve
