"""GBNF: all features that llama.cpp's grammars use, and random grammars compared with a reference
parser.
"""

import random
from collections.abc import Iterator

import llguidance
import pytest

from quire.serving.request.gbnf import (
    Alt,
    Chars,
    GrammarError,
    Node,
    Ref,
    Repeat,
    Seq,
    is_gbnf,
    parse,
)
from quire.serving.request.lark import to_lark
from quire.tests.support.cases import cases

# Grammars with the features of those that llama.cpp publishes and generates from JSON schemas.
CHESS = r"""
# two moves a line
root ::= (
    "1. " move " " move "\n"   # the first
    ([1-9] [0-9]? ". " move " " move "\n")+
)
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]   # any piece
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"""
SUMS = r"""root ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SCHEMA = r"""char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})
item ::= "{" space item-name-kv "," space item-age-kv "}" space
item-age ::= ([0-9] | ([1-8] [0-9] | [9] [0-9]) | "1" ([0-4] [0-9] | [5] "0")) space
item-age-kv ::= "\"age\"" space ":" space item-age
item-name ::= "\"" char{1,100} "\"" space
item-name-kv ::= "\"name\"" space ":" space item-name
root ::= "[" space item ("," space item){1,3} "]" space
space ::= | " " | "\n" [ \t]{0,20}
"""
CODE = r"""root ::= (declaration)*
declaration ::= dataType identifier "(" parameter? ")" "{" statement* "}"
dataType  ::= "int" ws | "char" ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= dataType identifier
statement ::= ( dataType identifier ws "=" ws expression ";" ) | ( identifier ws "=" ws expression ";" ) |
    ( "return" ws expression ";" ) | ( singleLineComment )
