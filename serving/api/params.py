"""Parameters of requests, checked completely before a request is queued: sampling and service
options.

Each parameter is declared only here: its default, its rule, the HTTP endpoints that take it under
its own name, its help text, whether commands have its flag and, if the rows of a step carry it, its
value in padding rows. The endpoints' fields, their JSON schemas, docs/api.md, the flags, `help()`
and the arrays of a batch follow from the declaration. Parameter `x` becomes the array `x_R` of
`ops.sampling.SamplingInputs`, where it is used.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from enum import Enum
from numbers import Integral
from typing import Any, NoReturn, TypeVar

from . import vllm_names
from .errors import RequestError
from .flags import SAMPLING as PANEL
from .options import describe_option
from .other_engines import suggest_name
from .structured import StructuredOutputsParams, check_structure
from .validation import (
    FLAG,
    INT32_MAX,
    MAX_STRING_LENGTH,
    STRING,
    STRINGS,
    TOKEN,
    Rule,
    integer,
    many,
    number,
    real,
    refuse_unknown,
    rule,
    shown,
    strings,
    token_ids,
    whole,
)
from .vllm_names import takes_vllm_names

T = TypeVar("T")
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_WANTED = 128
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_ALLOWED = 1 << 20  # token ids
# parameters whose defaults a model's generation_config.json may set
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
OPENAI = ("chat", "completions", "responses")
EVERYWHERE = (*OPENAI, "messages")


@dataclass(frozen=True)
class Declaration:
    """The declaration of a parameter, besides its name, type and default."""

    rule: Rule
    optional: bool  # None is allowed
    endpoints: tuple[str, ...]  # endpoints that take it under its own name
    padding: float | int | None  # value in padding rows; None if rows do not carry it


def declared(
    default: Any,
    rule: Rule,
    endpoints: tuple[str, ...] = EVERYWHERE,
    optional: bool = False,
    padding: float | int | None = None,
    help: str = "",
    metavar: str | None = None,
    flag: bool = False,
) -> Any:
    """Declare a field. It is optional if its default is None. With `flag`, commands have its flag.

    An integer with a metavar may be written there as 32K.
    """
    declaration = Declaration(rule, optional or default is None, endpoints, padding)
    metadata = {"declaration": declaration, "help": help, "metavar": metavar}
    return field(default=default, metadata=metadata | ({"panel": PANEL} if flag else {}))


def documented(cls: type[T]) -> type[T]:
    """Append what each field does to the docstring of a class."""
    summary = inspect.cleandoc(cls.__doc__ or "")
    cls.__doc__ = "\n".join([summary, "", *map(describe_option, fields(cls))])  # type: ignore[arg-type]
    return cls


@functools.cache
def declarations(of: type) -> dict[str, Declaration]:
    return {
        option.name: option.metadata["declaration"]
        for option in fields(of)
        if "declaration" in option.metadata
    }


def check_fields(params: Any) -> None:
    """Check each field and store its normalised value, during the construction of a frozen
    object.
    """
    for name, declaration in declarations(type(params)).items():
        value = getattr(params, name)
        if value is not None or not declaration.optional:
            normalised = declaration.rule.check(
                name, value, " or null" if declaration.optional else ""
            )
            if normalised is not value:
                object.__setattr__(params, name, normalised)


def checked_salt(param: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(
            param, f"must be a string that is not empty, or null, got {shown(value)}"
        )
    if len(value) > MAX_STRING_LENGTH:
        raise RequestError(
            param, f"must have at most {MAX_STRING_LENGTH} characters, got {len(value)}"
        )
    return value


def checked_temperature(param: str, value: Any) -> float:
    temperature = TEMPERATURE.check(param, value)
    if 0 < temperature < 1e-6:  # float32 logits would overflow
        raise RequestError(param, f"must be 0 (greedy) or from 1e-06 to 100, got {shown(value)}")
    return temperature


def checked_top_k(param: str, value: Any) -> int:
    return max(0, TOP_K.check(param, value))


def checked_seed(param: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) not in SEEDS:
        raise RequestError(param, f"must be an integer of 64 bits or null, got {shown(value)}")
    return int(value)


def checked_biases(param: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        received = f"{len(value)} entries" if isinstance(value, Mapping) else shown(value)
        raise RequestError(
            param, f"must map at most {MAX_BIASES} token ids to numbers, got {received}"
        )
    # JSON has only string keys, so "50256" is accepted; eleven digits exceed int32
    texts = {key for key in value if isinstance(key, str)}
    if wrong := [key for key in texts if not (key.isascii() and key.isdigit() and len(key) < 11)]:
        raise RequestError(param, f"must have token ids as keys, got {shown(sorted(wrong))}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = integer(
            param, int(key) if key in texts else key, 0, INT32_MAX, " (each key is a token id)"
        )
        biases[token] = number(f"{param}[{token}]", bias, *BIAS)
    return biases


def checked_allowed(param: str, value: Any) -> tuple[int, ...]:
    tokens = token_ids(param, value, MAX_ALLOWED)
    if not tokens:
        raise RequestError(param, "must hold at least one token id, or be null to allow all")
    return tokens


def checked_count(param: str, value: Any, hint: str = "") -> int:
    return integer(param, value, -1, INT32_MAX, " (-1 is all)" + hint)


def checked_prompt_count(param: str, value: Any, hint: str = "") -> int:
    return COUNT.check(param, 1 if value is True else value, hint)


class RequestOutputKind(Enum):
    """Contents of each result of a stream."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # only updates since the previous result
    FINAL_ONLY = 2  # everything, in a single result


