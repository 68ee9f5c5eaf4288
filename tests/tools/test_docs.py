"""The documentation as a site: every link leads somewhere, every page is listed, the references
have everything.
"""

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


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def site():
    return pages.all_pages(ROOT)


def test_every_link_leads_somewhere():
    def violations(path: Path) -> Iterator[str]:
        text = path.read_text()
        for target in pages.links(text):
            there, anchor = pages.target_of(name(path), target)
            place = f"{name(path)}:{text[: text.index(f']({target}')].count(chr(10)) + 1}"
            if not (ROOT / there).exists():
                yield f"{place}: {target}: there is no {there}"
            elif anchor and anchor not in pages.anchors((ROOT / there).read_text()):
                yield f"{place}: {target}: no heading of {there} has this name"

    require_none(
        (line for path in TEXTS for line in violations(path)),
        "Links name files of the repository and headings as GitHub writes them:",
    )


def test_every_link_of_the_site_leads_to_a_page(site):
    for path, text in site.items():
        for target in pages.links(text) if isinstance(text, str) else ():
            there, anchor = pages.target_of(path, target)
            assert there in site, f"{path} links to {target}"
            assert not anchor or anchor in pages.anchors(site[there]), f"{path} links to {target}"


def test_the_index_lists_every_page(site):
    listed = [path for section in pages.sections(ROOT) for _, path in section.pages]
    assert len(listed) == len(set(listed))
    own = {path for path in site if path.endswith(".md") and not path.startswith("files/")}
    assert own - {"index.md"} - set(listed) == set(), "docs/index.md has a line for each page"
    assert set(listed) <= own


def test_what_is_no_page_is_shown_by_one(site):
    source = (ROOT / "examples" / "batch.py").read_text()
    assert f"~~~~python\n{source}~~~~" in site["files/examples/batch.py.md"]
    assert "(files/examples/batch.py.md)" in site["examples.md"]
    assert (
        "(../docs/" not in site["CONTRIBUTING.md"]
        and "(architecture.md)" in site["CONTRIBUTING.md"]
    )
    assert site["page.png"] == (ROOT / "docs" / "page.png").read_bytes()


def test_links_in_fences_are_text():
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
def test_anchors_are_github_s(heading, anchor):
    assert pages.anchors(f"## {heading}\n") == {anchor}


def test_the_python_reference_has_every_export():
    text = python_page()
    for each in quire.EXPORTS:
        assert f"\n### {each}\n" in text
        said = (getattr(quire, each).__doc__ or "").strip().splitlines()[0]
        assert said in text, f"{each} is not explained"
    for field in EngineOptions.__dataclass_fields__:
        assert f"| `{field}` |" in text
    for method in "generate chat stream embed score search sleep".split():
        assert f"\n#### LLM.{method}\n" in text
    assert "LLM.run" not in text


def test_the_command_reference_has_every_option():
    found = command_pages()
    assert list(found) == list(COMMANDS)
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

    for each, text in found.items():
        check(group.get_command(None, each), text)
