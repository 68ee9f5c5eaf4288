"""GBNF: every feature that llama.cpp's grammars use, and random grammars against a reading of them
by hand.
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

# By the features of the grammars that llama.cpp publishes, and of those that it makes from JSON
# schemas.
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
    ('root ::= root "a" | "b"', ["b", "baa"], ["", "a", "ab"]),  # to the left
    # what the letters take is not lost
    ('root ::= [a-z]+ "x" root?', ["abx", "xxx", "abxcdx"], ["x", "ab"]),
    ('root ::= "a" ("bc" | "b" root)', ["abc", "ababc"], ["ab"]),
    ('root ::= ("a" "")* ""', ["", "aaa"], ["b"]),
    ('#first\r\nroot ::= "a"\r\n#last', ["a"], ["a\r"]),
]
TOKENIZER = llguidance.LLTokenizer("byte")


def matcher(grammar: str) -> llguidance.LLMatcher:
    made = llguidance.LLMatcher(
        TOKENIZER, f'%llguidance {{"no_forcing": true}}\n{to_lark(grammar)}', log_level=0
    )
    assert not made.is_error(), made.get_error()
    return made


def accepts(fresh: llguidance.LLMatcher, text: str) -> bool:
    trial = fresh.deep_copy()
    return all(map(trial.consume_token, text.encode())) and trial.is_accepting()


@pytest.mark.parametrize(("grammar", "right", "wrong"), GRAMMARS, ids=range(len(GRAMMARS)))
def test_every_feature_means_what_it_means_in_llama_cpp(grammar, right, wrong):
    fresh = matcher(grammar)
    assert is_gbnf(grammar)
    assert [text for text in right if not accepts(fresh, text)] == []
    assert [text for text in wrong if accepts(fresh, text)] == []


def test_a_string_is_one_lexeme_and_what_is_ambiguous_is_not():
    """One lexeme for all characters of a string is what makes a mask quick to compute."""
    lark = to_lark(JSON)
    assert lark.count("\nL") < 20 and '"\\"" ' not in lark.split("\nL0")[0]
    assert to_lark(CHESS).count("\nr") == 0  # no recursion: one lexeme
    assert "{1,})" not in to_lark('root ::= [a-z]+ "x" root?').split("\nL0")[0]


@pytest.mark.parametrize(
    ("grammar", "says"),
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
def test_a_mistake_is_named_with_its_line_and_column(grammar, says):
    with pytest.raises(GrammarError) as caught:
        to_lark(grammar)
    assert says in str(caught.value)


def test_braces_are_read_in_linear_time():
    """White space without a closing brace: 4,000 spaces took 4,000^4 steps."""
    for spaces in (" " * 16_000, "\n" * 16_000, "1" + " " * 16_000, "1," + " " * 16_000):
        with pytest.raises(GrammarError, match="a repetition is"):
            parse('root ::= "a"{' + spaces)
    assert parse('root ::= "a"{ 1 , 2 }')["root"].high == 2


def test_lark_is_told_from_gbnf():
    assert not is_gbnf('start: a\na: "::="') and not is_gbnf('// x ::= y\nstart: "a"')
    assert is_gbnf('# a comment\n\n root::="a"') and is_gbnf('root := "a"\nx ::= "b"')


def drawn(rng: random.Random, depth: int, names: list[str]) -> str:
    """A random expression over a, b and c, of a kind that is often ambiguous."""
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        text = '"' + "".join(rng.choices("abc", k=rng.randint(0, 3))) + '"'
        return rng.choice(
            [text, rng.choice(["[ab]", "[a-c]", "[^a]", "[bc]", "."]), rng.choice(names)]
        )
    if kind < 0.6:
        return " ".join(drawn(rng, depth - 1, names) for _ in range(rng.randint(1, 3)))
    if kind < 0.8:
        return f"({' | '.join(drawn(rng, depth - 1, names) for _ in range(rng.randint(2, 3)))})"
    return f"({drawn(rng, depth - 1, names)}){rng.choice(['*', '+', '?', '{2}', '{1,2}', '{0,2}', '{2,}'])}"


def written(rng: random.Random, rules: dict[str, Node], node: Node, left: list[int]) -> str:
    """A random text of a node, of at most so many steps."""
    left[0] -= 1
    if left[0] < 0:
        raise RecursionError
    if isinstance(node, Chars):
        return rng.choice([letter for letter in "abcd" if within(node, letter)])
    if isinstance(node, Seq):
        return "".join(written(rng, rules, part, left) for part in node.children)
    if isinstance(node, Alt):
        return written(rng, rules, rng.choice(node.children), left)
    if isinstance(node, Repeat):
        times = rng.randint(node.low, node.low + 2 if node.high is None else node.high)
        return "".join(written(rng, rules, node.child, left) for _ in range(times))
    return written(rng, rules, rules[node.name], left)


def within(node: Chars, letter: str) -> bool:
    return any(low <= ord(letter) <= high for low, high in node.ranges)


def reads(rules: dict[str, Node], text: str) -> bool:
    """Whether a text is of the grammar: all places where a rule may end, until no more are
    found.
    """
    known: dict[tuple[str, int], set[int]] = {("root", 0): set()}

    def places(node: Node, at: int) -> set[int]:
        if isinstance(node, Chars):
            return {at + 1} if at < len(text) and within(node, text[at]) else set()
        if isinstance(node, Alt):
            return set().union(*(places(part, at) for part in node.children))
        if isinstance(node, Ref):
            return set(known.setdefault((node.name, at), set()))
        now = {at}
        after = set()
        parts: Iterator[Node] = iter(
            node.children if isinstance(node, Seq) else [node.child] * node.low
        )
        for part in parts:
            now = set().union(*(places(part, each) for each in now))
        if isinstance(node, Seq):
            return now
        for _ in range(len(text) + 1 if node.high is None else node.high - node.low):
            after |= now
            now = set().union(*(places(node.child, each) for each in now))
        return after | now

    before = -1
    while before != (before := sum(map(len, known.values())) + len(known)):
        for name, at in list(known):
            known[name, at] |= places(rules[name], at)
    return len(text) in known["root", 0]


def test_random_grammars_take_what_a_reading_by_hand_takes():
    rng = random.Random(0)
    taken = 0
    refused = 0
    for _ in range(cases(600, 100)):
        names = ["root", "x", "y", "z"][: rng.randint(2, 4)]
        grammar = "\n".join(
            f"{name} ::= {drawn(rng, rng.randint(1, 3), names)} | {drawn(rng, 1, names)}"
            for name in names
        )
        rules = parse(grammar)
        fresh = matcher(grammar)
        texts = set()
        for _ in range(6):
            try:
                text = written(rng, rules, Ref("root"), [60])[:12]
            except RecursionError:
                continue
            cut = rng.randint(0, len(text))
            texts |= {
                text,
                text[:cut] + rng.choice("abcd") + text[cut + 1 :],
                text[:cut] + text[cut + 1 :],
            }
        for text in sorted(texts):
            expected = reads(rules, text)
            assert accepts(fresh, text) == expected, (grammar, text)
            taken = taken + expected
            refused = refused + (not expected)
    assert taken > 300 and refused > 300
