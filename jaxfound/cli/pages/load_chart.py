"""The picture of load tests: how throughput and waiting grow with the load."""

from collections.abc import Sequence
from pathlib import Path

from jaxfound.cli.pages.picture import open_pyplot, save
from jaxfound.serving.load_report import LoadReport

THROUGHPUT, FIRST, TOKEN = "#0072b2", "#d55e00", "#009e73"


def write_chart(found: Sequence[LoadReport], path: Path, *, title: str) -> None:
    """Draw tokens a second, and the median and 99th percentile of both waits, as a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = open_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    names = [report.name.replace(" ", "\n", 1) for report in found]
    left.bar(names, [report.token_rate for report in found], color=THROUGHPUT)
    left.set(ylabel="tokens/s", title="Throughput")
    for label, colour, spreads in (
        ("first token", FIRST, [report.first_token_s for report in found]),
        ("each token after it", TOKEN, [report.per_token_s for report in found]),
    ):
        right.plot(names, [1e3 * s.p50 for s in spreads], "o-", color=colour, label=label)
        right.plot(
            names, [1e3 * s.p99 for s in spreads], "o:", color=colour, label="99th percentile"
        )
    right.set(yscale="log", ylabel="ms", title="Waiting: median, and 99th percentile dotted")
    right.grid(visible=True, which="both", linewidth=0.3, alpha=0.5)
    right.legend(fontsize=8, frameon=False)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=11)
    save(figure, path)
