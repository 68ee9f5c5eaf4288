"""Markdown tables."""

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """Escape text for a table cell; only backquotes keep their meaning."""
    segments = text.replace("|", "&#124;").split("`")
    segments[::2] = [
        segment.replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
        for segment in segments[::2]
    ]
    return " ".join("`".join(segments).split())


def code(text: str) -> str:
    """Format code for a table cell; the code may contain `|`, which separates cells."""
    if "|" not in text:
        return f"`{text}`" if text else ""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    for sign in "*_[`":
        escaped = escaped.replace(sign, f"&#{ord(sign)};")
    return f"<code>{escaped}</code>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
