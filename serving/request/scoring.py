"""How likely one text is after another: the tokens to ask the engine for, and the score from its answer."""

from collections.abc import Sequence

from ...model.text.chat_template import PromptError
from ...model.text.tokenizer import Tokenizer
from ..api.errors import RequestError
from ..api.outputs import RequestOutput, ScoringOutput, ScoringRequestOutput
from ..api.params import SamplingParams
from ..api.validation import shown, unicode_text

PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)


def pairs(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Each first text with its second one; a single text goes with each of the others."""
    firsts, seconds = [[text] if isinstance(text, str) else list(text) for text in (text_1, text_2)]
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(seconds) == 1:
        seconds *= len(firsts)
    if len(firsts) != len(seconds):
        raise RequestError("text_2", f"has {len(seconds)} texts for the {len(firsts)} of text_1; give one, or as many")
    return list(zip(firsts, seconds, strict=True))


def pair_tokens(tokenizer: Tokenizer, text_1: str, text_2: str) -> tuple[list[int], int]:
    """The tokens of both texts in one, and the place of the first that reaches beyond `text_1`.

    They are cut as one text, as the model would read it: a token that holds the end of the one and the beginning of
    the other counts for the second.
    """
    for name, text in (("text_1", text_1), ("text_2", text_2)):
        if not unicode_text(name, text) and name == "text_2":
            raise RequestError("text_2", f"must have at least one character, got {shown(text)}")
    try:
        tokens, ends = tokenizer.encode_with_ends(text_1 + text_2)
    except PromptError as error:
        raise RequestError("text_2", str(error)) from None
    first = next((place for place, end in enumerate(ends) if end > len(text_1)), len(tokens))
    first = max(first, 1)  # nothing precedes the first token of all, so it has no score
    if first >= len(tokens):
        raise RequestError("text_2", f"has no token that can be scored after text_1: {shown(text_2)}")
    return tokens, first


def scored(output: RequestOutput, first: int) -> ScoringRequestOutput:
    """The mean log-probability of the prompt's tokens from `first` on."""
    tokens, logprobs = output.prompt_token_ids, output.prompt_logprobs or ()
    found = [
        entry[token].logprob
        for token, entry in zip(tokens[first:], logprobs[first:], strict=False)
        if entry is not None
    ]
    if len(found) < len(tokens) - first:
        raise RuntimeError(f"the request {output.request_id} has no score: it ended before its prompt did")
    return ScoringRequestOutput(
        request_id=output.request_id,
        outputs=ScoringOutput(sum(found) / len(found)),
        prompt_token_ids=tokens,
        num_cached_tokens=output.num_cached_tokens,
    )
