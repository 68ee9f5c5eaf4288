"""Makefile targets, files and commands that `.github/` names exist."""

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


def path_stem(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", WORKFLOWS, ids=path_stem)
def test_workflows_call_existing_targets_and_commands(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}, "pull requests get no more permissions"
    lines = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
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


def test_ci_runs_all_parts_of_a_check_with_the_oldest_supported_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert {True, "on"} & set(workflow), "YAML 1.1 reads `on` as a boolean"
    job = workflow["jobs"]["check"]
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert job["steps"][1]["with"]["python-version"] == oldest
    parts = " ".join(job["strategy"]["matrix"]["part"])
    assert {"lint", "check-clients", "check-parity", "real-small"} <= set(parts.split())
    elsewhere = {"clients", "parity", "real", "support", "__pycache__"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - elsewhere
    assert set(re.findall(r"tests/(\w+)", parts)) - {"test_"} == folders
    assert "tests/test_*.py" in parts


@pytest.mark.parametrize("path", FORMS, ids=path_stem)
def test_issue_forms_name_existing_commands(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    commands = re.findall(r"`quire ([\w-]+)", path.read_text())
    assert commands and set(commands) <= set(COMMANDS)
