"""/v1/responses: stored answers, also ones that are computed in the background."""

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
from ..pages import make_page, parse_limit, parse_order
from ..recording import Recording, Replay
from ..service import Protocol, Service
from ..stored import OPEN, StoredResponse, finished_items
from . import conversations

log = logging.getLogger("quire")

RESPONSES = Protocol(
    "resp_", responses.parse, prompting.chat, answers.response, answers.ResponsesStream
)
COMPACT = Protocol(
    "resp_", responses.parse_compact, prompting.compact, answers.compacted, answers.ResponsesStream
)
MAX_LISTED = 100  # items in one answer


async def create(service: Service, request: Request) -> Any:
    """Answer a request; with `background`, return at once and compute the answer later."""
    key = service.key(request)
    history = partial(service.stored.history, key)
    parsed, body = await service.read(
        request, partial(responses.parse, history=history), reads_stored=True
    )
    if not service.stored.max_entries:
        if parsed.background:
            raise RequestError(
                "background", "needs stored responses, and --max-stored-responses is 0 here"
            )
        parsed = replace(parsed, store=False)
    if (request_id := parsed.delivery.request_id) is not None:
        service.stored.check_unused(key, f"{RESPONSES.prefix}{request_id}")
    if not parsed.store and parsed.conversation is None:
        return await service.serve(request, RESPONSES, parsed, body)
    # A random id: without API keys, knowing it is all that is needed to read the response.
    delivery = replace(
        parsed.delivery, request_id=parsed.delivery.request_id or secrets.token_hex(16)
    )
    parsed = replace(parsed, delivery=delivery)
    if parsed.background:
        return answer_in_background(service, request, key, parsed, body)

    def keep(response: dict[str, Any]) -> None:
        input_items = responses.input_items(body.get("input"))
        remember(service, key, parsed, input_items, response)
        if parsed.store:
            stored = StoredResponse(response, input_items, parsed.previous_response_id)
            response["store"] = service.stored.put_answer(key, response["id"], stored, is_new=True)

    return await service.serve(request, protocol_with_keep(keep), parsed, body)


def remember(
    service: Service,
    key: str | None,
    parsed: ResponsesRequest,
    input_items: list[dict[str, Any]],
    response: dict[str, Any],
) -> None:
    """Append the input and output items to the conversation that the request names."""
    if parsed.conversation is not None and response["status"] in ("completed", "incomplete"):
        conversations.add_turn(
            service, key, parsed.conversation, [*input_items, *finished_items(response)]
        )


async def compact(service: Service, request: Request) -> Any:
    """Summarise a conversation with the model."""
    history = partial(service.stored.history, service.key(request))
    parsed, body = await service.read(
        request, partial(responses.parse_compact, history=history), reads_stored=True
    )
    return await service.serve(request, COMPACT, parsed, body)


async def input_tokens(service: Service, request: Request) -> JsonResponse:
    """Count the prompt tokens of a request."""
    history = partial(service.stored.history, service.key(request))
    parsed, _ = await service.read(
        request, partial(responses.parse_count, history=history), reads_stored=True
    )
    async with service.models.use(parsed.model) as model:
        prepared = await service.run_in_thread(
            prompting.chat, model.llm.engine, parsed, service.settings.formats
        )
        count = sum(len(ask.tokens) for ask in prepared.engine_requests)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


def protocol_with_keep(keep: Callable[[dict[str, Any]], None]) -> Protocol:
    """The protocol of /v1/responses that calls `keep` with each finished response."""
    return RESPONSES._replace(
        response=partial(answers.response, keep=keep),
        stream=partial(answers.ResponsesStream, keep=keep),
    )


