"""The OpenAPI document of the server."""

from typing import Any

from ...protocol.schema import ALIASES, BODIES, body_schema
from ..settings import ServerSettings
from . import ollama

ABOUT = {
    "/v1/chat/completions": "Answer a conversation.",
    "/v1/chat/completions/batch": "Answer several conversations alike, without streaming; `messages` is their list.",
    "/v1/completions": "Write on from a prompt.",
    "/v1/responses": "Answer a conversation, in the form of OpenAI's newer interface.",
    "/v1/responses/input_tokens": "How many tokens a request to /v1/responses would have.",
    "/v1/responses/compact": "A conversation in short, written by the model: items to go on from.",
    "/v1/conversations": "Keep items that responses go on from and add to (`conversation`), as responses are kept.",
    "/v1/messages": "Answer a conversation, in Anthropic's form.",
    "/v1/messages/count_tokens": "How many tokens a conversation has.",
    "/v1/messages/batches": "Answer conversations that nobody waits for, behind those of clients that wait.",
    "/v1/batches": "Answer a file of requests that nobody waits for: an answer or an error for each line.",
    "/v1/embeddings": "Texts as vectors.",
    "/v2/embed": "Texts as vectors, in Cohere's form.",
    "/classify": "The classes of texts with their probabilities, by a model that has classes in place of tokens.",
    "/pooling": "What the model gives for texts: a vector, as /v1/embeddings, its classes, or its reward.",
    "/score": "What the model says of pairs of texts: one that writes how likely the second is after the first (the "
    "mean log-probability of its tokens), a reranker its judgement, an embedding model their cosine.",
    "/generative_scoring": "How likely one of some tokens is to come next, for each of several items.",
    "/rerank": "Documents, the best first: by a reranker's judgement, by the cosine of embeddings, or by how likely a "
    "model that writes finds the query after each (the mean log-probability of its tokens); ranked_by says which.",
    "/tokenize": "A text or a conversation as token ids.",
    "/detokenize": "Token ids as text.",
    "/v1/models": "The models of this server.",
    "/v1/models/{name}": "One of them.",
    "/health": "200 when requests can be served, 503 otherwise.",
    "/ping": "200 as long as the process lives.",
    "/version": "The version of the server.",
    "/load": "How many requests are being answered.",
    "/metrics": "Metrics in Prometheus' form.",
    "/api/chat": "Answer a conversation, in Ollama's form; without `messages` the model is loaded.",
    "/api/generate": "Answer a prompt, in Ollama's form; without one the model is loaded.",
    "/api/embed": "Texts as vectors, in Ollama's form.",
    "/api/embeddings": "One text as a vector, in Ollama's older form.",
    "/api/show": "What a model can do, in Ollama's form. One of `model` and `name`, its old name, must be given.",
    "/api/pull": "Success for a model that is served; nothing is fetched. One of `model` and `name` must be given.",
    "/api/tags": "The models of this server, in Ollama's form.",
    "/api/ps": "Those that are awake.",
    "/api/version": "The version of Ollama whose interface this is.",
}
INFO = {  # with --enable-tokenizer-info-endpoint
    "/tokenizer_info": "What tokenizer_config.json says of a model (`model`), with its length and chat template here."
}
ELSEWHERE = {  # (method, path) of what is no question with fields of its own
    ("GET", "/v1/responses/{id}"): "A response that is kept; `stream`, `starting_after`: its events.",
    ("DELETE", "/v1/responses/{id}"): "Keep it no longer; one in the background ends.",
    ("POST", "/v1/responses/{id}/cancel"): "End a response in the background.",
    ("GET", "/v1/responses/{id}/input_items"): "What was asked: `limit` (20, at most 100), `order` (desc), `after`.",
    ("GET", "/v1/conversations/{id}"): "A conversation that is kept.",
    ("POST", "/v1/conversations/{id}"): "Another `metadata`.",
    ("DELETE", "/v1/conversations/{id}"): "Keep it no longer.",
    ("POST", "/v1/conversations/{id}/items"): "Add `items`, at most 20.",
    ("GET", "/v1/conversations/{id}/items"): "What is in it: `limit` (20, at most 100), `order` (desc), `after`.",
    ("GET", "/v1/conversations/{id}/items/{item_id}"): "One item of it.",
    ("DELETE", "/v1/conversations/{id}/items/{item_id}"): "Keep the item no longer.",
    ("POST", "/v1/files"): "Keep a file: a form with `file`, `purpose` (batch) and `expires_after`.",
    ("GET", "/v1/files"): "The files: `purpose`, `order` (desc), `limit`, `after`.",
    ("GET", "/v1/files/{id}"): "What is known of a file.",
    ("DELETE", "/v1/files/{id}"): "Keep it no longer.",
    ("GET", "/v1/files/{id}/content"): "What is in it.",
    ("GET", "/v1/batches"): "The batches, the newest first: `limit` (20, at most 100), `after`.",
    ("GET", "/v1/batches/{id}"): "How far a batch is, and its files.",
    ("POST", "/v1/batches/{id}/cancel"): "End a batch; what is answered is kept.",
    ("GET", "/v1/messages/batches"): "The batches: `limit` (20, at most 1000), `after_id`, `before_id`.",
    ("GET", "/v1/messages/batches/{id}"): "How far a batch is.",
    ("DELETE", "/v1/messages/batches/{id}"): "Keep a batch and its results no longer.",
    ("POST", "/v1/messages/batches/{id}/cancel"): "End a batch; what is answered is kept.",
    ("GET", "/v1/messages/batches/{id}/results"): "The results of a batch, a line each.",
    **{("POST", alias): f"{path} by another name." for alias, path in ALIASES.items()},
    ("POST", "/invocations"): "Any of the questions above, told by its fields, for Amazon SageMaker.",
    **{route: f"Refused: {why}." for route, (_, why) in ollama.REFUSED.items()},
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}
MESSAGES_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("message", "type")},
            "required": ["message", "type"],
        },
    },
    "required": ["type", "error"],
}
OLLAMA_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
    "additionalProperties": False,
}
JSON, LINES = "application/json", "application/x-ndjson"
STREAMS = ("/api/chat", "/api/generate", "/api/pull")  # as lines, unless `stream` is false
REFUSALS = {  # of Ollama's endpoints, beside what any request may meet
    400: "A field is wrong; the text begins with its name.",
    403: "A model cannot be fetched or put to sleep by a client; `--admin` lets `keep_alive` 0 without a prompt do so.",
    404: "No model of this server has that name.",
}
OWN_REFUSALS = {
    **dict.fromkeys(("/api/chat", "/api/generate"), (400, 403, 404)),
    **dict.fromkeys(("/api/embed", "/api/embeddings", "/api/show"), (400, 404)),
    "/api/pull": (400, 403),
}


