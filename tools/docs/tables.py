"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """Plain text for a cell, in which no sign has a meaning but backquotes."""
    parts = text.replace("|", "&#124;").split("`")
    parts[::2] = [
        part.replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_") for part in parts[::2]
    ]
    return " ".join("`".join(parts).split())


def code(text: str) -> str:
    """Code for a cell, which may have the sign that divides cells."""
    if "|" not in text:
        return f"`{text}`" if text else ""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    for sign in "*_[`":
        escaped = escaped.replace(sign, f"&#{ord(sign)};")
    return f"<code>{escaped}</code>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
