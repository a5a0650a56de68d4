"""What each start of a run trained with, kept beside its config."""

from jax.sharding import Mesh

from jaxfound.data.bins import Manifest
from jaxfound.resources.metrics import MetricsWriter
from jaxfound.resources.platform import package_versions, source_commit
from jaxfound.resources.run_directory import RunDirectory


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