def document(settings: ServerSettings) -> dict[str, Any]:
    """Each path with what it takes; every answer is JSON, but for streams and /metrics."""
    paths: dict[str, Any] = {}
    for path, about in (ABOUT | (INFO if settings.enable_tokenizer_info_endpoint else {})).items():
        method = "POST" if path in BODIES else "GET"
        operation: dict[str, Any] = {"summary": about, "responses": answers(method, path)} | parameters(path)
        if path in BODIES:
            operation["requestBody"] = request_body(path)
        paths[path] = {method.lower(): operation}
    for (method, path), about in ELSEWHERE.items():
        operation = {"summary": about, "responses": answers(method, path)} | parameters(path)
        if path in ALIASES:
            operation["requestBody"] = request_body(ALIASES[path])
        paths.setdefault(path, {})[method.lower()] = operation
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": settings.version, "description": "LLM inference in JAX."},
        "paths": paths,
        "components": {"schemas": {name_of(path): body_schema(path) for path in BODIES}},
    }
    if settings.api_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def request_body(path: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name_of(path)}"}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def error_of(path: str) -> dict[str, Any]:
    """The schema of an error, in the shape of the client's protocol."""
    if path.startswith("/api/"):
        return OLLAMA_ERROR
    return MESSAGES_ERROR if path.startswith("/v1/messages") else ERROR


def answers(method: str, path: str) -> dict[str, Any]:
    """What may come back, by its status; a HEAD has no body."""
    wrong = {} if method == "HEAD" else {"content": {JSON: {"schema": error_of(path)}}}
    found = {"default": {"description": "What is wrong."} | wrong}
    if (method, path) in ollama.REFUSED:
        status, why = ollama.REFUSED[method, path]
        return {str(status): {"description": why} | wrong} | found
    good: dict[str, Any] = {"description": "The answer."}
    if path.startswith("/api/"):
        good["content"] = dict.fromkeys((LINES, JSON) if path in STREAMS else (JSON,), {})
    refusals = {str(status): {"description": REFUSALS[status]} | wrong for status in OWN_REFUSALS.get(path, ())}
    return {"200": good} | refusals | found


def parameters(path: str) -> dict[str, Any]:
    """What stands in a path in braces."""
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    found = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return {"parameters": found} if found else {}


def name_of(path: str) -> str:
    """`/v1/chat/completions` is ChatCompletions, and `/api/chat` is ApiChat."""
    return "".join(word.title() for word in path.removeprefix("/v1").replace("_", "/").split("/"))
