"""What a caller asks for, checked completely before it is queued: the sampling parameters of a request, and its terms.

A parameter is declared here and nowhere else. Its line says its default, what it may be, which HTTP endpoints take it
under its own name, what its flag of the commands says and, where the rows of a step carry it, what padding rows have;
the endpoints' fields, their JSON schemas, docs/api.md, the flags and the arrays of a batch follow from it. `x` is the
array `x_R` of `ops.sampling.SamplingInputs`, where it is put to use.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any

from .errors import RequestError
from .options import SAMPLING as PANEL
from .structured import checked_structure
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

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_ALLOWED = 1 << 20  # token ids
OPENAI = ("chat", "completions", "responses")
EVERYWHERE = (*OPENAI, "messages")


@dataclass(frozen=True)
class Declaration:
    """What is declared of a parameter beside its name, type and default."""

    rule: Rule
    optional: bool  # None is allowed
    endpoints: tuple[str, ...]  # that take it under its own name
    padding: float | int | None  # what padding rows have; None: rows do not carry it


def declared(
    default: Any,
    rule: Rule,
    endpoints: tuple[str, ...] = EVERYWHERE,
    optional: bool = False,
    padding: float | int | None = None,
    help: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A field with its declaration; it is optional also where its default is None. With `help` commands have its flag.

    A whole number with a metavar may be written there as 32K.
    """
    declaration = Declaration(rule, optional or default is None, endpoints, padding)
    about = {"declaration": declaration, "panel": PANEL, "help": help, "metavar": metavar}
    return field(default=default, metadata=about)


@functools.cache
def declarations(of: type) -> dict[str, Declaration]:
    return {each.name: each.metadata["declaration"] for each in fields(of)}


def check_fields(given: Any) -> None:
    """Check each field, and store its normalised form while the object is being made."""
    for name, declaration in declarations(type(given)).items():
        value = getattr(given, name)
        if value is not None or not declaration.optional:
            kept = declaration.rule.check(name, value, " or null" if declaration.optional else "")
            if kept is not value:
                object.__setattr__(given, name, kept)


