"""The pages of the site in Markdown: `docs/`, the references, and other files that these link
to.
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
    """The pages under one heading of the index, each as (title, path in the site)."""

    name: str
    pages: list[tuple[str, str]]


def site_path(path: str) -> str:
    """The path in the site of a file of the repository. Source files become Markdown pages that
    show them.
    """
    inside = path.removeprefix("docs/")
    return inside if path.startswith("docs/") or inside.endswith(".md") else f"files/{inside}.md"


def map_prose(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the text outside of fenced code blocks."""
    pieces = []
    end = 0
    for fence in FENCED.finditer(text):
        pieces += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, change(text[end:])])


def links(text: str) -> list[str]:
    """The link targets in a page, without external URLs."""
    targets: list[str] = []
    map_prose(text, lambda body: targets.extend(match[2] for match in LINK.finditer(body)) or "")
    return [target for target in targets if not ELSEWHERE.match(target)]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub generates them."""
    headings: list[str] = []
    map_prose(
        text, lambda body: headings.extend(re.findall(r"^#+ (.*?)#* *$", body, re.MULTILINE)) or ""
    )
    return {slug(heading) for heading in headings}


def slug(heading: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", text).strip().lower()).replace(
        " ", "-"
    )


def target_of(source: str, target: str) -> tuple[str, str]:
    """Resolve a link `target` in the file `source` to (path in the repository, anchor)."""
    path, _, anchor = target.partition("#")
    return (
        posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
    ), anchor


def moved(source: str, text: str) -> str:
    """Rewrite a file's links to paths in the site."""
    source_folder = posixpath.dirname(site_path(source))

    def follow(match: re.Match) -> str:
        if ELSEWHERE.match(match[2]) or match[2].startswith("#"):
            return match[0]
        path, anchor = target_of(source, match[2])
        target_path = posixpath.relpath(site_path(path), source_folder or ".")
        return f"{match[1]}{target_path}{'#' if anchor else ''}{anchor}{match[3]}"

    return map_prose(text, lambda body: LINK.sub(follow, body))


def source_page(path: str, text: str) -> str:
    """A Markdown page that shows a source file."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {Path(path).name}\n\n`{path}` in the repository:\n\n~~~~{language}\n{text}~~~~\n"


def linked_files(root: Path) -> Iterator[str]:
    """Yield the files of `docs/` and all files that they link to, directly or indirectly."""
    pending = [
        path.relative_to(root).as_posix()
        for path in sorted((root / "docs").iterdir())
        if path.is_file()
    ]
    visited = set(pending)
    while pending:
        path = pending.pop(0)
        yield path
        if path.endswith(".md"):
            linked_paths = dict.fromkeys(
                target_of(path, target)[0] for target in links((root / path).read_text())
            )
            new = [
                path_in_repository
                for path_in_repository in linked_paths
                if path_in_repository not in visited and (root / path_in_repository).is_file()
            ]
            pending += new
            visited.update(new)


def all_pages(root: Path) -> dict[str, str | bytes]:
    """The content of every file of the site by its path."""
    content_by_path: dict[str, str | bytes] = {}
    for path in linked_files(root):
        if path.startswith("docs/") and not path.endswith(".md"):
            content_by_path[site_path(path)] = (root / path).read_bytes()
        else:
            text = (root / path).read_text()
            content_by_path[site_path(path)] = (
                moved(path, text) if path.endswith(".md") else source_page(path, text)
            )
    return content_by_path | references()


def references() -> dict[str, str]:
    return {"reference/python.md": python_page()} | {
        f"reference/{name}.md": text for name, text in command_pages().items()
    }


def sections(root: Path) -> list[Section]:
    """The navigation of the site: the sections of the index, then the references."""
    text = (root / INDEX).read_text()
    text_by_heading = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    index_sections = [
        Section(
            name,
            [
                (title, site_path(target_of(INDEX, target)[0]))
                for title, target in LISTED.findall(section_text)
            ],
        )
        for name, section_text in zip(text_by_heading[1::2], text_by_heading[2::2], strict=True)
    ]
    commands = [(f"quire {name}", f"reference/{name}.md") for name in command_pages()]
    return [
        *(section for section in index_sections if section.pages),
        Section("Reference", [("Python", "reference/python.md"), *commands]),
    ]


def write(root: Path, folder: Path) -> Mapping[str, str | bytes]:
    """Write all pages to a folder."""
    pages = all_pages(root)
    for path, content in pages.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return pages
