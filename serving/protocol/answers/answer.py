"""Requests and answers before a protocol gives them its shape."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...api.outputs import Logprob
from ...api.params import PLAIN, SamplingParams, Terms
from ...parsing.pieces import Piece

Logprobs = Sequence[Mapping[int, Logprob]]  # by position: the chosen token and the likeliest


@dataclass(frozen=True)
class Delivery:
    """How an answer is to be sent."""

    stream: bool = False
    include_usage: bool = False  # a last chunk has the usage
    continuous_usage: bool = False  # every chunk has the usage so far
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # log-probabilities name tokens by their ids
    request_id: str | None = None
    include_drafted: bool = False  # every chunk says which of its tokens were drafted
    include_reasoning: bool = True  # a chat shows what the model thought
    metrics: bool = False  # the end says how long the answer took


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to answer, whatever the protocol it came by."""

    messages: list[dict[str, Any]]  # as chat templates take them; arguments of tool calls are objects
    params: SamplingParams
    model: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)  # add_generation_prompt and the template's own
    terms: Terms = PLAIN
    delivery: Delivery = Delivery()
    tools: list[dict[str, Any]] = field(default_factory=list)  # {"type": "function", "function": {...}}
    # Which of the tools take a text, and its form: they are told as functions with one argument.
    custom: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()  # the functions whose arguments keep to their schemas
    old_calls: bool = False  # a call is told under its old name, `function_call`
    tool_choice: str = "auto"  # or "none", "required", or the name of a function behind "function:"
    parallel_tool_calls: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"  # where tokens beyond those are left out
    length_penalty: float | None = None  # of a beam search, where that chooses the answers
    drops_oldest: bool = False  # turns, where not all fit
    kept_room: int = 1  # tokens that those leave for an answer without a limit
    edits: Sequence[Any] = ()  # of the conversation, each as `context.Edit`
    echo: bool = False
    ignored: Sequence[str] = ()  # names of fields of messages that say nothing here
    given: frozenset[str] = field(default=frozenset(), compare=False)  # parameters that the model's own do not replace


@dataclass(frozen=True)
class ResponsesRequest(ChatRequest):
    """A conversation whose answer is kept, unless the client does not want that."""

    store: bool = True
    background: bool = False  # the client does not wait for it
    previous_response_id: str | None = None  # the stored one that it goes on from
    conversation: str | None = None  # the stored one that it goes on from and adds to
    shows_raw: bool = False  # the answer has what the model read and wrote, as it is


@dataclass(frozen=True)
class ChatBatch(ChatRequest):
    """Several conversations that are answered alike; `messages` are those of the first."""

    conversations: Sequence[list[dict[str, Any]]] = ()

    def each(self) -> list[ChatRequest]:
        """One request a conversation."""
        return [replace(self, messages=messages) for messages in self.conversations]


@dataclass(frozen=True)
class CompletionRequest:
    """Prompts to write on from, each as text or as token ids."""

    prompts: list[str | list[int]]
    params: SamplingParams
    model: str | None = None
    terms: Terms = PLAIN
    delivery: Delivery = Delivery()
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    length_penalty: float | None = None
    add_special_tokens: bool = True
    suffix: str = ""  # what comes after the answer, for models that were taught to fill a gap
    echo: bool = False
    silent: bool = False  # no text is wanted: with echo, max_tokens may be 0
    wants_prompt_logprobs: bool = False  # by themselves, and not for echo only
    given: frozenset[str] = field(default=frozenset(), compare=False)  # parameters that the model's own do not replace


@dataclass(frozen=True)
class OllamaRequest(ChatRequest):
    """A conversation or a prompt; without either the model is only loaded."""

    called: str = ""  # the model, by the name that the client knows
    prompt: str | None = None  # of /api/generate; None: a conversation
    suffix: str = ""
    raw: bool = False  # the prompt is what the model reads, without its chat template
    context: Sequence[int] = ()  # tokens that came before
    thinks: bool = False  # thoughts were asked for, so that a model without them is refused
    unloads: bool = False  # keep_alive is 0
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def loads(self) -> bool:
        """Whether nothing is asked but that the model be ready."""
        return not (self.messages if self.prompt is None else self.prompt or self.suffix)


@dataclass(frozen=True)
class Prompted:
    """The prompt of an answer."""

    text: str | None
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    first: str = ""  # the text of its first token, which has no probability
    applied: Sequence[Mapping[str, Any]] = ()  # edits of the conversation, and what they changed


@dataclass(frozen=True)
class Head:
    """What a response says about itself, and the prompts it answers."""

    id: str
    model: str
    created: int  # seconds since 1970
    system_fingerprint: str | None = None
    prompts: Sequence[Prompted] = ()


@dataclass(frozen=True)
class Usage:
    """The tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    reading: float = 0.0  # seconds from when the engine took it up to its first token
    writing: float = 0.0  # and from there until now
    waiting: float | None = None  # seconds before that, where it is one answer to one prompt
    stored_tokens: int = 0  # of the prompt, that the prefix cache did not have and has now


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class FinishedChoice:
    """One choice, whole; `finish_reason` is stop, length, tool_calls, abort or timeout."""

    index: int
    content: str | None
    finish_reason: str
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()
    stop_reason: int | str | None = None
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    raw: str = ""  # the text before it was parsed


@dataclass(frozen=True)
class ChoicePart:
    """What one choice got since the part before; the last one has a finish reason."""

    index: int
    pieces: Sequence[Piece] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    drafted: Sequence[int] = ()  # places in `token_ids`
    raw: str = ""  # the text before it was parsed
