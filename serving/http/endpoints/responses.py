"""/v1/responses: answers that are kept, in the background too, and what is asked of them later."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request

from ...api.errors import RequestError
from ...api.validation import INT32_MAX, integer, parse_digits
from ...protocol import responses
from ...protocol.answers import responses as answers
from ...protocol.answers.answer import ResponsesRequest
from .. import prompting
from ..answering import EventStream
from ..errors import HttpError, JsonResponse, as_http
from ..pages import count_of, order_of, page_of
from ..recording import Recording, Replay
from ..service import Protocol, Service
from ..stored import OPEN, StoredResponse, finished
from . import conversations

log = logging.getLogger("quire")

RESPONSES = Protocol("resp_", responses.parse, prompting.chat, answers.response, answers.ResponsesStream)
COMPACT = Protocol("resp_", responses.parse_compact, prompting.compact, answers.compacted, answers.ResponsesStream)
MAX_LISTED = 100  # items in one answer


async def create(service: Service, request: Request) -> Any:
    """An answer, or with `background` the promise of one."""
    key = service.key(request)
    history = partial(service.stored.history, key)
    parsed, body = await service.read(request, partial(responses.parse, history=history), reads_stored=True)
    if not service.stored.most:
        if parsed.background:
            raise RequestError("background", "needs stored responses, and --max-stored-responses is 0 here")
        parsed = replace(parsed, store=False)
    if (chosen := parsed.delivery.request_id) is not None:
        service.stored.check_unused(key, f"{RESPONSES.prefix}{chosen}")
    if not parsed.store and parsed.conversation is None:
        return await service.serve(request, RESPONSES, parsed, body)
    # Whoever knows the name may ask for the response, so it cannot be guessed.
    delivery = replace(parsed.delivery, request_id=parsed.delivery.request_id or secrets.token_hex(16))
    parsed = replace(parsed, delivery=delivery)
    if parsed.background:
        return begin(service, request, key, parsed, body)

    def keep(found: dict[str, Any]) -> None:
        asked = responses.items_of(body.get("input"))
        remember(service, key, parsed, asked, found)
        if parsed.store:
            stored = StoredResponse(found, asked, parsed.previous_response_id)
            found["store"] = service.stored.put_answer(key, found["id"], stored, is_new=True)

    return await service.serve(request, keeping(keep), parsed, body)


def remember(
    service: Service, key: str | None, parsed: ResponsesRequest, asked: list[dict[str, Any]], found: dict[str, Any]
) -> None:
    """Add what was asked and answered to the conversation that the request names."""
    if parsed.conversation is not None and found["status"] in ("completed", "incomplete"):
        conversations.add_turn(service, key, parsed.conversation, [*asked, *finished(found)])


async def compact(service: Service, request: Request) -> Any:
    """A conversation in short, written by the model."""
    history = partial(service.stored.history, service.key(request))
    parsed, body = await service.read(request, partial(responses.parse_compact, history=history), reads_stored=True)
    return await service.serve(request, COMPACT, parsed, body)


async def input_tokens(service: Service, request: Request) -> JsonResponse:
    """How many tokens a request would have."""
    history = partial(service.stored.history, service.key(request))
    asked, _ = await service.read(request, partial(responses.parse_count, history=history), reads_stored=True)
    async with service.models.use(asked.model) as model:
        prepared = await service.beside(prompting.chat, model.llm.engine, asked, service.settings.formats)
        count = sum(len(ask.tokens) for ask in prepared.asks)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


def keeping(keep: Callable[[dict[str, Any]], None]) -> Protocol:
    """The protocol whose answers are given to `keep` when they are over."""
    return RESPONSES._replace(
        response=partial(answers.response, keep=keep), stream=partial(answers.ResponsesStream, keep=keep)
    )


def begin(service: Service, request: Request, key: str | None, parsed: ResponsesRequest, body: dict[str, Any]) -> Any:
    """Answer without a client that has to wait; it may read along, and again later, if it asks for a stream now."""
    name = f"{RESPONSES.prefix}{parsed.delivery.request_id}"
    model = service.models.find(parsed.model)
    head = service.head(name, parsed.model or model.name)

    def keep(found: dict[str, Any]) -> None:
        stored.body = found
        remember(service, key, parsed, stored.items, found)
        found["store"] = service.stored.put_answer(key, name, stored)
        if not found["store"]:
            service.stored.forget(key, name)

    def finish(task: asyncio.Task) -> None:
        if recording is not None:
            recording.end()
        service.stored.finish(key, name, stored)

    stream = answers.ResponsesStream(head, parsed, body, keep)
    recording = Recording() if parsed.delivery.stream else None
    if recording is not None:
        recording.add(stream.queue())
    queued = stream.frame("queued")
    stored = StoredResponse(
        queued, responses.items_of(body.get("input")), parsed.previous_response_id, recording=recording
    )
    state = {"facts": {}, "key": request.state.key, "request_id": request.state.request_id}
    alone = Request({**request.scope, "state": state}, asyncio.Event().wait)  # nobody leaves
    stored.task = asyncio.create_task(work(service, alone, stream, stored, parsed))
    stored.task.add_done_callback(finish)
    if not service.stored.put(key, name, stored, is_new=True):
        stored.task.cancel()
        why = "as many responses are kept as may be (--max-stored-responses, --max-stored-bytes)"
        raise HttpError(429, f"background: {why}", "background", "store_full", {"Retry-After": "1"})
    return JsonResponse(queued) if recording is None else Replay(recording, 0, service.http_metrics)


async def work(
    service: Service, request: Request, stream: answers.ResponsesStream, stored: StoredResponse, parsed: Any
) -> None:
    """Answer in the background; what goes wrong is kept as a response that failed."""
    began, failed = time.monotonic(), None
    stored.body = stored.body | {"status": "in_progress"}
    recording = stored.recording or Recording()
    protocol = keeping(stream.keep)._replace(stream=lambda head, *_: stream.goes_on(head))
    try:
        found = await service.serve(request, protocol, parsed, stream.asked)
        if isinstance(found, EventStream):
            await found.copy(recording.add)
    except Exception as error:
        found = as_http(error)
        failed = f"HTTP {found.status}"
        if found.status == 500:
            log.exception("a response in the background failed")
        recording.add(stream.fail(found.status, found.message, found.param))
    finally:
        service.trace(request.scope["state"], time.monotonic() - began, failed)


async def asked_for(service: Service, request: Request) -> StoredResponse:
    """The response that the path names; a large one takes long to read."""
    return await service.beside(service.stored.get, service.key(request), request.path_params["id"])


async def retrieve(service: Service, request: Request) -> Any:
    """The response; with `stream` its events, those after `starting_after`."""
    stored, given = await asked_for(service, request), request.query_params
    if given.get("stream", "false").lower() in ("false", "0"):
        return JsonResponse(stored.body)
    recording = await service.beside(service.stored.recording, service.key(request), request.path_params["id"])
    if recording is None:
        raise RequestError("stream", "was not asked for together with background when the response was made")
    last = integer("starting_after", parse_digits(given.get("starting_after", "-1")), -1, INT32_MAX)
    return Replay(recording, last + 1, service.http_metrics)


async def delete(service: Service, request: Request) -> JsonResponse:
    name = request.path_params["id"]
    service.stored.delete(service.key(request), name)
    return JsonResponse({"id": name, "object": "response", "deleted": True})


async def cancel(service: Service, request: Request) -> JsonResponse:
    """End what is computed in the background; what is over stays as it is."""
    stored = await asked_for(service, request)
    if not stored.body["background"]:
        raise RequestError("id", "Cannot cancel a synchronous response. Only one with background can be cancelled")
    if stored.task is not None and stored.body["status"] in OPEN:
        stored.task.cancel()
        stored.body = stored.body | {"status": "cancelled"}
    return JsonResponse(stored.body)


async def input_items(service: Service, request: Request) -> JsonResponse:
    """What was asked, the last item first unless `order` is asc."""
    stored, given = await asked_for(service, request), request.query_params
    name = stored.body["id"]
    items = [{"id": f"{item.get('type')}_{i}_{name}"} | item for i, item in enumerate(stored.items)]
    if order_of(given, "desc") == "desc":
        items.reverse()
    return JsonResponse(page_of(items, given, count_of(given, 20, MAX_LISTED)))


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/responses/compact"): compact,
    ("POST", "/v1/responses/input_tokens"): input_tokens,
    ("GET", "/v1/responses/{id}"): retrieve,
    ("DELETE", "/v1/responses/{id}"): delete,
    ("POST", "/v1/responses/{id}/cancel"): cancel,
    ("GET", "/v1/responses/{id}/input_items"): input_items,
}
