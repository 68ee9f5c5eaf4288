"""The documentation site: links have targets, pages are listed, references are complete."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import quire
from quire.__main__ import COMMANDS, app
from quire.serving.api.options import EngineOptions
from quire.tests.support.violations import require_none
from tools.docs import pages
from tools.docs.command_reference import command_pages
from tools.docs.python_reference import python_page

ROOT = Path(quire.__file__).resolve().parent
TEXTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / ".github").glob("*.md")),
]


def relative_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def site():
    return pages.all_pages(ROOT)


def test_repository_links_have_targets():
    def violations(path: Path) -> Iterator[str]:
        text = path.read_text()
        for target in pages.links(text):
            file, anchor = pages.target_of(relative_name(path), target)
            place = f"{relative_name(path)}:{text[: text.index(f']({target}')].count(chr(10)) + 1}"
            if not (ROOT / file).exists():
                yield f"{place}: {target}: there is no {file}"
            elif anchor and anchor not in pages.anchors((ROOT / file).read_text()):
                yield f"{place}: {target}: no heading of {file} has this name"

    require_none(
        (line for path in TEXTS for line in violations(path)),
        "Links name files of the repository and headings as GitHub writes them:",
    )


def test_site_links_have_targets(site):
    for path, text in site.items():
        for target in pages.links(text) if isinstance(text, str) else ():
            page, anchor = pages.target_of(path, target)
            assert page in site, f"{path} links to {target}"
            assert not anchor or anchor in pages.anchors(site[page]), f"{path} links to {target}"


def test_docs_index_lists_every_page(site):
    indexed = [path for section in pages.sections(ROOT) for _, path in section.pages]
    assert len(indexed) == len(set(indexed))
    site_pages = {path for path in site if path.endswith(".md") and not path.startswith("files/")}
    assert site_pages - {"index.md"} - set(indexed) == set(), (
        "docs/index.md has a line for each page"
    )
    assert set(indexed) <= site_pages


def test_linked_source_files_become_pages(site):
    source = (ROOT / "examples" / "batch.py").read_text()
    assert f"~~~~python\n{source}~~~~" in site["files/examples/batch.py.md"]
    assert "(files/examples/batch.py.md)" in site["examples.md"]
    assert (
        "(../docs/" not in site["CONTRIBUTING.md"]
        and "(architecture.md)" in site["CONTRIBUTING.md"]
    )
    assert site["page.png"] == (ROOT / "docs" / "page.png").read_bytes()


def test_links_in_code_blocks_are_ignored():
    text = "[a](b.md)\n\n```\n[c](d.md)\n```\n\n[e](https://f.example) ![g](h.png) [i](j.md#k)\n"
    assert pages.links(text) == ["b.md", "h.png", "j.md#k"]
    assert pages.moved("docs/x.md", text.replace("b.md", "../e/b.py")) == text.replace(
        "b.md", "files/e/b.py.md"
    )


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        (
            "Paged attention (`ops/attention/hopper_kernel`)",
            "paged-attention-opsattentionhopper_kernel",
        ),
        ("`LLM`, `AsyncLLM`", "llm-asyncllm"),
        ("int8 & FP8", "int8--fp8"),
        ("See [this](that.md)", "see-this"),
    ],
)
def test_heading_anchors_match_github(heading, anchor):
    assert pages.anchors(f"## {heading}\n") == {anchor}


def test_python_reference_has_every_export():
    text = python_page()
    for export in quire.EXPORTS:
        assert f"\n### {export}\n" in text
        summary = (getattr(quire, export).__doc__ or "").strip().splitlines()[0]
        assert summary in text, f"{export} is not explained"
    for field in EngineOptions.__dataclass_fields__:
        assert f"| `{field}` |" in text
    for method in "generate chat stream embed score search sleep".split():
        assert f"\n#### LLM.{method}\n" in text
    assert "LLM.run" not in text


def test_command_reference_has_every_option():
    texts_by_command = command_pages()
    assert list(texts_by_command) == list(COMMANDS)
    group = typer.main.get_command(app)

    def check(command, text):
        for inner in getattr(command, "commands", ()):
            check(command.get_command(None, inner), text)
        for option in command.params:
            if option.param_type_name == "option" and not getattr(option, "hidden", False):
                assert max(option.opts, key=len) in text
                assert (
                    " ".join((option.help or "").split())[:20].replace("_", r"\_").split("<")[0]
                    in text
                )

    for name, text in texts_by_command.items():
        check(group.get_command(None, name), text)
