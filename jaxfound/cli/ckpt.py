"""`jaxfound ckpt`: what checkpoints a run has on each tier, whether they are whole, and copies."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.config.train import CheckpointConfig

ckpt_app = typer.Typer(help="List, verify, fetch and copy the checkpoints of a run.")

TIERS = ("local", "shared", "remote", "all")
RunArgument = Annotated[
    Path, typer.Argument(help="The run's folder, or a folder of checkpoints.", metavar="RUN")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON list instead of a table.")]
TierOption = Annotated[str, typer.Option(help="local, shared, remote, or all.")]


@dataclass(frozen=True)
class Row:
    """One checkpoint on one tier, as the table shows it.

    Attributes:
        step: what it is called; its number, or the name of something unfinished.
        tier: local, shared or remote.
        state: committed, part 0 of 2, unfinished …; after a verification intact or damaged.
        num_bytes: of all its files; 0 when unknown.
        layout: the mesh that saved it.
        attempt: the start of the program that saved it.
        where: folder or URL.
        faults: what is wrong with it.
    """

    step: str
    tier: str
    state: str
    num_bytes: int
    layout: str
    attempt: str
    where: str
    faults: tuple[str, ...] = ()


@ckpt_app.command("ls")
def list_command(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of RUN on every tier that its config names; nothing is verified."""
    found = list(rows_of(run))
    show(found, as_json=as_json, title=str(run))


@ckpt_app.command("verify")
def verify_command(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="This step only.")] = None,
    tier: TierOption = "all",
    as_json: JsonOption = False,
) -> None:
    """Sum every file of RUN's checkpoints; exit 1 if one is not as it was written."""
    from jaxfound.resources.checkpoint import CheckpointError

    if tier not in TIERS:
        raise CheckpointError(f"--tier takes {', '.join(TIERS)}; got {tier!r}")
    wanted = [
        row
        for row in rows_of(run)
        if tier in ("all", row.tier) and (step is None or row.step == str(step))
    ]
    if not wanted:
        of = "" if step is None else f" {step}"
        raise CheckpointError(f"{run} has no checkpoint{of} on tier {tier}; see jaxfound ckpt ls")
    verified = [verify(row) for row in wanted]
    show(verified, as_json=as_json, title=str(run))
    if any(row.faults for row in verified):
        raise typer.Exit(1)


@ckpt_app.command("pull")
def pull_command(
    source: Annotated[str, typer.Argument(help="RUN, a folder of checkpoints, or a URL.")],
    destination: Annotated[Path, typer.Argument(help="Folder that gets the step.")],
    step: Annotated[int | None, typer.Option(help="Which; the newest by default.")] = None,
) -> None:
    """Copy one committed step from SOURCE into DESTINATION, verified, whole or not at all."""
    from jaxfound.resources.checkpoint import CheckpointError, remote
    from jaxfound.resources.checkpoint.tiers import SharedTier

    is_url = "://" in source
    folder = checkpoints_in(Path(source))
    known = remote.committed(source) if is_url else SharedTier(folder).committed()
    chosen = max((key.step for key in known), default=None) if step is None else step
    if chosen not in {key.step for key in known}:
        wanted = "committed checkpoint" if chosen is None else f"committed step {chosen}"
        raise CheckpointError(f"{source} holds no {wanted}; it has {sorted(k.step for k in known)}")
    if is_url:
        done = remote.pull(source, chosen, into=destination)
    else:
        done = remote.copy(folder / str(chosen), into=destination)
    open_console().print(f"{done}")


@ckpt_app.command("export")
def export_command(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="New folder.", metavar="OUT")],
    step: Annotated[int | None, typer.Option(help="Which; the newest intact by default.")] = None,
) -> None:
    """Write one step's state as a plain Orbax checkpoint; for published weights see `convert`."""
    import shutil

    from jaxfound.resources.checkpoint import CheckpointError, CheckpointManager
    from jaxfound.resources.checkpoint.sums import find_damage
    from jaxfound.resources.checkpoint.tiers import STATE

    if out.exists():
        raise CheckpointError(f"{out} exists already: name a new folder")
    directory = checkpoints_in(run)
    with CheckpointManager(directory, keep=0) as checkpoints:
        chosen = checkpoints.latest_good() if step is None else step
        if chosen is None:
            raise CheckpointError(f"{directory} holds no committed checkpoint")
        manifest = checkpoints.manifest(chosen)
    faults = find_damage(directory / str(chosen), manifest.files)
    if faults:
        raise CheckpointError(f"step {chosen} is damaged: {'; '.join(faults)}")
    shutil.copytree(directory / str(chosen) / STATE, out)
    open_console().print(f"step {chosen} as a plain Orbax checkpoint in {out}")


