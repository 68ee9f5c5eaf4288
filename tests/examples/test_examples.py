"""The programs in `examples/` run unchanged and print what their docstrings describe."""

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


def run_example(name: str, *arguments: str) -> list[str]:
    """Runs an example and returns the lines that it prints."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.splitlines()


@pytest.mark.slow
def test_batch():
    lines = run_example("batch")
    starts = [line.split("|")[0] for line in lines if "|" in line]
    assert starts == ["Once upon a time", "Long ago", "One day, a fox", "In a small village"]
    assert re.fullmatch(r"4 answers, 128 tokens, \d+ tokens a second", lines[-1])


@pytest.mark.slow
def test_stream():
    text = "\n".join(run_example("stream"))
    pieces = re.findall(r"^(fox|sea): (.*)$", text, re.MULTILINE)
    texts = {
        name: "".join(
            ast.literal_eval(piece) for stream_name, piece in pieces if stream_name == name
        )
        for name in ("fox", "sea")
    }
    assert text.endswith(f"One day, a fox{texts['fox']}\nFar out at sea{texts['sea']}")
    names = [name for name, _ in pieces]
    assert names != sorted(names), "the streams were not interleaved"


@pytest.mark.slow
def test_conversation():
    pattern = re.compile(r"(.*) -> (.*)    \[(\d+) of (\d+) tokens cached\]")
    matches = [pattern.fullmatch(line) for line in run_example("conversation")]
    answers = ["31 52 90", "91", "c b a", '{"name": "Anna", "age": 31, "city": "Oslo"}']
    assert [match and match[2] for match in matches] == answers
    cached_counts, prompt_counts = (
        [int(match[group]) for match in matches if match] for group in (3, 4)
    )
    assert cached_counts[0] == 0
    assert all(
        num_cached_tokens > num_prompt_tokens
        for num_prompt_tokens, num_cached_tokens in zip(
            prompt_counts, cached_counts[1:], strict=False
        )
    ), "a turn did not reuse the pages of the previous ones"


@pytest.mark.slow
def test_json_answers():
    person, shopping = run_example("json_answers")
    assert person == "Person(name='Anna', age=31, city='Oslo')"
    assert re.fullmatch(r"Shopping\(shop='(market|bakery)', items=\[[a-z', ]*\]\)", shopping)


@pytest.mark.slow
def test_tool_calls():
    with scripted_server(FORMATS) as server:
        lines = run_example("tool_calls", f"{server.url}/v1")
    assert lines == [
        'weather({"city": "Rome"}) -> 12 degrees and rain in Rome',
        'weather({"city": "Oslo"}) -> 12 degrees and rain in Oslo',
        "It is 12 degrees and rain in Rome and 12 degrees and rain in Oslo.",
    ]


@pytest.mark.slow
def test_semantic_search():
    lines = run_example("semantic_search")
    assert len(lines) == 3 * 5
    for first_line in range(0, 15, 5):
        cosines = [float(line.split()[0]) for line in lines[first_line + 1 : first_line + 5]]
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
    plain_line, speculative_line, comparison_line = run_example("speculation")
    assert re.fullmatch(r"plain +\d+ tokens a second", plain_line)
    match = re.fullmatch(
        r"speculative +\d+ tokens a second, (\d+) of (\d+) drafts were right", speculative_line
    )
    assert match and 0 < int(match[1]) <= int(match[2])
    assert comparison_line == "the answers are the same"


@pytest.mark.slow  # two models
def test_quantisation():
    rows = [re.split(r"  +", line.strip()) for line in run_example("quantisation")]
    assert [row[0] for row in rows] == ["original", "four bits"]
    sizes = [float(row[1].removesuffix(" MiB")) for row in rows]
    assert sizes[1] < sizes[0] / 2
    assert all(float(row[2]) < 0 for row in rows)
    assert [row[3] for row in rows] == ["31 52 90", "31 52 90"]


def test_shared_document():
    pattern = re.compile(r"(\w+) +(\d+) of (\d+) tokens cached, +[\d.]+ ms   - (\w+): (\w+)")
    matches = [pattern.fullmatch(line) for line in run_example("shared_document")]
    assert all(match and match[1] == match[4] for match in matches)
    assert [match[5] for match in matches if match] == ["farm", "moon", "key"]
    first_cached, *later_cached = [int(match[2]) for match in matches if match]
    assert first_cached == 0
    assert min(later_cached) > 300


def test_perplexity():
    familiar_line, least_expected_line, strange_line, _ = run_example("perplexity")
    familiar_perplexity, strange_perplexity = (
        float(line.split()[0]) for line in (familiar_line, strange_line)
    )
    assert 1 < familiar_perplexity < strange_perplexity
    assert re.fullmatch(r" +least expected: '.*', in place of '.*'", least_expected_line)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_are_short_documented_and_tested(path):
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert "Prints" in docstring or "prints" in docstring
    assert f"python examples/{path.name}" in docstring
    assert len(text.splitlines()) <= 60
    assert f"test_{path.stem}" in globals(), f"no test runs {path.name}"
