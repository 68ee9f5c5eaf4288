"""A fake of Quire's server for tests and screenshots of the page: scripted answers, a fake engine.

`python tests/support/page_server.py [CELLS [PORT]]` serves it with an engine that is always busy.
"""

import asyncio
import contextlib
import json
import math
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quire.tests.support.page_engine import Busy

PAGE = Path(__file__).parents[2] / "serving" / "http" / "page"
KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
}
STORY = (
    "Once upon a time there was a small dog named Pip. Pip lived by the sea with a kind old "
    "sailor. One day Pip found a lamp in the sand. The lamp was cold and full of salt.\n\nPip "
    "took the lamp home. The sailor dried it, and at night it shone over the water, so that the "
    "boats could find their way. Pip was proud and slept beside it."
)


def token(
    text: str,
    p: float = 0.9,
    alternatives: dict[str, float] | None = None,
    is_complete: bool = True,
) -> dict[str, Any]:
    """An entry of `logprobs.content`; not `is_complete`: the token is part of a character."""

    def entry(text: str, p: float) -> dict[str, Any]:
        broken = "\ufffd" in text or not is_complete
        return {
            "token": text,
            "logprob": math.log(p),
            "bytes": None if broken else list(text.encode()),
        }

    likeliest = sorted({text: p, **(alternatives or {})}.items(), key=lambda item: -item[1])
    return entry(text, p) | {"top_logprobs": [entry(*item) for item in likeliest[:5]]}


def said(text: str, *tokens: dict[str, Any], **delta: Any) -> dict[str, Any]:
    """The choice of a chunk: text and the entries of its tokens."""
    return {"delta": {"content": text, **delta}, "logprobs": {"content": list(tokens)}}


def words(
    text: str, seed: int = 1, pieces_per_chunk: int = 1, drafts: bool = False
) -> Iterator[dict[str, Any]]:
    """Chunks of a text in tokens of about a word, with plausible probabilities."""
    rng = random.Random(seed)
    pieces = [piece for word in text.split(" ") for piece in (" " + word[:5], word[5:]) if piece]
    pieces[0] = pieces[0].strip()
    for at in range(0, len(pieces), pieces_per_chunk):
        tokens = []
        for piece in pieces[at : at + pieces_per_chunk]:
            p = rng.choice([0.999, 0.98, 0.9, 0.75, 0.5, 0.22, 0.06])
            shares = sorted((rng.random() ** 3 + 0.01 for _ in range(5)), reverse=True)
            alternatives = {
                candidate: (1 - p) * share / (sum(shares) + 0.05)
                for candidate, share in zip(
                    rng.sample(
                        [" the", " a", " little", ",", " and", " of", " sea", " one", "ing"], 5
                    ),
                    shares,
                    strict=True,
                )
                if candidate != piece
            }
            tokens.append(token(piece, p, alternatives))
        places = [place for place in range(len(tokens)) if rng.random() < 0.45]
        yield said("".join(pieces[at : at + pieces_per_chunk]), *tokens) | (
            {"drafted": places} if drafts else {}
        )


