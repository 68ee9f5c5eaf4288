"""Structured outputs: compiled grammars, and the tokens that each of them allows next.

A grammar masks tokens before biases, bans and penalties apply to the others. The tokens that end an
answer (EOS and `stop_token_ids`) are allowed only where the grammar may end; `ignore_eos` and
`min_tokens` forbid them there too. Where only the end is left, the answer finishes with "stop",
whatever `min_tokens` says; where other options forbid all remaining tokens, with "error". Stop
strings cut the text as usual. Log-probabilities are those before the mask.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...model.text.tokenizer import Tokenizer
from ...model.text.worker import WorkerProcess
from ..api.errors import RequestError
from ..api.outputs import FinishReason
from ..api.structured import FIELD, ServersGrammar
from .grammar_text import complete_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

WORKER = f"{__package__}.grammar_worker"
LIMITS = {  # bounds of a matcher: for its creation, for a step and in total
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_items_in_row": 1_000,
    # 0.6 kB each, shared by all answers of a grammar; six per character of a bound.
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
RAISED = 4  # factor of RAISED_LIMITS for a grammar of which one answer or one step needs more
RAISED_LIMITS = ("max_lexer_states", "step_lexer_fuel")
EXHAUSTED = "lexer error"  # prefix of the error messages for RAISED_LIMITS
PROBE_STEPS = 4  # tokens that a new grammar must be able to consume
MAX_CACHED = 128  # compiled grammars
MAX_CACHED_RAISED = 8  # compiled grammars with raised limits
BYTES = 256
MAX_CACHED_CHARACTERS = 1 << 20  # characters of all cached grammars


class CompiledGrammar:
    """A matcher at the start of its grammar, and a way to make another one.

    All copies of a matcher share a table of lexer states which only grows. When it is full, or a
    step has cost too much, all copies fail for good, and their sequences continue with copies of a
    new matcher.
    """

    def __init__(self, make: Callable[[int], "LLMatcher"]):
        """Args:
        make: Makes a matcher whose limits are multiplied by a factor.
        """
        self.make = make
        self.factor = 1
        self.matcher = make(1)
        self.lock = threading.Lock()

    def replacement(self, failed: "LLMatcher", factor: int) -> "LLMatcher":
        """Return a matcher with a fresh lexer table, to replace the `failed` one.

        Its limits are at least `factor` times those of the first.
        """
        with self.lock:
            if self.matcher is failed or factor > self.factor:
                self.factor = max(factor, self.factor)
                self.matcher = self.make(self.factor)
            return self.matcher


class Constraint:
    """The position of one sequence in its grammar."""

    def __init__(self, grammar: CompiledGrammar, num_tokens: int, vocab: int):
        self.grammar = grammar
        self.vocab = vocab
        self.num_tokens = num_tokens  # ids below have a token; llguidance's own end token follows
        # The matcher at the start of the grammar that `matcher` was copied from.
        self.origin = grammar.matcher
        self.matcher = self.origin.deep_copy()
        self.tokens: list[int] = []

    def advance(self, token: int) -> FinishReason | None:
        """Consume a sampled token; return the reason to finish, if there is one."""
        self.tokens.append(token)
        took = self.matcher.consume_token(token) and not self.matcher.is_error()
        if not took and not self.recover(self.matcher):
            return "error"  # the grammar exceeds even the raised limits
        return "stop" if self.matcher.is_stopped() else None

    def allowed(self, stop_ids: Collection[int]) -> np.ndarray:
        """Return the mask of allowed tokens. End tokens are allowed where the grammar may end."""
        allowed = self.allowed_by(self.matcher, stop_ids)
        if self.matcher.is_error() and self.recover(self.matcher):
            return self.allowed_by(self.matcher, stop_ids)
        return allowed

    def allowed_by(self, matcher: "LLMatcher", stop_ids: Collection[int]) -> np.ndarray:
        allowed = np.zeros(self.vocab, bool)
        allowed[: self.num_tokens] = (
            np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: self.num_tokens] != 0
        )
        allowed[[token for token in stop_ids if token < self.vocab]] = matcher.is_accepting()
        return allowed

    def allowed_after(
        self, drafts: Sequence[int], stop_ids: Collection[int]
    ) -> Iterator[np.ndarray]:
        """Yield the mask of allowed tokens now, and the mask after each of the draft tokens."""
        yield self.allowed(stop_ids)
        if not drafts:
            return
        matcher = self.matcher_after(())
        for count in range(1, len(drafts) + 1):
            matcher.try_consume_tokens([drafts[count - 1]])
            allowed = self.allowed_by(matcher, stop_ids)
            if matcher.is_error() and self.recover(matcher):
                matcher = self.matcher_after(drafts[:count])
                allowed = self.allowed_by(matcher, stop_ids)
            yield allowed

    def longest_allowed_prefix(self, drafts: list[int]) -> list[int]:
        """Return the longest prefix of the draft tokens that the grammar allows."""
        matcher = self.matcher_after(())
        count = matcher.try_consume_tokens(drafts)
        if matcher.is_error() and self.recover(matcher):
            count = self.matcher_after(()).try_consume_tokens(drafts)
        return drafts[:count]

    def matcher_after(self, drafts: Sequence[int]) -> "LLMatcher":
        """Return a copy of the matcher after `drafts`.

        Drafts use copies because a rollback does not always restore a matcher's state.
        """
        matcher = self.matcher.deep_copy()
        matcher.try_consume_tokens(list(drafts))
        return matcher

    def recover(self, failed: "LLMatcher") -> bool:
        """Continue in a new matcher if the failed one exhausted the table that it shares.

        The first attempt may get a matcher that another sequence has filled meanwhile, the second
        gets a new one, and the third one with raised limits.
        """
        if not failed.get_error().startswith(EXHAUSTED):
            return False
        for factor in (1, 1, RAISED):
            try:
                self.origin = self.grammar.replacement(self.origin, factor)
            except RequestError:
                return False
            self.matcher = self.origin.deep_copy()
            self.matcher.consume_tokens(self.tokens)
            if not self.matcher.is_stopped():
                self.matcher.compute_logit_bias()
            if not self.matcher.is_error():
                return True
        return False


class Vocabulary:
    """The tokenizer interface of llguidance: the bytes of every token, and the special tokens.

    There is no end token, because `Constraint.allowed` handles the end. Calling it would tokenize
    text that a grammar forces; `no_forcing` turns that off, so that the model chooses among all
    tokens that start the text.
    """

    is_tokenizer_wrapper = True
    eos_token_id = None
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        count = min(tokenizer.vocab_size, vocab)
        self.tokens = [tokenizer.token_bytes(token) for token in range(count)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < count)

    def __call__(self, text: str) -> list[int]:
        return []


class Grammars:
    """The grammars of one model, with a cache of compiled ones. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.worker = WorkerProcess("-m", WORKER)
        self.lock = threading.Lock()
        self.library_lock = threading.Lock()
        self.cached: OrderedDict[tuple, tuple[CompiledGrammar, int]] = OrderedDict()
        self.cached_characters = 0

    def constraints(self, structure: Mapping[str, Any], count: int) -> list[Constraint]:
        """Return `count` constraints at the start of the grammar of a checked
        `structured_outputs`.
        """
        grammar = self.compile(structure)
        return [self.constraint(grammar) for _ in range(count)]

    def constraint(self, grammar: CompiledGrammar) -> Constraint:
        return Constraint(grammar, len(self.vocabulary.tokens), self.vocab)

    def compile(self, structure: Mapping[str, Any]) -> CompiledGrammar:
        """Return the compiled grammar, from the cache if possible.

        Compilation may take a second, so call this before the request reaches the engine's thread.
        """
        key = tuple(structure.items())
        with self.lock:
            if key in self.cached:
                self.cached.move_to_end(key)
                return self.cached[key][0]
        body = self.body(structure)
        grammar = CompiledGrammar(partial(self.make_matcher, body))
        self.probe(grammar)
        with self.lock:
            if key not in self.cached:
                self.cached[key] = grammar, len(body)
                self.cached_characters += len(body)
            while len(self.cached) > MAX_CACHED or (
                self.cached_characters > MAX_CACHED_CHARACTERS and len(self.cached) > 1
            ):
                self.drop(next(iter(self.cached)))
            raised = [
                raised_key for raised_key, (grammar, _) in self.cached.items() if grammar.factor > 1
            ]
            for raised_key in raised[:-MAX_CACHED_RAISED]:
                self.drop(raised_key)
        return grammar

    def drop(self, key: tuple) -> None:
        self.cached_characters -= self.cached.pop(key)[1]

    def probe(self, grammar: CompiledGrammar) -> None:
        """Refuse a grammar that has no valid first tokens, trying the longest token at each
        step.
        """
        constraint = self.constraint(grammar)
        for _ in range(PROBE_STEPS):
            allowed = np.flatnonzero(constraint.allowed(()))
            reason = None
            if len(allowed):
                reason = constraint.advance(
                    int(max(allowed, key=lambda token: len(self.vocabulary.tokens[token])))
                )
            if constraint.matcher.is_error():
                raise RequestError(FIELD, one_line(constraint.matcher.get_error()))
            if reason or not len(allowed):
                return

    def checker(self, structure: Mapping[str, Any]) -> Callable[[str], bool]:
        """Return a function that checks whether a text matches a checked `structured_outputs`."""
        import llguidance

        self.compile(structure)  # refuses what cannot be served
        tokenizer = llguidance.LLTokenizer("byte")
        text = complete_grammar(self.body(structure), "")

        def make(factor: int) -> "LLMatcher":
            return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits(factor))

        grammar = CompiledGrammar(make)

        def holds(text: str) -> bool:
            constraint = Constraint(grammar, BYTES, BYTES)
            reasons = [constraint.advance(byte) for byte in text.encode()]
            return "error" not in reasons and constraint.matcher.is_accepting()

        return holds

    def body(self, structure: Mapping[str, Any]) -> str:
        """Compile to a grammar of llguidance, in JSON. Raises RequestError if it cannot be
        served.
        """
        if not self.tokenizer.shows_bytes:
            raise RequestError(
                FIELD,
                "needs a tokenizer whose texts are the bytes of their tokens; this model's is not",
            )
        is_servers = isinstance(structure.get("grammar"), ServersGrammar)
        answer = self.worker.ask(json.dumps([dict(structure), is_servers, LIMITS]).encode())
        if answer is None:
            raise RequestError(
                FIELD, "takes too much time or memory to compile; ask for something simpler"
            )
        if "fault" in answer:
            raise RequestError(answer["param"], one_line(answer["fault"]))
        return answer["body"]

    def make_matcher(self, body: str, factor: int) -> "LLMatcher":
        """Return a new matcher of a grammar that the worker process has compiled."""
        matcher, first = self.matcher(complete_grammar(body, ""), factor)
        if self.tokenizer.drops_space:
            # The tokenizer drops a leading space. If the text may start with one, require another
            # before it.
            spaced = [token for token in first if self.vocabulary.tokens[token].startswith(b" ")]
            matcher, first = self.matcher(
                complete_grammar(body, '" " ' if spaced else '" "? '), factor
            )
        return matcher

    def matcher(self, grammar: str, factor: int) -> tuple["LLMatcher", list[int]]:
        """Return a matcher and the tokens that it allows first."""
        import llguidance

        with self.library_lock:
            tokenizer = self.library
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits(factor))
        trial = matcher.deep_copy()
        allowed = np.frombuffer(trial.compute_logit_bias(), np.uint8)[: len(self.vocabulary.tokens)]
        first = np.flatnonzero(allowed).tolist()
        if trial.is_error():
            raise RequestError(FIELD, one_line(trial.get_error()))
        return matcher, first

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, self.vocab)

    @cached_property
    def library(self):
        """The llguidance tokenizer. A large vocabulary takes 0.5 s, so it is created on first
        use.
        """
        import llguidance

        return llguidance.LLTokenizer(self.vocabulary)  # type: ignore[arg-type]


def limits(factor: int) -> "LLParserLimits":
    import llguidance

    return llguidance.LLParserLimits(
        **{**LIMITS, **{name: factor * LIMITS[name] for name in RAISED_LIMITS}}
    )


def one_line(error: str) -> str:
    """Reduce a compiler's error message to one line, without its arrows."""
    first, *lines = error.splitlines()
    if first.startswith("NoExtensionBias"):
        return "no text of this model's tokens has this form"
    if first.startswith(EXHAUSTED):
        return (
            "takes too much work for each token; use smaller bounds of lengths and "
            f"repetitions ({first})"
        )
    messages = [first, *(line for line in lines if line.startswith("error:"))]
    return " ".join(" ".join(messages).split()).encode("ascii", "backslashreplace").decode()[:200]
