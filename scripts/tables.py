"""Tables and amounts as the commands print them."""


def amount(count: float) -> str:
    """Bytes in the largest unit that leaves at least one."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.4g} {unit}"
    return f"{count:,.0f} B"


def length_name(tokens: int | None) -> str:
    if tokens is None:
        return "all"
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def table(head: tuple, rows: list[tuple]) -> str:
    """Columns under their heads: names to the left, numbers to the right."""
    cells = [tuple(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "   ".join(
            (row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
        )
        for row in cells
    )
