"""What a model says of pairs of texts: how likely, by its judgement, or how similar; one way for each kind of model."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ...model.checkpoint.embedder import Embedder
from ...model.config import FAR, ModelConfig
from ...model.text.chat_template import PromptError
from ...model.text.tokenizer import Tokenizer
from ..api.errors import RequestError
from ..api.options import Pooling
from ..api.outputs import RequestOutput, ScoringOutput, ScoringRequestOutput
from ..api.params import SamplingParams
from . import classes, pooling, scoring

# How Qwen3-Reranker is asked, where its folder has no template for it.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
TASK = "Given a web search query, retrieve relevant passages that answer the query"
BEGINS, ENDS = "<|im_start|>", "<|im_end|>\n"
ASKED = (
    f"{BEGINS}system\n{SYSTEM}{ENDS}{BEGINS}user\n<Instruct>: {{task}}\n<Query>: {{query}}\n<Document>: {{document}}"
    f"{ENDS}{BEGINS}assistant\n<think>\n\n</think>\n\n"
)


SEPARATOR = "\n"  # between a document and a query, so that no token holds parts of both


class Asked(NamedTuple):
    """One of the prompts to be computed."""

    tokens: list[int]
    params: SamplingParams
    pooling: Pooling | None = None
    second: int = FAR  # where the second text of a pair begins


class PairScores(Protocol):
    """Scores of pairs of a query and a document."""

    asked: list[Asked]
    ranked_by: str  # what the scores are, in a few words

    def scores(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        """Those of all pairs, from the outputs for all that was asked."""
        ...


def pair_scores(
    config: ModelConfig, embedder: Embedder, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], ranks: bool = False
) -> PairScores:
    """By the kind of model; `ranks`: one that writes says how likely the query is after the document."""
    if config.classes is not None:
        return Judgement(config, embedder, tokenizer, pairs)
    if not config.writes:
        return Similarity(embedder, tokenizer, pairs)
    if ranks:
        pairs = [(document + SEPARATOR, query) for query, document in pairs]
    return Likelihood(tokenizer, pairs)


class Likelihood:
    """The mean log-probability of the second text's tokens after the first."""

    ranked_by = "mean log-probability of the query's tokens after each document"

    def __init__(self, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]):
        found = [scoring.pair_tokens(tokenizer, *pair) for pair in pairs]
        self.asked = [Asked(tokens, scoring.PARAMS) for tokens, _ in found]
        self.firsts = [first for _, first in found]

    def scores(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        return [scoring.scored(output, first) for output, first in zip(outputs, self.firsts, strict=True)]


class Judgement:
    """The probability that a model with one class gives the two texts, which it reads together."""

    ranked_by = "the model's judgement of the query and each document"

    def __init__(self, config: ModelConfig, embedder: Embedder, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]):
        assert config.classes is not None
        if (count := len(config.classes.labels)) != 1:
            raise RequestError("model", f"has {count} classes and scores no pairs; ask LLM.classify or /classify")
        self.config = config
        task = pooling.before(embedder, None)
        self.asked = [asked_of(judged_tokens(config, tokenizer, task, *pair)) for pair in pairs]

    def scores(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        return [score(classes.probabilities(output, self.config)[0], [output]) for output in outputs]


def asked_of(found: tuple[list[int], int]) -> Asked:
    tokens, second = found
    return Asked(tokens, pooling.PARAMS, "last", second)


def judged_tokens(
    config: ModelConfig, tokenizer: Tokenizer, task: str, query: str, document: str
) -> tuple[list[int], int]:
    """(the prompt of a pair, where the second text begins if the model is to be told).

    By a template that knows both, as Qwen3-Reranker is asked, or as the tokenizer pairs.
    """
    template = tokenizer.chat_template or ""
    try:
        if all(re.search(f"['\"]{role}['\"]", template) for role in ("query", "document")):
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            messages = [{"role": "system", "content": task}, *messages] if task else messages
            return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False), FAR
        if config.classes is not None and config.classes.tokens:
            if query.startswith(BEGINS):  # written out, as vLLM wants it
                return tokenizer.encode(query + document, add_special_tokens=False), FAR
            text = ASKED.format(task=task or TASK, query=query, document=document)
            return tokenizer.encode(text, add_special_tokens=False), FAR
        tokens, second = tokenizer.encode_pair(query, document)
        return tokens, second if config.pairs else FAR
    except PromptError as error:
        raise RequestError("text_2", str(error)) from None


class Similarity:
    """The cosine of the two texts' embeddings; the same text is computed once."""

    ranked_by = "cosine of the embeddings of the query and each document"

    def __init__(self, embedder: Embedder, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]):
        first, second = (
            pooling.before(embedder, name if name in embedder.prompts else None) for name in ("query", "document")
        )
        self.pairs = [(first + query, second + document) for query, document in pairs]
        self.places: dict[str, int] = {}
        self.asked = []
        for text in (text for pair in self.pairs for text in pair):
            if text not in self.places:
                self.places[text] = len(self.asked)
                self.asked.append(Asked(encoded(embedder, tokenizer, text), pooling.PARAMS, embedder.pooling))

    def scores(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        vectors = [np.asarray(pooling.embedding(output).outputs.embedding, np.float64) for output in outputs]
        found = []
        for pair in self.pairs:
            one, other = (self.places[text] for text in pair)
            found.append(score(float(vectors[one] @ vectors[other]), [outputs[one], outputs[other]]))
        return found


def encoded(embedder: Embedder, tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        tokens = pooling.encode(embedder, tokenizer, text)
    except PromptError as error:
        raise RequestError("text_1", str(error)) from None
    if not tokens:
        raise RequestError("text_1", "and text_2 must have at least one token each")
    return tokens


def score(value: float, outputs: Sequence[RequestOutput]) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        request_id=outputs[0].request_id,
        outputs=ScoringOutput(value),
        prompt_token_ids=[token for output in outputs for token in output.prompt_token_ids],
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )
