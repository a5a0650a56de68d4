"""Tables of the kernels in documents, written between markers from a results file."""

from collections.abc import Callable
from pathlib import Path

from jaxfound.cli.pages.kernel_grids import (
    Grid,
    grids,
    headline_grid,
    missing_text,
    remarks,
    target_grid,
)
from pallas_kernels.bench.results import Results

# Where the file lies that documents are written from, from the root of a checkout.
SOURCE = Path("docs/benchmarks/kernels-h200.json")


class DocumentError(ValueError):
    """A document cannot be written; the text says why."""


def markdown(grid: Grid) -> str:
    """Return `grid` as a Markdown table."""
    align = [
        ":---" if index == 0 or n in grid.names else "---:" for index, n in enumerate(grid.header)
    ]
    rows = [grid.header, tuple(align), *grid.rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def where_from(results: Results) -> str:
    """Return one sentence: on what, how often and from which source it was measured."""
    devices = dict.fromkeys(call.versions.get("device", "unknown device") for call in results.calls)
    commits = dict.fromkeys(call.commit for call in results.calls if call.commit)
    num_calls = len(results.calls)
    calls = "one call" if num_calls == 1 else f"{num_calls} calls"
    return f"One {', '.join(devices)}; {calls}; source {', '.join(commits) or 'not recorded'}."


def kernels_page(results: Results) -> str:
    """Return the measured part of the page on kernels."""
    parts = [
        f"{where_from(results)} Times are medians of interleaved rounds with a bootstrap 95 % "
        "interval; `rounds` are calls x rounds. A peer's column says how many times as long as "
        "ours it took, round by round. The floor is the larger of FLOPs and bytes at the "
        "ceilings that the same call measured."
    ]
    for grid in (*grids(results, whole=True), target_grid(results)):
        parts.append(f"### {grid.title}\n\n{markdown(grid)}")
    said = [*remarks(results), *missing_text(results)]
    if said:
        parts.append("\n".join(f"- {line}" for line in said))
    notes = dict.fromkeys(call.note for call in results.calls if call.note)
    parts += [f"> {note}" for note in notes]
    return "\n\n".join(parts)


def front_page(results: Results) -> str:
    """Return the README's table."""
    return f"{markdown(headline_grid(results))}\n\n{where_from(results)}"


PAGES: dict[str, Callable[[Results], str]] = {
    "docs/kernels.md": kernels_page,
    "README.md": front_page,
}


def between_markers(text: str, body: str, *, path: str) -> str:
    """Return the document `text` with `body` between its two markers.

    Raises:
        DocumentError: if the markers are not there, once and in order.
    """
    begin, end = "<!-- measured: begin -->", "<!-- measured: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise DocumentError(f"{path} must hold the lines {begin} and {end}, once each.")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    return f"{before}{begin}\n{body}\n{after}"


def documents(results: Results, root: Path) -> dict[Path, str]:
    """Return every document under `root` as it has to be.

    Raises:
        DocumentError: if one is missing or has no markers.
    """
    found: dict[Path, str] = {}
    for name, page in PAGES.items():
        path = root / name
        if not path.is_file():
            raise DocumentError(f"there is no {path}; run this from the root of a checkout.")
        found[path] = between_markers(path.read_text("utf-8"), page(results), path=name)
    return found