@dataclass
class StandIn:
    """A fake server. An answer lists chunks (dicts with `delta`), pauses in seconds and an end.

    The end is a finish reason (a string), `{"error": ...}`, or None: the connection closes.
    """

    key: str | None = None
    models: list[str] = field(default_factory=lambda: ["quill"])
    answers: dict[str, list[Any]] = field(default_factory=dict)
    # by prompt: a status, an error
    refusals: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    # the data of /live; `None`: the stream ends at once
    frame: dict[str, Any] | Callable[[], dict[str, Any]] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    watched: list[str | None] = field(default_factory=list)  # models that were requested at /live
    num_disconnects: int = 0  # number of clients that disconnected during an answer
    pause: float = 0.0  # seconds between the words of the story
    busy: Busy | None = None
    down: bool = False  # streams end and nothing is answered

    def app(self) -> Starlette:
        routes = [
            Route("/", self.index),
            Route("/page/{name:path}", self.part),
            Route("/v1/models", self.list),
        ]
        routes += [
            Route("/live", self.live),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def index(self, request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html", headers=HEADERS)

    async def part(self, request: Request) -> Response:
        path = PAGE / request.path_params["name"]
        return Response(path.read_bytes(), media_type=KINDS[path.suffix], headers=HEADERS)

    def locked(self, request: Request) -> Response | None:
        if self.down:
            return error(503, "the server is going down", "overloaded_error")
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return error(
            401,
            "a valid API key is needed: Authorization: Bearer KEY",
            "authentication_error",
            "invalid_api_key",
        )

    async def list(self, request: Request) -> Response:
        data = [{"id": name, "object": "model"} for name in self.models]
        return self.locked(request) or JSONResponse({"object": "list", "data": data})

    async def live(self, request: Request) -> Response:
        self.watched.append(request.query_params.get("model"))
        return self.locked(request) or StreamingResponse(
            self.frames(), media_type="text/event-stream"
        )

    async def frames(self) -> AsyncIterator[str]:
        while not self.down:
            frame = self.busy.frame() if self.busy else self.frame
            frame = frame() if callable(frame) else frame
            if frame is None:
                return
            yield f"data: {json.dumps({'t': time.monotonic(), **frame})}\n\n"
            await asyncio.sleep(0.15)

    async def chat(self, request: Request) -> Response:
        if (refused := self.locked(request)) is not None:
            return refused
        body = await request.json()
        self.bodies.append(body)
        prompt = body["messages"][-1]["content"]
        if isinstance(prompt, list):  # with images
            prompt = "".join(part.get("text", "") for part in prompt)
        if prompt in self.refusals:
            status, refusal = self.refusals[prompt]
            return JSONResponse({"error": refusal}, status)
        return StreamingResponse(self.events(body, prompt), media_type="text/event-stream")

    async def events(self, body: dict[str, Any], prompt: str) -> AsyncIterator[str]:
        name = f"chatcmpl-{body.get('request_id', 'x')}"
        answer = self.answers.get(prompt)
        drafts = "include_drafted" in body.get("stream_options", {})
        steps = [*words(STORY, len(prompt), drafts=drafts), "stop"] if answer is None else answer
        run = self.busy and self.busy.add(name, 20 + len(prompt))
        count = 0
        reason = None
        try:
            yield event(name, {"delta": {"role": "assistant", "content": ""}})
            if run:
                while run.state != "writing":
                    await asyncio.sleep(0.02)
            for step in steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, str):
                    reason = step
                elif step is None:
                    return
                elif "error" in step:
                    yield f"data: {json.dumps(step)}\n\n"
                    return
                else:
                    if answer is None and self.pause:
                        await asyncio.sleep(self.pause)
                    count += len(step["logprobs"]["content"])
                    if run:
                        run.tokens = count
                    yield event(name, step)
            yield event(name, {"delta": {}, "finish_reason": reason})
            usage = {
                "prompt_tokens": 40,
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": 32},
            }
            yield (
                f"data: {json.dumps({'id': name, 'choices': [], 'usage': usage})}\n\ndata: "
                "[DONE]\n\n"
            )
        except asyncio.CancelledError:
            self.num_disconnects += 1
            raise
        finally:
            if run:
                run.ended = True


def event(name: str, choice: dict[str, Any]) -> str:
    choice = {"index": 0, "logprobs": None, "finish_reason": None, **choice}
    return (
        "data: "
        f"{json.dumps({'id': name, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"
    )


def error(status: int, message: str, kind: str, code: str | None = None) -> Response:
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}, status
    )


@contextlib.contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """Serve the fake on a free port; yields its URL."""
    server = uvicorn.Server(
        uvicorn.Config(stand_in.app(), port=0, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        stand_in.down = True
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    cells, port = [
        int(number_text) for number_text in [*sys.argv[1:], *["4095", "8123"][len(sys.argv) - 1 :]]
    ]
    busy = Busy({"full": cells})
    uvicorn.run(StandIn(busy=busy, pause=0.03).app(), port=port, log_level="warning")
