"""Disaggregated prefill: one engine computes prompts, another decodes, so long prompts delay no
answers.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from ..api.outputs import RequestOutput
from ..api.params import SamplingParams
from ..api.prompts import Prompt
from ..async_llm import AsyncLLM, EngineRequest
from ..llm import REQUEST_OPTIONS, parse_prompt
from .kv_transfer import (
    Handover,
    check_same_identity,
    count_missing_tokens,
    export_pages,
    import_pages,
    require_host_cache,
)

log = logging.getLogger("quire")

# Pages; prompts that lack at most this many are computed by the decoding engine.
MIN_MISSING_PAGES = 4
READ = SamplingParams(max_tokens=1, temperature=0, detokenize=False)


async def compute_prompt(llm: AsyncLLM, name: str, ask: EngineRequest) -> Handover:
    """Compute a prompt and return its pages, without waiting for the device."""
    answers = await llm.ask([name], [ask._replace(params=READ, text=None)], at_end=True)
    await answers.outputs()
    return await llm.call(
        lambda: export_pages(llm.engine, ask.tokens, ask.request_options.cache_salt)
    )


async def fetch_missing_pages(
    llm: AsyncLLM, ask: EngineRequest, reader: Callable[[EngineRequest], Awaitable[Handover]]
) -> None:
    """Let `reader` compute the pages of a prompt that this engine lacks, if they are many.

    A failed reader costs time but no request, because this engine can compute everything itself.
    """
    if ask.pooling is not None or ask.params.prompt_logprobs is not None:
        return  # every row is needed here
    if ask.media is not None:
        return  # a prefill replica gets tokens alone
    engine = llm.engine
    salt = ask.request_options.cache_salt
    if (
        await llm.call(lambda: count_missing_tokens(engine, ask.tokens, salt))
        <= MIN_MISSING_PAGES * engine.tables[0].page_size
    ):
        return
    try:
        handover = await reader(ask)
    except Exception as error:
        log.warning("a prompt could not be read elsewhere, and is read here: %s", error)
    else:
        await llm.call(lambda: import_pages(engine, handover))


class Apart:
    """Two engines in one process, on separate or shared devices; pages move from device to
    device.
    """

    def __init__(self, reader: AsyncLLM, writer: AsyncLLM):
        check_same_identity(
            *(require_host_cache(llm.engine.tables[0]).identity for llm in (reader, writer))
        )
        self.reader = reader
        self.writer = writer
        self.ids = itertools.count()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Like `AsyncLLM.generate`."""
        text, tokens, request_options = await asyncio.to_thread(
            parse_prompt, prompt, self.writer.engine.tokenizer
        )
        await fetch_missing_pages(
            self.writer,
            EngineRequest(tokens, sampling_params or SamplingParams(), text, request_options),
            self.read,
        )
        prompt_with_tokens = {
            "prompt": text,
            "prompt_token_ids": tokens,
            **{name: getattr(request_options, name) for name in REQUEST_OPTIONS},
        }
        async for output in self.writer.generate(prompt_with_tokens, sampling_params, request_id):
            yield output

    async def read(self, ask: EngineRequest) -> Handover:
        handover = await compute_prompt(self.reader, f"read-{next(self.ids)}", ask)
        return handover.map_blocks(self.writer.engine.runner.place_block)

    def close(self) -> None:
        """Close both engines; requests in flight end."""
        self.reader.close()
        self.writer.close()
