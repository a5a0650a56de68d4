"""`jaxfound verify` and `verify-stack`: proofs on this machine, of a layout and of the stack."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.console import ConfigPath, Overrides, open_console

if TYPE_CHECKING:
    from jaxfound.config.parallel import AxisName
    from jaxfound.config.run import RunConfig
    from jaxfound.training.verify import Finding

MESH_HELP = "Degrees in place of the config's, e.g. fsdp=2,expert=2,tensor=2."
HERE_HELP = "On the devices of this machine, e.g. its GPUs, in place of virtual CPU devices."
WHOLE_HELP = "CONFIG's own sizes and formats in place of a small model in float32."
LATTICE_HELP = "Check every layout of up to eight devices instead: slice I of N, 1/1 for all."
# Up to so many virtual devices a layout is tried as it is; above, axes keep their smallest factor.
MOST_DEVICES = 16
# Virtual devices of the CPU for what needs several.
STACK_CPU_DEVICES = 8
LATTICE_DEVICES = 8


def verify_command(
    config: ConfigPath,
    overrides: Overrides = None,
    mesh: Annotated[str | None, typer.Option(help=MESH_HELP, metavar="AXIS=N,...")] = None,
    here: Annotated[bool, typer.Option("--here", help=HERE_HELP)] = False,
    whole: Annotated[bool, typer.Option("--whole", help=WHOLE_HELP)] = False,
    lattice: Annotated[str | None, typer.Option(help=LATTICE_HELP, metavar="I/N")] = None,
    out: Annotated[
        Path, typer.Option(help="With --lattice: file that its results are added to.")
    ] = Path("runs/lattice.json"),
) -> None:
    """Check a layout against one device, on virtual CPU devices and a small model.

    The model keeps its structure and gets small sizes. Exits with 1 when something does not hold.
    On a machine with several GPUs `--here --whole` checks the run itself, on them.
    """
    from jaxfound.config.load import load
    from jaxfound.training.shrink import small_degrees

    cfg = load(config, overrides or ())
    if lattice is not None:
        if here or whole:
            raise typer.BadParameter(
                "the layouts of --lattice are tried with a small model on virtual CPU devices: "
                "leave --here and --whole out, or name one layout with --mesh",
                param_hint="--lattice",
            )
        if not report_lattice(cfg, part=slice_of(lattice), out=out):
            raise typer.Exit(1)
        return
    asked = degrees_of(cfg) if mesh is None else parsed(mesh)
    degrees = asked if here else small_degrees(asked, most=MOST_DEVICES)
    console = open_console()
    if degrees != asked:
        console.print(
            f"{degrees_text(asked)} has more than {MOST_DEVICES} devices: each axis keeps its "
            "smallest factor",
            markup=False,
        )
    order = f", {cfg.parallel.schedule}" if degrees["pipeline"] > 1 else ""
    console.print(f"{degrees_text(degrees)}{order} against one device", markup=False)
    if not report(cfg, degrees, here=here, whole=whole):
        raise typer.Exit(1)


def verify_stack_command(
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("runs/stacks"),
) -> None:
    """Check JAX, its driver and this machine's devices against what the code relies on.

    Writes one result file for each combination of them. Run it before a package's pin moves.
    Exits with 1 when something does not hold.
    """
    from jaxfound.resources.platform import use_virtual_cpus
    from jaxfound.training.verify_stack import stack_name, verify_stack, write_findings

    use_virtual_cpus(STACK_CPU_DEVICES)
    console = open_console()
    console.print(stack_name(), markup=False)
    found = print_findings(verify_stack())
    console.print(f"written to {write_findings(found, out)}", markup=False)
    if not all(finding.holds for finding in found):
        raise typer.Exit(1)


def report(
    cfg: "RunConfig", degrees: "dict[AxisName, int]", *, here: bool = False, whole: bool = False
) -> bool:
    """Print each finding when it is known; return whether all hold."""
    from jaxfound.resources.platform import use_virtual_cpus
    from jaxfound.training.verify import verify

    num_devices = math.prod(degrees.values())
    if here:
        check_devices(num_devices)
    else:
        use_virtual_cpus(num_devices, alone=True)
    found = print_findings(verify(cfg, degrees, whole=whole))
    return all(finding.holds for finding in found)


def check_devices(num_wanted: int) -> None:
    """Say on what devices a layout is tried.

    Raises:
        typer.BadParameter: there are too few of them.
    """
    from jaxfound.resources.platform import devices_here

    num_here, kind = devices_here()
    if num_here < num_wanted:
        raise typer.BadParameter(
            f"the mesh has {num_wanted} devices, and here are {num_here} x {kind}. Ask for fewer "
            "with --mesh, or leave --here out to use virtual CPU devices",
            param_hint="--here",
        )
    open_console().print(f"on {num_wanted} x {kind}", markup=False)


def report_lattice(cfg: "RunConfig", *, part: tuple[int, int], out: Path) -> bool:
    """Print a line for each layout of a slice, write their file, and return whether all hold."""
    from jaxfound.resources.platform import use_virtual_cpus
    from jaxfound.training.lattice import layout_text, verify_lattice, write_lattice

    use_virtual_cpus(LATTICE_DEVICES, alone=True)
    console, kept = open_console(), []
    for parallel, found in verify_lattice(cfg, part=part):
        failed = [finding for finding in found if not finding.holds]
        mark = "FAILS" if failed else "holds"
        console.print(f"  {mark}  {layout_text(parallel)}", markup=False)
        for finding in failed:
            console.print(f"         {finding.question}: {finding.detail}", markup=False)
        kept.append((parallel, found))
    write_lattice(kept, out, name=cfg.name, part=part)
    console.print(f"{len(kept)} layouts, written to {out}", markup=False)
    return all(finding.holds for _, found in kept for finding in found)


def slice_of(text: str) -> tuple[int, int]:
    """Return the numbers of a text like `2/8`.

    Raises:
        typer.BadParameter: it is no slice.
    """
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise typer.BadParameter(f"{text!r} is no slice like 2/8", param_hint="--lattice")
    return int(number), int(count)


def print_findings(found: "Iterable[Finding]") -> "list[Finding]":
    """Print each finding when it is known; return them all."""
    console, kept = open_console(), []
    for finding in found:
        mark = "holds" if finding.holds else "FAILS"
        console.print(f"  {mark}  {finding.question}: {finding.detail}", markup=False)
        kept.append(finding)
    return kept


def degrees_of(cfg: "RunConfig") -> "dict[AxisName, int]":
    """Return the degrees that a config asks for; data that is left open is one replica."""
    from jaxfound.config.parallel import AXES

    data = 1 if cfg.parallel.data == "auto" else cfg.parallel.data
    return {a: data if a == "data" else getattr(cfg.parallel, a) for a in AXES}


def parsed(text: str) -> "dict[AxisName, int]":
    """Return the degrees of a text like `fsdp=2,tensor=4`; axes that are not named are 1.

    Raises:
        typer.BadParameter: an axis or a number cannot be read.
    """
    from jaxfound.config.parallel import AXES

    found: dict[AxisName, int] = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in found or not number.isdigit() or int(number) < 1:
            raise typer.BadParameter(
                f"{part.strip()!r} is not AXIS=N with an axis of {', '.join(AXES)} and N from 1 on",
                param_hint="--mesh",
            )
        found[name] = int(number)
    return found


def degrees_text(degrees: "dict[AxisName, int]") -> str:
    """Return the axes above one as `fsdp=2 x tensor=4`."""
    return " x ".join(f"{a}={n}" for a, n in degrees.items() if n > 1) or "one device"
