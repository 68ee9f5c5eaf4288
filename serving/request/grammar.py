"""Grammars: from what an answer has to look like to the tokens that may come next.

How a grammar meets what else a request says: it closes tokens before biases, bans and penalties choose among the
others. The tokens that end an answer (the model's own, `stop_token_ids`) are open where the grammar may end, and
nowhere else; `ignore_eos` and `min_tokens` close them there too. Where nothing but the end is left, the answer ends
with "stop", whatever `min_tokens` says; where other fields have closed all that was left, with "error". Stop strings
cut the text as they do any other. Log-probabilities are the model's own, from before the grammar.
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
from ..api.structured import FIELD, ServersGrammar
from .grammar_text import whole

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

WORKER = f"{__package__}.grammar_worker"
LIMITS = {  # what a matcher may cost: to make, a step, and in all
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 20_000,  # 0.6 kB each, for all answers of a grammar together: six a character of a bound
    "verbose_errors": False,
}
RAISED = 4  # times the limits, for a grammar of which one answer or one step needs more
RAISED_LIMITS = ("max_lexer_states", "step_lexer_fuel")
EXHAUSTED = "lexer error"  # how the messages of these limits begin
PROBE_STEPS = 4  # that a new grammar must be able to take
MAX_KEPT = 128  # compiled grammars
MAX_KEPT_RAISED = 8  # of them with raised limits
BYTES = 256
MAX_KEPT_TEXT = 1 << 20  # characters of them


class CompiledGrammar:
    """A matcher at the beginning of its grammar, and how to make another one.

    Copies of a matcher share a table of lexer states which only grows; once it is full, or a step has cost too much,
    all of them fail for good. Then they go on with copies of a new matcher.
    """

    def __init__(self, make: Callable[[int], "LLMatcher"]):
        """`make`: makes a matcher whose limits are multiplied by a factor."""
        self.make = make
        self.factor = 1
        self.matcher = make(1)
        self.lock = threading.Lock()

    def replacement(self, failed: "LLMatcher", factor: int) -> "LLMatcher":
        """A matcher whose table is not that of the one that failed, with limits raised by `factor` at least."""
        with self.lock:
            if self.matcher is failed or factor > self.factor:
                self.factor = max(factor, self.factor)
                self.matcher = self.make(self.factor)
            return self.matcher


class Constraint:
    """Where one sequence is in its grammar."""

    def __init__(self, grammar: CompiledGrammar, known: int, vocab: int):
        self.grammar, self.vocab = grammar, vocab
        self.known = known  # ids below this have a token; the library's own end comes after them
        self.origin = grammar.matcher  # the matcher at the beginning that `matcher` was copied from
        self.matcher = self.origin.deep_copy()
        self.tokens: list[int] = []

    def advance(self, token: int) -> str | None:
        """Take in a token that was drawn; the reason to end, if there is one."""
        self.tokens.append(token)
        took = self.matcher.consume_token(token) and not self.matcher.is_error()
        if not took and not self.recovers(self.matcher):
            return "error"  # the grammar has grown beyond its limits
        return "stop" if self.matcher.is_stopped() else None

    def allowed(self, stop_ids: Collection[int]) -> np.ndarray:
        """Which tokens may come now; those that end an answer may where the grammar may end."""
        allowed = self.allowed_by(self.matcher, stop_ids)
        if self.matcher.is_error() and self.recovers(self.matcher):
            return self.allowed_by(self.matcher, stop_ids)
        return allowed

    def allowed_by(self, matcher: "LLMatcher", stop_ids: Collection[int]) -> np.ndarray:
        allowed = np.zeros(self.vocab, bool)
        allowed[: self.known] = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: self.known] != 0
        allowed[[token for token in stop_ids if token < self.vocab]] = matcher.is_accepting()
        return allowed

    def allowed_after(self, drafts: Sequence[int], stop_ids: Collection[int]) -> Iterator[np.ndarray]:
        """Which tokens may come now, and which after each of the drafts."""
        yield self.allowed(stop_ids)
        if not drafts:
            return
        ahead = self.matcher_after(())
        for count in range(1, len(drafts) + 1):
            ahead.try_consume_tokens([drafts[count - 1]])
            allowed = self.allowed_by(ahead, stop_ids)
            if ahead.is_error() and self.recovers(ahead):
                ahead = self.matcher_after(drafts[:count])
                allowed = self.allowed_by(ahead, stop_ids)
            yield allowed

    def open_beginning(self, drafts: list[int]) -> list[int]:
        """As many of the drafts as may come, one after the other."""
        ahead = self.matcher_after(())
        count = ahead.try_consume_tokens(drafts)
        if ahead.is_error() and self.recovers(ahead):
            count = self.matcher_after(()).try_consume_tokens(drafts)
        return drafts[:count]

    def matcher_after(self, drafts: Sequence[int]) -> "LLMatcher":
        """A copy that looks ahead: a matcher that is rolled back is not always where it was."""
        ahead = self.matcher.deep_copy()
        ahead.try_consume_tokens(list(drafts))
        return ahead

    def recovers(self, failed: "LLMatcher") -> bool:
        """Go on in a new matcher if the one that failed has exhausted what it shares with others.

        The second is new even where another sequence has filled the first meanwhile; the third has higher limits.
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
    """What the grammars' library asks of a tokenizer: the bytes of every token, and which are never text.

    It declares no end token: `Constraint.allowed` opens the ends. The library could ask for the tokens of a text that a
    grammar forces; with `no_forcing` it does not, and the model chooses among all that begin it.
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
    """The grammars of one model; the last ones that were compiled are kept. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self.tokenizer, self.vocab = tokenizer, vocab
        self.worker = WorkerProcess("-m", WORKER)
        self.lock, self.library_lock = threading.Lock(), threading.Lock()
        self.kept: OrderedDict[tuple, tuple[CompiledGrammar, int]] = OrderedDict()
        self.kept_text = 0

    def constraints(self, structure: Mapping[str, Any], count: int) -> list[Constraint]:
        """So many fresh starts in the grammar of a checked `structured_outputs`."""
        grammar = self.compile(structure)
        return [self.constraint(grammar) for _ in range(count)]

    def constraint(self, grammar: CompiledGrammar) -> Constraint:
        return Constraint(grammar, len(self.vocabulary.tokens), self.vocab)

    def compile(self, structure: Mapping[str, Any]) -> CompiledGrammar:
        """The grammar, kept or new: a new one may take a second, so have it compiled before the engine asks."""
        key = tuple(structure.items())
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key][0]
        body = self.body(structure)
        grammar = CompiledGrammar(partial(self.made, body))
        self.probe(grammar)
        with self.lock:
            if key not in self.kept:
                self.kept[key] = grammar, len(body)
                self.kept_text += len(body)
            while len(self.kept) > MAX_KEPT or (self.kept_text > MAX_KEPT_TEXT and len(self.kept) > 1):
                self.drop(next(iter(self.kept)))
            raised = [kept for kept, (grammar, _) in self.kept.items() if grammar.factor > 1]
            for kept in raised[:-MAX_KEPT_RAISED]:
                self.drop(kept)
        return grammar

    def drop(self, key: tuple) -> None:
        self.kept_text -= self.kept.pop(key)[1]

    def probe(self, grammar: CompiledGrammar) -> None:
        """Refuse a grammar of which a model could not write the first tokens, with the longest token at each step."""
        constraint = self.constraint(grammar)
        for _ in range(PROBE_STEPS):
            allowed = np.flatnonzero(constraint.allowed(()))
            reason = None
            if len(allowed):
                reason = constraint.advance(int(max(allowed, key=lambda token: len(self.vocabulary.tokens[token]))))
            if constraint.matcher.is_error():
                raise RequestError(FIELD, one_line(constraint.matcher.get_error()))
            if reason or not len(allowed):
                return

    def checker(self, structure: Mapping[str, Any]) -> Callable[[str], bool]:
        """Whether a text has the form of a checked `structured_outputs`, whatever its tokens."""
        import llguidance

        self.compile(structure)  # refuses what cannot be served
        tokenizer, text = llguidance.LLTokenizer("byte"), whole(self.body(structure), "")

        def make(factor: int) -> "LLMatcher":
            return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits(factor))

        grammar = CompiledGrammar(make)

        def holds(text: str) -> bool:
            trial = Constraint(grammar, BYTES, BYTES)
            reasons = [trial.advance(byte) for byte in text.encode()]
            return "error" not in reasons and trial.matcher.is_accepting()

        return holds

    def body(self, structure: Mapping[str, Any]) -> str:
        """The form as a grammar of the library, in JSON; RequestError where it cannot be served."""
        if not self.tokenizer.shows_bytes:
            raise RequestError(
                FIELD, "needs a tokenizer whose texts are the bytes of their tokens; this model's is not"
            )
        is_servers = isinstance(structure.get("grammar"), ServersGrammar)
        answer = self.worker.ask(json.dumps([dict(structure), is_servers, LIMITS]).encode())
        if answer is None:
            raise RequestError(FIELD, "takes too much time or memory to compile; ask for something simpler")
        if "fault" in answer:
            raise RequestError(answer["param"], one_line(answer["fault"]))
        return answer["body"]

    def made(self, body: str, factor: int) -> "LLMatcher":
        """A new matcher of a grammar that the worker has compiled."""
        matcher, first = self.matcher(whole(body, ""), factor)
        if self.tokenizer.drops_space:
            # The first space is not shown. Where a text may begin with one, another must stand before it.
            spaced = [token for token in first if self.vocabulary.tokens[token].startswith(b" ")]
            matcher, first = self.matcher(whole(body, '" " ' if spaced else '" "? '), factor)
        return matcher

    def matcher(self, grammar: str, factor: int) -> tuple["LLMatcher", list[int]]:
        """A matcher and the tokens that it begins with."""
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
        """The tokenizer as the library knows it: half a second for a large vocabulary, so not before it is wanted."""
        import llguidance

        return llguidance.LLTokenizer(self.vocabulary)  # type: ignore[arg-type]


def limits(factor: int) -> "LLParserLimits":
    import llguidance

    return llguidance.LLParserLimits(**{**LIMITS, **{name: factor * LIMITS[name] for name in RAISED_LIMITS}})


def one_line(error: str) -> str:
    """What a compiler says, without the arrows that it draws at the place."""
    first, *others = error.splitlines()
    if first.startswith("NoExtensionBias"):
        return "no text of this model's tokens has this form"
    if first.startswith(EXHAUSTED):
        return f"takes too much work for each token; use smaller bounds of lengths and repetitions ({first})"
    said = [first, *(line for line in others if line.startswith("error:"))]
    return " ".join(" ".join(said).split()).encode("ascii", "backslashreplace").decode()[:200]
