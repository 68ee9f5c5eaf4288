r"""What a text is cut into before its bytes are merged, by the names that llama.cpp gave: `tokenizer.ggml.pre`.

Each rule is a list of patterns: the first cuts the text into what it matches and what lies between, the next cuts all
of these, and so on. Where llama.cpp's own pattern only comes near to that of the model's tokenizer, it is the model's
that stands here.
"""

from dataclasses import dataclass

from ..errors import ModelError
from .metadata import shown

ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + SPACES
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + SPACES
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + SPACES
HAN_UPPER, HAN_LOWER = (rf"[{kind[1:-1]}&&[^\p{{Han}}]]" for kind in (UPPER, LOWER))
ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
V3_WORDS = ASCII_SIGNS + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
# Letters that have two cases, of the scripts that do.
TWO_CASES = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ"
    "Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
CJK, CJK_WIDE = "[一-龥぀-ゟ゠-ヿ]+", "[一-龥ࠀ-一가-퟿]+"
ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"


def words(digits: str, ending: str = ENDING + "|", signs: str = SIGNS) -> str:
    """Llama 3's and Qwen's rule; `digits` is how many stay together."""
    return rf"{ending}{LETTERS}|\p{{N}}{digits}|{signs}"


def cased(ending: str, digits: str, upper: str = UPPER, lower: str = LOWER) -> str:
    """GPT-4o's and Mistral's rule: words are also cut before a capital."""
    start = r"[^\r\n\p{L}\p{N}]?"
    whole = rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"
    return rf"{whole}|\p{{N}}{digits}|{CASED_SIGNS}"


@dataclass(frozen=True)
class Rule:
    """How a text is cut; whether a word that is a token is that token; and whether texts begin with a bos token."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False


LLAMA3 = Rule((words("{1,3}"),), whole_words=True, bos=True)
DIGIT_BY_DIGIT = Rule((r"\p{N}", GPT2))
PLAIN = Rule((GPT2,))
QWEN2 = Rule((words(""),))
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
DEEPSEEK3 = Rule((r"\p{N}{1,3}", CJK, V3_WORDS + r"[\r\n]*|\s*[\r\n]+|" + SPACES))
GPT4O = Rule((cased(f"{ENDING}?", "{1,3}"),))
BAILING = Rule(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + SPACES,)
)
GLM = words("{1,3}")

RULES: dict[str, Rule] = {
    "default": Rule((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Rule((GLM,))),
    **dict.fromkeys(("glm4", "glm5"), Rule((GLM,), whole_words=True)),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), DIGIT_BY_DIGIT
    ),
    **dict.fromkeys(
        (
            "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
            "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "jina-v1-en",
            "jina-v2-code", "roberta-bpe",
        ),
        PLAIN,
    ),
    **dict.fromkeys(
        (
            "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2",
        ),
        QWEN2,
    ),
    "qwen35": Rule(
        (
            rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{SPACES}",
        )
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Rule((BLOOM,))),
    "viking": Rule((BLOOM, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK3),
    "deepseek-llm": Rule(
        (
            "[\r\n]", rf"\s?[{TWO_CASES}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK_WIDE, r"\p{N}",
        )
    ),
    "deepseek-coder": Rule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_WIDE, r"\p{N}")),
    "spark2_5": Rule((r"\p{N}{1,3}", CJK, V3_WORDS + r"|[\r\n]|" + SPACES, r"\p{N}")),
    "youtu": Rule(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            cased(f"{ENDING}?", ""),
        ),
        whole_words=True,
    ),
    "falcon": Rule((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")),
    "jais-2": Rule(
        (
            words("{1,3}", signs=r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|")
            + "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
            + r"|\s{1}",
        )
    ),
    "tekken": Rule((cased("", ""),), whole_words=True, bos=True),
    "chameleon": Rule(
        (
            "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]", GPT2,
        ),
        bos=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), GPT4O),
    "granite-embed-multi-97m": Rule(GPT4O.patterns, whole_words=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Rule((r"\d{1,3}(?=(?:\d{3})*\b)", *GPT4O.patterns))),
    "kimi-k2": Rule(
        (r"[\p{Han}]+|" + cased(f"{ENDING}?", "{1,3}", HAN_UPPER, HAN_LOWER).replace("[\\r\\n/]*", "[\\r\\n]*"),),
        whole_words=True,
    ),
    "superbpe": Rule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), BAILING),
    "seed-coder": Rule((words("{1}", signs=r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|" + SPACES),)),
    "ufakzeka": Rule((words("", ending=""),)),
    "afmoe": Rule(
        (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", ASIAN, V3_WORDS + r"[\r\n]*|\s*[\r\n]+|" + SPACES)
    ),
    "laguna": Rule((r"[^\n]+|[\n]+", words(""))),
    "exaone-moe": Rule(
        (
            rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACES}",
        )
    ),
    "minicpm5": Rule((r"\p{N}{1,3}", words("+")), whole_words=True),
}  # fmt: skip


def rule_of(name: str) -> Rule:
    """The rule of this name."""
    if name not in RULES:
        raise ModelError(f"GGUF: tokenizer.ggml.pre = {shown(name)} is not known; it can be {', '.join(RULES)}")
    return RULES[name]
