"""Prompts read by one engine, answers written by another: a long prompt holds up nobody who is being answered."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from ..api.outputs import RequestOutput
from ..api.params import SamplingParams
from ..api.prompts import Prompt
from ..async_llm import Ask, AsyncLLM
from ..llm import TERMS, parse_prompt
from .kv_transfer import Handover, check_alike, give, host_cache_of, lacking, take

log = logging.getLogger("quire")

WORTH = 4  # pages; what lacks no more of its prompt is computed where it is written
READ = SamplingParams(max_tokens=1, temperature=0, detokenize=False)


async def read(llm: AsyncLLM, name: str, ask: Ask) -> Handover:
    """Compute a prompt; its pages, where the engine's device has them."""
    answers = await llm.ask([name], [ask._replace(params=READ, text=None)], at_end=True)
    await answers.outputs()
    return await llm.call(lambda: give(llm.engine, ask.tokens, ask.terms.cache_salt))


async def bring(llm: AsyncLLM, ask: Ask, reader: Callable[[Ask], Awaitable[Handover]]) -> None:
    """Let `reader` compute what this engine lacks of a prompt, if that is much.

    A reader that fails costs time and no request: this engine can compute everything itself.
    """
    if ask.pooling is not None or ask.params.prompt_logprobs is not None:
        return  # every row is needed here
    engine, salt = llm.engine, ask.terms.cache_salt
    if await llm.call(lambda: lacking(engine, ask.tokens, salt)) <= WORTH * engine.tables[0].page_size:
        return
    try:
        handover = await reader(ask)
    except Exception as error:
        log.warning("a prompt could not be read elsewhere, and is read here: %s", error)
    else:
        await llm.call(lambda: take(engine, handover))


class Apart:
    """Two engines of one process, on devices of their own or on the same; pages go from device to device."""

    def __init__(self, reader: AsyncLLM, writer: AsyncLLM):
        check_alike(*(host_cache_of(llm.engine.tables[0]).identity for llm in (reader, writer)))
        self.reader, self.writer, self.ids = reader, writer, itertools.count()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """As `AsyncLLM.generate`."""
        text, tokens, terms = await asyncio.to_thread(parse_prompt, prompt, self.writer.engine.tokenizer)
        await bring(self.writer, Ask(tokens, sampling_params or SamplingParams(), text, terms), self.read)
        whole = {"prompt": text, "prompt_token_ids": tokens, **{name: getattr(terms, name) for name in TERMS}}
        async for output in self.writer.generate(whole, sampling_params, request_id):
            yield output

    async def read(self, ask: Ask) -> Handover:
        handover = await read(self.reader, f"read-{next(self.ids)}", ask)
        return handover.moved(self.writer.engine.runner.place_block)

    def close(self) -> None:
        """Stop both; requests under way end."""
        self.reader.close()
        self.writer.close()
