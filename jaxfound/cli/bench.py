"""`jaxfound bench`: measurements, printed and written as JSON."""

import typer

from jaxfound.cli.bench_bound import bound_command
from jaxfound.cli.bench_checkpoints import checkpoints_command
from jaxfound.cli.bench_decode import decode_command
from jaxfound.cli.bench_kernels import kernels_command, tune_command
from jaxfound.cli.bench_ledger import ledger_command
from jaxfound.cli.bench_pipeline import pipeline_command
from jaxfound.cli.bench_serve import bench_serve_command
from jaxfound.cli.bench_train import train_command

bench_app = typer.Typer(no_args_is_help=True, help="Measure, and write what was measured.")


@bench_app.callback()
def bench() -> None:
    """Measure, and write what was measured."""


bench_app.command("kernels")(kernels_command)
bench_app.command("tune")(tune_command)
bench_app.command("train")(train_command)
bench_app.command("bound")(bound_command)
bench_app.command("pipeline")(pipeline_command)
bench_app.command("ledger")(ledger_command)
bench_app.command("serve")(bench_serve_command)
bench_app.command("decode")(decode_command)
bench_app.command("checkpoints")(checkpoints_command)
