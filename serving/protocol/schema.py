"""The JSON schemas of request bodies, for the server's OpenAPI document."""

from ..api.params import MAX_WANTED, SAMPLING, RequestOptions, declarations
from ..api.validation import FLAG, STRINGS, TOKEN, Schema, many, or_null, real, whole
from . import (
    batch_file,
    batches,
    chat,
    cohere,
    completion,
    conversations,
    label_scores,
    messages,
    ollama_fields,
    pooling,
    responses,
)
from .completion import MAX_PROMPTS
from .fields import PENALTY, SIDES, STREAM_OPTIONS, VERBOSITIES
from .tokens import DETOKENIZE, TOKENIZE

TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
ANYTHING: Schema = {}
CONTENT: Schema = {
    "anyOf": [TEXT, many({"type": "object", "properties": {"type": TEXT, "text": TEXT}}, 64)]
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {"role": TEXT, "content": CONTENT},
    "required": ["role"],
}

LINE: Schema = {
    "type": "object",
    "properties": {
        "custom_id": {"type": "string", "minLength": 1, "maxLength": 64},
        "params": OBJECT,
    },
    "required": ["custom_id", "params"],
    "additionalProperties": False,
}

PARAMS = {
    name: declaration.rule.schema
    for name, declaration in (declarations(RequestOptions) | SAMPLING).items()
}
FIELDS: dict[str, Schema] = PARAMS | {  # by field name, for all endpoints
    "model": TEXT,
    "stop_sequences": STRINGS,
    "max_completion_tokens": PARAMS["max_tokens"],
    "random_seed": PARAMS["seed"],
    "max_output_tokens": PARAMS["max_tokens"],
    "top_logprobs": PARAMS["logprobs"],
    "stream": FLAG.schema,
    "stream_options": {"type": "object", "properties": dict.fromkeys(STREAM_OPTIONS, FLAG.schema)},
    "return_tokens_as_token_ids": FLAG.schema,
    "include_reasoning": FLAG.schema,
    "return_token_ids": FLAG.schema,
    "request_id": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
    "verbosity": {"enum": list(VERBOSITIES)},
    "functions": many(OBJECT, 128),
    "function_call": ANYTHING,
    "truncation": {"enum": ["auto", "disabled"]},
    "context_management": OBJECT,
    "add_generation_prompt": FLAG.schema,
    "continue_final_message": FLAG.schema,
    "chat_template": TEXT,
    "chat_template_kwargs": OBJECT,
    "reasoning_effort": TEXT,
    "echo": FLAG.schema,
    "use_beam_search": FLAG.schema,
    "length_penalty": real(*PENALTY).schema,
    "truncate_prompt_tokens": whole(-1).schema,
    "truncation_side": {"enum": list(SIDES)},
    "add_special_tokens": FLAG.schema,
    "prompt": {
        "anyOf": [TEXT, many(TEXT, 8, 1), many(TOKEN, 4096, 1), many(many(TOKEN, 4096, 1), 8, 1)]
    },
    "messages": many(MESSAGE, 4096, 1),
    "tools": many(OBJECT, 128),
    "tool_choice": ANYTHING,
    "parallel_tool_calls": FLAG.schema,
    "response_format": OBJECT,
    "user": TEXT,
    "metadata": OBJECT,
    "store": FLAG.schema,
    "service_tier": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "suffix": TEXT,
    "modalities": {"const": ["text"]},
    "tokens": many(TOKEN, 1 << 20),
    "return_token_strs": FLAG.schema,
    "system": CONTENT,
    "input": {"anyOf": [TEXT, many(OBJECT, 4096, 1)]},
    "instructions": TEXT,
    "encoding_format": {"enum": ["float", "base64"]},
    "dimensions": whole(1, pooling.MAX_DIMENSIONS).schema,
    "query": TEXT,
    "documents": many(TEXT, MAX_PROMPTS, 1),
    "apply_softmax": FLAG.schema,
    "item_first": FLAG.schema,
    "background": FLAG.schema,
    "enable_response_messages": FLAG.schema,
    "previous_response_id": TEXT,
    "label_token_ids": many(TOKEN, MAX_WANTED, 1),
    "texts": many(TEXT, MAX_PROMPTS, 1),
    "inputs": many(OBJECT, MAX_PROMPTS, 1),
    "input_type": {"enum": list(cohere.INPUT_TYPES)},
    "truncate": {"enum": list(cohere.TRUNCATE)},
    "embedding_types": many({"enum": list(cohere.EMBEDDING_TYPES)}, 4, 1),
    "output_dimension": whole(1, pooling.MAX_DIMENSIONS).schema,
    "input_file_id": TEXT,
    "endpoint": {"enum": list(batch_file.ENDPOINTS)},
    "output_expires_after": OBJECT,
    "requests": many(LINE, batch_file.MAX_LINES, 1),
    "top_n": whole(0, MAX_PROMPTS).schema,
    "return_documents": FLAG.schema,
}
OLLAMA = {  # paths whose parsing rules also have schemas
    "/api/chat": ollama_fields.CHAT,
    "/api/generate": ollama_fields.GENERATE,
    "/api/embed": ollama_fields.EMBED,
    "/api/embeddings": ollama_fields.EMBEDDINGS,
    "/api/show": ollama_fields.SHOW,
    "/api/pull": ollama_fields.PULL,
}
TEXTS: Schema = {"anyOf": [TEXT, many(TEXT, 64, 1)]}
SCHEMAS_BY_PATH: dict[str, dict[str, Schema]] = {  # fields that differ from FIELDS, by path
    "/v1/embeddings": {"input": FIELDS["prompt"]},
    "/classify": {"input": FIELDS["prompt"]},
    "/pooling": {"input": FIELDS["prompt"], "task": {"enum": list(pooling.TASKS)}},
    "/score": dict.fromkeys((name for pair in pooling.SIDES for name in pair), TEXTS),
    "/generative_scoring": {
        "query": {"anyOf": [TEXT, many(TOKEN, 1 << 20)]},
        "items": {
            "anyOf": [many(TEXT, MAX_PROMPTS, 1), many(many(TOKEN, 1 << 20), MAX_PROMPTS, 1)]
        },
    },
    "/v1/conversations": {"items": many(OBJECT, conversations.MAX_ITEMS)},
    "/v1/chat/completions": {"logprobs": FLAG.schema},
    "/v1/chat/completions/batch": {
        "logprobs": FLAG.schema,
        "messages": many(many(MESSAGE, 4096, 1), chat.MAX_CONVERSATIONS, 1),
    },
    **{path: ollama_fields.rule_schemas(rules) for path, rules in OLLAMA.items()},
}
BODIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # path: (fields, required fields)
    "/v1/chat/completions": (chat.FIELDS, ("messages",)),
    "/v1/chat/completions/batch": (chat.BATCH_FIELDS, ("messages",)),
    "/v1/completions": (completion.FIELDS, ("prompt",)),
    "/v1/responses": (responses.FIELDS, ("input",)),
    "/v1/responses/input_tokens": (responses.COUNT_FIELDS, ()),
    "/v1/responses/compact": (responses.COMPACT_FIELDS, ()),
    "/v1/conversations": (conversations.FIELDS, ()),
    "/v1/messages": (messages.FIELDS, ("messages", "max_tokens")),
    "/v1/messages/count_tokens": (messages.COUNT_FIELDS, ("messages",)),
    "/v1/messages/batches": (batches.MESSAGE_FIELDS, batches.MESSAGE_FIELDS),
    "/v1/batches": (batches.FIELDS, ("input_file_id", "endpoint")),
    "/v1/embeddings": (pooling.EMBEDDINGS, ("input",)),
    "/v2/embed": (cohere.FIELDS, ()),
    "/classify": (pooling.CLASSIFY, ("input",)),
    "/pooling": (pooling.POOLING, ("input",)),
    "/score": (pooling.SCORE, ()),
    "/generative_scoring": (label_scores.FIELDS, ("query", "items", "label_token_ids")),
    "/rerank": (pooling.RERANK, ("query", "documents")),
    "/tokenize": (TOKENIZE, ()),
    "/detokenize": (DETOKENIZE, ("tokens",)),
    **{
        path: (tuple(rules), () if "name" in rules else ("model",))
        for path, rules in OLLAMA.items()
    },
}

# Other paths of an endpoint.
ALIASES = {"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"}
ALTERNATIVES = {  # fields of which one group must be given
    "/tokenize": (("prompt",), ("messages",)),
    "/v2/embed": (("texts",), ("inputs",)),
    "/score": pooling.SIDES,
    **{path: tuple((name,) for name in ollama_fields.NAMED) for path in ("/api/show", "/api/pull")},
}


def body_schema(path: str) -> Schema:
    """The schema of a body. Optional fields may be null, which means that they are absent."""
    names, required = BODIES[path]
    schemas = FIELDS | SCHEMAS_BY_PATH.get(path, {})
    properties = {name: schemas.get(name, ANYTHING) for name in dict.fromkeys(names)}
    optional = {
        name: schema if name in required else or_null(schema) for name, schema in properties.items()
    }
    object_schema: Schema = {
        "type": "object",
        "properties": optional,
        "additionalProperties": False,
    }
    if path in ALTERNATIVES:
        object_schema["anyOf"] = [{"required": list(names)} for names in ALTERNATIVES[path]]
    return object_schema | ({"required": list(required)} if required else {})
