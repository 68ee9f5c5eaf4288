"""The OpenAPI document of the server."""

from typing import Any

from ...protocol.schema import ALIASES, BODIES, body_schema
from ..settings import ServerSettings
from . import ollama

SUMMARIES = {
    "/v1/chat/completions": "Answer a conversation.",
    "/v1/chat/completions/batch": (
        "Answer several conversations alike, without streaming; `messages` is their list."
    ),
    "/v1/completions": "Continue a prompt.",
    "/v1/responses": "Answer a conversation, in the form of OpenAI's newer API.",
    "/v1/responses/input_tokens": "Count the prompt tokens of a request to /v1/responses.",
    "/v1/responses/compact": (
        "Summarise a conversation with the model; returns items to continue from."
    ),
    "/v1/conversations": "Store items that responses continue from and append to (`conversation`).",
    "/v1/messages": "Answer a conversation, in Anthropic's form.",
    "/v1/messages/count_tokens": "Count the tokens of a conversation.",
    "/v1/messages/batches": (
        "Answer conversations in the background, at a lower priority than other requests."
    ),
    "/v1/batches": (
        "Answer a file of requests in the background: an answer or an error for each line."
    ),
    "/v1/embeddings": "Embed texts.",
    "/v2/embed": "Embed texts, in Cohere's form.",
    "/classify": "The class probabilities of texts, by a classification model.",
    "/pooling": (
        "The pooled output for texts: an embedding, as /v1/embeddings, class "
        "probabilities, or a reward."
    ),
    "/score": (
        "Score text pairs: the mean log-probability of the second text's tokens after the "
        "first (generative models), relevance (rerankers) or cosine similarity (embedders)."
    ),
    "/generative_scoring": (
        "The probability that the next token is one of some labels, for each of several items."
    ),
    "/rerank": (
        "Documents, most relevant first: by relevance (rerankers), by cosine similarity "
        "(embedders), or by the mean log-probability of the query's tokens after each "
        "document (generative models); ranked_by says which."
    ),
    "/tokenize": "The token ids of a text or a conversation.",
    "/detokenize": "The text of token ids.",
    "/v1/models": "The models of this server.",
    "/v1/models/{name}": "One model of this server.",
    "/health": "200 when requests can be served, 503 otherwise.",
    "/ping": "200 as long as the process runs.",
    "/version": "The version of the server.",
    "/load": "The number of running requests.",
    "/metrics": "Metrics in Prometheus' format.",
    "/api/chat": "Answer a conversation, in Ollama's form; without `messages` the model is loaded.",
    "/api/generate": "Answer a prompt, in Ollama's form; without one the model is loaded.",
    "/api/embed": "Embed texts, in Ollama's form.",
    "/api/embeddings": "Embed one text, in Ollama's older form.",
    "/api/show": (
        "A model's capabilities, in Ollama's form. One of `model` and `name`, its old "
        "name, must be given."
    ),
    "/api/pull": (
        "Succeeds for a served model; nothing is downloaded. One of `model` and `name` "
        "must be given."
    ),
    "/api/tags": "The models of this server, in Ollama's form.",
    "/api/ps": "The models that are awake, in Ollama's form.",
    "/api/version": "The version of Ollama whose API this is.",
}
INFO = {  # with --enable-tokenizer-info-endpoint
    "/tokenizer_info": (
        "The tokenizer_config.json of a model (`model`), with its context length and chat template."
    )
}
OTHER_ROUTES = {  # (method, path) of routes without a body schema of their own
    (
        "GET",
        "/v1/responses/{id}",
    ): "A stored response; with `stream`, its events after `starting_after`.",
    ("DELETE", "/v1/responses/{id}"): "Delete a stored response; one in the background ends.",
    ("POST", "/v1/responses/{id}/cancel"): "Cancel a background response.",
    (
        "GET",
        "/v1/responses/{id}/input_items",
    ): "The input items: `limit` (20, at most 100), `order` (desc), `after`.",
    ("GET", "/v1/conversations/{id}"): "A stored conversation.",
    ("POST", "/v1/conversations/{id}"): "Replace the `metadata`.",
    ("DELETE", "/v1/conversations/{id}"): "Delete a conversation.",
    ("POST", "/v1/conversations/{id}/items"): "Add `items`, at most 20.",
    (
        "GET",
        "/v1/conversations/{id}/items",
    ): "Its items: `limit` (20, at most 100), `order` (desc), `after`.",
    ("GET", "/v1/conversations/{id}/items/{item_id}"): "One item of a conversation.",
    ("DELETE", "/v1/conversations/{id}/items/{item_id}"): "Delete an item of a conversation.",
    (
        "POST",
        "/v1/files",
    ): "Store a file: a form with `file`, `purpose` (batch) and `expires_after`.",
    ("GET", "/v1/files"): "The files: `purpose`, `order` (desc), `limit`, `after`.",
    ("GET", "/v1/files/{id}"): "A file's name, size, purpose and times.",
    ("DELETE", "/v1/files/{id}"): "Delete a file.",
    ("GET", "/v1/files/{id}/content"): "The content of a file.",
    ("GET", "/v1/batches"): "The batches, newest first: `limit` (20, at most 100), `after`.",
    ("GET", "/v1/batches/{id}"): "The progress of a batch, and its files.",
    ("POST", "/v1/batches/{id}/cancel"): "End a batch; its finished answers are kept.",
    (
        "GET",
        "/v1/messages/batches",
    ): "The batches: `limit` (20, at most 1000), `after_id`, `before_id`.",
    ("GET", "/v1/messages/batches/{id}"): "The progress of a batch.",
    ("DELETE", "/v1/messages/batches/{id}"): "Delete a batch and its results.",
    ("POST", "/v1/messages/batches/{id}/cancel"): "End a batch; its finished answers are kept.",
    ("GET", "/v1/messages/batches/{id}/results"): "The results of a batch, one JSON line each.",
    **{("POST", alias): f"{path} by another name." for alias, path in ALIASES.items()},
    (
        "POST",
        "/invocations",
    ): "Any of the requests above, told apart by its fields, for Amazon SageMaker.",
    **{route: f"Refused: {why}." for route, (_, why) in ollama.REFUSED.items()},
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")
            },
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
JSON = "application/json"
LINES = "application/x-ndjson"
STREAMS = ("/api/chat", "/api/generate", "/api/pull")  # JSON lines, unless `stream` is false
REFUSALS = {  # of Ollama's endpoints, besides the errors of all endpoints
    400: "A field is wrong; the text begins with its name.",
    403: (
        "A model cannot be fetched or put to sleep by a client; `--admin` lets `keep_alive` 0 "
        "without a prompt do so."
    ),
    404: "No model of this server has that name.",
}
REFUSALS_BY_PATH = {
    **dict.fromkeys(("/api/chat", "/api/generate"), (400, 403, 404)),
    **dict.fromkeys(("/api/embed", "/api/embeddings", "/api/show"), (400, 404)),
    "/api/pull": (400, 403),
}