def checked_kind(param: str, value: Any) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        raise RequestError(
            param,
            f"must be a RequestOutputKind: CUMULATIVE, DELTA or FINAL_ONLY, got {shown(value)}",
        )
    return value


BIAS = -100, 100
SEEDS = range(-(2**63), 2**63)
TEMPERATURE = real(0, 100, " (0 is greedy)")
TOP_K = whole(-1, remedy=" (0 or -1 is off)")
COUNT = Rule(checked_count, whole(-1).schema)  # the engine's `max_logprobs` is the limit
PROMPT_COUNT = Rule(checked_prompt_count, COUNT.schema)
WANTED = rule(lambda param, value: token_ids(param, value, MAX_WANTED), many(TOKEN, MAX_WANTED))
PENALTY = real(-2, 2)
SALT = rule(checked_salt, {"type": "string", "minLength": 1})
TEXTS = rule(lambda param, value: strings(param, () if value is None else value), STRINGS)
TEXT_OR_TEXTS = rule(
    lambda param, value: TEXTS.check(param, (value,) if isinstance(value, str) else value),
    {"anyOf": [STRING, STRINGS]},
)
STOP_TOKENS = rule(
    lambda param, value: token_ids(param, () if value is None else value, MAX_STOP_TOKENS),
    many(TOKEN, MAX_STOP_TOKENS),
)
BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": real(*BIAS).schema,
    "maxProperties": MAX_BIASES,
}


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of how a request is served, independent of its content."""

    # Only requests with the same salt share computed pages.
    cache_salt: str | None = declared(None, SALT)
    share_key: str | None = declared(None, SALT, ())  # the tenant; waiting tenants get equal shares
    # Within a tenant lower values are served first; waiting helps too.
    priority: int = declared(0, whole(-1000, 1000))
    # Seconds after arrival at which the request ends with its tokens so far.
    timeout: float | None = declared(None, real(0, 7 * 24 * 3600.0, " (seconds)", open_low=True))
    adapter: Any = None  # a loaded `Adapter` that is added to the weights

    def __post_init__(self):
        check_fields(self)


PLAIN = RequestOptions()


def refuse(name: str, value: Any, reason: str) -> NoReturn:
    raise RequestError(name, f"has no place here, got {shown(value)}: {reason}")


@takes_vllm_names(vllm_names.SAMPLING, refuse, suggest_name)
@documented
@dataclass(frozen=True)
class SamplingParams:
    """How to sample the tokens of a request and when to stop; checked at construction."""

    n: int = declared(
        1,
        whole(1, MAX_CHOICES),
        ("chat", "completions"),
        help="Number of sequences to generate for the prompt.",
    )
    presence_penalty: float = declared(
        0.0,
        PENALTY,
        padding=0.0,
        help="Presence penalty, subtracted once from the logit of every generated token.",
        flag=True,
    )
    frequency_penalty: float = declared(
        0.0,
        PENALTY,
        padding=0.0,
        help="Frequency penalty, subtracted from a token's logit for every time it was generated.",
        flag=True,
    )
    # Beyond these bounds float32 logits overflow, so the result would be NaN rather than extreme.
    repetition_penalty: float = declared(
        1.0,
        real(0.01, 100, " (1 is off)"),
        padding=1.0,
        help="Repetition penalty for tokens in the prompt or output; above 1 makes them less "
        "likely.",
        flag=True,
    )
    temperature: float = declared(
        1.0,
        rule(checked_temperature, TEMPERATURE.schema),
        padding=0.0,
        help="Sampling temperature; 0 is greedy decoding.",
        flag=True,
    )
    top_p: float = declared(
        1.0, real(0, 1, " (1 is off)", open_low=True), padding=1.0,
        help="Nucleus sampling: sample from the likeliest tokens with this total probability.",
        flag=True,
    )  # fmt: skip
    top_k: int = declared(  # -1 is stored as 0
        0,
        rule(checked_top_k, TOP_K.schema),
        padding=0,
        help="Sample from this many of the likeliest tokens; 0 is off.",
        flag=True,
    )
    min_p: float = declared(
        0.0, real(0, 1, " (0 is off)"), padding=0.0,
        help="Minimum probability of a token, as a fraction of the likeliest token's.", flag=True,
    )  # fmt: skip
    seed: int | None = declared(
        None,
        rule(checked_seed, whole(SEEDS[0], SEEDS[-1]).schema),
        help="Sampling seed; the same seed gives the same tokens.",
        flag=True,
    )
    # A string or several, stored as a tuple. The other lists are tuples too; None is stored as
    # empty.
    stop: Sequence[str] = declared(
        (),
        TEXT_OR_TEXTS,
        OPENAI,
        help="Stop string, which ends the answer; may be given several times.",
        flag=True,
    )
    stop_token_ids: Sequence[int] = declared(
        (), STOP_TOKENS, help="Token ids that end the answer, besides EOS."
    )
    ignore_eos: bool = declared(False, FLAG, help="Continue generating after EOS tokens.")
    max_tokens: int | None = declared(
        16, whole(1), ("chat", "completions", "messages"), True,
        help="Maximum number of tokens to generate.", metavar="TOKENS", flag=True,
    )  # fmt: skip
    min_tokens: int = declared(
        0, whole(0), help="Minimum number of tokens to generate before EOS or a stop string."
    )
    logprobs: int | None = declared(
        None,
        COUNT,
        ("completions",),
        help="Return log-probabilities of each token and of this many of the likeliest tokens. "
        "More than 20, and -1 for the whole vocabulary, need the engine's `max_logprobs`.",
    )
    prompt_logprobs: int | None = declared(
        None,
        PROMPT_COUNT,
        ("chat", "completions"),
        help="Return log-probabilities for the prompt's tokens, as with `logprobs`; True is 1.",
    )
    _: KW_ONLY  # the order above is vLLM's
    logprob_token_ids: Sequence[int] | None = declared(
        None,
        WANTED,
        ("chat", "completions"),
        help="Return log-probabilities of each token and of these token ids, instead of the "
        "likeliest.",
    )
    flat_logprobs: bool = declared(
        False,
        FLAG,
        (),
        help="Return log-probabilities as `FlatLogprobs`: a few long lists instead of many "
        "objects.",
    )
    detokenize: bool = declared(True, FLAG, (), help="Decode the answer to text.")
    skip_special_tokens: bool = declared(
        True, FLAG, help="Leave special tokens out of the answer's text."
    )
    include_stop_str_in_output: bool = declared(
        False, FLAG, help="Include the stop string at the end of the answer's text."
    )
    output_kind: RequestOutputKind = declared(
        RequestOutputKind.CUMULATIVE, rule(checked_kind, {}), (),
        help="Contents of each result of a stream: a `RequestOutputKind`.",
    )  # fmt: skip
    logit_bias: Mapping[int, float] | None = declared(
        None,
        rule(checked_biases, BIASES),
        help="Values added to the logits of these token ids, from -100 to 100.",
    )
    allowed_token_ids: Sequence[int] | None = declared(
        None,
        rule(checked_allowed, many(TOKEN, MAX_ALLOWED, 1)),
        help="Token ids that may be generated; all if None.",
    )
    bad_words: Sequence[str] = declared((), TEXTS, help="Texts that must not be generated.")
    # Stored as a dict.
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = declared(
        None, rule(lambda param, value: check_structure(value), {"type": "object"}),
        help="Structured output: `StructuredOutputsParams`, or a dict with its fields.",
    )  # fmt: skip
    best_of: int | None = declared(
        None, whole(1, MAX_CHOICES), ("completions",),
        help="Number of sequences to generate; returns the n with the highest mean "
        "log-probability.",
    )  # fmt: skip

    def __post_init__(self):
        check_fields(self)
        if self.best_of is not None and self.best_of < self.n:
            integer("best_of", self.best_of, self.n, MAX_CHOICES, f" (n is {self.n}) or null")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens",
                f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )
        if not self.detokenize and self.stop:
            raise RequestError(
                "stop", f"needs detokenize=True, or use stop_token_ids; got {shown(self.stop)}"
            )

    @property
    def num_sequences(self) -> int:
        """Number of generated sequences."""
        return self.best_of or self.n

    @property
    def gives_logprobs(self) -> bool:
        """Whether the completions have log-probabilities."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def scored(self) -> bool:
        """Whether log-probabilities of the sampled tokens are computed."""
        return self.gives_logprobs or self.num_sequences > self.n

    def clone(self) -> "SamplingParams":
        """Return a copy. Parameters are immutable: `dataclasses.replace` makes changed ones."""
        return replace(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Make parameters from a mapping of field names to JSON values; unknown names raise."""
        if not isinstance(values, Mapping):
            raise RequestError(
                "sampling_params", f"must map field names to values, got {shown(values)}"
            )
        refuse_unknown(values, list(declarations(cls)))
        return cls(**values)


SAMPLING = declarations(SamplingParams)
