"""Small tokenizers of every kind, as Hugging Face folders, and text that is hard to tokenize."""

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

BOS = "<s>"
EOS = "</s>"
TURN = "<|turn|>"
SPECIAL = [BOS, EOS, TURN]
CORPUS = [
    "Once upon a time a small fox lived by the river, and the river sang to the fox.",
    (
        "It's 12,345 o'clock; don't worry: we'll go there. (Yes!) \"Really?\" she "
        "said...\n\n\tindented = code(x)"
    ),
    "naïve café Ångström, Straße, Привет мир, Γειά σου Κόσμε",
    "一只狐狸住在河边。 日本語のテキストです。 안녕하세요 세계",
    "emoji 🙂🙃 👨‍👩‍👧‍👦 🇫🇷 👍🏽 and math ∑∫≠∞ 𝔘𝔫𝔦",
]
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz     ,.!?'",
    "áèîõüñçßøå",
    "e\u0301a\u0308o\u0302\u0327n\u0303",  # combining marks
    "가각간힣한글안녕",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",  # Hangul jamo
    "你好世界狐狸河一日本語のテキスト",
    "नमस्तेสวัสดีမြန်မာ",
    "🙂🙃👨‍👩‍👧‍👦🇫🇷👍🏽\u200d\ufe0f",
    "𝔘𝔫𝔦𠜎𡃁",
    " \n\t\u00a0\u3000",
    "שלוםمرحبا",
    "\ufffd\ufffd",
    "▁Ġ<0x>",
]


def random_text(rng: random.Random, max_characters: int = 40) -> str:
    """A text of runs from different scripts."""
    return "".join(
        rng.choice(alphabet)
        for alphabet in rng.choices(ALPHABETS, k=rng.randint(1, 6))
        for _ in range(rng.randint(1, max(1, max_characters // 6)))
    )


def byte_level() -> Tokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen, quill) with few merges: most characters are several
    tokens.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=360,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.post_processor = processors.TemplateProcessing(
        f"{BOS} $A", f"{BOS} $A {BOS} $B", [(BOS, 0)]
    )
    return core


def byte_fallback(strip: bool = True) -> Tokenizer:
    """SentencePiece's BPE as in Llama 2: rare characters and newlines are byte tokens."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        CORPUS[:1],
        trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", *SPECIAL], show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [token for token in [*model["vocab"], "é", "🙂", "한", "\ufffd"] if token not in names]
    merges = [tuple(merge) for merge in model["merges"]]
    core = Tokenizer(
        models.BPE(dict(zip(names, range(len(names)), strict=True)), merges, byte_fallback=True)
    )
    core.add_special_tokens(["<unk>", *SPECIAL])
    prepend = [normalizers.Prepend("▁")] if strip else []
    core.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    stripped = [decoders.Strip(" ", 1, 0)] if strip else []
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    core.post_processor = processors.TemplateProcessing(
        f"{BOS} $A", f"{BOS} $A {BOS} $B", [(BOS, 1)]
    )
    return core


def byte_fallback_unstripped() -> Tokenizer:
    """BPE with byte fallback as in Gemma, without a space before a text."""
    return byte_fallback(strip=False)


def unigram() -> Tokenizer:
    """SentencePiece's unigram model with a Metaspace decoder: T5, ALBERT and others."""
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300,
            special_tokens=["<unk>", *SPECIAL],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return core


def word_piece() -> Tokenizer:
    """WordPiece as in BERT: pieces with ##; the decoder restores spaces."""
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer(lowercase=False)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False
        ),
    )
    return core


def end_of_word() -> Tokenizer:
    """The original BPE, with a suffix at each word's end: OpenAI's first GPT, CLIP."""
    core = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.BPEDecoder()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<unk>", *SPECIAL],
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    return core


ZOO: dict[str, Callable[[], Tokenizer]] = {
    make.__name__: make
    for make in (
        byte_level,
        byte_fallback,
        byte_fallback_unstripped,
        unigram,
        word_piece,
        end_of_word,
    )
}


def save(folder: Path, core: Tokenizer, chat_template: str | None = None, **files: dict) -> Path:
    """Write a tokenizer's Hugging Face folder; `files` (JSON by file stem) override the defaults."""
    core.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    for stem, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def with_plain_token(core: Tokenizer, token: str) -> Tokenizer:
    """The tokenizer with one added token that is not special."""
    core.add_tokens([AddedToken(token, normalized=False)])
    return core


def characters(text: str) -> str:
    """Names of a text's characters, for a failure's message."""
    return " ".join(unicodedata.name(character, hex(ord(character))) for character in text)
