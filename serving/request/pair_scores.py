"""Scores of text pairs: by log-probability, by a classifier, or by the similarity of embeddings."""

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

# The prompt of Qwen3-Reranker, used if the model's folder has no template for it.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
TASK = "Given a web search query, retrieve relevant passages that answer the query"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>\n"
QWEN3_PROMPT = (
    f"{TURN_START}system\n{SYSTEM}{TURN_END}{TURN_START}user\n<Instruct>: {{task}}\n<Query>: "
    f"{{query}}\n<Document>: {{document}}{TURN_END}{TURN_START}assistant\n<think>\n\n</think>\n\n"
)


SEPARATOR = "\n"  # between a document and a query, so that no token covers both


class ScoringPrompt(NamedTuple):
    """One prompt to compute for a score."""

    tokens: list[int]
    params: SamplingParams
    pooling: Pooling | None = None
    second_start: int = FAR  # where the second text of a pair starts


class PairScores(Protocol):
    """Scores pairs of a query and a document."""

    prompts: list[ScoringPrompt]
    ranked_by: str  # description of the scores

    def scores(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        """Return the scores of all pairs, given the outputs for all prompts."""
        ...


def pair_scores(
    config: ModelConfig,
    embedder: Embedder,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    ranks: bool = False,
) -> PairScores:
    """Choose the scorer by the kind of model.

    Args:
        ranks: A generative model scores the query after the document, as a reranker would.
    """
    if config.classes is not None:
        return ClassifierScores(config, embedder, tokenizer, pairs)
    if not config.writes:
        return CosineScores(embedder, tokenizer, pairs)
    if ranks:
        pairs = [(document + SEPARATOR, query) for query, document in pairs]
    return LogprobScores(tokenizer, pairs)


class LogprobScores:
    """The mean log-probability of the second text's tokens after the first text."""

    ranked_by = "mean log-probability of the query's tokens after each document"

    def __init__(self, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]):
        encoded_pairs = [scoring.pair_tokens(tokenizer, *pair) for pair in pairs]
        self.prompts = [ScoringPrompt(tokens, scoring.PARAMS) for tokens, _ in encoded_pairs]
        self.second_starts = [first for _, first in encoded_pairs]

    def scores(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        return [
            scoring.score_output(output, first)
            for output, first in zip(outputs, self.second_starts, strict=True)
        ]


class ClassifierScores:
    """The probability that a model with one class computes from both texts together."""

    ranked_by = "the model's judgement of the query and each document"

    def __init__(
        self,
        config: ModelConfig,
        embedder: Embedder,
        tokenizer: Tokenizer,
        pairs: Sequence[tuple[str, str]],
    ):
        assert config.classes is not None
        if (count := len(config.classes.labels)) != 1:
            raise RequestError(
                "model", f"has {count} classes and scores no pairs; ask LLM.classify or /classify"
            )
        self.config = config
        task = pooling.prompt_prefix(embedder, None)
        self.prompts = [
            classifier_prompt(encode_pair(config, tokenizer, task, *pair)) for pair in pairs
        ]

    def scores(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        return [
            score(classes.probabilities(output, self.config)[0], [output]) for output in outputs
        ]


def classifier_prompt(encoded_pair: tuple[list[int], int]) -> ScoringPrompt:
    tokens, second_start = encoded_pair
    return ScoringPrompt(tokens, pooling.PARAMS, "last", second_start)


def encode_pair(
    config: ModelConfig, tokenizer: Tokenizer, task: str, query: str, document: str
) -> tuple[list[int], int]:
    """Return the prompt of a pair, and where the second text starts if the model needs it.

    The pair is formatted by a chat template with the roles `query` and `document`, as
    Qwen3-Reranker expects, or by the tokenizer's template for pairs.
    """
    template = tokenizer.chat_template or ""
    try:
        if all(re.search(f"['\"]{role}['\"]", template) for role in ("query", "document")):
            messages = [
                {"role": "query", "content": query},
                {"role": "document", "content": document},
            ]
            messages = [{"role": "system", "content": task}, *messages] if task else messages
            return tokenizer.encode(
                tokenizer.apply_chat_template(messages), add_special_tokens=False
            ), FAR
        if config.classes is not None and config.classes.tokens:
            if query.startswith(TURN_START):  # already formatted, as vLLM's clients send it
                return tokenizer.encode(query + document, add_special_tokens=False), FAR
            text = QWEN3_PROMPT.format(task=task or TASK, query=query, document=document)
            return tokenizer.encode(text, add_special_tokens=False), FAR
        tokens, second_start = tokenizer.encode_pair(query, document)
        return tokens, second_start if config.pairs else FAR
    except PromptError as error:
        raise RequestError("text_2", str(error)) from None


class CosineScores:
    """The cosine of the two texts' embeddings. Each distinct text is computed once."""

    ranked_by = "cosine of the embeddings of the query and each document"

    def __init__(self, embedder: Embedder, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]):
        query_prefix, document_prefix = (
            pooling.prompt_prefix(embedder, name if name in embedder.prompts else None)
            for name in ("query", "document")
        )
        self.pairs = [
            (query_prefix + query, document_prefix + document) for query, document in pairs
        ]
        self.index_by_text: dict[str, int] = {}
        self.prompts = []
        for text in (text for pair in self.pairs for text in pair):
            if text not in self.index_by_text:
                self.index_by_text[text] = len(self.prompts)
                self.prompts.append(
                    ScoringPrompt(
                        encode_text(embedder, tokenizer, text), pooling.PARAMS, embedder.pooling
                    )
                )

    def scores(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        vectors = [
            np.asarray(pooling.embedding(output).outputs.embedding, np.float64)
            for output in outputs
        ]
        scores = []
        for pair in self.pairs:
            query_index, document_index = (self.index_by_text[text] for text in pair)
            scores.append(
                score(
                    float(vectors[query_index] @ vectors[document_index]),
                    [outputs[query_index], outputs[document_index]],
                )
            )
        return scores


def encode_text(embedder: Embedder, tokenizer: Tokenizer, text: str) -> list[int]:
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
