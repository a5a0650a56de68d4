"""`jaxfound convert`: published weights into a run's folder, and back."""

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.config.model import ModelConfig
    from jaxfound.config.run import RunConfig
    from jaxfound.models.weights.load import Hub
    from jaxfound.models.weights.outgoing import ExportFormat
    from jaxfound.resources.checkpoint.manifest import Manifest
    from jaxfound.resources.checkpoint.storage import StoredArray

# Folder of a run that remembers where its weights came from.
HUB = "hub"
Destination = Literal["hub", "jaxfound"]


def convert_command(
    source: Annotated[
        Path,
        typer.Argument(help="A published folder or .gguf file, or a run's folder.", metavar="IN"),
    ],
    out: Annotated[Path, typer.Argument(help="A new folder.", metavar="OUT")],
    to: Annotated[
        Destination | None, typer.Option(help="What OUT becomes; what IN is not, by default.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="To hub: stored, float32, bfloat16, float16, fp8.")
    ] = "stored",
    mtp: Annotated[
        str, typer.Option(help="Multi-token-prediction layers of a published IN: use or drop.")
    ] = "use",
    step: Annotated[int | None, typer.Option(help="Which checkpoint of a run; the newest.")] = None,
    max_shard_gb: Annotated[float, typer.Option(help="To hub: size of one file, GB.")] = 5.0,
    allow_nan: Annotated[
        bool, typer.Option("--allow-nan", help="Take arrays with NaN or infinity.")
    ] = False,
    allow_unused: Annotated[
        bool, typer.Option("--allow-unused", help="Leave arrays that are not known here.")
    ] = False,
) -> None:
    """Convert IN to OUT: a published folder to a run that `generate` reads, or back.

    Nothing is written before IN was checked, and OUT appears when it is complete.
    """
    # Weights go through the host's memory, which is larger than one accelerator's.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxfound.models.weights import open_hub
    from jaxfound.models.weights.errors import WeightsError
    from jaxfound.models.weights.folder import CONFIG

    started_s = time.monotonic()
    console = open_console()
    published = (source / CONFIG).is_file() or not (source / "config.yaml").is_file()
    to = to or ("jaxfound" if published else "hub")
    check_options(to, published=published, dtype=dtype, mtp=mtp, step=step)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WeightsError(f"{out} is there already: give a new folder, or remove it first")
    if published:
        hub = open_hub(source, mtp="drop" if mtp == "drop" else "use", allow_unused=allow_unused)
        for line in hub.report():
            console.print(line, markup=False)
        if to == "jaxfound":
            hub_to_run(hub, out, allow_nan=allow_nan)
        else:
            hub_to_hub(hub, out, dtype=format_of(dtype), gb=max_shard_gb, allow_nan=allow_nan)
    else:
        run_to_hub(source, out, dtype=format_of(dtype), step=step, gb=max_shard_gb)
    console.print(f"{out}: written in {time.monotonic() - started_s:.1f} s", markup=False)
    if to == "jaxfound":
        words = ""
        if not has_tokenizer(source):
            words = " --tokenizer FILE"
            console.print(f"{source} has no tokenizer.json: the run's is byte", markup=False)
        console.print(f"next: jaxfound generate {out} PROMPT{words}", markup=False)


def check_options(
    to: Destination, *, published: bool, dtype: str, mtp: str, step: int | None
) -> None:
    """Refuse options that would be ignored.

    Raises:
        WeightsError: names the option.
    """
    from jaxfound.models.weights.errors import WeightsError

    if not published and to == "jaxfound":
        raise WeightsError("IN is a run already; --to jaxfound takes a published folder")
    if to == "jaxfound" and dtype != "stored":
        raise WeightsError(
            f"--dtype={dtype} is for --to hub: a run's weights are float32, which holds every "
            "published format unrounded; precision.compute of its config.yaml says how it computes"
        )
    if mtp not in ("use", "drop"):
        raise WeightsError(f"--mtp takes use or drop; got {mtp!r}")
    if not published and mtp == "drop":
        raise WeightsError("--mtp is for a published IN")
    if published and step is not None:
        raise WeightsError("--step is for a run; IN is a published folder")


def format_of(name: str) -> "ExportFormat":
    """Return the format of that name.

    Raises:
        WeightsError: if there is none.
    """
    from typing import get_args

    from jaxfound.models.weights.errors import WeightsError
    from jaxfound.models.weights.outgoing import ExportFormat

    found = next((word for word in get_args(ExportFormat) if word == name), None)
    if found is None:
        raise WeightsError(f"--dtype takes {', '.join(get_args(ExportFormat))}; got {name!r}")
    return found


def hub_to_run(hub: "Hub", out: Path, *, allow_nan: bool) -> None:
    """Write published weights as step 0 of a run: config.yaml, checkpoints/0 and hub."""
    from jaxfound.config.load import save as save_config
    from jaxfound.models.weights import load_weights
    from jaxfound.models.weights.origin import save_origin
    from jaxfound.models.weights.writer import NewFolder
    from jaxfound.resources.checkpoint.saving import save_unchanging
    from jaxfound.resources.checkpoint.storage import OrbaxStorage
    from jaxfound.resources.run_directory import RunDirectory

    cfg = run_config(hub, out)
    arrays = load_weights(hub, allow_nan=allow_nan)
    with NewFolder(out) as folder:
        there = RunDirectory(folder)
        save_unchanging(there.checkpoints, 0, arrays._asdict(), storage=OrbaxStorage())
        save_config(cfg, there.config)
        save_origin(hub.folder, folder / HUB)
        save_gguf_tokenizer(hub.folder.path, folder / HUB)


def save_gguf_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer that a .gguf file holds as the Hub's files; nothing for a folder."""
    from jaxfound.data.gguf_tokenizer import tokenizer_files
    from jaxfound.models.weights.gguf import SUFFIX, read_gguf

    if source.suffix != SUFFIX:
        return
    for name, data in tokenizer_files(read_gguf(source).metadata, place=str(source)).items():
        (folder / name).write_bytes(data)


def has_tokenizer(source: Path) -> bool:
    """True when a published folder or .gguf file brings its tokenizer."""
    from jaxfound.models.weights.gguf import SUFFIX

    return source.suffix == SUFFIX or (source / "tokenizer.json").is_file()


def run_config(hub: "Hub", out: Path) -> "RunConfig":
    """Return the config of a run that was converted and not trained here."""
    from jaxfound.config.load import parse

    words = out.absolute() / HUB / "tokenizer.json"
    name = re.sub(r"[^A-Za-z0-9._-]", "-", out.name).lstrip("._-")
    compute = "float32" if hub.config.dtype == "float32" else "bfloat16"
    values: dict[str, object] = {
        "name": name or "converted",
        "runs_dir": str(out.absolute().parent),
        "model": hub.model.model_dump(mode="json"),
        "precision": {"compute": compute},
        "data": {"tokenizer": str(words) if has_tokenizer(hub.folder.path) else "byte"},
        "train": {"steps": 1, "batch_size": 1, "seq_len": min(hub.model.max_positions, 2048)},
    }
    return parse(values, place=hub.folder.place)


def hub_to_hub(hub: "Hub", out: Path, *, dtype: "ExportFormat", gb: float, allow_nan: bool) -> None:
    """Write published weights in another format, some rows of one array in memory at a time."""
    from jaxfound.models.weights import reformat_hub
    from jaxfound.models.weights.origin import copy_companions

    def beside(folder: Path) -> None:
        copy_companions(hub.folder.path, folder)
        save_gguf_tokenizer(hub.folder.path, folder)

    reformat_hub(
        hub,
        out,
        dtype=dtype,
        max_shard_bytes=int(gb * 1e9),
        allow_nan=allow_nan,
        beside=beside,
    )


def run_to_hub(run: Path, out: Path, *, dtype: "ExportFormat", step: int | None, gb: float) -> None:
    """Write the weights of a run's checkpoint as a published folder, one array at a time."""
    from jaxfound.config.load import load as load_config
    from jaxfound.models.weights import export_hub
    from jaxfound.models.weights.origin import copy_companions, load_origin
    from jaxfound.resources.run_directory import RunDirectory

    there = RunDirectory(run)
    model = load_config(there.config).model
    checkpoint = Checkpoint(there.checkpoints, model, step=step)
    export_hub(
        out,
        model,
        checkpoint.read,
        dtype=dtype,
        origin=load_origin(run / HUB),
        max_shard_bytes=int(gb * 1e9),
        beside=lambda folder: copy_companions(run / HUB, folder),
    )


class Checkpoint:
    """The weights of one committed step, read some rows at a time; its files are checked first.

    Args:
        directory: folder of the steps.
        model: what the weights are of.
        step: which; the newest intact one by default.
    Raises:
        CheckpointError: if there is none, it is damaged, or it holds another model.
    """

    def __init__(self, directory: Path, model: "ModelConfig", *, step: int | None) -> None:
        from jaxfound.models.build import Frame
        from jaxfound.resources.checkpoint.leaves import check_fits, describe, flatten
        from jaxfound.resources.checkpoint.storage import OrbaxStorage
        from jaxfound.resources.checkpoint.tiers import STATE

        manifest = intact(directory, step=step)
        leaves = flatten(Frame(model).shapes()._asdict())
        self._names = {path[-1]: path for path in leaves}
        where = directory / str(manifest.step)
        check_fits(manifest.leaves, describe(leaves), where=str(where), allow_unread=True)
        self._state = where / STATE
        self._storage = OrbaxStorage()

    def read(self, path: str) -> "StoredArray":
        """Return one array by its dotted path."""
        return self._storage.open(self._state, self._names[path])


def intact(directory: Path, *, step: int | None) -> "Manifest":
    """Return the manifest of a committed step whose files are as they were written.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    from jaxfound.resources.checkpoint import (
        CheckpointError,
        CheckpointManager,
        DamagedCheckpointError,
    )
    from jaxfound.resources.checkpoint.sums import find_damage

    with CheckpointManager(directory, keep=0) as checkpoints:
        found = checkpoints.latest_good() if step is None else step
        if found is None:
            raise CheckpointError(f"{directory} holds no committed checkpoint")
        manifest = checkpoints.manifest(found)
    # The newest was verified while it was looked for.
    damage = [] if step is None else find_damage(directory / str(found), manifest.files)
    if damage:
        raise DamagedCheckpointError(f"step {found} is damaged: {'; '.join(damage)}")
    return manifest
