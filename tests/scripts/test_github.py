"""What `.github/` asks for exists: targets of the Makefile, files, and commands."""

import re
from pathlib import Path

import pytest
import yaml

import quire
from quire.__main__ import COMMANDS

ROOT = Path(quire.__file__).resolve().parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [
    path
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    if path.stem != "config"
]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", WORKFLOWS, ids=name)
def test_a_workflow_calls_what_there_is(path):
    told = yaml.safe_load(path.read_text())
    assert told["permissions"] == {"contents": "read"}, "a change of a stranger gets no more"
    lines = [step["run"] for job in told["jobs"].values() for step in job["steps"] if "run" in step]
    assert lines
    for line in lines:
        first, *words = line.split()
        if first == "make":
            assert TARGETS.issuperset(word for word in words if "=" not in word), line
        elif first == "bash":
            assert (ROOT / words[0]).is_file(), line
        else:
            assert first == ".venv/bin/quire", line
            assert words[0] in COMMANDS, line


def test_each_change_is_tested_on_the_oldest_python_that_is_promised():
    told = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    versions = told["jobs"]["linux"]["strategy"]["matrix"]["python"]
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert versions[0] == oldest
    assert {True, "on"} & set(told), "`on` is a truth value to YAML 1.1"


@pytest.mark.parametrize("path", FORMS, ids=name)
def test_a_form_asks_for_commands_that_there_are(path):
    told = yaml.safe_load(path.read_text())
    assert told["name"] and told["description"]
    ids = [field["id"] for field in told["body"]]
    assert len(ids) == len(set(ids))
    found = re.findall(r"`quire ([\w-]+)", path.read_text())
    assert found and set(found) <= set(COMMANDS)
