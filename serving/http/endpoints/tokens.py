"""/tokenize, /detokenize, /tokenizer_info and /v1/messages/count_tokens."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from ....model.text.chat_template import PromptError
from ...api.content import MessageImage, take_images
from ...api.errors import RequestError
from ...chat_prompt import render
from ...engine.engine import Engine
from ...protocol import messages
from ...protocol.tokens import TokenizeRequest, check_token_ids, parse_detokenize, parse_tokenize
from .. import prompting
from ..errors import JsonResponse
from ..service import Service
from ..settings import Formats

# Keys with paths.
PATH_KEYS = (
    "vocab_file",
    "merges_file",
    "tokenizer_file",
    "special_tokens_map_file",
    "name_or_path",
)
FAST = "PreTrainedTokenizerFast"  # the class that transformers uses for a tokenizer.json


async def tokenize(service: Service, request: Request) -> JsonResponse:
    parsed, _ = await service.read(request, parse_tokenize)
    async with service.models.use(parsed.model) as model:
        return JsonResponse(
            await service.run_in_thread(
                tokenize_text, model.llm.engine, parsed, service.settings.formats
            )
        )


def tokenize_text(engine: Engine, parsed: TokenizeRequest, formats: Formats) -> dict[str, Any]:
    tokenizer = prompting.chat_tokenizer(engine, formats)
    text = parsed.prompt
    images: list[MessageImage] = []
    if text is None:
        messages, images = take_images(parsed.messages)
        engine.check_images(images)
        text = render(tokenizer, messages, parsed.tools, parsed.options)
    try:
        prompting.check_length(engine, "messages" if parsed.messages else "prompt", text)
        token_ids = tokenizer.encode(text, add_special_tokens=parsed.add_special_tokens)
    except PromptError as error:
        raise RequestError("messages" if parsed.messages else "prompt", str(error)) from None
    if images:
        token_ids, _ = engine.read_images(token_ids, images, is_client=True)
    names = (
        [tokenizer.token_name(token) for token in token_ids] if parsed.return_token_strs else None
    )
    return {
        "count": len(token_ids),
        "max_model_len": engine.max_len,
        "tokens": token_ids,
        "token_strs": names,
    }


async def detokenize(service: Service, request: Request) -> JsonResponse:
    parsed, _ = await service.read(request, parse_detokenize)
    async with service.models.use(parsed.model) as model:
        engine = model.llm.engine

        def join() -> str:
            token_ids = check_token_ids(parsed.tokens, engine.config.vocab_size)
            return prompting.require_tokenizer(engine).decode(
                token_ids, skip_special_tokens=parsed.skip_special_tokens
            )

        return JsonResponse({"prompt": await service.run_in_thread(join)})


async def tokenizer_info(service: Service, request: Request) -> JsonResponse:
    """tokenizer_config.json, with this server's context length and chat template."""
    async with service.models.use(request.query_params.get("model")) as model:
        engine = model.llm.engine
        tokenizer = await service.run_in_thread(
            prompting.chat_tokenizer, engine, service.settings.formats
        )
        config = {name: value for name, value in tokenizer.config.items() if name not in PATH_KEYS}
        served = {"model_max_length": engine.max_len, "chat_template": tokenizer.chat_template}
        return JsonResponse({"tokenizer_class": FAST} | config | tokenizer.special_tokens | served)


async def count(service: Service, request: Request) -> JsonResponse:
    """Count the tokens of a conversation in Anthropic's form."""
    parsed, _ = await service.read(request, messages.parse_count)
    async with service.models.use(parsed.model) as model:
        prepared = await service.run_in_thread(
            prompting.chat, model.llm.engine, parsed, service.settings.formats, False
        )
        [ask] = prepared.engine_requests
        [prompt] = prepared.prompts
        body: dict[str, Any] = {"input_tokens": len(ask.tokens)}
        if parsed.edits:
            cleared = sum(edit["cleared_input_tokens"] for edit in prompt.applied)
            body["context_management"] = {"original_input_tokens": len(ask.tokens) + cleared}
        return JsonResponse(body)


INFO: dict[tuple[str, str], Callable] = {
    ("GET", "/tokenizer_info"): tokenizer_info
}  # with --enable-tokenizer-info-endpoint
ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
    ("POST", "/v1/messages/count_tokens"): count,
}
