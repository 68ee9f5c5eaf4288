"""A GGUF file's tokenizer, as the files of a Hugging Face folder that say the same."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from ..errors import ModelError
from .metadata import NUMBER, TEXT, WHOLE, Metadata, shown
from .sampling import recommended_sampling
from .words import Rule, rule_of

SPACE = "▁"  # what SentencePiece writes for a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
NAMED = {  # names in tokenizer_config.json: those of the file
    "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask", "cls": "cls",
}  # fmt: skip
ENDS = (  # tokens that end an answer, in files that name one of them alone
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
MESSAGE_END = "<|end|>"  # where these are too, it ends a message, and another follows
ANSWER_ENDS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
LONGEST = 4096  # characters of a token: a merge of two is looked for at every place in it
MOST = 1 << 21  # tokens
MOST_WORK = 1 << 28  # steps of looking for what two tokens make each: real vocabularies take some millions


@dataclass(frozen=True)
class Vocabulary:
    """The tokens by id, with their types."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def of(self, *types: int) -> list[int]:
        return [number for number, kind in enumerate(self.types) if kind in types]


def files_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The texts of tokenizer.json, tokenizer_config.json and generation_config.json."""
    meta = Metadata(metadata)
    vocabulary = read_vocabulary(meta)
    found = {
        "tokenizer.json": core_json(meta, vocabulary),
        "tokenizer_config.json": settings(meta, vocabulary),
        "generation_config.json": generation(meta, vocabulary),
    }
    return {name: json.dumps(content, ensure_ascii=False) for name, content in found.items()}


def tokenizer_of(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer itself."""
    meta = Metadata(metadata)
    core = json.dumps(core_json(meta, read_vocabulary(meta)))
    try:
        return tokenizers.Tokenizer.from_str(core)
    except Exception as error:  # the library raises a bare Exception
        why = " ".join(str(error).split())
        raise ModelError(f"GGUF: not a tokenizer that the tokenizers library reads: {why:.200}") from None


def core_json(meta: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer.json."""
    kind = meta.text("tokenizer.ggml.model")
    if kind not in KINDS:
        raise ModelError(
            f"GGUF: tokenizer.ggml.model = {shown(kind)} is not supported; supported are {', '.join(KINDS)}"
        )
    parts, bos = KINDS[kind](meta, vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(vocabulary),
        "post_processor": ends(meta, vocabulary, bos),
    } | parts


def read_vocabulary(meta: Metadata) -> Vocabulary:
    tokens, key = meta.array("tokenizer.ggml.tokens", TEXT), "tokenizer.ggml.token_type"
    if not 0 < len(tokens) <= MOST:
        raise ModelError(f"GGUF: tokenizer.ggml.tokens has {len(tokens)} entries; it must have 1 to {MOST}")
    types = meta.array(key, WHOLE, None)
    types = [NORMAL] * len(tokens) if types is None else types
    if len(types) != len(tokens):
        raise ModelError(f"GGUF: {key} has {len(types)} entries for {len(tokens)} tokens")
    ids: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if len(token) > LONGEST:
            raise ModelError(f"GGUF: token {number} has {len(token)} characters; it must have at most {LONGEST}")
        if not NORMAL <= kind <= BYTE:
            raise ModelError(f"GGUF: {key} has {kind} at place {number}; it can be {NORMAL} to {BYTE}")
        if kind == UNUSED or not token:
            continue
        if token in ids:
            raise ModelError(f"GGUF: tokenizer.ggml.tokens has {shown(token)} twice, as {ids[token]} and {number}")
        ids[token] = number
    return Vocabulary(tokens, types, ids)


def added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is cut; those for control are no text of their own."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": vocabulary.tokens[number], "special": vocabulary.types[number] != USER_DEFINED}
        | flags
        for number in vocabulary.of(UNKNOWN, CONTROL, USER_DEFINED)
        if vocabulary.tokens[number]
    ]


def byte_level(meta: Metadata, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """GPT-2's kind: Llama 3, Qwen and most others."""
    if "tokenizer.ggml.pre" not in meta:
        raise ModelError(
            "GGUF: tokenizer.ggml.pre is missing, as in files of before May 2024; how the model cuts a text into words "
            "is not known: take a newer file"
        )
    rule = rule_of(meta.text("tokenizer.ggml.pre"))
    parts = {
        "normalizer": None,
        "pre_tokenizer": cutting(rule),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe(vocabulary, read_merges(meta, vocabulary), ignore_merges=rule.whole_words),
    }
    return parts, rule.bos


def cutting(rule: Rule) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, bytes_]}


def bpe(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], **more: Any) -> dict[str, Any]:
    usual = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return usual | {"vocab": vocabulary.ids, "merges": merges} | more


