"""The tokenizer of a GGUF file, converted to the files of a Hugging Face folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from ..errors import ModelError
from .metadata import NUMBER, TEXT, WHOLE, Metadata, format_value
from .pre_tokenizers import PreTokenizerRule, pre_tokenizer_rule
from .sampling import recommended_sampling

SPACE = "▁"  # SentencePiece's space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types
GGUF_TOKEN_NAMES = {  # name in tokenizer_config.json: name in the file
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "mask": "mask",
    "cls": "cls",
}
END_TOKENS = (  # tokens that end an answer: files name only one of them
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
MESSAGE_END = "<|end|>"  # ends a message, not the answer, in vocabularies with ANSWER_ENDS
ANSWER_ENDS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
MAX_TOKEN_LENGTH = 4096  # characters: a merge is searched at every position of a token
MAX_TOKENS = 1 << 21
MAX_MERGE_STEPS = 1 << 28  # of searching for merges: real vocabularies take some millions


@dataclass(frozen=True)
class Vocabulary:
    """The tokens and their types, indexed by id."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def ids_of_types(self, *types: int) -> list[int]:
        return [number for number, kind in enumerate(self.types) if kind in types]


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The contents of tokenizer.json, tokenizer_config.json and generation_config.json, as text."""
    meta = Metadata(metadata)
    vocabulary = read_vocabulary(meta)
    contents = {
        "tokenizer.json": tokenizer_json(meta, vocabulary),
        "tokenizer_config.json": tokenizer_config(meta, vocabulary),
        "generation_config.json": generation_config(meta, vocabulary),
    }
    return {name: json.dumps(content, ensure_ascii=False) for name, content in contents.items()}


def load_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The file's tokenizer as a `tokenizers.Tokenizer`."""
    meta = Metadata(metadata)
    core = json.dumps(tokenizer_json(meta, read_vocabulary(meta)))
    try:
        return tokenizers.Tokenizer.from_str(core)
    except Exception as error:  # the library raises a bare Exception
        reason = " ".join(str(error).split())
        raise ModelError(
            f"GGUF: not a tokenizer that the tokenizers library reads: {reason:.200}"
        ) from None


