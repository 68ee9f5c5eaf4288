"""The pages of the site, as Markdown: those of `docs/`, the references, and what these link to
beside.
"""

import posixpath
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .command_reference import command_pages
from .python_reference import python_page

FENCED = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$\n?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
LISTED = re.compile(r"^- \[([^\]]+)\]\(([^)\s#]+)\)", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z]+:|//")
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".yml": "yaml"}
INDEX = "docs/index.md"


class Section(NamedTuple):
    """Pages under one heading of the index: (name, path in the site)."""

    name: str
    pages: list[tuple[str, str]]


def on_site(path: str) -> str:
    """Where a file of the repository is in the site; what is no Markdown and no picture is shown by
    a page.
    """
    inside = path.removeprefix("docs/")
    return inside if path.startswith("docs/") or inside.endswith(".md") else f"files/{inside}.md"


def prose(text: str, change: Callable[[str], str]) -> str:
    """A page with what is outside of its fences changed."""
    parts = []
    end = 0
    for fence in FENCED.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def links(text: str) -> list[str]:
    """The targets in a page that are no addresses."""
    found: list[str] = []
    prose(text, lambda part: found.extend(match[2] for match in LINK.finditer(part)) or "")
    return [target for target in found if not ELSEWHERE.match(target)]


def anchors(text: str) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    found: list[str] = []
    prose(text, lambda part: found.extend(re.findall(r"^#+ (.*?)#* *$", part, re.MULTILINE)) or "")
    return {slug(heading) for heading in found}


def slug(heading: str) -> str:
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", shown).strip().lower()).replace(
        " ", "-"
    )


def target_of(source: str, target: str) -> tuple[str, str]:
    """(path in the repository, anchor) of a link that stands in a file."""
    path, _, anchor = target.partition("#")
    return (
        posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
    ), anchor


def moved(source: str, text: str) -> str:
    """A file's text with its links as they are in the site."""
    here = posixpath.dirname(on_site(source))

    def follow(match: re.Match) -> str:
        if ELSEWHERE.match(match[2]) or match[2].startswith("#"):
            return match[0]
        path, anchor = target_of(source, match[2])
        there = posixpath.relpath(on_site(path), here or ".")
        return f"{match[1]}{there}{'#' if anchor else ''}{anchor}{match[3]}"

    return prose(text, lambda part: LINK.sub(follow, part))


def shown(path: str, text: str) -> str:
    """A page that shows a file."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {Path(path).name}\n\n`{path}` in the repository:\n\n~~~~{language}\n{text}~~~~\n"


def reached(root: Path) -> Iterator[str]:
    """The files of the documentation, and those that it links to."""
    left = [
        path.relative_to(root).as_posix()
        for path in sorted((root / "docs").iterdir())
        if path.is_file()
    ]
    seen = set(left)
    while left:
        path = left.pop(0)
        yield path
        if path.endswith(".md"):
            found = dict.fromkeys(
                target_of(path, target)[0] for target in links((root / path).read_text())
            )
            new = [each for each in found if each not in seen and (root / each).is_file()]
            left += new
            seen.update(new)


def all_pages(root: Path) -> dict[str, str | bytes]:
    """Every file of the site by its path."""
    found: dict[str, str | bytes] = {}
    for path in reached(root):
        if path.startswith("docs/") and not path.endswith(".md"):
            found[on_site(path)] = (root / path).read_bytes()
        else:
            text = (root / path).read_text()
            found[on_site(path)] = moved(path, text) if path.endswith(".md") else shown(path, text)
    return found | references()


def references() -> dict[str, str]:
    return {"reference/python.md": python_page()} | {
        f"reference/{name}.md": text for name, text in command_pages().items()
    }


def sections(root: Path) -> list[Section]:
    """The order of the site: that of the index, and then the references."""
    text = (root / INDEX).read_text()
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    found = [
        Section(
            name,
            [
                (title, on_site(target_of(INDEX, target)[0]))
                for title, target in LISTED.findall(part)
            ],
        )
        for name, part in zip(parts[1::2], parts[2::2], strict=True)
    ]
    commands = [(f"quire {name}", f"reference/{name}.md") for name in command_pages()]
    return [
        *(each for each in found if each.pages),
        Section("Reference", [("Python", "reference/python.md"), *commands]),
    ]


def write(root: Path, folder: Path) -> Mapping[str, str | bytes]:
    """All pages as files of a folder."""
    pages = all_pages(root)
    for path, content in pages.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return pages
