"""Plots of benchmark results, drawn on matplotlib figures of the caller."""

from collections.abc import Mapping, Sequence
from typing import Any

from .metrics import percentile

BLUE = "#2a6fbb"
ORANGE = "#d9762b"
GREEN = "#3a9a6b"
PURPLE = "#7f63b8"
GREY = "#6b7280"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
SMALL = 8


def distributions(
    figure,
    values: Mapping[str, Sequence[float]],
    names: Mapping[str, str],
    limits: Mapping[str, float],
    title: str,
) -> None:
    """Plot the cumulative distribution of each metric with its percentiles and limit."""
    measured = {metric: metric_values for metric, metric_values in values.items() if metric_values}
    columns = 2 if len(measured) in (2, 4) else max(len(measured), 1)
    rows = -(-max(len(measured), 1) // columns)
    figure.set_size_inches(4.2 * columns, 3.1 * rows + 0.4)
    figure.suptitle(title, fontsize=10)
    for place, (metric, metric_values) in enumerate(measured.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        ordered = sorted(metric_values)
        colour = COLOURS[place % len(COLOURS)]
        cumulative(axes, ordered, colour)
        for name, level, mark in (("median", 50, "o"), ("P90", 90, "s"), ("P99", 99, "^")):
            value = percentile(ordered, level)
            axes.plot(
                [value], [level], mark, color=colour, markersize=5, label=f"{name} {value:,.1f}"
            )
        if metric in limits:
            axes.axvline(
                limits[metric],
                color=GREY,
                linestyle="--",
                linewidth=1,
                label=f"limit {limits[metric]:g}",
            )
        axes.set_xlabel(f"{names[metric]}, ms")
        axes.set_ylabel("% at most this" if place % columns == 0 else "")
        axes.legend(fontsize=SMALL, loc="lower right", handlelength=1)
        plain(axes)


def cumulative(axes, ordered: Sequence[float], colour: str, **options: Any) -> None:
    """Plot the percentage of values that are at most x."""
    last = max(len(ordered) - 1, 1)
    axes.plot(
        ordered,
        [100 * i / last for i in range(len(ordered))],
        color=colour,
        linewidth=1.5,
        **options,
    )
    axes.set_ylim(0, 103)
    # Cut the axis where a few outliers would squeeze all other values to the left edge.
    p995 = percentile(ordered, 99.5)
    if ordered[-1] > 3 * max(p995, 1e-9):
        axes.set_xlim(0, 1.5 * p995)
        axes.annotate(
            f"longest {ordered[-1]:,.0f} →",
            (0.99, 0.6),
            xycoords="axes fraction",
            ha="right",
            fontsize=SMALL,
        )


def throughput(figure, points: Sequence[Mapping[str, Any]], name: str, bandwidth: float) -> None:
    """Plot throughput and decode step time by concurrency; for a single level, the distribution of
    its decode step times with the roofline.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    roof = f"roof: reading at {bandwidth / 1e9:.1f} GB/s"
    with_steps = [point for point in points if point["decode"] is not None]
    if len(points) == 1:
        figure.set_size_inches(6.4, 4)
        axes = figure.add_subplot()
        axes.set_title(
            f"{name}: decode steps, {points[0]['concurrency']} requests at once", fontsize=10
        )
        one_level(axes, points[0], roof)
        return
    figure.set_size_inches(9.6, 4)
    figure.suptitle(name, fontsize=10)
    rate_axes, step_axes = figure.subplots(1, 2)
    levels = [point["concurrency"] for point in points]
    rates = [point["output_throughput"] for point in points]
    rate_axes.plot(levels, rates, "o-", color=BLUE, label="measured")
    for level, rate in zip(levels, rates, strict=True):
        rate_axes.annotate(
            f"{rate:,.0f}",
            (level, rate),
            (0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=SMALL,
        )
    rate_axes.set_ylabel("output tokens a second")
    decode = [(point["concurrency"], point["decode"]) for point in with_steps]
    if decode:
        at = [level for level, _ in decode]
        best = [d["sequences"] / d["roof_ms"] * 1000 for _, d in decode]
        rate_axes.plot(at, best, "--", color=GREY, label=roof)
        step_axes.fill_between(
            at,
            [d["p10_ms"] for _, d in decode],
            [d["p90_ms"] for _, d in decode],
            color=BLUE,
            alpha=0.15,
            linewidth=0,
            label="P10 to P90",
        )
        step_axes.plot(
            at,
            [d["mean_ms"] for _, d in decode],
            "o-",
            color=BLUE,
            label="mean, and its share of the roof",
        )
        step_axes.plot(at, [d["roof_ms"] for _, d in decode], "--", color=GREY, label="roof")
        for level, d in decode:
            step_axes.annotate(
                f"{d['roof_share']:.0%}",
                (level, d["mean_ms"]),
                (0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=SMALL,
            )
    step_axes.set_ylabel("decode step, mean, ms")
    for axes in (rate_axes, step_axes):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(levels, [f"{level}" for level in levels])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.10g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("requests at once")
        axes.margins(x=0.08, y=0.12)
        axes.legend(
            fontsize=SMALL,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=3,
            frameon=False,
            columnspacing=1.2,
        )
        plain(axes)


def one_level(axes, point: Mapping[str, Any], roof: str) -> None:
    """Plot the distribution of a run's decode step times, with the roofline."""
    decode = point["decode"]
    if decode is None:
        axes.text(0.5, 0.5, "no step only decoded", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    cumulative(axes, sorted(decode["steps_ms"]), BLUE, label="decode steps")
    axes.axvline(
        decode["mean_ms"], color=BLUE, linestyle=":", label=f"mean {decode['mean_ms']:.2f} ms"
    )
    axes.axvline(
        decode["roof_ms"],
        color=GREY,
        linestyle="--",
        label=f"{roof}, {decode['roof_ms']:.2f} ms ({decode['roof_share']:.0%})",
    )
    axes.set_xlim(left=0)
    axes.set_xlabel("decode step, ms")
    axes.set_ylabel("% at most this")
    axes.legend(fontsize=SMALL, loc="lower right")
    plain(axes)


def stages(
    figure, stage_ends: Mapping[str, Sequence[float]], names: Sequence[str], title: str
) -> None:
    """Plot stacked bars of stages; `stage_ends` holds the end of each stage in seconds, by bar."""
    figure.set_size_inches(7.5, 1.3 + 0.7 * len(stage_ends))
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    rows = list(stage_ends)[::-1]
    for place, name in enumerate(names):
        starts = [stage_ends[row][place - 1] if place else 0.0 for row in rows]
        widths = [stage_ends[row][place] - begin for row, begin in zip(rows, starts, strict=True)]
        axes.barh(
            rows, widths, left=starts, height=0.55, color=COLOURS[place % len(COLOURS)], label=name
        )
    for row in rows:
        axes.annotate(
            f"{stage_ends[row][-1]:.2f} s",
            (stage_ends[row][-1], row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
        )
    axes.set_xlim(0, 1.12 * max(ends_of_row[-1] for ends_of_row in stage_ends.values()))
    axes.set_xlabel("seconds from process start")
    axes.legend(
        fontsize=SMALL,
        ncols=len(names),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3 if len(rows) < 3 else -0.2),
        frameon=False,
    )
    plain(axes)
    axes.grid(axis="y", visible=False)


def simulation(figure, looks: Sequence[Any], max_requests: int, title: str) -> None:
    """Plot batch size, queue length, page usage and preemptions over a simulation's time."""
    figure.set_size_inches(8.4, 6.4)
    figure.suptitle(title, fontsize=10)
    times = [look.now for look in looks]
    panels = (
        ("sequences in the batch", [look.running for look in looks], BLUE, max_requests),
        ("waiting requests", [look.waiting for look in looks], ORANGE, None),
        ("pages in use, %", [100 * look.pages for look in looks], GREEN, 100),
        ("preemptions so far", [look.preemptions for look in looks], PURPLE, None),
    )
    for place, (name, values, colour, limit) in enumerate(panels):
        axes = figure.add_subplot(2, 2, place + 1)
        axes.fill_between(times, values, color=colour, alpha=0.25, linewidth=0)
        axes.plot(times, values, color=colour, linewidth=1)
        if limit is not None:
            axes.axhline(limit, color=GREY, linestyle="--", linewidth=1)
        axes.set_ylim(0, 1.08 * max([limit or 0, 1, *values]))
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_title(name, fontsize=SMALL + 1, loc="left")
        axes.set_xlabel("seconds" if place > 1 else "")
        plain(axes)


def plain(axes) -> None:
    axes.grid(color="#e5e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL)
