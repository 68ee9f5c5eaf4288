"""The options of a server, except those of its engines."""

from dataclasses import dataclass

from ...model.config import ModelError
from .. import parsing
from ..api.options import flag
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
    port: int = flag(8000, LISTEN, "Port to listen on; 0 takes a free one.")
    uds: str | None = flag(
        None, LISTEN, "Unix socket to listen on, instead of host and port.", "PATH"
    )
    api_keys: tuple[str, ...] = ()
    # Accepted Host headers; empty: the server's own names on loopback, else any.
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # other sites whose pages may send requests (CORS)
    open_metrics: bool = flag(False, ACCESS, "Serve /metrics without a key.")
    admin: bool = flag(  # the paths of `endpoints/admin.py` and `adapters.py`
        False,
        ACCESS,
        "Serve /sleep, /wake_up, /is_sleeping, /pause, /resume, /reset_prefix_cache, "
        "/expert_loads, /rebalance_experts, /v1/load_lora_adapter and /v1/unload_lora_adapter.",
    )
    lora_dir: str | None = flag(
        None,
        ACCESS,
        "Folder below which adapters lie that /v1/load_lora_adapter may load.",
        "DIR",
        "none is loaded",
    )
    state_dir: str | None = flag(
        None,
        STATE,
        "Folder for stored responses, conversations, files and batches; they outlive the server "
        "there.",
        "DIR",
        "none: they are in memory",
    )
    max_body_bytes: int = flag(16 << 20, LIMITS, "Largest body of a request.", "BYTES", "16M")
    # `n` times the number of prompts.
    max_choices: int = flag(MAX_CHOICES, LIMITS, "Most answers to one request.", "N")
    max_stored_responses: int = flag(
        1024,
        STATE,
        "Most responses and conversations that are kept, for previous_response_id too; 0: none.",
        "N",
    )
    max_stored_bytes: int = flag(
        64 << 20, STATE, "Most bytes of them; the least recently used go.", "BYTES", "64M"
    )
    max_file_bytes: int = flag(
        256 << 20,
        STATE,
        "Most bytes of /v1/files, of batches' requests and of their results.",
        "BYTES",
        "256M",
    )
    max_batches: int = flag(
        256, STATE, "Most batches that are kept, also of those that are over.", "N"
    )
    max_connections: int = flag(4096, LIMITS, "Most open connections.", "N")
    receive_seconds: float = seconds(
        30.0, "Time for a request's head to arrive, and again for its body."
    )
    idle_seconds: float = seconds(60.0, "Time after which an unused connection is closed.")
    write_seconds: float = seconds(30.0, "Time for a client to read what it was sent.")
    request_seconds: float | None = seconds(None, "Time for a whole request.")
    stall_seconds: float = seconds(30.0, "Time after which a step counts as failed.")
    shutdown_grace: float = seconds(30.0, "Time for running requests to end after SIGTERM.")
    max_loaded: int | None = flag(
        None,
        LIMITS,
        "Most models awake at once; the least recently used sleeps.",
        "N",
        "all of them",
    )
    enable_prompt_tokens_details: bool = flag(
        False,
        ANSWERS,
        "Say in the usage of /v1/embeddings, /score and /rerank too how many tokens were cached.",
    )
    enable_force_include_usage: bool = flag(
        False,
        ANSWERS,
        "Say in every chunk of a stream what was used so far, also where it was not asked for.",
    )
    enable_per_request_metrics: bool = flag(
        False,
        ANSWERS,
        "Say beside the usage of a chat or completion how long it waited, read and wrote.",
    )
    enable_tokenizer_info_endpoint: bool = flag(
        False,
        ANSWERS,
        "Serve /tokenizer_info: what tokenizer_config.json says, and the chat template.",
    )
    formats: Formats = Formats()
    otlp_traces_endpoint: str | None = None

    @property
    def loopback(self) -> bool:
        return self.uds is not None or self.host in LOOPBACK
