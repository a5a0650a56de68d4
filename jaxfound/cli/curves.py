"""`jaxfound curves`: the losses of runs that read the same batches, against the first one's."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.console import open_console
from jaxfound.cli.evaluate import write_json

if TYPE_CHECKING:
    from rich.table import Table

    from jaxfound.training.curves import Curve, Paired

WITHIN_HELP = "Exit with 1 if a mean is further from BASE's than this share, e.g. 0.0025."

Base = Annotated[Path, typer.Argument(help="Folder of the run that others are held against.")]
Others = Annotated[list[Path], typer.Argument(help="Folders of other runs.", metavar="RUN...")]


def curves_command(
    base: Base,
    others: Others,
    last: Annotated[int, typer.Option(help="Steps at the end that are compared.", min=1)] = 200,
    within: Annotated[float | None, typer.Option(help=WITHIN_HELP, min=0)] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file, losses of all steps too.")] = None,
    png: Annotated[Path | None, typer.Option(help="PNG file to draw.")] = None,
) -> None:
    """Compare the end of each RUN's loss curve with BASE's, step against step.

    All must have read the same tokens at the same steps: the same bins, seed and batch. A run
    again with another order of sums, e.g. other micro-batches, shows what rounding alone does.
    """
    from jaxfound.training.curves import as_record, check_alike, paired, read_curve

    curves = [read_curve(path) for path in (base, *others)]
    check_alike(curves)
    found = paired(curves, last=last)
    console = open_console(wraps=True)
    console.print(table_of(curves, found))
    record = as_record(curves, found, last=last)
    if out is not None:
        write_json(record, out)
        console.print(f"written to {out}", markup=False)
    if png is not None:
        from jaxfound.cli.pages.curves_chart import write_chart

        write_chart(record, png)
        console.print(f"drawn to {png}", markup=False)
    beyond = [] if within is None else [one for one in found if abs(one.relative) > within]
    for one in beyond:
        console.print(f"{one.name} is {one.relative:+.3%} from {curves[0].name}", markup=False)
    if beyond:
        raise typer.Exit(1)


def table_of(curves: "list[Curve]", found: "list[Paired]") -> "Table":
    """Return a line for each run against the first one."""
    from rich.table import Table

    from jaxfound.training.curves import differences

    base = curves[0]
    table = Table("", "steps", "loss", f"above {base.name}", "95 % interval", "differs in")
    table.box, table.pad_edge = None, False
    table.add_row(base.name, "", f"{found[0].base:.5f}")
    for curve, one in zip(curves[1:], found, strict=True):
        differs = ", ".join(key for key, _ in differences(base.cfg, curve.cfg)) or "nothing"
        interval = f"{one.low:+.3%} to {one.high:+.3%}"
        relative = f"{one.relative:+.3%}"
        table.add_row(one.name, str(one.steps), f"{one.loss:.5f}", relative, interval, differs)
    return table
