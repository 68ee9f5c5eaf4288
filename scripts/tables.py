"""Text tables for command output."""


def length_name(tokens: int | None) -> str:
    if tokens is None:
        return "all"
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def table(head: tuple, rows: list[tuple]) -> str:
    """Format columns with headings: the first left-aligned, others right-aligned."""
    cells = [tuple(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "   ".join(
            (
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            )
        )
        for row in cells
    )
