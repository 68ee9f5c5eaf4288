"""What a caller asks for: the sampling parameters of one request, checked completely at the door."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STRINGS = 64  # stop strings, bad words
MAX_STRING_LENGTH = 1024
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_PRIORITY = 1000
MAX_TIMEOUT = 7 * 24 * 3600.0
INT32_MAX = 2**31 - 1  # token ids and counts travel to the device as int32


class RequestError(ValueError):
    """A request that cannot be served: one line that names the field, the value and what would be right."""

    def __init__(self, param: str, message: str):
        super().__init__(param, message)  # both, so that it pickles and copies
        self.param = param
        self.message = message

    def __str__(self) -> str:
        return f"{self.param}: {self.message}"


def shown(value: object) -> str:
    """A value as an error quotes it: on one line, and short, whatever the client sent."""
    try:
        text = ascii(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def refuse_unknown(given: Iterable[object], known: Sequence[str], prefix: str = "") -> None:
    """Raise for the first name in `given` that is not one of `known`, with the nearest known one."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the known fields are {', '.join(sorted(known))}"
            raise RequestError(prefix + (name if isinstance(name, str) else shown(name)), f"unknown field; {hint}")


def integer(param: str, value: Any, low: int, high: int, remedy: str = "") -> int:
    """`value` as an int from `low` to `high`; a bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        wanted = f"an integer of {low} or more" if high >= INT32_MAX else f"an integer from {low} to {high}"
        raise RequestError(param, f"must be {wanted}{remedy}, got {shown(value)}")
    return int(value)


def number(param: str, value: Any, low: float, high: float, remedy: str = "", open_low: bool = False) -> float:
    """`value` as a finite float from `low` (exclusive if `open_low`) to `high`."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not value <= high or value < low or (open_low and value == low):  # NaN is not <= anything
        above = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise RequestError(param, f"must be a number {above}{remedy}, got {shown(value)}")
    return float(value)


def boolean(param: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(param, f"must be true or false, got {shown(value)}")
    return value


def items(param: str, value: Any, most: int) -> tuple:
    """`value` as a tuple of at most `most` items: any sequence, set or array, but no string."""
    if isinstance(value, str | bytes | bytearray) or not (
        isinstance(value, Sequence | AbstractSet) or hasattr(value, "tolist")
    ):
        raise RequestError(param, f"must be a list, got {shown(value)}")
    found = tuple(value)
    if len(found) > most:
        raise RequestError(param, f"must hold at most {most} items, got {len(found)}")
    return found


def unicode_text(param: str, value: object) -> str:
    """`value` as text that UTF-8 can carry: JSON lets a lone surrogate through."""
    if not isinstance(value, str):
        raise RequestError(param, f"must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(param, f"must be valid Unicode without lone surrogates, got {shown(value)}") from None
    return value


def strings(param: str, value: object) -> tuple[str, ...]:
    found = items(param, value, MAX_STRINGS)
    for i, text in enumerate(found):
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STRING_LENGTH:
            raise RequestError(
                f"{param}[{i}]", f"must be a string of 1 to {MAX_STRING_LENGTH} characters, got {shown(text)}"
            )
        unicode_text(f"{param}[{i}]", text)
    return found


def token_ids(param: str, value: object, most: int) -> tuple[int, ...]:
    return tuple(
        integer(f"{param}[{i}]", token, 0, INT32_MAX, " (a token id)")
        for i, token in enumerate(items(param, value, most))
    )


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
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids, INT32_MAX)
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
