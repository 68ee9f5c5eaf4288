"""Requests and answers, independent of the protocol."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...api.outputs import Logprob
from ...api.params import PLAIN, RequestOptions, SamplingParams
from ...parsing.pieces import Piece

Logprobs = Sequence[Mapping[int, Logprob]]  # by position: the chosen token and the likeliest


@dataclass(frozen=True)
class Delivery:
    """The delivery options of an answer."""

    stream: bool = False
    include_usage: bool = False  # the last chunk has the usage
    continuous_usage: bool = False  # every chunk has the usage so far
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # log-probabilities name tokens by their ids
    request_id: str | None = None
    include_drafted: bool = False  # every chunk lists which of its tokens were drafted
    include_reasoning: bool = True  # chat answers contain the reasoning
    metrics: bool = False  # the response has the times that the answer took


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to answer, from any protocol."""

    messages: list[dict[str, Any]]  # for the chat template; arguments of tool calls are objects
    params: SamplingParams
    model: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    request_options: RequestOptions = PLAIN
    delivery: Delivery = Delivery()
    # {"type": "function", "function": {...}}
    tools: list[dict[str, Any]] = field(default_factory=list)
    # Custom tools, which take a text, with its format; the model sees functions with one argument.
    custom: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()  # functions whose arguments must match their schemas
    old_calls: bool = False  # a call is returned in the old field `function_call`
    tool_choice: str = "auto"  # or "none", "required", or the name of a function behind "function:"
    parallel_tool_calls: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"  # the side at which tokens are cut
    length_penalty: float | None = None  # of a beam search; None: sampling
    drops_oldest: bool = False  # drop the oldest turns if not all fit
    kept_room: int = 1  # tokens that dropping turns leaves for an answer without a limit
    edits: Sequence[Any] = ()  # `context.Edit`s of the conversation
    echo: bool = False
    ignored: Sequence[str] = ()  # unknown fields of messages
    # The sampling parameters that the request sets; the model's defaults replace the others.
    explicit_params: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class ResponsesRequest(ChatRequest):
    """A conversation whose answer is stored if `store` is true."""

    store: bool = True
    background: bool = False  # the client does not wait for it
    previous_response_id: str | None = None  # the stored response to continue from
    conversation: str | None = None  # the stored conversation to continue and append to
    shows_raw: bool = False  # the response contains the model's input and output, unparsed


@dataclass(frozen=True)
class ChatBatch(ChatRequest):
    """Several conversations with the same options; `messages` are those of the first."""

    conversations: Sequence[list[dict[str, Any]]] = ()

    def each(self) -> list[ChatRequest]:
        """One request per conversation."""
        return [replace(self, messages=messages) for messages in self.conversations]


@dataclass(frozen=True)
class CompletionRequest:
    """Prompts to continue, each as text or as token ids."""

    prompts: list[str | list[int]]
    params: SamplingParams
    model: str | None = None
    request_options: RequestOptions = PLAIN
    delivery: Delivery = Delivery()
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    length_penalty: float | None = None
    add_special_tokens: bool = True
    suffix: str = ""  # the text after the answer, for fill-in-the-middle models
    echo: bool = False
    silent: bool = False  # echo with max_tokens 0: nothing is returned but the prompt
    wants_prompt_logprobs: bool = False  # the request has `prompt_logprobs`, and not only echo
    # The sampling parameters that the request sets; the model's defaults replace the others.
    explicit_params: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class OllamaRequest(ChatRequest):
    """A conversation or a prompt in Ollama's form; without either the model is only loaded."""

    called: str = ""  # the model's name in the request
    prompt: str | None = None  # of /api/generate; None: a conversation
    suffix: str = ""
    raw: bool = False  # the chat template is not applied to the prompt
    context: Sequence[int] = ()  # tokens before the prompt
    thinks: bool = False  # reasoning was requested, so that a model without it is refused
    unloads: bool = False  # keep_alive is 0
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def only_loads(self) -> bool:
        """Whether the request only loads the model."""
        return not (self.messages if self.prompt is None else self.prompt or self.suffix)


@dataclass(frozen=True)
class AnsweredPrompt:
    """The prompt of an answer."""

    text: str | None
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    first: str = ""  # the text of its first token, which has no probability
    applied: Sequence[Mapping[str, Any]] = ()  # reports of the edits of the conversation


@dataclass(frozen=True)
class ResponseHead:
    """The common fields of a response, and the prompts that it answers."""

    id: str
    model: str
    created: int  # seconds since 1970
    system_fingerprint: str | None = None
    prompts: Sequence[AnsweredPrompt] = ()


@dataclass(frozen=True)
class Usage:
    """The tokens and the times of a request so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    reading: float = 0.0  # seconds from the first scheduled step to the first token
    writing: float = 0.0  # seconds since the first token
    waiting: float | None = None  # seconds in the queue; None with several prompts or choices
    stored_tokens: int = 0  # prompt tokens that the request added to the prefix cache


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class FinishedChoice:
    """A complete choice; `finish_reason` is stop, length, tool_calls, abort or timeout."""

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
    """The new output of one choice since its previous part; the last part has a finish reason."""

    index: int
    pieces: Sequence[Piece] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    drafted: Sequence[int] = ()  # positions in `token_ids` of accepted draft tokens
    raw: str = ""  # the text before it was parsed
