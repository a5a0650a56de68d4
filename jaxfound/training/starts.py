"""What each start of a run trained with, and whether another start may go on from there."""

from jax.sharding import Mesh

from jaxfound.config.run import RunConfig
from jaxfound.config.schema import ConfigError
from jaxfound.data.bins import Manifest
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.metrics import MetricsWriter, read_metrics
from jaxfound.resources.platform import package_versions, source_commit
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.training.events import TrainingError


def check_rows(there: RunDirectory, data: Manifest, *, saved: int | None) -> None:
    """Refuse to go on with other rows than the run was trained on until now.

    The position in the data is a number of steps: in other rows it is another place.

    Args:
        there: the run's folder.
        data: of the prepared bins.
        saved: the newest step that is saved; None, and the run begins again.

    Raises:
        ConfigError: says which bins there were and are, and how to go on.
    """
    if saved is None or not there.starts.exists():
        return
    # A start that was killed while it wrote leaves a torn line, which is passed over.
    told = [record["data"] for record in read_metrics(there.starts) if record["event"] == "start"]
    before = told[-1] if told else data.key
    if before != data.key:
        raise ConfigError(
            f"{there.path} was trained on the rows {before} and would go on in {data.key}: the "
            "text of data.source is another one now, or this version cuts it up another way. A "
            "resumed run would repeat or skip data. Give the new run its own name=…, and "
            f"train.init_from={there.path} if it is to begin with these weights"
        )


def record_start(there: RunDirectory, data: Manifest, mesh: Mesh, *, first_step: int) -> None:
    """Append one record: the bins, devices, versions and commit that steps from here on come from.

    Args:
        data: of the prepared bins; its key is a hash of the text and of all that cut it up.
        first_step: steps that are done already.
    """
    devices = list(mesh.devices.flat)
    with MetricsWriter(there.starts) as starts:
        starts.write(
            "start",
            step=first_step,
            data=data.key,
            train_tokens=data.train.tokens,
            device=devices[0].device_kind,
            num_devices=len(devices),
            versions=package_versions(),
            commit=source_commit(),
        )


def is_done(cfg: RunConfig, checkpoints: CheckpointManager) -> bool:
    """Return whether the run's last step is saved already.

    Raises:
        TrainingError: if more steps are saved than the config asks for.
    """
    latest = checkpoints.latest()
    if latest is not None and latest > cfg.train.steps:
        raise TrainingError(
            f"{checkpoints.directory} holds step {latest}, but train.steps={cfg.train.steps}: the "
            "run is past its end. Raise train.steps, or give the new run its own name=…"
        )
    return latest == cfg.train.steps
