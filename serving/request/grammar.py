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
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from ...model.text.tokenizer import Tokenizer
from ...model.text.worker import WorkerProcess
from ..api.errors import RequestError
from ..api.structured import FIELD, ServersGrammar
from .grammar_text import whole

if TYPE_CHECKING:
    from llguidance import LLMatcher

WORKER = f"{__package__}.grammar_worker"
LIMITS = {  # what a matcher may cost: to make, a step, and in all
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 20_000,  # up to two kilobytes each
    "verbose_errors": False,
}
MAX_KEPT = 128  # compiled grammars
MAX_KEPT_TEXT = 1 << 20  # characters of them


class Constraint:
    """Where one sequence is in its grammar."""

    def __init__(self, matcher: "LLMatcher", known: int, vocab: int):
        self.matcher, self.vocab = matcher, vocab
        self.known = known  # ids below this have a token; the library's own end comes after them

    def advance(self, token: int) -> str | None:
        """Take in a token that was drawn; the reason to end, if there is one."""
        if not self.matcher.consume_token(token) or self.matcher.is_error():
            return "error"  # the grammar has grown beyond its limits
        return "stop" if self.matcher.is_stopped() else None

    def allowed(self, stop_ids: Collection[int]) -> np.ndarray:
        """Which tokens may come now; those that end an answer may where the grammar may end."""
        return self.allowed_by(self.matcher, stop_ids)

    def allowed_by(self, matcher: "LLMatcher", stop_ids: Collection[int]) -> np.ndarray:
        allowed = np.zeros(self.vocab, bool)
        allowed[: self.known] = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: self.known] != 0
        allowed[[token for token in stop_ids if token < self.vocab]] = matcher.is_accepting()
        return allowed

    def allowed_after(self, drafts: Sequence[int], stop_ids: Collection[int]) -> Iterator[np.ndarray]:
        """Which tokens may come now, and which after each of the drafts.

        A copy looks ahead: a matcher that is rolled back is not always where it was.
        """
        yield self.allowed(stop_ids)
        ahead = self.matcher.deep_copy() if drafts else self.matcher
        for draft in drafts:
            ahead.try_consume_tokens([draft])
            yield self.allowed_by(ahead, stop_ids)

    def open_beginning(self, drafts: list[int]) -> list[int]:
        """As many of the drafts as may come, one after the other."""
        ahead = self.matcher.deep_copy()
        return list(takewhile(lambda draft: ahead.try_consume_tokens([draft]), drafts))


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
        self.lock = threading.Lock()
        self.kept: OrderedDict[tuple, tuple[LLMatcher, int]] = OrderedDict()
        self.kept_text = 0

    def constraints(self, structure: Mapping[str, Any], count: int) -> list[Constraint]:
        """So many fresh starts in the grammar of a checked `structured_outputs`."""
        matcher = self.compile(structure)
        return [Constraint(matcher.deep_copy(), len(self.vocabulary.tokens), self.vocab) for _ in range(count)]

    def compile(self, structure: Mapping[str, Any]) -> "LLMatcher":
        """The grammar, kept or new: a new one may take a second, so have it compiled before the engine asks."""
        key = tuple(structure.items())
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key][0]
        body = self.body(structure)
        matcher = self.made(body)
        with self.lock:
            if key not in self.kept:
                self.kept[key] = matcher, len(body)
                self.kept_text += len(body)
            while len(self.kept) > MAX_KEPT or (self.kept_text > MAX_KEPT_TEXT and len(self.kept) > 1):
                self.kept_text -= self.kept.popitem(last=False)[1][1]
        return matcher

    def checker(self, structure: Mapping[str, Any]) -> Callable[[str], bool]:
        """Whether a text has the form of a checked `structured_outputs`, whatever its tokens."""
        import llguidance

        self.compile(structure)  # refuses what cannot be served
        limits = llguidance.LLParserLimits(**LIMITS)
        grammar = whole(self.body(structure), "")
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0, limits=limits)

        def holds(text: str) -> bool:
            trial = matcher.deep_copy()
            return trial.consume_tokens(list(text.encode())) and trial.is_accepting()

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

    def made(self, body: str) -> "LLMatcher":
        """A new matcher of a grammar that the worker has compiled."""
        matcher, first = self.matcher(whole(body, ""))
        if self.tokenizer.drops_space:
            # The first space is not shown. Where a text may begin with one, another must stand before it.
            spaced = [token for token in first if self.vocabulary.tokens[token].startswith(b" ")]
            matcher, first = self.matcher(whole(body, '" " ' if spaced else '" "? '))
        return matcher

    def matcher(self, grammar: str) -> tuple["LLMatcher", list[int]]:
        """A matcher and the tokens that it begins with."""
        import llguidance

        limits = llguidance.LLParserLimits(**LIMITS)
        with self.lock:
            tokenizer = self.library
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
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


def one_line(error: str) -> str:
    """What a compiler says, without the arrows that it draws at the place."""
    first, *others = error.splitlines()
    if first.startswith("NoExtensionBias"):
        return "no text of this model's tokens has this form"
    said = [first, *(line for line in others if line.startswith("error:"))]
    return " ".join(" ".join(said).split()).encode("ascii", "backslashreplace").decode()[:200]
