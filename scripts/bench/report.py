"""Output of benchmark results: a table, JSON and a plot."""

import json
import math
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ... import __version__
from ...model.extras import import_extra
from .. import options as o
from ..tables import table
from .metrics import METRICS, summarise

PLOTS = (".png", ".svg", ".pdf")

OPTIONS = {
    "as_json": Annotated[
        Path | None,
        o.option(
            "Write the results as JSON to a file; - writes to stdout instead of the table.",
            o.OUTPUT,
            "FILE",
            name="--json",
        ),
    ],
    "save_result": Annotated[
        bool,
        o.option(
            "Write the results as JSON to a file named by command and time.",
            o.OUTPUT,
            name="--save-result",
        ),
    ],
    "result_filename": Annotated[
        Path | None, o.option("File name for --save-result.", o.OUTPUT, "FILE")
    ],
    "plot": Annotated[
        Path | None, o.option(f"Plot the results to a {', '.join(PLOTS)} file.", o.OUTPUT, "FILE")
    ],
}


@dataclass(frozen=True)
class ResultFiles:
    """The files to write results to, and the options to record in them."""

    command: str
    options: dict[str, Any]
    json: Path | None
    plot: Path | None

    def write(
        self, result: dict[str, Any], text: str, draw: Callable[[Any, Any], None] | None = None
    ) -> None:
        """Print the table, then write the files; the table appears even if writing fails.

        Args:
            result: The results to write as JSON.
            text: The table.
            draw: Draws the plot; called with the module `plot` and a figure.
        """
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        head = {
            "command": f"bench {self.command}",
            "date": now,
            "quire": __version__,
            "machine": machine(),
        }
        result = head | {"options": self.options} | result
        if str(self.json) == "-":
            print(json.dumps(result))
        else:
            print(text)
        try:
            if self.json is not None and str(self.json) != "-":
                self.json.write_text(json.dumps(result, indent=1) + "\n")
            if self.plot is not None and draw is not None:
                # matplotlib's object-oriented interface: no window, no global state.
                from matplotlib.figure import Figure

                from . import plot

                figure = Figure(layout="constrained", dpi=150)
                draw(plot, figure)
                figure.savefig(self.plot)
        except OSError as error:
            raise o.UsageError(f"cannot write {error.filename}: {error.strerror}") from None


def takes_report(excluded: Collection[str] = ("result_filename",)):
    """Replace a command's parameter `report` by the result file options; its value is a
    `ResultFiles`.
    """
    added = {"context": typer.Context} | {
        name: OPTIONS[name] for name in OPTIONS if name not in excluded
    }
    return o.takes("report", added, {"save_result": False}, report)


def report(
    context: typer.Context,
    save_result: bool,
    as_json: Path | None = None,
    plot: Path | None = None,
    result_filename: Path | None = None,
) -> ResultFiles:
    """Make a `ResultFiles` from the options, and check that the files can be written."""
    if save_result and as_json is not None:
        raise o.UsageError("--json and --save-result both write the results: leave one out")
    if result_filename is not None and not save_result:
        raise o.UsageError("--result-filename needs --save-result; or use --json FILE")
    if save_result:
        as_json = result_filename or Path(
            f"quire-bench-{context.info_name}-{datetime.now():%Y%m%d-%H%M%S}.json"
        )
    if plot is not None and plot.suffix.lower() not in PLOTS:
        raise o.UsageError(f"--plot is {str(plot)!r}; its name must end in {', '.join(PLOTS)}")
    if plot is not None:
        import_extra("matplotlib", "plots", "--plot")
    for path in (as_json, plot):
        if path is None or str(path) == "-":
            continue
        if not path.parent.is_dir():
            raise o.UsageError(f"cannot write {path}: there is no folder {path.parent}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise o.UsageError(
                f"cannot write {path}: {'it is a folder' if path.is_dir() else 'permission denied'}"
            )
    options = {
        name: json_value(value) for name, value in context.params.items() if value is not None
    }
    return ResultFiles(str(context.info_name), options, as_json, plot)


def json_value(value: Any) -> Any:
    """Convert a path or infinity, which JSON cannot represent, to a string."""
    return str(value) if isinstance(value, Path) or value == math.inf else value


def machine() -> dict[str, Any]:
    from ..collect_env import machine

    return {"python": sys.version.split()[0], **dict(machine())}


def latency_table(values: dict[str, list[float]], names: dict[str, str] = METRICS) -> str:
    """A table with mean, median, P90 and P99 of each metric in milliseconds."""
    rows = [
        (names[metric], *("-",) * 4)
        if summary is None
        else (
            names[metric],
            *(
                f"{value:,.2f}"
                for value in (summary.mean, summary.median, summary.p90, summary.p99)
            ),
        )
        for metric, summary in (
            (metric, summarise(metric_values)) for metric, metric_values in values.items()
        )
    ]
    return table(("ms", "mean", "median", "P90", "P99"), rows)


def rates_table(result: dict[str, Any]) -> str:
    """A table with the counts and rates of one run."""
    head = (
        "answered",
        "seconds",
        "requests/s",
        "output tokens/s",
        "total tokens/s",
        "prompt tokens",
        "output tokens",
    )
    totals = (result["total_input_tokens"], result["total_output_tokens"])
    rates = (
        result["request_throughput"],
        result["output_throughput"],
        result["total_token_throughput"],
    )
    row = (
        f"{result['completed']} of {result['completed'] + result['failed']}",
        f"{result['duration']:,.2f}",
        *(f"{rate:,.2f}" for rate in rates),
        *(f"{count:,}" for count in totals),
    )
    return table(head, [row])
