"""A tokenizer.json as a GGUF file says it; `tokenizer.py` reads it, and what it reads must cut texts as before."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from ..errors import ModelError
from .tokenizer import BYTE, CONTROL, NAMED, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, cutting, tokenizer_of
from .words import RULES

# Texts that tell one way to cut from another; what is composed of several characters is not among them.
PROBES = (
    "", " ", "a", "Once upon a time, there lived: a fox\n", "  two   spaces\t\ttabs \n\n\nlines\r\n x",
    "I'm we'LL they're DON'T", "1 22 333 4444 1234567 3.14159, x1y22z333", "HTMLParser camelCase snake_case",
    "foo->bar(); #include <x>", "¿Qué? naïve Ångström", "Привет мир Γειά ΣΟΥ", "一只狐狸住在河边。",
    "日本語テキスト 안녕하세요",
       "🙂👍🏽 ∑∫≠ ½ ² ٣٤ Ⅻ", "“quoted” — dash… $100 + 5% ~ ^ | `x`", "!important /path //x\n/\n", "x" * 40,
    "नमस्ते ไทย שלום", "\u00a0\u3000x\ufffd",
)  # fmt: skip
OFF = ("never", False)  # of Metaspace's prepend_scheme, and of what older files have in its place


def vocabulary_of(core_json: str, size: int, special: Mapping[str, str], ends: Sequence[int]) -> dict[str, Any]:
    """The keys of a tokenizer.json whose model has `size` tokens.

    `special` has the tokens of tokenizer_config.json by their names, bos and so on; `ends` the ids that end an answer.
    """
    core = json.loads(core_json)
    model = core.get("model") or {}
    if model.get("type") != "BPE":
        raise ModelError(f"tokenizer.json: model.type = {model.get('type')!r} is not written to GGUF files; BPE is")
    tokens, types = tokens_of(core, size)
    found: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    library = tokenizers.Tokenizer.from_str(core_json)
    library.no_truncation()
    library.no_padding()
    if spaced(core):
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores_of(merges, tokens)}
        found["tokenizer.ggml.add_space_prefix"] = prefixed(core)
    else:
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [f"{one} {other}" for one, other in merges]}
        found["tokenizer.ggml.pre"] = rule_like(library, bool(model.get("ignore_merges")))
    ids = library.get_vocab(with_added_tokens=True)
    for name, own in NAMED.items():
        if (token := special.get(name)) in ids:
            found[f"tokenizer.ggml.{own}_token_id"] = ids[token]
    others = [end for end in ends if end != found.get("tokenizer.ggml.eos_token_id")]
    for name in ("eos", "eot"):
        if others and f"tokenizer.ggml.{name}_token_id" not in found:
            found[f"tokenizer.ggml.{name}_token_id"] = others.pop(0)
    bare, whole = (library.encode("a", add_special_tokens=added).ids for added in (False, True))
    begin = whole.index(bare[0]) if bare else 0
    for name, added in (("bos", whole[:begin]), ("eos", whole[begin + len(bare) :])):
        token = found.get(f"tokenizer.ggml.{name}_token_id")
        found[f"tokenizer.ggml.add_{name}_token"] = bool(added) and added == [token]
    check(library, found)
    return found


def tokens_of(core: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """The tokens by id with their types; ids that no token has are unused."""
    vocabulary, added = core["model"]["vocab"], core.get("added_tokens") or []
    largest = max([*vocabulary.values(), *(token["id"] for token in added)], default=-1)
    if largest >= size:
        raise ModelError(f"tokenizer.json has a token {largest}, and the model's vocabulary ends at {size - 1}")
    tokens, types = [f"[PAD{number}]" for number in range(size)], [UNUSED] * size
    for token, number in vocabulary.items():
        is_byte = spaced(core) and re.fullmatch("<0x[0-9A-F]{2}>", token)
        tokens[number], types[number] = token, BYTE if is_byte else NORMAL
    for token in added:
        kind = UNKNOWN if token["content"] == core["model"].get("unk_token") else CONTROL
        tokens[token["id"]], types[token["id"]] = token["content"], kind if token["special"] else USER_DEFINED
    return tokens, types


def parts(node: Any) -> list[dict[str, Any]]:
    """A normalizer or pre_tokenizer, and those in it."""
    if not isinstance(node, dict):
        return []
    inside = node.get("normalizers") or node.get("pretokenizers") or []
    return [node, *(found for one in inside for found in parts(one))]


def spaced(core: Mapping[str, Any]) -> bool:
    """Whether spaces are characters of tokens, as SentencePiece has them."""
    found = [*parts(core.get("normalizer")), *parts(core.get("pre_tokenizer"))]
    return any(
        part["type"] == "Metaspace" or (part["type"] == "Replace" and part["content"] == SPACE) for part in found
    )


def prefixed(core: Mapping[str, Any]) -> bool:
    """Whether a space comes before a text."""
    found = [*parts(core.get("normalizer")), *parts(core.get("pre_tokenizer"))]
    return any(
        part["type"] == "Prepend"
        or (
            part["type"] == "Metaspace"
            and part.get("prepend_scheme", part.get("add_prefix_space")) not in ("never", False)
        )
        for part in found
    )


def scores_of(merges: Sequence[tuple[str, ...]], tokens: Sequence[str]) -> list[float]:
    """A score for each token, the better the earlier it is merged."""
    ranks: dict[str, int] = {}
    for merge in merges:
        ranks.setdefault("".join(merge), len(ranks))
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def rule_like(library: tokenizers.Tokenizer, whole_words: bool) -> str:
    """The name that llama.cpp has for how a tokenizer cuts texts into words."""
    cut = library.pre_tokenizer
    names = sorted(RULES, key=lambda name: RULES[name].whole_words != whole_words)
    wanted = None if cut is None else [cut.pre_tokenize_str(text) for text in PROBES]
    for name in names:
        if wanted == cuts(name):
            return name
    raise ModelError("tokenizer.json: pre_tokenizer cuts texts in a way that llama.cpp has no name for")


def cuts(name: str) -> list[Any]:
    """What a rule makes of the texts."""
    core = {
        "version": "1.0",
        "pre_tokenizer": cutting(RULES[name]),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    cut = tokenizers.Tokenizer.from_str(json.dumps(core)).pre_tokenizer
    return [cut.pre_tokenize_str(text) for text in PROBES]


def check(library: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Refuse a tokenizer that would be read as one that cuts texts otherwise."""
    again = tokenizer_of(metadata)
    for text in PROBES:
        mine, theirs = library.encode(text).ids, again.encode(text).ids
        if mine != theirs:
            raise ModelError(
                f"tokenizer.json cuts {text!r:.60} into {mine[:8]}, and from a GGUF file it would be {theirs[:8]}; "
                "llama.cpp has no tokenizer of this kind"
            )
