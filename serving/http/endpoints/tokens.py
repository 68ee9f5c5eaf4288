"""/tokenize and /detokenize, and what the tokenizer is."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from ....model.text.chat_template import PromptError
from ...api.errors import RequestError
from ...chat_prompt import render
from ...engine.engine import Engine
from ...protocol import messages
from ...protocol.tokens import TokenizeRequest, checked, parse_detokenize, parse_tokenize
from .. import prompting
from ..errors import JsonResponse
from ..service import Service
from ..settings import Formats

OF_FILES = ("vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file", "name_or_path")  # paths
FAST = "PreTrainedTokenizerFast"  # what transformers makes of a tokenizer.json


async def tokenize(service: Service, request: Request) -> JsonResponse:
    asked, _ = await service.read(request, parse_tokenize)
    async with service.models.use(asked.model) as model:
        return JsonResponse(await service.beside(cut, model.llm.engine, asked, service.settings.formats))


def cut(engine: Engine, asked: TokenizeRequest, formats: Formats) -> dict[str, Any]:
    tokenizer = prompting.chat_tokenizer(engine, formats)
    text = asked.prompt
    if text is None:
        text = render(tokenizer, asked.messages, asked.tools, asked.options)
    try:
        prompting.check_length(engine, "messages" if asked.messages else "prompt", text)
        found = tokenizer.encode(text, add_special_tokens=asked.add_special_tokens)
    except PromptError as error:
        raise RequestError("messages" if asked.messages else "prompt", str(error)) from None
    names = [tokenizer.token_name(token) for token in found] if asked.return_token_strs else None
    return {"count": len(found), "max_model_len": engine.max_len, "tokens": found, "token_strs": names}


async def detokenize(service: Service, request: Request) -> JsonResponse:
    asked, _ = await service.read(request, parse_detokenize)
    async with service.models.use(asked.model) as model:
        engine = model.llm.engine

        def join() -> str:
            known = checked(asked.tokens, engine.config.vocab_size)
            return prompting.needs_tokenizer(engine).decode(known, skip_special_tokens=asked.skip_special_tokens)

        return JsonResponse({"prompt": await service.beside(join)})


async def tokenizer_info(service: Service, request: Request) -> JsonResponse:
    """tokenizer_config.json, with what is served: the length, and the chat template."""
    async with service.models.use(request.query_params.get("model")) as model:
        engine = model.llm.engine
        tokenizer = await service.beside(prompting.chat_tokenizer, engine, service.settings.formats)
        found = {name: value for name, value in tokenizer.config.items() if name not in OF_FILES}
        served = {"model_max_length": engine.max_len, "chat_template": tokenizer.chat_template}
        return JsonResponse({"tokenizer_class": FAST} | found | tokenizer.special_tokens | served)


async def count(service: Service, request: Request) -> JsonResponse:
    """Anthropic's question how many tokens a conversation has."""
    asked, _ = await service.read(request, messages.parse_count)
    async with service.models.use(asked.model) as model:
        prepared = await service.beside(prompting.chat, model.llm.engine, asked, service.settings.formats, False)
        [ask], [prompt] = prepared.asks, prepared.prompts
        found: dict[str, Any] = {"input_tokens": len(ask.tokens)}
        if asked.edits:
            cleared = sum(edit["cleared_input_tokens"] for edit in prompt.applied)
            found["context_management"] = {"original_input_tokens": len(ask.tokens) + cleared}
        return JsonResponse(found)


INFO: dict[tuple[str, str], Callable] = {("GET", "/tokenizer_info"): tokenizer_info}  # with an option
ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
    ("POST", "/v1/messages/count_tokens"): count,
}