expression ::= term (("+" | "-") term)*
term ::= identifier | [0-9]+ | "(" expression ")"
singleLineComment ::= "//" [^\n]* "\n"
ws ::= [ \t\n]+
"""
GRAMMARS = [
    ('root ::= "yes" | "no"', ["yes", "no"], ["", "ye", "yes no", "maybe"]),
    (
        CHESS,
        ["1. e4 e5\n2. Nf3 O-O-O#\n", "1. exd8=Q+ Kd8\n12. a3 O-O\n"],
        ["1. e4 e5\n", "1. e9 e5\n2. a3 a3\n"],
    ),
    (
        SUMS,
        ["a=1\n", "(1)=(3)\n", "a +b \n=3\n\n", "1=2\n(a_1*(b))=x\n"],
        ["a=1", "a + b=3\n", "1=\n", "(1=2\n"],
    ),
    (
        JSON,
        ["{}", '{"a": [1, -2.5e+3], "é\\n\\u00e9": {"b":\n\t null}} '],
        ['{"a": }', '{"a\n": 1}', "[]", '{"a": 1e}'],
    ),
    (
        SCHEMA,
        ['[{"name": "Ann", "age": 42},{"name":"é","age":150}]'],
        ['[{"name": "", "age": 2}]', "[]"],
    ),
    (
        CODE,
        ["", "int f(){}", "int f(char x){x = (a+1)-b;return 7;// ok\n}"],
        ["int f(){x=1}", "float f(){}"],
    ),
    ("root ::= [ぁ-ゟ]+ ([、。] [ァ-ヿ]{2})?", ["こんにちは", "あ。カナ"], ["", "abc", "あ。カ"]),
    (
        r'root ::= "\x41\u00e9\U0001F600\t\"\\" [\]\-\[^]',
        ['Aé😀\t"\\]', 'Aé😀\t"\\-', 'Aé😀\t"\\^'],
        ['Aé😀\t"\\a'],
    ),
    ('root ::= . . "/"', ["ab/", "\n/" + "/", "é😀/"], ["a/", "ab"]),
    (
        "root ::= [a-c-]{2} [0-9]{2,} [x]{1,2} [y]{,1}",
        ["a-00x", "bc123xxy"],
        ["a00x", "a-0x", "a-00xxx", "a-00xyy"],
    ),
    ('root ::= a-B_1\n\n\na-B_1 ::= "x"\n  "y" | # either\n  "z"', ["xy", "z"], ["x", "xyz"]),
    ('root ::= "(" root ")" | ""', ["", "()", "((()))"], ["(", "(()"]),
    ('root ::= root "a" | "b"', ["b", "baa"], ["", "a", "ab"]),  # left recursion
    # [a-z]+ must not consume the "x"
    ('root ::= [a-z]+ "x" root?', ["abx", "xxx", "abxcdx"], ["x", "ab"]),
    ('root ::= "a" ("bc" | "b" root)', ["abc", "ababc"], ["ab"]),
    ('root ::= ("a" "")* ""', ["", "aaa"], ["b"]),
    ('#first\r\nroot ::= "a"\r\n#last', ["a"], ["a\r"]),
]
TOKENIZER = llguidance.LLTokenizer("byte")


def make_matcher(grammar: str) -> llguidance.LLMatcher:
    new_matcher = llguidance.LLMatcher(
        TOKENIZER, f'%llguidance {{"no_forcing": true}}\n{to_lark(grammar)}', log_level=0
    )
    assert not new_matcher.is_error(), new_matcher.get_error()
    return new_matcher


def accepts(matcher: llguidance.LLMatcher, text: str) -> bool:
    copied_matcher = matcher.deep_copy()
    return all(map(copied_matcher.consume_token, text.encode())) and copied_matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "accepted_texts", "refused_texts"), GRAMMARS, ids=range(len(GRAMMARS))
)
def test_gbnf_grammars_accept_the_same_texts_as_in_llama_cpp(
    grammar, accepted_texts, refused_texts
):
    grammar_matcher = make_matcher(grammar)
    assert is_gbnf(grammar)
    assert [text for text in accepted_texts if not accepts(grammar_matcher, text)] == []
    assert [text for text in refused_texts if accepts(grammar_matcher, text)] == []


def test_unambiguous_rules_become_single_lexemes():
    """Masks are computed fast only if the characters of a string are one lexeme."""
    lark = to_lark(JSON)
    assert lark.count("\nL") < 20 and '"\\"" ' not in lark.split("\nL0")[0]
    assert to_lark(CHESS).count("\nr") == 0  # no recursion: one lexeme
    assert "{1,})" not in to_lark('root ::= [a-z]+ "x" root?').split("\nL0")[0]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a" | "b', "line 1, column 16: this text has no end"),
        ("root ::= [ab", "line 1, column 10: this class has no end"),
        ('root ::= "a"\nx := "b"', 'line 2, column 3: a rule is written name ::= ...'),
        ('root ::= "a" )', "line 1, column 14: expected | or a rule"),
        ('root ::=\n  ("a" | "b"', "line 2, column 13: the grammar ends here; expected ) or |"),
        ('root ::= "a" b', "line 1, column 14: there is no rule b"),
        ('rot ::= "a"', "line 1, column 1: there is no rule root"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: there is a rule root already"),
        ("root ::= [z-a]", "line 1, column 11: the range z-a runs backwards"),
        ("root ::= []", "line 1, column 10: a class must have"),
        (r'root ::= "\q"', r"line 1, column 11: there is no escape \q"),
        (r'root ::= "\u12"', r"line 1, column 11: \u needs 4 hexadecimal digits"),
        (r'root ::= "\uD800"', "is no character"),
        (r'root ::= "\U00110000"', "is no character"),
        ('root ::= * "a"', "line 1, column 10: * repeats what stands before it"),
        ('root ::= "a"{2,1}', "line 1, column 13: {2,1} must go from low to high"),
        ('root ::= "a"{1,2001}', "2000 at most"),
        ('root ::= "a"{x}', "line 1, column 13: a repetition is {m}, {m,} or {m,n}"),
        ('root ::= "a"{,}', "a repetition is"),
        ('root ::= "a"{1 2}', "a repetition is"),
        ('root ::= "a"{²}', "a repetition is"),
        ('root ::= "a"{' + "9" * 5000 + "}", "a repetition is"),
        ('root ::= "a"+*', "line 1, column 14: a repetition of a repetition"),
        ("root ::= <think>", "line 1, column 10: tokens such as <think>"),
        ('root ::= "a" & "b"', "line 1, column 14: expected a text"),
        ("root ::= " + "(" * 100, "more than 64 groups"),
    ],
)  # fmt: skip
def test_gbnf_errors_name_line_and_column(grammar, message):
    with pytest.raises(GrammarError) as error_info:
        to_lark(grammar)
    assert message in str(error_info.value)


def test_repetition_braces_are_parsed_in_linear_time():
    """Whitespace without a closing brace: 4,000 spaces once took 4,000^4 steps."""
    for text in (" " * 16_000, "\n" * 16_000, "1" + " " * 16_000, "1," + " " * 16_000):
        with pytest.raises(GrammarError, match="a repetition is"):
            parse('root ::= "a"{' + text)
    assert parse('root ::= "a"{ 1 , 2 }')["root"].high == 2


def test_is_gbnf_distinguishes_lark():
    assert not is_gbnf('start: a\na: "::="') and not is_gbnf('// x ::= y\nstart: "a"')
    assert is_gbnf('# a comment\n\n root::="a"') and is_gbnf('root := "a"\nx ::= "b"')


def random_expression(rng: random.Random, depth: int, names: list[str]) -> str:
    """Returns a random, often ambiguous expression over the letters a, b and c."""
    choice = rng.random()
    if depth == 0 or choice < 0.35:
        text = '"' + "".join(rng.choices("abc", k=rng.randint(0, 3))) + '"'
        return rng.choice(
            [text, rng.choice(["[ab]", "[a-c]", "[^a]", "[bc]", "."]), rng.choice(names)]
        )
    if choice < 0.6:
        return " ".join(random_expression(rng, depth - 1, names) for _ in range(rng.randint(1, 3)))
    if choice < 0.8:
        children = [random_expression(rng, depth - 1, names) for _ in range(rng.randint(2, 3))]
        return f"({' | '.join(children)})"
    child = random_expression(rng, depth - 1, names)
    return f"({child}){rng.choice(['*', '+', '?', '{2}', '{1,2}', '{0,2}', '{2,}'])}"


def random_text(
    rng: random.Random, rules: dict[str, Node], node: Node, steps_left: list[int]
) -> str:
    """Returns a random text of a node; raises RecursionError after `steps_left[0]` calls."""
    steps_left[0] -= 1
    if steps_left[0] < 0:
        raise RecursionError
    if isinstance(node, Chars):
        return rng.choice([letter for letter in "abcd" if contains(node, letter)])
    if isinstance(node, Seq):
        return "".join(random_text(rng, rules, child, steps_left) for child in node.children)
    if isinstance(node, Alt):
        return random_text(rng, rules, rng.choice(node.children), steps_left)
    if isinstance(node, Repeat):
        times = rng.randint(node.low, node.low + 2 if node.high is None else node.high)
        return "".join(random_text(rng, rules, node.child, steps_left) for _ in range(times))
    return random_text(rng, rules, rules[node.name], steps_left)


def contains(node: Chars, character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in node.ranges)


def matches(rules: dict[str, Node], text: str) -> bool:
    """Returns whether the grammar accepts a text.

    Computes, for each rule and start, all positions where it may end, until no more are found.
    """
    ends_by_start: dict[tuple[str, int], set[int]] = {("root", 0): set()}

    def end_positions(node: Node, start: int) -> set[int]:
        if isinstance(node, Chars):
            return {start + 1} if start < len(text) and contains(node, text[start]) else set()
        if isinstance(node, Alt):
            return set().union(*(end_positions(child, start) for child in node.children))
        if isinstance(node, Ref):
            return set(ends_by_start.setdefault((node.name, start), set()))
        positions = {start}
        reached = set()
        children: Iterator[Node] = iter(
            node.children if isinstance(node, Seq) else [node.child] * node.low
        )
        for child in children:
            positions = set().union(*(end_positions(child, position) for position in positions))
        if isinstance(node, Seq):
            return positions
        for _ in range(len(text) + 1 if node.high is None else node.high - node.low):
            reached |= positions
            positions = set().union(*(end_positions(node.child, start) for start in positions))
        return reached | positions

    def size() -> int:
        return sum(map(len, ends_by_start.values())) + len(ends_by_start)

    previous_size = -1
    while previous_size != (previous_size := size()):
        for name, start in list(ends_by_start):
            ends_by_start[name, start] |= end_positions(rules[name], start)
    return len(text) in ends_by_start["root", 0]


def test_random_grammars_match_a_reference_parser():
    rng = random.Random(0)
    num_accepted = 0
    num_refused = 0
    for _ in range(cases(600, 100)):
        names = ["root", "x", "y", "z"][: rng.randint(2, 4)]
        grammar = "\n".join(
            f"{name} ::= {random_expression(rng, rng.randint(1, 3), names)}"
            f" | {random_expression(rng, 1, names)}"
            for name in names
        )
        rules = parse(grammar)
        grammar_matcher = make_matcher(grammar)
        texts = set()
        for _ in range(6):
            try:
                text = random_text(rng, rules, Ref("root"), [60])[:12]
            except RecursionError:
                continue
            position = rng.randint(0, len(text))
            texts |= {
                text,
                text[:position] + rng.choice("abcd") + text[position + 1 :],
                text[:position] + text[position + 1 :],
            }
        for text in sorted(texts):
            expected = matches(rules, text)
            assert accepts(grammar_matcher, text) == expected, (grammar, text)
            num_accepted = num_accepted + expected
            num_refused = num_refused + (not expected)
    assert num_accepted > 300 and num_refused > 300
