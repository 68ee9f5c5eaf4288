"""Summary of the comparison (medians, ratios, roofline shares), as a terminal table and
Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from .checkpoint import ModelShape
from .work import FILE_WORKS, WORKS, Workload

Results = Mapping[tuple[str, str], list[dict]]  # (work, engine) -> a measurement per round
Failures = Mapping[tuple[str, str], str]
FIGURES = ("rate", "first", "decode", "seconds", "memory")
NOTES = {
    "quire": (
        "with int4 and Q4_K_M rows are rounded to eight bits (`--activation-dtype int8`), as "
        "most others do"
    ),
    "vllm": "prefix cache off",
    "openvino": (
        "continuous batching pipeline, weights kept as fp16 and its own choices of "
        "precision; prefix cache off"
    ),
    "transformers": "static batches, eager; requests that arrive while one runs wait for it to end",
    "llama.cpp": (
        "its C interface, batched as its server does it; int8 is Q8_0, int4 is Q4_0; "
        "Quire reads its Q4_K_M; drafts by its binding"
    ),
}
FILE_NOTES = {
    "quire": "reads the file, without options",
    "vllm": "the dequantised weights in int4 with groups of 32, by `quire quantize`",
    "openvino": "the dequantised weights in int4 with groups of 32 and zero points, by NNCF",
    "transformers": "the dequantised weights in bfloat16; static batches, eager",
    "llama.cpp": "reads the file, through its C interface, batched as its server does it",
}


def summary(
    works: Mapping[str, Workload],
    engines: list[str],
    results: Results,
    failures: Failures,
    shape: ModelShape | None,
    bandwidth: float,
) -> dict:
    """Summarise the results by workload: for each engine its medians and rounds, or the reason that
    it failed; the best peer, and Quire's ratio to it.
    """
    result_by_work = {
        name: summarise_work(name, work, engines, results, failures, shape, bandwidth)
        for name, work in works.items()
    }
    return {name: work for name, work in result_by_work.items() if work["engines"]}


def summarise_work(
    name: str,
    work: Workload,
    engines: list[str],
    results: Results,
    failures: Failures,
    shape: ModelShape | None,
    bandwidth: float,
) -> dict:
    moved = work.must_move(shape)
    rows: dict[str, dict] = {}
    quire_tokens = (results.get((name, "quire")) or [{}])[0].get("tokens")
    for engine in engines:
        rounds = results.get((name, engine))
        if not rounds:
            if (name, engine) in failures:
                rows[engine] = {"failed": failures[name, engine]}
            continue  # neither result nor failure: the comparison was stopped before
        row: dict = {
            key: median(measurement[key] for measurement in rounds)
            for key in FIGURES
            if rounds[0].get(key) is not None
        }
        row |= {key: rounds[0][key] for key in ("identical", "of") if key in rounds[0]}
        if moved is not None:
            row["roof_share"] = moved / bandwidth / row["seconds"]
        if (
            quire_tokens and "tokens" in rounds[0] and work.weights in ("bf16", "int8")
        ):  # engines quantise these formats differently, so tokens are not comparable
            row["first_tokens_as_quire"] = [
                sum(map(int.__eq__, quire_tokens, rounds[0]["tokens"])),
                len(quire_tokens),
            ]
        if (name, engine) in failures:
            row["failed_later"] = failures[name, engine]
        row["rounds"] = [
            {key: measurement[key] for key in measurement if key != "tokens"}
            for measurement in rounds
        ]
        rows[engine] = row
    result = {"title": work.title, "must_move": moved, "engines": rows}
    peers = {
        engine: row[work.by] for engine, row in rows.items() if engine != "quire" and work.by in row
    }
    if peers and work.by in rows.get("quire", {}):
        best = (max if work.by == "rate" else min)(peers, key=peers.__getitem__)
        quire_value = rows["quire"][work.by]
        result |= {
            "best_peer": best,
            "ratio": quire_value / peers[best] if work.by == "rate" else peers[best] / quire_value,
        }
    return result


def figure_text(row: dict, by: str) -> str:
    """The figure of an engine at a workload that the ratio compares."""
    if "failed" in row:
        return "failed"
    if "identical" in row:
        return f"{row['identical']} of {row['of']}"
    return f"{row[by]:.1f}" if by == "rate" else seconds_text(row[by])


def seconds_text(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def text_or_empty(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def rich_table(report: dict):
    """A table with a row for every engine at every workload.

    If most of an engine's first tokens differ from Quire's, it runs another model.
    """
    from rich.table import Table

    table = Table(
        title=f"{report['size']}, {report['rounds']} rounds, {report['bandwidth'] / 1e9:.1f} GB/s "
        "to read"
    )
    headers = (
        "work",
        "engine",
        "tokens/s",
        "first token",
        "tokens/s a request",
        "of the roof",
        "identical",
        "first as Quire",
        "Quire / best peer",
    )
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < 2 else "right")
    for work in report["works"].values():
        table.add_section()
        for i, (engine, row) in enumerate(work["engines"].items()):
            title = work["title"] if i == 0 else ""
            if "failed" in row:
                table.add_row(title, engine, f"failed: {row['failed']}")
                continue
            table.add_row(
                title,
                engine,
                text_or_empty(row.get("rate"), "{:.1f}".format),
                text_or_empty(row.get("first"), seconds_text),
                text_or_empty(row.get("decode"), "{:.1f}".format),
                text_or_empty(row.get("roof_share"), "{:.0%}".format),
                f"{row['identical']} of {row['of']}" if "identical" in row else "",
                "{} of {}".format(*row["first_tokens_as_quire"])
                if "first_tokens_as_quire" in row
                else "",
                f"{work['ratio']:.2f}" if engine == "quire" and "ratio" in work else "",
            )
    return table


def markdown(report: dict) -> str:
    """The Markdown table for the documentation: a row per workload and a column per engine, with
    the figure that the ratio compares.
    """
    engines = list(report["versions"])
    works = WORKS if report["shape"] else FILE_WORKS
    head = [
        f"{name} {next(iter(report['versions'][name].values()), '')}".strip() for name in engines
    ]
    lines = [
        f"| {report['size']} | {' | '.join(head)} | Quire / best peer | Quire's share of the roof |",
        "|---|" + "---|" * (len(engines) + 2),
    ]
    for name, work in report["works"].items():
        rows = work["engines"]
        cells = [
            figure_text(rows[engine], works[name].by) if engine in rows else ""
            for engine in engines
        ]
        ratio = text_or_empty(work.get("ratio"), "{:.2f}".format)
        share = text_or_empty(rows.get("quire", {}).get("roof_share"), "{:.0%}".format)
        is_rate = works[name].kind == "serve" and works[name].by == "rate"
        unit = ", tokens/s" if is_rate else ""
        lines.append(f"| {work['title']}{unit} | {' | '.join(cells)} | {ratio} | {share} |")
    if not report["shape"]:
        lines += memory_and_quality_rows(report, engines)
    lines += [
        "",
        (
            f"Medians of {report['rounds']} rounds; the roof is {report['bandwidth'] / 1e9:.1f} "
            "GB/s."
        ),
    ]
    notes = NOTES if report["shape"] else FILE_NOTES
    lines += [f"- {name}: {notes[name]}." for name in engines if name in notes]
    failed = {
        (engine, row["failed"]): None
        for work in report["works"].values()
        for engine, row in work["engines"].items()
        if "failed" in row
    }
    lines += [f"- {engine} failed: {reason}" for engine, reason in failed]
    return "\n".join(lines) + "\n"


def memory_and_quality_rows(report: dict, engines: list[str]) -> list[str]:
    peaks = [
        max(
            (
                work["engines"][engine].get("memory", 0)
                for work in report["works"].values()
                if engine in work["engines"]
            ),
            default=0,
        )
        for engine in engines
    ]
    memory = [f"{peak / 2**30:.2f}" if peak else "" for peak in peaks]
    divergences = [
        text_or_empty(value, "{:.2g}".format) or "failed" * (engine in report["divergences"])
        for engine in engines
        for value in [report["divergences"].get(engine)]
    ]
    return [
        f"| peak resident memory over all of these, GiB | {' | '.join(memory)} | | |",
        f"| mean KL divergence from float32 | {' | '.join(divergences)} | | |",
    ]