def answer_in_background(
    service: Service,
    request: Request,
    key: str | None,
    parsed: ResponsesRequest,
    body: dict[str, Any],
) -> Any:
    """Start a background response; return its first state, or its events with `stream`."""
    name = f"{RESPONSES.prefix}{parsed.delivery.request_id}"
    model = service.models.find(parsed.model)
    head = service.head(name, parsed.model or model.name)

    def keep(response: dict[str, Any]) -> None:
        stored.body = response
        remember(service, key, parsed, stored.items, response)
        response["store"] = service.stored.put_answer(key, name, stored)
        if not response["store"]:
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
        queued,
        responses.input_items(body.get("input")),
        parsed.previous_response_id,
        recording=recording,
    )
    state = {"facts": {}, "key": request.state.key, "request_id": request.state.request_id}
    # This request never disconnects.
    never: Any = asyncio.Event().wait
    background_request = Request({**request.scope, "state": state}, never)
    stored.task = asyncio.create_task(
        run_in_background(service, background_request, stream, stored, parsed)
    )
    stored.task.add_done_callback(finish)
    if not service.stored.put(key, name, stored, is_new=True):
        stored.task.cancel()
        reason = "as many responses are kept as may be (--max-stored-responses, --max-stored-bytes)"
        raise HttpError(
            429, f"background: {reason}", "background", "store_full", {"Retry-After": "1"}
        )
    return JsonResponse(queued) if recording is None else Replay(recording, 0, service.http_metrics)


async def run_in_background(
    service: Service,
    request: Request,
    stream: answers.ResponsesStream,
    stored: StoredResponse,
    parsed: Any,
) -> None:
    """Compute a background response; an error becomes a stored response with status `failed`."""
    start_time = time.monotonic()
    failure = None
    stored.body = stored.body | {"status": "in_progress"}
    recording = stored.recording or Recording()
    protocol = protocol_with_keep(stream.keep)._replace(
        stream=lambda head, *_: stream.with_prompts(head)
    )
    try:
        response = await service.serve(request, protocol, parsed, stream.request_body)
        if isinstance(response, EventStream):
            await response.copy(recording.add)
    except Exception as error:
        http_error = as_http(error)
        failure = f"HTTP {http_error.status}"
        if http_error.status == 500:
            log.exception("a response in the background failed")
        recording.add(stream.fail(http_error.status, http_error.message, http_error.param))
    finally:
        service.trace(request.scope["state"], time.monotonic() - start_time, failure)


async def requested_response(service: Service, request: Request) -> StoredResponse:
    """The response that the path names, read in a thread since it may be large."""
    return await service.run_in_thread(
        service.stored.get, service.key(request), request.path_params["id"]
    )


async def retrieve(service: Service, request: Request) -> Any:
    """The stored response; with `stream`, its events after number `starting_after`."""
    stored = await requested_response(service, request)
    query = request.query_params
    if query.get("stream", "false").lower() in ("false", "0"):
        return JsonResponse(stored.body)
    recording = await service.run_in_thread(
        service.stored.recording, service.key(request), request.path_params["id"]
    )
    if recording is None:
        raise RequestError(
            "stream", "was not asked for together with background when the response was made"
        )
    last = integer("starting_after", parse_digits(query.get("starting_after", "-1")), -1, INT32_MAX)
    return Replay(recording, last + 1, service.http_metrics)


async def delete(service: Service, request: Request) -> JsonResponse:
    name = request.path_params["id"]
    service.stored.delete(service.key(request), name)
    return JsonResponse({"id": name, "object": "response", "deleted": True})


async def cancel(service: Service, request: Request) -> JsonResponse:
    """Cancel a background response; a finished one stays as it is."""
    stored = await requested_response(service, request)
    if not stored.body["background"]:
        raise RequestError(
            "id", "Cannot cancel a synchronous response. Only one with background can be cancelled"
        )
    if stored.task is not None and stored.body["status"] in OPEN:
        stored.task.cancel()
        stored.body = stored.body | {"status": "cancelled"}
    return JsonResponse(stored.body)


async def input_items(service: Service, request: Request) -> JsonResponse:
    """The input items of a response, last item first unless `order` is asc."""
    stored = await requested_response(service, request)
    query = request.query_params
    name = stored.body["id"]
    items = [{"id": f"{item.get('type')}_{i}_{name}"} | item for i, item in enumerate(stored.items)]
    if parse_order(query, "desc") == "desc":
        items.reverse()
    return JsonResponse(make_page(items, query, parse_limit(query, 20, MAX_LISTED)))


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/responses/compact"): compact,
    ("POST", "/v1/responses/input_tokens"): input_tokens,
    ("GET", "/v1/responses/{id}"): retrieve,
    ("DELETE", "/v1/responses/{id}"): delete,
    ("POST", "/v1/responses/{id}/cancel"): cancel,
    ("GET", "/v1/responses/{id}/input_items"): input_items,
}
