r"""The pre-tokenizers by llama.cpp's names, `tokenizer.ggml.pre`: how a text is split before its
bytes are merged.

Each rule is a list of patterns. The first splits the text into matches and the text between them, the next splits all
of these, and so on. Where llama.cpp's pattern only approximates that of the model's own tokenizer, the model's is used.
"""

from dataclasses import dataclass

from ..errors import ModelError
from .metadata import format_value

ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + SPACES
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + SPACES
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + SPACES
HAN_UPPER, HAN_LOWER = (rf"[{kind[1:-1]}&&[^\p{{Han}}]]" for kind in (UPPER, LOWER))
ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
V3_WORDS = ASCII_SIGNS + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
# Letters of scripts with upper and lower case.
TWO_CASES = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ"
    "Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
CJK = "[一-龥぀-ゟ゠-ヿ]+"
CJK_WIDE = "[一-龥ࠀ-一가-퟿]+"
ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"


def llama3_pattern(digits: str, ending: str = ENDING + "|", signs: str = SIGNS) -> str:
    """The pattern of Llama 3 and Qwen; `digits` is the quantifier for digits that stay together."""
    return rf"{ending}{LETTERS}|\p{{N}}{digits}|{signs}"


def gpt4o_pattern(ending: str, digits: str, upper: str = UPPER, lower: str = LOWER) -> str:
    """The pattern of GPT-4o and Mistral, which also splits before a capital."""
    start = r"[^\r\n\p{L}\p{N}]?"
    word = rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"
    return rf"{word}|\p{{N}}{digits}|{CASED_SIGNS}"


@dataclass(frozen=True)
class PreTokenizerRule:
    """The patterns; `whole_words` keeps words that are tokens unmerged; `bos` is the default of
    add_bos_token.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False


LLAMA3 = PreTokenizerRule((llama3_pattern("{1,3}"),), whole_words=True, bos=True)
DIGIT_BY_DIGIT = PreTokenizerRule((r"\p{N}", GPT2))
PLAIN = PreTokenizerRule((GPT2,))
QWEN2 = PreTokenizerRule((llama3_pattern(""),))
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
DEEPSEEK3 = PreTokenizerRule((r"\p{N}{1,3}", CJK, V3_WORDS + r"[\r\n]*|\s*[\r\n]+|" + SPACES))
GPT4O = PreTokenizerRule((gpt4o_pattern(f"{ENDING}?", "{1,3}"),))
BAILING = PreTokenizerRule(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
        + SPACES,
    )
)
GLM = llama3_pattern("{1,3}")

RULES: dict[str, PreTokenizerRule] = {
    "default": PreTokenizerRule((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        (
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ),
        LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizerRule((GLM,))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizerRule((GLM,), whole_words=True)),
    **dict.fromkeys(
        (
            "starcoder",
            "refact",
            "command-r",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ),
        DIGIT_BY_DIGIT,
    ),
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
        ),
        PLAIN,
    ),
    **dict.fromkeys(
        (
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ),
        QWEN2,
    ),
    "qwen35": PreTokenizerRule(
        (
            rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{SPACES}",
        )
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizerRule((BLOOM,))),
    "viking": PreTokenizerRule((BLOOM, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK3),
    "deepseek-llm": PreTokenizerRule(
        (
            "[\r\n]",
            rf"\s?[{TWO_CASES}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            CJK_WIDE,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizerRule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_WIDE, r"\p{N}")),
    "spark2_5": PreTokenizerRule((r"\p{N}{1,3}", CJK, V3_WORDS + r"|[\r\n]|" + SPACES, r"\p{N}")),
    "youtu": PreTokenizerRule(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            gpt4o_pattern(f"{ENDING}?", ""),
        ),
        whole_words=True,
    ),
    "falcon": PreTokenizerRule((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")),
    "jais-2": PreTokenizerRule(
        (
            llama3_pattern("{1,3}", signs=r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|")
            + "|".join(
                rf"\s{{{n}}}(?!\S)"
                for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
            )
            + r"|\s{1}",
        )
    ),
    "tekken": PreTokenizerRule((gpt4o_pattern("", ""),), whole_words=True, bos=True),
    "chameleon": PreTokenizerRule(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        bos=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), GPT4O),
    "granite-embed-multi-97m": PreTokenizerRule(GPT4O.patterns, whole_words=True),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"), PreTokenizerRule((r"\d{1,3}(?=(?:\d{3})*\b)", *GPT4O.patterns))
    ),
    "kimi-k2": PreTokenizerRule(
        (
            r"[\p{Han}]+|"
            + gpt4o_pattern(f"{ENDING}?", "{1,3}", HAN_UPPER, HAN_LOWER).replace(
                "[\\r\\n/]*", "[\\r\\n]*"
            ),
        ),
        whole_words=True,
    ),
    "superbpe": PreTokenizerRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), BAILING),
    "seed-coder": PreTokenizerRule(
        (llama3_pattern("{1}", signs=r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|" + SPACES),)
    ),
    "ufakzeka": PreTokenizerRule((llama3_pattern("", ending=""),)),
    "afmoe": PreTokenizerRule(
        (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", ASIAN, V3_WORDS + r"[\r\n]*|\s*[\r\n]+|" + SPACES)
    ),
    "laguna": PreTokenizerRule((r"[^\n]+|[\n]+", llama3_pattern(""))),
    "exaone-moe": PreTokenizerRule(
        (
            rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACES}",
        )
    ),
    "minicpm5": PreTokenizerRule((r"\p{N}{1,3}", llama3_pattern("+")), whole_words=True),
}


def pre_tokenizer_rule(name: str) -> PreTokenizerRule:
    if name not in RULES:
        raise ModelError(
            f"GGUF: tokenizer.ggml.pre = {format_value(name)} is not known; it can be "
            f"{', '.join(RULES)}"
        )
    return RULES[name]
