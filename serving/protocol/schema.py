"""The JSON schemas of what requests may hold, for the server's OpenAPI document."""

from typing import Any

from ..api.params import MAX_BIASES, MAX_CHOICES, MAX_LOGPROBS, MAX_PRIORITY, MAX_STOP_TOKENS, MAX_TIMEOUT
from ..api.validation import INT32_MAX, MAX_STRING_LENGTH, MAX_STRINGS
from . import chat, completion, messages, pooling, responses
from .completion import MAX_PROMPTS
from .tokens import DETOKENIZE, TOKENIZE

Schema = dict[str, Any]


def whole(low: int, high: int = INT32_MAX) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def real(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def many(item: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
ANYTHING: Schema = {}
TOKEN = whole(0)
WORDS = many({"type": "string", "minLength": 1, "maxLength": MAX_STRING_LENGTH}, MAX_STRINGS)
CONTENT: Schema = {"anyOf": [TEXT, many({"type": "object", "properties": {"type": TEXT, "text": TEXT}}, 64)]}
MESSAGE: Schema = {"type": "object", "properties": {"role": TEXT, "content": CONTENT}, "required": ["role"]}

FIELDS: dict[str, Schema] = {  # what a field is wherever it has this name
    "model": TEXT, "n": whole(1, MAX_CHOICES), "best_of": whole(1, MAX_CHOICES), "presence_penalty": real(-2, 2),
    "frequency_penalty": real(-2, 2), "repetition_penalty": real(0.01, 100), "temperature": real(0, 100),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "top_k": whole(-1), "min_p": real(0, 1),
    "seed": whole(-(2**63), 2**63 - 1),
    "stop": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": MAX_STRING_LENGTH}, WORDS]},
    "stop_sequences": WORDS, "stop_token_ids": many(TOKEN, MAX_STOP_TOKENS), "ignore_eos": FLAG,
    "max_tokens": whole(1), "max_completion_tokens": whole(1), "max_output_tokens": whole(1), "min_tokens": whole(0),
    "prompt_logprobs": whole(0, MAX_LOGPROBS), "top_logprobs": whole(0, MAX_LOGPROBS), "skip_special_tokens": FLAG,
    "include_stop_str_in_output": FLAG, "logit_bias": {
        "type": "object", "propertyNames": {"pattern": "^[0-9]{1,9}$"}, "additionalProperties": real(-100, 100),
        "maxProperties": MAX_BIASES,
    },
    "allowed_token_ids": many(TOKEN, 1 << 20, 1), "bad_words": WORDS, "structured_outputs": OBJECT, "stream": FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": FLAG, "continuous_usage_stats": FLAG}},
    "return_token_ids": FLAG, "request_id": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
    "priority": whole(-MAX_PRIORITY, MAX_PRIORITY), "cache_salt": {"type": "string", "minLength": 1},
    "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT},
    "add_generation_prompt": FLAG, "continue_final_message": FLAG, "chat_template": TEXT,
    "chat_template_kwargs": OBJECT, "reasoning_effort": TEXT, "echo": FLAG, "truncate_prompt_tokens": whole(-1),
    "add_special_tokens": FLAG,
    "prompt": {"anyOf": [TEXT, many(TEXT, 8, 1), many(TOKEN, 4096, 1), many(many(TOKEN, 4096, 1), 8, 1)]},
    "messages": many(MESSAGE, 4096, 1),
    "tools": many(OBJECT, 128), "tool_choice": ANYTHING, "parallel_tool_calls": FLAG, "response_format": OBJECT,
    "user": TEXT, "metadata": OBJECT, "store": FLAG, "service_tier": TEXT, "safety_identifier": TEXT,
    "prompt_cache_key": TEXT, "suffix": {"const": ""}, "modalities": {"const": ["text"]},
    "tokens": many(TOKEN, 1 << 20), "return_token_strs": FLAG, "system": CONTENT,
    "input": {"anyOf": [TEXT, many(OBJECT, 4096, 1)]},
    "instructions": TEXT, "encoding_format": {"enum": ["float", "base64"]},
    "dimensions": whole(1, pooling.MAX_DIMENSIONS), "query": TEXT,
    "documents": many(TEXT, 2048, 1), "top_n": whole(0, MAX_PROMPTS), "return_documents": FLAG,
}  # fmt: skip
TEXTS: Schema = {"anyOf": [TEXT, many(TEXT, 64, 1)]}
OWN: dict[str, dict[str, Schema]] = {  # where a name means something else
    "/v1/embeddings": {"input": FIELDS["prompt"]},
    "/score": {"text_1": TEXTS, "text_2": TEXTS},
    "/v1/chat/completions": {"logprobs": FLAG},
    "/v1/completions": {"logprobs": whole(0, MAX_LOGPROBS)},
}
BODIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # path: (fields, those that must be given)
    "/v1/chat/completions": (chat.FIELDS, ("messages",)),
    "/v1/completions": (completion.FIELDS, ("prompt",)),
    "/v1/responses": (responses.FIELDS, ("input",)),
    "/v1/messages": (messages.FIELDS, ("messages", "max_tokens")),
    "/v1/messages/count_tokens": (messages.COUNTED, ("messages",)),
    "/v1/embeddings": (pooling.EMBEDDINGS, ("input",)),
    "/score": (pooling.SCORE, ("text_1", "text_2")),
    "/rerank": (pooling.RERANK, ("query", "documents")),
    "/tokenize": (TOKENIZE, ()),
    "/detokenize": (DETOKENIZE, ("tokens",)),
}


def body_schema(path: str) -> Schema:
    """The schema of a request to one of these paths. Every field may be null: as if it were not given."""
    names, required = BODIES[path]
    own = FIELDS | OWN.get(path, {})
    properties = {name: own.get(name, ANYTHING) for name in dict.fromkeys(names)}
    optional = {
        name: schema if name in required or not schema else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in properties.items()
    }
    found: Schema = {"type": "object", "properties": optional, "additionalProperties": False}
    return found | ({"required": list(required)} if required else {})
