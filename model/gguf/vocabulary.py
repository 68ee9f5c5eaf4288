"""The metadata that describes a tokenizer.json in a GGUF file; the file's tokenizer must split
texts identically.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from ..errors import ModelError
from .pre_tokenizers import RULES
from .tokenizer import (
    BYTE,
    CONTROL,
    GGUF_TOKEN_NAMES,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    load_tokenizer,
    pre_tokenizer_section,
)

# Texts on which pre-tokenizers differ; combining characters are not among them.
PROBES = (
    "",
    " ",
    "a",
    "Once upon a time, there lived: a fox\n",
    ("  two   spaces\t\ttabs \n\n\nlines\r\n x"),
    "I'm we'LL they're DON'T",
    "1 22 333 4444 1234567 3.14159, x1y22z333",
    ("HTMLParser camelCase snake_case"),
    "foo->bar(); #include <x>",
    "¿Qué? naïve Ångström",
    "Привет мир Γειά ΣΟΥ",
    "一只狐狸住在河边。",
    "日本語テキスト 안녕하세요",
    "🙂👍🏽 ∑∫≠ ½ ² ٣٤ Ⅻ",
    "“quoted” — dash… $100 + 5% ~ ^ | `x`",
    "!important /path //x\n/\n",
    "x" * 40,
    "नमस्ते ไทย שלום",
    "\u00a0\u3000x\ufffd",
)
NO_PREFIX = ("never", False)  # prepend_scheme of Metaspace; add_prefix_space in older files


def tokenizer_metadata(
    tokenizer_json: str, size: int, special: Mapping[str, str], end_ids: Sequence[int]
) -> dict[str, Any]:
    """The metadata keys for a tokenizer.json.

    Args:
        size: the number of tokens of the model.
        special: the special tokens of tokenizer_config.json by name: bos and so on.
        end_ids: the ids of the tokens that end an answer.
    """
    core = json.loads(tokenizer_json)
    model = core.get("model") or {}
    if model.get("type") != "BPE":
        raise ModelError(
            f"tokenizer.json: model.type = {model.get('type')!r} is not written to GGUF files; "
            "BPE is"
        )
    tokens, types = tokens_with_types(core, size)
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    merges = [
        tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge)
        for merge in model["merges"]
    ]
    library = tokenizers.Tokenizer.from_str(tokenizer_json)
    library.no_truncation()
    library.no_padding()
    if is_sentence_piece(core):
        metadata |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.scores": merge_scores(merges, tokens),
        }
        metadata["tokenizer.ggml.add_space_prefix"] = adds_space_prefix(core)
    else:
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        }
        metadata["tokenizer.ggml.pre"] = matching_pre_tokenizer(
            library, bool(model.get("ignore_merges"))
        )
    ids = library.get_vocab(with_added_tokens=True)
    for name, gguf_name in GGUF_TOKEN_NAMES.items():
        if (token := special.get(name)) in ids:
            metadata[f"tokenizer.ggml.{gguf_name}_token_id"] = ids[token]
    other_end_ids = [end for end in end_ids if end != metadata.get("tokenizer.ggml.eos_token_id")]
    for name in ("eos", "eot"):
        if other_end_ids and f"tokenizer.ggml.{name}_token_id" not in metadata:
            metadata[f"tokenizer.ggml.{name}_token_id"] = other_end_ids.pop(0)
    text_ids, wrapped_ids = (
        library.encode("a", add_special_tokens=added).ids for added in (False, True)
    )
    begin = wrapped_ids.index(text_ids[0]) if text_ids else 0
    for name, added in (
        ("bos", wrapped_ids[:begin]),
        ("eos", wrapped_ids[begin + len(text_ids) :]),
    ):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        metadata[f"tokenizer.ggml.add_{name}_token"] = bool(added) and added == [token]
    check_round_trip(library, metadata)
    return metadata


def tokens_with_types(core: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """The tokens by id with their types; ids without a token are unused."""
    vocabulary = core["model"]["vocab"]
    added = core.get("added_tokens") or []
    largest = max([*vocabulary.values(), *(token["id"] for token in added)], default=-1)
    if largest >= size:
        raise ModelError(
            f"tokenizer.json has a token {largest}, and the model's vocabulary ends at {size - 1}"
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [UNUSED] * size
    for token, number in vocabulary.items():
        is_byte = is_sentence_piece(core) and re.fullmatch("<0x[0-9A-F]{2}>", token)
        tokens[number] = token
        types[number] = BYTE if is_byte else NORMAL
    for token in added:
        kind = UNKNOWN if token["content"] == core["model"].get("unk_token") else CONTROL
        tokens[token["id"]] = token["content"]
        types[token["id"]] = kind if token["special"] else USER_DEFINED
    return tokens, types


def flatten_sections(node: Any) -> list[dict[str, Any]]:
    """A normalizer or pre_tokenizer section followed by the sections nested in it."""
    if not isinstance(node, dict):
        return []
    inside = node.get("normalizers") or node.get("pretokenizers") or []
    return [node, *(section for child in inside for section in flatten_sections(child))]


def is_sentence_piece(core: Mapping[str, Any]) -> bool:
    """Whether spaces are part of tokens, as in SentencePiece."""
    sections = [
        *flatten_sections(core.get("normalizer")),
        *flatten_sections(core.get("pre_tokenizer")),
    ]
    return any(
        section["type"] == "Metaspace"
        or (section["type"] == "Replace" and section["content"] == SPACE)
        for section in sections
    )


def adds_space_prefix(core: Mapping[str, Any]) -> bool:
    """Whether a space is added in front of a text."""
    sections = [
        *flatten_sections(core.get("normalizer")),
        *flatten_sections(core.get("pre_tokenizer")),
    ]
    return any(
        section["type"] == "Prepend"
        or (
            section["type"] == "Metaspace"
            and section.get("prepend_scheme", section.get("add_prefix_space")) not in NO_PREFIX
        )
        for section in sections
    )


def merge_scores(merges: Sequence[tuple[str, ...]], tokens: Sequence[str]) -> list[float]:
    """A score for each token: higher for earlier merges."""
    ranks: dict[str, int] = {}
    for merge in merges:
        ranks.setdefault("".join(merge), len(ranks))
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def matching_pre_tokenizer(library: tokenizers.Tokenizer, whole_words: bool) -> str:
    """llama.cpp's name for the pre-tokenizer of the library's tokenizer."""
    pre_tokenizer = library.pre_tokenizer
    names = sorted(RULES, key=lambda name: RULES[name].whole_words != whole_words)
    expected = (
        None if pre_tokenizer is None else [pre_tokenizer.pre_tokenize_str(text) for text in PROBES]
    )
    for name in names:
        if expected == split_probes(name):
            return name
    raise ModelError(
        "tokenizer.json: pre_tokenizer cuts texts in a way that llama.cpp has no name for"
    )


def split_probes(name: str) -> list[Any]:
    """The probe texts split by the rule of this name."""
    core = {
        "version": "1.0",
        "pre_tokenizer": pre_tokenizer_section(RULES[name]),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    pre_tokenizer = tokenizers.Tokenizer.from_str(json.dumps(core)).pre_tokenizer
    return [pre_tokenizer.pre_tokenize_str(text) for text in PROBES]


def check_round_trip(library: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Raise if the tokenizer read back from the metadata would split the probe texts
    differently.
    """
    restored = load_tokenizer(metadata)
    for text in PROBES:
        ids = library.encode(text).ids
        restored_ids = restored.encode(text).ids
        if ids != restored_ids:
            raise ModelError(
                f"tokenizer.json cuts {text!r:.60} into {ids[:8]}, "
                f"and from a GGUF file it would be {restored_ids[:8]}; "
                "llama.cpp has no tokenizer of this kind"
            )
