"""Log-probability scores of text pairs: the prompt to compute, and the score from its output."""

from collections.abc import Sequence

from ...model.text.chat_template import PromptError
from ...model.text.tokenizer import Tokenizer
from ..api.errors import RequestError
from ..api.outputs import RequestOutput, ScoringOutput, ScoringRequestOutput
from ..api.params import SamplingParams
from ..api.validation import shown, unicode_text

PARAMS = SamplingParams(
    temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False
)


def pairs(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair the first texts with the second ones; a single text is paired with each of the
    others.
    """
    firsts, seconds = [[text] if isinstance(text, str) else list(text) for text in (text_1, text_2)]
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(seconds) == 1:
        seconds *= len(firsts)
    if len(firsts) != len(seconds):
        raise RequestError(
            "text_2",
            f"has {len(seconds)} texts for the {len(firsts)} of text_1; give one, or as many",
        )
    return list(zip(firsts, seconds, strict=True))


def pair_tokens(tokenizer: Tokenizer, text_1: str, text_2: str) -> tuple[list[int], int]:
    """Return the tokens of the joined texts and the index of the first token beyond `text_1`.

    The texts are tokenized as one, as the model would read them. A token that covers the end of the
    first text and the start of the second counts for the second.
    """
    for name, text in (("text_1", text_1), ("text_2", text_2)):
        if not unicode_text(name, text) and name == "text_2":
            raise RequestError("text_2", f"must have at least one character, got {shown(text)}")
    try:
        tokens, token_ends = tokenizer.encode_with_ends(text_1 + text_2)
    except PromptError as error:
        raise RequestError("text_2", str(error)) from None
    first = next((place for place, end in enumerate(token_ends) if end > len(text_1)), len(tokens))
    first = max(first, 1)  # the very first token has no score
    if first >= len(tokens):
        raise RequestError(
            "text_2", f"has no token that can be scored after text_1: {shown(text_2)}"
        )
    return tokens, first


def score_output(output: RequestOutput, first: int) -> ScoringRequestOutput:
    """Return the mean log-probability of the prompt's tokens from index `first` on."""
    tokens = output.prompt_token_ids
    logprobs = output.prompt_logprobs or ()
    logprobs_found = [
        entry[token].logprob
        for token, entry in zip(tokens[first:], logprobs[first:], strict=False)
        if entry is not None
    ]
    if len(logprobs_found) < len(tokens) - first:
        raise RuntimeError(
            f"the request {output.request_id} has no score: it ended before its prompt did"
        )
    return ScoringRequestOutput(
        request_id=output.request_id,
        outputs=ScoringOutput(sum(logprobs_found) / len(logprobs_found)),
        prompt_token_ids=tokens,
        num_cached_tokens=output.num_cached_tokens,
    )