def checked_salt(param: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(param, f"must be a string that is not empty, or null, got {shown(value)}")
    if len(value) > MAX_STRING_LENGTH:
        raise RequestError(param, f"must have at most {MAX_STRING_LENGTH} characters, got {len(value)}")
    return value


def checked_temperature(param: str, value: Any) -> float:
    found = TEMPERATURE.check(param, value)
    if 0 < found < 1e-6:  # float32 logits would overflow
        raise RequestError(param, f"must be 0 (greedy) or from 1e-06 to 100, got {shown(value)}")
    return found


def checked_top_k(param: str, value: Any) -> int:
    return max(0, TOP_K.check(param, value))


def checked_seed(param: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) not in SEEDS:
        raise RequestError(param, f"must be an integer of 64 bits or null, got {shown(value)}")
    return int(value)


def checked_biases(param: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        got = f"{len(value)} entries" if isinstance(value, Mapping) else shown(value)
        raise RequestError(param, f"must map at most {MAX_BIASES} token ids to numbers, got {got}")
    found: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has only string keys, so "50256" is a token id too; eleven digits are no int32.
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11
        token = integer(param, int(key) if digits else key, 0, INT32_MAX, " (each key is a token id)")
        found[token] = number(f"{param}[{token}]", bias, *BIAS)
    return found


def checked_allowed(param: str, value: Any) -> tuple[int, ...]:
    found = token_ids(param, value, MAX_ALLOWED)
    if not found:
        raise RequestError(param, "must hold at least one token id, or be null to allow all")
    return found


BIAS = -100, 100
SEEDS = range(-(2**63), 2**63)
TEMPERATURE = real(0, 100, " (0 is greedy)")
TOP_K = whole(-1, remedy=" (0 or -1 is off)")
COUNT = whole(0, MAX_LOGPROBS)
PENALTY = real(-2, 2)
SALT = rule(checked_salt, {"type": "string", "minLength": 1})
TEXTS = rule(lambda param, value: strings(param, () if value is None else value), STRINGS)
TEXT_OR_TEXTS = rule(
    lambda param, value: TEXTS.check(param, (value,) if isinstance(value, str) else value), {"anyOf": [STRING, STRINGS]}
)
STOP_TOKENS = rule(
    lambda param, value: token_ids(param, () if value is None else value, MAX_STOP_TOKENS), many(TOKEN, MAX_STOP_TOKENS)
)
BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": real(*BIAS).schema,
    "maxProperties": MAX_BIASES,
}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a request is served, whatever it asks for."""

    cache_salt: str | None = declared(None, SALT)  # only requests with the same one share computed pages
    share_key: str | None = declared(None, SALT, ())  # its tenant: each gets an equal share while others wait
    priority: int = declared(0, whole(-1000, 1000))  # among a tenant's requests the lower goes first; waiting helps too
    # Seconds from its arrival; then it ends with what it has.
    timeout: float | None = declared(None, real(0, 7 * 24 * 3600.0, " (seconds)", open_low=True))

    def __post_init__(self):
        check_fields(self)


PLAIN = Terms()


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of a request and when to stop; every field is checked when it is made."""

    n: int = declared(1, whole(1, MAX_CHOICES), ("chat", "completions"))
    # So many are written, and the n likeliest of them, a token, are the answer.
    best_of: int | None = declared(None, whole(1, MAX_CHOICES), ("completions",))
    presence_penalty: float = declared(
        0.0, PENALTY, padding=0.0, help="Subtracted from the logit of every token already generated."
    )
    frequency_penalty: float = declared(
        0.0, PENALTY, padding=0.0, help="Subtracted from it for every time that the token was generated."
    )
    # Beyond these bounds float32 logits overflow, and the answer would be NaN rather than extreme.
    repetition_penalty: float = declared(
        1.0, real(0.01, 100, " (1 is off)"), padding=1.0, help="Above 1: tokens already seen become less likely."
    )
    temperature: float = declared(
        1.0, rule(checked_temperature, TEMPERATURE.schema), padding=0.0, help="0 always takes the likeliest token."
    )
    top_p: float = declared(
        1.0, real(0, 1, " (1 is off)", open_low=True), padding=1.0,
        help="Sample from the likeliest tokens that together have this probability.",
    )  # fmt: skip
    top_k: int = declared(  # -1 is read as 0
        0, rule(checked_top_k, TOP_K.schema), padding=0, help="Sample from this many of the likeliest tokens."
    )
    min_p: float = declared(
        0.0, real(0, 1, " (0 is off)"), padding=0.0, help="Drop tokens less likely than this fraction of the likeliest."
    )
    seed: int | None = declared(
        None, rule(checked_seed, whole(SEEDS[0], SEEDS[-1]).schema), help="The same seed gives the same tokens."
    )
    # One string or several, stored as a tuple; so are the other lists, and None is empty.
    stop: Sequence[str] = declared((), TEXT_OR_TEXTS, OPENAI, help="Stop before this text; may be given several times.")
    stop_token_ids: Sequence[int] = declared((), STOP_TOKENS)
    ignore_eos: bool = declared(False, FLAG)
    # None: up to the model's length.
    max_tokens: int | None = declared(
        16, whole(1), ("chat", "completions", "messages"), True, help="Most tokens of an answer.", metavar="TOKENS"
    )
    min_tokens: int = declared(0, whole(0))
    logprobs: int | None = declared(None, COUNT, ("completions",))  # how many beside the chosen token's own
    prompt_logprobs: int | None = declared(None, COUNT, ("chat", "completions"))
    detokenize: bool = declared(True, FLAG, ())
    skip_special_tokens: bool = declared(True, FLAG)
    include_stop_str_in_output: bool = declared(False, FLAG)
    logit_bias: Mapping[int, float] | None = declared(None, rule(checked_biases, BIASES))
    allowed_token_ids: Sequence[int] | None = declared(None, rule(checked_allowed, many(TOKEN, MAX_ALLOWED, 1)))
    bad_words: Sequence[str] = declared((), TEXTS)
    # What the answer has to look like: see structured.py.
    structured_outputs: Mapping[str, Any] | None = declared(
        None, rule(lambda param, value: checked_structure(value), {"type": "object"})
    )

    def __post_init__(self):
        check_fields(self)
        if self.best_of is not None and self.best_of < self.n:
            integer("best_of", self.best_of, self.n, MAX_CHOICES, f" (n is {self.n}) or null")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if not self.detokenize and self.stop:
            raise RequestError("stop", f"needs detokenize=True, or use stop_token_ids; got {shown(self.stop)}")

    @property
    def num_sequences(self) -> int:
        """How many are written."""
        return self.best_of or self.n

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of the tokens drawn are wanted."""
        return self.logprobs is not None or self.num_sequences > self.n

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "SamplingParams":
        """The parameters in a mapping, as JSON gives them; a name that is not a field is refused."""
        if not isinstance(given, Mapping):
            raise RequestError("sampling_params", f"must map field names to values, got {shown(given)}")
        refuse_unknown(given, list(declarations(cls)))
        return cls(**given)


SAMPLING = declarations(SamplingParams)
