"""Kimi's tokenizer: a tiktoken rank file, read without running the model's code."""

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ..config import ModelError

NAME = "tiktoken.model"
# Ids after those of the file: special tokens named in tokenizer_config.json, or reserved ones.
SPECIAL = 256
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER, LOWER = (
    rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kind in (r"Lu}\p{Lt", "Ll")
)
WORDS = "|".join(  # pre-tokenisation: how a text is split before byte pairs are merged
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def read(path: Path, config: dict[str, Any]) -> Tokenizer:
    """Read the tokenizer; `config` is tokenizer_config.json. Only Kimi's splitting is known."""
    if "tokenization_kimi" not in str(config.get("auto_map")):
        raise ModelError(
            f"{path}: how its model cuts a text into words is in code, which is not run; it is "
            "known of Kimi's alone (auto_map in tokenizer_config.json names tokenization_kimi). "
            "Give a folder with tokenizer.json"
        )
    ranks = read_ranks(path)
    core = Tokenizer(
        models.BPE({spell_token(token): rank for token, rank in ranks.items()}, token_merges(ranks))
    )
    core.model.ignore_merges = True  # a word in the vocabulary is one token
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    named = named_tokens(path, config, len(ranks))
    for number in range(len(ranks), len(ranks) + SPECIAL):
        content = named.get(number, {}).get("content") or f"<|reserved_token_{number}|>"
        special = named.get(number, {}).get("special", True)
        core.add_tokens([AddedToken(content, special=special, normalized=False)])
        if core.token_to_id(content) != number:
            raise ModelError(
                f"{path.parent}: tokenizer_config.json has two tokens {content!r}, one of them "
                f"{number}"
            )
    return core


def named_tokens(path: Path, config: dict[str, Any], first: int) -> dict[int, dict[str, Any]]:
    """The named tokens after those of the file, by id."""
    added = config.get("added_tokens_decoder")
    ids = {str(first + number): first + number for number in range(SPECIAL)}
    for key, token in added.items() if isinstance(added, dict) else ():
        if (
            key not in ids
            or not isinstance(token, dict)
            or not isinstance(token.get("content"), str)
        ):
            raise ModelError(
                f"{path.parent}: added_tokens_decoder in tokenizer_config.json has {key!r:.40}: "
                f"{token!r:.60}; it must be an id from {first} to {first + SPECIAL - 1} and an "
                "object with content"
            )
    return {ids[key]: token for key, token in added.items()} if isinstance(added, dict) else {}


def read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens and ranks: each line has a token in base64 and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ModelError(
                f"{path}: line {number} is {line[:60]!r}; it must be a token in base64 and a rank"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(
        bytes([byte]) not in ranks for byte in range(256)
    ):
        raise ModelError(
            f"{path}: the ranks must count from 0 without a gap, and every byte must be a token"
        )
    return ranks


def token_merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Each pair of tokens whose concatenation is a token, ordered by rank."""
    pairs = []
    for token, rank in ranks.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs += [
            (rank, ranks[prefix], prefix, suffix)
            for prefix, suffix in cuts
            if prefix in ranks and suffix in ranks
        ]
    return [(spell_token(prefix), spell_token(suffix)) for _, _, prefix, suffix in sorted(pairs)]


def byte_alphabet() -> list[str]:
    """The character for each byte in a vocabulary: itself if printable, else one from U+0100 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    replacements = iter(range(256, 512))
    return [chr(byte if byte in printable else next(replacements)) for byte in range(256)]


LETTERS = byte_alphabet()


def spell_token(token: bytes) -> str:
    """A token as spelled in a vocabulary."""
    return "".join(LETTERS[byte] for byte in token)
