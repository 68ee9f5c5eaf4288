"""What a caller asks for: the sampling parameters of one request, checked completely at the door."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from .errors import RequestError
from .structured import checked_structure
from .validation import (
    INT32_MAX,
    MAX_STRING_LENGTH,
    boolean,
    integer,
    number,
    refuse_unknown,
    shown,
    strings,
    token_ids,
)

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_ALLOWED = 1 << 20  # token ids
MAX_PRIORITY = 1000
MAX_TIMEOUT = 7 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a request is served, whatever it asks for."""

    cache_salt: str | None = None  # only requests with the same one share computed pages
    share_key: str | None = None  # whom it is for: each gets an equal share of the machine while others wait
    priority: int = 0  # among requests for the same, the lower goes first; waiting makes up for it
    timeout: float | None = None  # seconds from its arrival; then it ends with what it has

    def __post_init__(self):
        for name in ("cache_salt", "share_key"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(name, f"must be a string that is not empty, or null, got {shown(value)}")
            if value is not None and len(value) > MAX_STRING_LENGTH:
                raise RequestError(name, f"must have at most {MAX_STRING_LENGTH} characters, got {len(value)}")
        integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout is not None:
            number("timeout", self.timeout, 0, MAX_TIMEOUT, " (seconds) or null", open_low=True)


PLAIN = Terms()


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of a request and when to stop; every field is checked when it is made."""

    n: int = 1
    best_of: int | None = None  # so many are written, and the n likeliest of them, a token, are the answer
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off; -1 is read as 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()  # one string or several, kept as a tuple; so are the other lists, and None is empty
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the model's length
    min_tokens: int = 0
    logprobs: int | None = None  # how many beside the chosen token's own
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured_outputs: Mapping[str, Any] | None = None  # what the answer has to look like: see structure.py

    def __post_init__(self):
        self._set("n", integer("n", self.n, 1, MAX_CHOICES))
        if self.best_of is not None:
            self._set("best_of", integer("best_of", self.best_of, self.n, MAX_CHOICES, f" (n is {self.n}) or null"))
        self._check_distribution()
        self._check_ending()
        self._check_tokens()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                self._set(name, integer(name, value, 0, MAX_LOGPROBS, " or null"))
        for name in ("detokenize", "skip_special_tokens", "include_stop_str_in_output", "ignore_eos"):
            boolean(name, getattr(self, name))
        if not self.detokenize and self.stop:
            raise RequestError("stop", f"needs detokenize=True, or use stop_token_ids; got {shown(self.stop)}")
        if self.structured_outputs is not None:
            self._set("structured_outputs", checked_structure(self.structured_outputs))

    @property
    def num_sequences(self) -> int:
        """How many are written."""
        return self.best_of or self.n

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of the tokens drawn are wanted."""
        return self.logprobs is not None or self.num_sequences > self.n

    def _set(self, name: str, value: object) -> None:
        """Store the normalised form of a field while the object is being made."""
        object.__setattr__(self, name, value)

    def _check_distribution(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, number(name, getattr(self, name), -2, 2))
        # Beyond these bounds float32 logits overflow, and the answer would be NaN rather than extreme.
        self._set("repetition_penalty", number("repetition_penalty", self.repetition_penalty, 0.01, 100, " (1 is off)"))
        temperature = number("temperature", self.temperature, 0, 100, " (0 is greedy)")
        if 0 < temperature < 1e-6:
            raise RequestError("temperature", f"must be 0 (greedy) or from 1e-06 to 100, got {shown(self.temperature)}")
        self._set("temperature", temperature)
        self._set("top_p", number("top_p", self.top_p, 0, 1, " (1 is off)", open_low=True))
        self._set("min_p", number("min_p", self.min_p, 0, 1, " (0 is off)"))
        self._set("top_k", max(0, integer("top_k", self.top_k, -1, INT32_MAX, " (0 or -1 is off)")))
        if self.seed is not None:
            self._set("seed", self._seed())

    def _seed(self) -> int:
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral) or not -(2**63) <= self.seed < 2**63:
            raise RequestError("seed", f"must be an integer of 64 bits or null, got {shown(self.seed)}")
        return int(self.seed)

    def _check_ending(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        self._set("stop", strings("stop", stop))
        stop_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self._set("stop_token_ids", token_ids("stop_token_ids", stop_ids, MAX_STOP_TOKENS))
        if self.max_tokens is not None:
            self._set("max_tokens", integer("max_tokens", self.max_tokens, 1, INT32_MAX, " or null"))
        self._set("min_tokens", integer("min_tokens", self.min_tokens, 0, INT32_MAX))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")

    def _check_tokens(self) -> None:
        if self.logit_bias is not None:
            self._set("logit_bias", self._biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED)
            if not allowed:
                raise RequestError("allowed_token_ids", "must hold at least one token id, or be null to allow all")
            self._set("allowed_token_ids", allowed)
        self._set("bad_words", strings("bad_words", () if self.bad_words is None else self.bad_words))

    @staticmethod
    def _biases(given: object) -> dict[int, float]:
        if not isinstance(given, Mapping) or len(given) > MAX_BIASES:
            got = f"{len(given)} entries" if isinstance(given, Mapping) else shown(given)
            raise RequestError("logit_bias", f"must map at most {MAX_BIASES} token ids to numbers, got {got}")
        found: dict[int, float] = {}
        for key, bias in given.items():
            # JSON has only string keys, so "50256" is a token id too; eleven digits are no int32.
            digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11
            token = integer("logit_bias", int(key) if digits else key, 0, INT32_MAX, " (each key is a token id)")
            found[token] = number(f"logit_bias[{token}]", bias, -100, 100)
        return found

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "SamplingParams":
        """The parameters in a mapping, as JSON gives them; a name that is not a field is refused."""
        if not isinstance(given, Mapping):
            raise RequestError("sampling_params", f"must map field names to values, got {shown(given)}")
        refuse_unknown(given, [field.name for field in fields(cls)])
        return cls(**given)
