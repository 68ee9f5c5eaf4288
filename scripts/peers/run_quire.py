"""Quire itself, in the environment that runs the comparison."""

from collections.abc import Callable

from ... import LLM, SamplingParams
from .loop import Answer, Request, Settings, drive


def prepare(settings: Settings) -> None:
    """Nothing: it reads the checkpoint, and quantises as it loads."""


def load(settings: Settings) -> Callable[[list[Request]], list[Answer]]:
    options = {} if settings.weights == "bf16" else {"quantization": settings.weights}
    llm = LLM(settings.model, max_model_len=settings.max_len, max_num_seqs=settings.max_seqs, **options)

    def serve(requests: list[Request]) -> list[Answer]:
        handles: dict[str, list] = {}

        def add(index: int, request: Request) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=request.count, ignore_eos=True, detokenize=False)
            handle = llm.add({"prompt_token_ids": request.prompt}, params)
            handles[handle.request_id] = [index, 0]

        def step():
            for handle in llm.engine.step():
                entry, tokens = handles[handle.request_id], handle.output().outputs[0].token_ids
                if handle.finished and len(tokens) != requests[entry[0]].count:
                    raise RuntimeError(f"a request ended after {len(tokens)} tokens")
                yield entry[0], list(tokens[entry[1] :])
                entry[1] = len(tokens)

        return drive(requests, add, step)

    return serve
