"""The options of a server, except those of its engines."""

from dataclasses import dataclass

from ...model.config import ModelError
from .. import parsing
from ..api.flags import flag
from ..api.params import MAX_CHOICES

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Panels of `--help`.
LISTEN = "Listening"
ACCESS = "Access"
LIMITS = "Limits"
STATE = "Stored state"
ANSWERS = "Answers"


def seconds(default: float | None, help: str) -> float:
    return flag(default, LIMITS, help, "SECONDS")


@dataclass(frozen=True)
class Formats:
    """The chat template and the formats of tool calls and reasoning.

    `auto` detects them from the template.
    """

    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_auto_tool_choice: bool = True
    chat_template: str | None = None

    def __post_init__(self):
        for name, supported, refused in (
            ("tool_call_parser", parsing.TOOL_PARSERS, parsing.REFUSED_TOOLS),
            ("reasoning_parser", parsing.REASONING_PARSERS, parsing.REFUSED_REASONING),
        ):
            if (value := getattr(self, name)) in refused:
                raise ModelError(f"{name} {value!r} is not served: {refused[value]}")
            if value not in ("auto", "none", *supported):
                raise ModelError(
                    f"{name} is {value!r}; it can be auto, none, {', '.join(supported)}"
                )

    def parsers(self, template: str) -> tuple[str | None, str | None]:
        """The names of the parsers of tool calls and of reasoning."""
        chosen = self.tool_call_parser, self.reasoning_parser
        tools, reasoning = (
            detected if name == "auto" else None if name == "none" else name
            for name, detected in zip(chosen, parsing.detect(template), strict=True)
        )
        return tools if self.enable_auto_tool_choice else None, reasoning


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The options of a server; `quire serve` makes a flag of each field."""

    version: str = "0"  # reported by /version
    host: str = flag("127.0.0.1", LISTEN, "Address to listen on.")
    port: int = flag(8000, LISTEN, "Port to listen on; 0 picks a free one.")
    uds: str | None = flag(
        None, LISTEN, "Unix socket to listen on, instead of host and port.", "PATH"
    )
    api_keys: tuple[str, ...] = ()
    # Accepted Host headers; empty: the server's own names on loopback, else any.
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # other sites whose pages may send requests (CORS)
    open_metrics: bool = flag(False, ACCESS, "Serve /metrics without an API key.")
    admin: bool = flag(  # the paths of `endpoints/admin.py` and `adapters.py`
        False,
        ACCESS,
        "Enable the admin endpoints /sleep, /wake_up, /is_sleeping, /pause, /resume, "
        "/reset_prefix_cache, "
        "/expert_loads, /rebalance_experts, /v1/load_lora_adapter and /v1/unload_lora_adapter.",
    )
    lora_dir: str | None = flag(
        None,
        ACCESS,
        "Folder with the LoRA adapters that /v1/load_lora_adapter may load.",
        "DIR",
        "dynamic loading is off",
    )
    state_dir: str | None = flag(
        None,
        STATE,
        "Folder for stored responses, conversations, files and batches, which then survive a "
        "restart.",
        "DIR",
        "none: kept in memory",
    )
    max_body_bytes: int = flag(
        16 << 20, LIMITS, "Maximum size of a request's body.", "BYTES", "16M"
    )
    # `n` times the number of prompts.
    max_choices: int = flag(
        MAX_CHOICES, LIMITS, "Maximum number of sequences per request: prompts times n.", "N"
    )
    max_stored_responses: int = flag(
        1024,
        STATE,
        "Maximum number of stored responses (for previous_response_id) and conversations; 0 turns "
        "storing off.",
        "N",
    )
    max_stored_bytes: int = flag(
        64 << 20,
        STATE,
        "Maximum size of stored responses and conversations; the least recently used are dropped.",
        "BYTES",
        "64M",
    )
    max_file_bytes: int = flag(
        256 << 20,
        STATE,
        "Maximum total size of /v1/files, including the inputs and outputs of batches.",
        "BYTES",
        "256M",
    )
    max_batches: int = flag(
        256, STATE, "Maximum number of stored batches, including finished ones.", "N"
    )
    max_connections: int = flag(4096, LIMITS, "Maximum number of open connections.", "N")
    receive_seconds: float = seconds(
        30.0, "Timeout for receiving a request's headers, and for its body."
    )
    idle_seconds: float = seconds(60.0, "Timeout of idle keep-alive connections.")
    write_seconds: float = seconds(30.0, "Timeout for a client to read sent data.")
    request_seconds: float | None = seconds(None, "Timeout of a whole request.")
    stall_seconds: float = seconds(30.0, "Time after which a running step counts as stalled.")
    shutdown_grace: float = seconds(
        30.0, "Time for running requests to finish after SIGTERM (graceful shutdown)."
    )
    max_loaded: int | None = flag(
        None,
        LIMITS,
        "Maximum number of loaded models; the least recently used one is put to sleep.",
        "N",
        "all models",
    )
    enable_prompt_tokens_details: bool = flag(
        False,
        ANSWERS,
        "Report the number of cached tokens also in the usage of /v1/embeddings, /score and "
        "/rerank.",
    )
    enable_force_include_usage: bool = flag(
        False,
        ANSWERS,
        "Report the usage so far in every chunk of a stream, even without stream_options.",
    )
    enable_per_request_metrics: bool = flag(
        False,
        ANSWERS,
        "Report the queue, prefill and decode times of a chat or completion beside its usage.",
    )
    enable_tokenizer_info_endpoint: bool = flag(
        False,
        ANSWERS,
        "Enable /tokenizer_info, which returns tokenizer_config.json and the chat template.",
    )
    formats: Formats = Formats()
    otlp_traces_endpoint: str | None = None

    @property
    def loopback(self) -> bool:
        return self.uds is not None or self.host in LOOPBACK
