"""The programs of `examples/` run as they stand, and print what their docstrings say."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.tests.support.served import FORMATS
from quire.tests.support.talk import scripted_server

ROOT = Path(quire.__file__).resolve().parent
FILES = sorted((ROOT / "examples").glob("*.py"))


def printed(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_batch():
    lines = printed("batch")
    starts = [line.split("|")[0] for line in lines if "|" in line]
    assert starts == ["Once upon a time", "Long ago", "One day, a fox", "In a small village"]
    assert re.fullmatch(r"4 answers, 128 tokens, \d+ tokens a second", lines[-1])


@pytest.mark.slow
def test_stream():
    text = "\n".join(printed("stream"))
    pieces = re.findall(r"^(fox|sea): (.*)$", text, re.MULTILINE)
    whole = {
        name: "".join(ast.literal_eval(piece) for of, piece in pieces if of == name)
        for name in ("fox", "sea")
    }
    assert text.endswith(f"One day, a fox{whole['fox']}\nFar out at sea{whole['sea']}")
    names = [name for name, _ in pieces]
    assert names != sorted(names), "one came after the other"


@pytest.mark.slow
def test_conversation():
    form = re.compile(r"(.*) -> (.*)    \[(\d+) of (\d+) tokens cached\]")
    found = [form.fullmatch(line) for line in printed("conversation")]
    answers = ["31 52 90", "91", "c b a", '{"name": "Anna", "age": 31, "city": "Oslo"}']
    assert [match and match[2] for match in found] == answers
    cached, prompts = ([int(match[part]) for match in found if match] for part in (3, 4))
    assert cached[0] == 0
    assert all(now > before for before, now in zip(prompts, cached[1:], strict=False)), (
        "what was computed is found"
    )


@pytest.mark.slow
def test_json_answers():
    person, shopping = printed("json_answers")
    assert person == "Person(name='Anna', age=31, city='Oslo')"
    assert re.fullmatch(r"Shopping\(shop='(market|bakery)', items=\[[a-z', ]*\]\)", shopping)


@pytest.mark.slow
def test_tool_calls():
    with scripted_server(FORMATS) as server:
        lines = printed("tool_calls", f"{server.url}/v1")
    assert lines == [
        'weather({"city": "Rome"}) -> 12 degrees and rain in Rome',
        'weather({"city": "Oslo"}) -> 12 degrees and rain in Oslo',
        "It is 12 degrees and rain in Rome and 12 degrees and rain in Oslo.",
    ]


@pytest.mark.slow
def test_semantic_search():
    lines = printed("semantic_search")
    assert len(lines) == 3 * 5
    for question in range(0, 15, 5):
        cosines = [float(line.split()[0]) for line in lines[question + 1 : question + 5]]
        assert cosines == sorted(cosines, reverse=True)
        assert cosines[0] <= 1
    nearest = [line.split("  ")[-1] for line in lines[1::5]]
    assert nearest == [
        "Mia found a lantern in the forest.",
        "What is 34 + 57?",
        "Anna is 31 and lives in Oslo",
    ]


@pytest.mark.nightly  # two models
def test_speculation():
    plain, guessed, same = printed("speculation")
    assert re.fullmatch(r"plain +\d+ tokens a second", plain)
    match = re.fullmatch(
        r"speculative +\d+ tokens a second, (\d+) of (\d+) drafts were right", guessed
    )
    assert match and 0 < int(match[1]) <= int(match[2])
    assert same == "the answers are the same"


@pytest.mark.slow  # two models
def test_quantisation():
    rows = [re.split(r"  +", line.strip()) for line in printed("quantisation")]
    assert [row[0] for row in rows] == ["original", "four bits"]
    sizes = [float(row[1].removesuffix(" MiB")) for row in rows]
    assert sizes[1] < sizes[0] / 2
    assert all(float(row[2]) < 0 for row in rows)
    assert [row[3] for row in rows] == ["31 52 90", "31 52 90"]


def test_shared_document():
    form = re.compile(r"(\w+) +(\d+) of (\d+) tokens cached, +[\d.]+ ms   - (\w+): (\w+)")
    found = [form.fullmatch(line) for line in printed("shared_document")]
    assert all(match and match[1] == match[4] for match in found)
    assert [match[5] for match in found if match] == ["farm", "moon", "key"]
    first, *later = [int(match[2]) for match in found if match]
    assert first == 0
    assert min(later) > 300


def test_perplexity():
    known, least, strange, _ = printed("perplexity")
    known_perplexity, strange_perplexity = (float(line.split()[0]) for line in (known, strange))
    assert 1 < known_perplexity < strange_perplexity
    assert re.fullmatch(r" +least expected: '.*', in place of '.*'", least)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    about = ast.get_docstring(ast.parse(text)) or ""
    assert "Prints" in about or "prints" in about
    assert f"python examples/{path.name}" in about
    assert len(text.splitlines()) <= 60
    assert f"test_{path.stem}" in globals(), f"{path.name} is run by no test"