def read_merges(meta: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, in the order in which they are merged."""
    key, found, known = "tokenizer.ggml.merges", [], vocabulary.ids
    for number, merge in enumerate(meta.array(key, TEXT)):
        cut = merge.find(" ", 1)  # a token may begin with a space
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in known or right not in known or left + right not in known:
            raise ModelError(f"GGUF: {key} has {shown(merge)} at place {number}; it must be two tokens that make one")
        found.append((left, right))
    return found


def sentence_piece(meta: Metadata, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """SentencePiece's BPE: Llama 2, Mistral, Gemma. Of two merges that of the better token comes first."""
    prefix = meta.flag("tokenizer.ggml.add_space_prefix", True)
    return spaced(meta, vocabulary, merges_by_score(meta, vocabulary), prefix), True


def gemma4(meta: Metadata, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """The same with its merges listed."""
    parts = spaced(meta, vocabulary, read_merges(meta, vocabulary), prefix=False)
    return parts | {"pre_tokenizer": None}, True


def spaced(meta: Metadata, vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], prefix: bool) -> dict[str, Any]:
    """Spaces are characters of tokens, and what no token has is bytes."""
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = named(meta, vocabulary, "unknown")
    every_byte = all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
    if not every_byte and unknown is None:
        raise ModelError("GGUF: tokenizer.ggml.unknown_token_id is missing, and there is no token for each byte")
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def merges_by_score(meta: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token; first those of the tokens with the highest score."""
    key = "tokenizer.ggml.scores"
    scores, known = meta.array(key, NUMBER), vocabulary.ids
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"GGUF: {key} has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    if odd := [number for number, score in enumerate(scores) if score != score]:
        raise ModelError(f"GGUF: {key} has {scores[odd[0]]} at place {odd[0]}; it must be a number")
    usual = {token: number for token, number in known.items() if vocabulary.types[number] == NORMAL}
    if (work := sum(len(token) ** 2 for token in usual)) > MOST_WORK:
        raise ModelError(f"GGUF: the tokens are too long to be cut everywhere: {work} steps, of at most {MOST_WORK}")
    found = [
        (-scores[number], number, cut, token)
        for token, number in usual.items()
        for cut in range(1, len(token))
        if token[:cut] in usual and token[cut:] in usual
    ]
    return [(token[:cut], token[cut:]) for _, _, cut, token in sorted(found)]


def ends(meta: Metadata, vocabulary: Vocabulary, bos: bool) -> dict[str, Any] | None:
    """The tokens that are added at the beginning and at the end of a text."""
    wanted = {
        "bos": meta.flag("tokenizer.ggml.add_bos_token", bos),
        "eos": meta.flag("tokenizer.ggml.add_eos_token", False),
    }
    tokens: dict[str, str] = {}
    for name, add in wanted.items():
        if add and (token := named(meta, vocabulary, name)) is not None:
            tokens[name] = token
        elif add and f"tokenizer.ggml.add_{name}_token" in meta:
            raise ModelError(f"GGUF: tokenizer.ggml.add_{name}_token is true, but {name}_token_id is missing")
    if not tokens:
        return None

    def text(letter: str, number: int) -> list[dict[str, Any]]:
        special = {name: {"SpecialToken": {"id": token, "type_id": number}} for name, token in tokens.items()}
        body = {"Sequence": {"id": letter, "type_id": number}}
        return [*([special["bos"]] if "bos" in special else []), body, *([special["eos"]] if "eos" in special else [])]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary.ids[token]], "tokens": [token]} for token in tokens.values()
        },
    }


def token_id(meta: Metadata, vocabulary: Vocabulary, name: str) -> int | None:
    """The id that the file gives for bos, eos and others."""
    key = f"tokenizer.ggml.{name}_token_id"
    found = meta.count(key, None, least=0)
    if found is not None and found >= len(vocabulary.tokens):
        raise ModelError(f"GGUF: {key} = {found}; there are {len(vocabulary.tokens)} tokens")
    return found


def named(meta: Metadata, vocabulary: Vocabulary, name: str) -> str | None:
    """The text of bos, eos and others; None also where it is of no use."""
    found = token_id(meta, vocabulary, name)
    if found is None or vocabulary.ids.get(vocabulary.tokens[found]) != found:
        return None
    return vocabulary.tokens[found]


def settings(meta: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens = {f"{name}_token": named(meta, vocabulary, own) for name, own in NAMED.items()}
    found: dict[str, Any] = {name: token for name, token in tokens.items() if token is not None}
    if templates := chat_templates(meta):
        found["chat_template"] = templates
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | found


def chat_templates(meta: Metadata) -> str | list[dict[str, str]] | None:
    """The one template, or all by name."""
    usual = meta.text("tokenizer.chat_template", None)
    names = meta.array("tokenizer.chat_templates", TEXT, [])
    others = {name: meta.text(f"tokenizer.chat_template.{name}") for name in names}
    if not others:
        return usual
    found = ({} if usual is None else {"default": usual}) | others
    return [{"name": name, "template": template} for name, template in found.items()]


def generation(meta: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of generation_config.json: the tokens that begin and end an answer, and the sampling to use."""
    control = {vocabulary.tokens[number]: number for number in vocabulary.of(CONTROL, USER_DEFINED)}
    stated = [token_id(meta, vocabulary, name) for name in ("eos", "eot", "eom")]
    found = [*stated, *(control[token] for token in ENDS if token in control)]
    if any(both <= control.keys() for both in ANSWER_ENDS):
        found = [number for number in found if number in stated[:1] or number != control.get(MESSAGE_END)]
    last = [number for number in dict.fromkeys(found) if number is not None]
    bos = token_id(meta, vocabulary, "bos")
    ends = ({} if bos is None else {"bos_token_id": bos}) | ({"eos_token_id": last} if last else {})
    return ends | recommended_sampling(meta)


KINDS = {"gemma4": gemma4, "gpt2": byte_level, "llama": sentence_piece}