def document(settings: ServerSettings) -> dict[str, Any]:
    """The OpenAPI document; every response is JSON, except for streams and /metrics."""
    paths: dict[str, Any] = {}
    for path, summary in (
        SUMMARIES | (INFO if settings.enable_tokenizer_info_endpoint else {})
    ).items():
        method = "POST" if path in BODIES else "GET"
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": response_schemas(method, path),
        } | path_parameters(path)
        if path in BODIES:
            operation["requestBody"] = request_body(path)
        paths[path] = {method.lower(): operation}
    for (method, path), summary in OTHER_ROUTES.items():
        operation = {
            "summary": summary,
            "responses": response_schemas(method, path),
        } | path_parameters(path)
        if path in ALIASES:
            operation["requestBody"] = request_body(ALIASES[path])
        paths.setdefault(path, {})[method.lower()] = operation
    spec: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": settings.version,
            "description": ("LLM inference in JAX."),
        },
        "paths": paths,
        "components": {"schemas": {schema_name(path): body_schema(path) for path in BODIES}},
    }
    if settings.api_keys:
        spec["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        spec["security"] = [{"key": []}]
    return spec


def request_body(path: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{schema_name(path)}"}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def error_schema(path: str) -> dict[str, Any]:
    """The schema of an error in the form of the path's protocol."""
    if path.startswith("/api/"):
        return OLLAMA_ERROR
    return MESSAGES_ERROR if path.startswith("/v1/messages") else ERROR


def response_schemas(method: str, path: str) -> dict[str, Any]:
    """The responses of a route, by status; those to HEAD have no body."""
    error_content = {} if method == "HEAD" else {"content": {JSON: {"schema": error_schema(path)}}}
    responses = {"default": {"description": "What is wrong."} | error_content}
    if (method, path) in ollama.REFUSED:
        status, reason = ollama.REFUSED[method, path]
        return {str(status): {"description": reason} | error_content} | responses
    success: dict[str, Any] = {"description": "The answer."}
    if path.startswith("/api/"):
        success["content"] = dict.fromkeys((LINES, JSON) if path in STREAMS else (JSON,), {})
    refusals = {
        str(status): {"description": REFUSALS[status]} | error_content
        for status in REFUSALS_BY_PATH.get(path, ())
    }
    return {"200": success} | refusals | responses


def path_parameters(path: str) -> dict[str, Any]:
    """The parameters in braces in a path."""
    names = [segment[1:-1] for segment in path.split("/") if segment.startswith("{")]
    declared = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    return {"parameters": declared} if declared else {}


def schema_name(path: str) -> str:
    """`/v1/chat/completions` is ChatCompletions, and `/api/chat` is ApiChat."""
    return "".join(word.title() for word in path.removeprefix("/v1").replace("_", "/").split("/"))
