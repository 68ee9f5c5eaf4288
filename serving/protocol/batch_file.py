"""OpenAI's batch files: one request per line in, one result per line out."""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..api.errors import RequestError
from ..api.validation import refuse_unknown, shown
from . import chat, completion
from .answers.answer import ChatRequest, CompletionRequest
from .sent_fields import as_sent

MAX_LINES = 50_000
ID_BYTES = 16  # of the digests by which duplicate ids are found
ENDPOINTS = {"/v1/chat/completions": chat.parse, "/v1/completions": completion.parse}


@dataclass(frozen=True)
class BatchLine:
    """A line of a batch with its request, or with the error in it."""

    number: int  # from 1
    custom_id: str | None
    request: ChatRequest | CompletionRequest | RequestError


def parse_lines(
    lines: Iterable[bytes], endpoints: Collection[str] = tuple(ENDPOINTS)
) -> Iterator[BatchLine]:
    """Parse the lines of a batch file that are not blank; `endpoints` are the allowed `url`s."""
    line_by_digest: dict[bytes, int] = {}
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        custom_id = None
        try:
            line = parse_json(raw)
            custom_id = parse_custom_id(line)
            digest = blake2b(
                custom_id.encode(errors="surrogatepass"), digest_size=ID_BYTES
            ).digest()
            if digest in line_by_digest:
                raise RequestError(
                    "custom_id",
                    f"must differ, got {shown(custom_id)} as in line {line_by_digest[digest]}",
                )
            line_by_digest[digest] = number
            yield BatchLine(number, custom_id, parse_request(line, endpoints))
        except RequestError as error:
            yield BatchLine(number, custom_id, error)


def result_line(line: BatchLine, request_id: str, body: Any) -> dict[str, Any]:
    """The output line of a request that succeeded."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": request_id, "custom_id": line.custom_id, "response": response, "error": None}


def error_line(
    line: BatchLine, request_id: str, error: Exception, code: str = "invalid_request"
) -> dict[str, Any]:
    """The output line of a request that failed."""
    param = error.param if isinstance(error, RequestError) else None
    reason = error.message if isinstance(error, RequestError) and param == "line" else str(error)
    body = {
        "code": code,
        "message": f"line {line.number}: {reason}",
        "param": param,
        "line": line.number,
    }
    return {"id": request_id, "custom_id": line.custom_id, "response": None, "error": body}


def parse_json(raw: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise RequestError("line", f"must be JSON, which has no {constant}")

    try:
        line = json.loads(raw.decode(), parse_constant=refuse)
    except RequestError:
        raise
    except RecursionError:
        raise RequestError("line", "must be JSON that is not nested so deep") from None
    except json.JSONDecodeError as error:
        raise RequestError("line", f"must be JSON: {error.msg}, column {error.colno}") from None
    except ValueError as error:  # not UTF-8, or a number of thousands of digits
        raise RequestError("line", f"must be JSON in UTF-8: {error}") from None
    if not isinstance(line, dict):
        raise RequestError("line", f"must be a JSON object, got {shown(line)}")
    return line


def parse_custom_id(line: dict[str, Any]) -> str:
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(
            "custom_id", f"must be a string that is not empty, got {shown(custom_id)}"
        )
    return custom_id


def parse_request(
    line: dict[str, Any], endpoints: Collection[str]
) -> ChatRequest | CompletionRequest:
    refuse_unknown(line, ("custom_id", "method", "url", "body"))
    if line.get("method") != "POST":
        raise RequestError("method", f"must be 'POST', got {shown(line.get('method'))}")
    url = line.get("url")
    if not isinstance(url, str) or url not in endpoints:
        raise RequestError("url", f"must be {' or '.join(endpoints)}, got {shown(url)}")
    try:
        request = ENDPOINTS[url](line.get("body"))
        if request.delivery.stream:
            raise RequestError("stream", "has no place in a batch; leave it out")
        return request
    except RequestError as error:
        error = as_sent(error, line.get("body"))
        raise RequestError(
            "body" if error.param == "body" else f"body.{error.param}", error.message
        ) from None