def rows_of(run: Path) -> Iterator[Row]:
    """Yield what is on each tier, nearest first, newest last.

    Raises:
        CheckpointError: if `run` is no folder.
    """
    from jaxfound.resources.checkpoint import CheckpointError

    if not run.is_dir():
        raise CheckpointError(f"{run} is no folder: name a run, e.g. runs/NAME")
    directory, cfg = checkpoints_in(run), config_of(run)
    if cfg is not None and cfg.local_dir:
        yield from local_rows(Path(cfg.local_dir), directory)
    yield from shared_rows(directory)
    if cfg is not None and cfg.remote:
        yield from remote_rows(cfg.remote)


def checkpoints_in(run: Path) -> Path:
    """Return the folder of steps of a run; a folder without `checkpoints` is one itself."""
    inside = run / "checkpoints"
    return inside if inside.is_dir() or (run / "config.yaml").exists() else run


def config_of(run: Path) -> "CheckpointConfig | None":
    """Return what the run's config says of checkpoints, None without a config."""
    from jaxfound.config.load import load

    path = run / "config.yaml"
    return load(path).checkpoint if path.exists() else None


def local_rows(local: Path, directory: Path) -> Iterator[Row]:
    """Yield the parts on this host's disk."""
    from jaxfound.resources.checkpoint.tiers import LocalTier

    if not local.is_dir():
        return
    for path, manifest in LocalTier.open(local, shared=directory).parts():
        part = manifest.part
        state = f"part {part.process} of {part.count}" if part else "committed"
        yield row_of(path, "local", state)


def shared_rows(directory: Path) -> Iterator[Row]:
    """Yield the committed steps of the run's folder, and what never became one."""
    from jaxfound.resources.checkpoint import steps

    for step in steps.committed(directory):
        yield row_of(directory / str(step), "shared", "committed")
    for path in steps.folders(directory):
        if not (steps.is_step(path) and steps.is_committed(path)):
            state = path.name.rpartition(".")[2] if "." in path.name else "unfinished"
            name = path.name.partition(".")[0]
            yield Row(name, "shared", state, 0, "", "", str(path))


def remote_rows(url: str) -> Iterator[Row]:
    """Yield the committed steps of the object store."""
    from jaxfound.resources.checkpoint import remote

    for key in sorted(remote.committed(url)):
        yield Row(str(key.step), "remote", "committed", 0, "", key.attempt, url)


def row_of(path: Path, tier: str, state: str) -> Row:
    """Return a row for the checkpoint in `path`; a manifest that cannot be read is a fault."""
    from jaxfound.resources.checkpoint import DamagedCheckpointError, manifest

    try:
        found = manifest.read_step(path.parent, int(path.name))
    except DamagedCheckpointError as error:
        return Row(path.name, tier, "damaged", 0, "", "", str(path), (str(error),))
    layout = " ".join(f"{axis}={size}" for axis, size in found.layout.items() if size > 1)
    return Row(path.name, tier, state, found.num_bytes, layout, found.attempt, str(path))


def verify(row: Row) -> Row:
    """Return the row with what is wrong with the files behind it; unfinished ones stay so."""
    from jaxfound.resources.checkpoint import manifest, remote
    from jaxfound.resources.checkpoint.sums import find_damage

    if row.faults or not (row.state == "committed" or row.state.startswith("part")):
        return row
    if row.tier == "remote":
        faults = tuple(remote.damage(row.where, int(row.step)))
    else:
        faults = tuple(find_damage(Path(row.where), manifest.read(Path(row.where)).files))
    return replace(row, state="damaged" if faults else f"{row.state}, intact", faults=faults)


def show(rows: list[Row], *, as_json: bool, title: str) -> None:
    """Print rows as a table or as JSON."""
    console = open_console()
    if as_json:
        console.print(json.dumps([asdict(row) for row in rows]), markup=False, soft_wrap=True)
        return
    if not rows:
        console.print(f"{title} has no checkpoints yet")
        return
    table = Table("step", "tier", "state", "size", "mesh", "saved by", box=None, pad_edge=False)
    for row in rows:
        size = f"{row.num_bytes / 1e6:,.1f} MB" if row.num_bytes else ""
        table.add_row(row.step, row.tier, row.state, size, row.layout, row.attempt)
    console.print(table)
    for row in rows:
        for fault in row.faults:
            console.print(f"step {row.step} ({row.tier}): {fault}", markup=False, soft_wrap=True)