def tokenizer_json(meta: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer.json."""
    kind = meta.text("tokenizer.ggml.model")
    if kind not in KINDS:
        raise ModelError(
            f"GGUF: tokenizer.ggml.model = {format_value(kind)} is not supported; supported are "
            f"{', '.join(KINDS)}"
        )
    sections, bos = KINDS[kind](meta, vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(vocabulary),
        "post_processor": post_processor(meta, vocabulary, bos),
    } | sections


def read_vocabulary(meta: Metadata) -> Vocabulary:
    tokens = meta.array("tokenizer.ggml.tokens", TEXT)
    key = "tokenizer.ggml.token_type"
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise ModelError(
            f"GGUF: tokenizer.ggml.tokens has {len(tokens)} entries; it must have 1 to {MAX_TOKENS}"
        )
    types = meta.array(key, WHOLE, None)
    types = [NORMAL] * len(tokens) if types is None else types
    if len(types) != len(tokens):
        raise ModelError(f"GGUF: {key} has {len(types)} entries for {len(tokens)} tokens")
    ids: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if len(token) > MAX_TOKEN_LENGTH:
            raise ModelError(
                f"GGUF: token {number} has {len(token)} characters; it must have at most "
                f"{MAX_TOKEN_LENGTH}"
            )
        if not NORMAL <= kind <= BYTE:
            raise ModelError(
                f"GGUF: {key} has {kind} at place {number}; it can be {NORMAL} to {BYTE}"
            )
        if kind == UNUSED or not token:
            continue
        if token in ids:
            raise ModelError(
                f"GGUF: tokenizer.ggml.tokens has {format_value(token)} twice, as {ids[token]} and "
                f"{number}"
            )
        ids[token] = number
    return Vocabulary(tokens, types, ids)


def added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are matched in a text before it is split; all but user-defined ones are
    special.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {
            "id": number,
            "content": vocabulary.tokens[number],
            "special": vocabulary.types[number] != USER_DEFINED,
        }
        | flags
        for number in vocabulary.ids_of_types(UNKNOWN, CONTROL, USER_DEFINED)
        if vocabulary.tokens[number]
    ]


def byte_level(meta: Metadata, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """Byte-level BPE of GPT-2, Llama 3, Qwen and most others."""
    if "tokenizer.ggml.pre" not in meta:
        raise ModelError(
            "GGUF: tokenizer.ggml.pre is missing, as in files of before May 2024; the model's "
            "pre-tokenizer is not known: use a newer file"
        )
    rule = pre_tokenizer_rule(meta.text("tokenizer.ggml.pre"))
    sections = {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer_section(rule),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": bpe_model(
            vocabulary, read_merges(meta, vocabulary), ignore_merges=rule.whole_words
        ),
    }
    return sections, rule.bos


def pre_tokenizer_section(rule: PreTokenizerRule) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    bytes_ = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {"type": "Sequence", "pretokenizers": [*splits, bytes_]}


def bpe_model(
    vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], **overrides: Any
) -> dict[str, Any]:
    defaults = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return defaults | {"vocab": vocabulary.ids, "merges": merges} | overrides


def read_merges(meta: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The pairs of tokens that merge to a token, in order of priority."""
    key = "tokenizer.ggml.merges"
    merges = []
    ids = vocabulary.ids
    for number, merge in enumerate(meta.array(key, TEXT)):
        cut = merge.find(" ", 1)  # a token may begin with a space
        first_token = merge[:cut]
        second_token = merge[cut + 1 :]
        if (
            cut < 0
            or first_token not in ids
            or second_token not in ids
            or first_token + second_token not in ids
        ):
            raise ModelError(
                f"GGUF: {key} has {format_value(merge)} at place {number}; it must be two tokens "
                "that make one"
            )
        merges.append((first_token, second_token))
    return merges


def sentence_piece(meta: Metadata, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """SentencePiece's BPE (Llama 2, Mistral, Gemma): the merge of the token with the highest score
    comes first.
    """
    prefix = meta.flag("tokenizer.ggml.add_space_prefix", True)
    return sentence_piece_sections(
        meta, vocabulary, merges_by_score(meta, vocabulary), prefix
    ), True


def gemma4(meta: Metadata, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """SentencePiece's BPE with listed merges."""
    sections = sentence_piece_sections(
        meta, vocabulary, read_merges(meta, vocabulary), prefix=False
    )
    return sections | {"pre_tokenizer": None}, True


def sentence_piece_sections(
    meta: Metadata, vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], prefix: bool
) -> dict[str, Any]:
    """The sections for a vocabulary whose tokens contain spaces, with bytes as the fallback."""
    normalizers: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    ]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = token_text(meta, vocabulary, "unknown")
    every_byte = all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
    if not every_byte and unknown is None:
        raise ModelError(
            "GGUF: tokenizer.ggml.unknown_token_id is missing, and there is no token for each byte"
        )
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe_model(
            vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


def merges_by_score(meta: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, by descending score of that token."""
    key = "tokenizer.ggml.scores"
    scores = meta.array(key, NUMBER)
    ids = vocabulary.ids
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(
            f"GGUF: {key} has {len(scores)} entries for {len(vocabulary.tokens)} tokens"
        )
    if nan_places := [number for number, score in enumerate(scores) if score != score]:
        raise ModelError(
            f"GGUF: {key} has {scores[nan_places[0]]} at place {nan_places[0]}; it must be a number"
        )
    normal_ids = {
        token: number for token, number in ids.items() if vocabulary.types[number] == NORMAL
    }
    if (work := sum(len(token) ** 2 for token in normal_ids)) > MAX_MERGE_STEPS:
        raise ModelError(
            f"GGUF: the tokens are too long to find their merges: {work} steps, of at most "
            f"{MAX_MERGE_STEPS}"
        )
    candidates = [
        (-scores[number], number, cut, token)
        for token, number in normal_ids.items()
        for cut in range(1, len(token))
        if token[:cut] in normal_ids and token[cut:] in normal_ids
    ]
    return [(token[:cut], token[cut:]) for _, _, cut, token in sorted(candidates)]


def post_processor(meta: Metadata, vocabulary: Vocabulary, bos: bool) -> dict[str, Any] | None:
    """The template that adds the bos and eos tokens to a text."""
    is_added = {
        "bos": meta.flag("tokenizer.ggml.add_bos_token", bos),
        "eos": meta.flag("tokenizer.ggml.add_eos_token", False),
    }
    tokens: dict[str, str] = {}
    for name, add in is_added.items():
        if add and (token := token_text(meta, vocabulary, name)) is not None:
            tokens[name] = token
        elif add and f"tokenizer.ggml.add_{name}_token" in meta:
            raise ModelError(
                f"GGUF: tokenizer.ggml.add_{name}_token is true, but {name}_token_id is missing"
            )
    if not tokens:
        return None

    def text(letter: str, number: int) -> list[dict[str, Any]]:
        special = {
            name: {"SpecialToken": {"id": token, "type_id": number}}
            for name, token in tokens.items()
        }
        body = {"Sequence": {"id": letter, "type_id": number}}
        return [
            *([special["bos"]] if "bos" in special else []),
            body,
            *([special["eos"]] if "eos" in special else []),
        ]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary.ids[token]], "tokens": [token]}
            for token in tokens.values()
        },
    }


def token_id(meta: Metadata, vocabulary: Vocabulary, name: str) -> int | None:
    """The id that the file states for bos, eos and others."""
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = meta.count(key, None, minimum=0)
    if token_id is not None and token_id >= len(vocabulary.tokens):
        raise ModelError(f"GGUF: {key} = {token_id}; there are {len(vocabulary.tokens)} tokens")
    return token_id


def token_text(meta: Metadata, vocabulary: Vocabulary, name: str) -> str | None:
    """The text of bos, eos and others; None also if the token is unused."""
    number = token_id(meta, vocabulary, name)
    if number is None or vocabulary.ids.get(vocabulary.tokens[number]) != number:
        return None
    return vocabulary.tokens[number]


def tokenizer_config(meta: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens = {
        f"{name}_token": token_text(meta, vocabulary, gguf_name)
        for name, gguf_name in GGUF_TOKEN_NAMES.items()
    }
    values: dict[str, Any] = {name: token for name, token in tokens.items() if token is not None}
    if templates := chat_templates(meta):
        values["chat_template"] = templates
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    } | values


def chat_templates(meta: Metadata) -> str | list[dict[str, str]] | None:
    """The template if there is one, or all by name."""
    default = meta.text("tokenizer.chat_template", None)
    names = meta.array("tokenizer.chat_templates", TEXT, [])
    named_templates = {name: meta.text(f"tokenizer.chat_template.{name}") for name in names}
    if not named_templates:
        return default
    templates = ({} if default is None else {"default": default}) | named_templates
    return [{"name": name, "template": template} for name, template in templates.items()]


def generation_config(meta: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of generation_config.json: ids of bos and end tokens, and sampling parameters."""
    control = {
        vocabulary.tokens[number]: number
        for number in vocabulary.ids_of_types(CONTROL, USER_DEFINED)
    }
    stated = [token_id(meta, vocabulary, name) for name in ("eos", "eot", "eom")]
    end_ids = [*stated, *(control[token] for token in END_TOKENS if token in control)]
    if any(end_pair <= control.keys() for end_pair in ANSWER_ENDS):
        end_ids = [
            number
            for number in end_ids
            if number in stated[:1] or number != control.get(MESSAGE_END)
        ]
    unique_end_ids = [number for number in dict.fromkeys(end_ids) if number is not None]
    bos = token_id(meta, vocabulary, "bos")
    ids = ({} if bos is None else {"bos_token_id": bos}) | (
        {"eos_token_id": unique_end_ids} if unique_end_ids else {}
    )
    return ids | recommended_sampling(meta)


KINDS = {"gemma4": gemma4, "gpt2": byte_level, "llama": sentence_piece}
