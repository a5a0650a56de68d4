"""`jaxfound`: every command, its errors in one line each, its exit codes.

Exit codes: 0 done, or nothing left to do; 1 a run ended early, or a gate was not passed, for a
reason it printed; 2 what was asked cannot be done (config, plan, data, checkpoint); 130
interrupted twice. A process that an agent started ends with the codes of
jaxfound/resources/launch/exits.py.
"""

import os
import sys
from collections.abc import Sequence

import typer

from jaxfound.cli.bench import bench_app
from jaxfound.cli.ckpt import ckpt_app
from jaxfound.cli.config import config_command
from jaxfound.cli.convert import convert_command
from jaxfound.cli.curves import curves_command
from jaxfound.cli.data import data_app
from jaxfound.cli.doctor import doctor_command
from jaxfound.cli.evaluate import evaluate_command
from jaxfound.cli.generate import generate_command
from jaxfound.cli.goodput import goodput_command
from jaxfound.cli.launch import WORDS_LAST, launch_command
from jaxfound.cli.launcher_flags import native_args, native_launch_args
from jaxfound.cli.logs import logs_app
from jaxfound.cli.model import model_command
from jaxfound.cli.plan import plan_command
from jaxfound.cli.precision import precision_command
from jaxfound.cli.probe import probe_command
from jaxfound.cli.replay import replay_command
from jaxfound.cli.report import report_command
from jaxfound.cli.schedule import schedule_command
from jaxfound.cli.serve import serve_command
from jaxfound.cli.train import train_command
from jaxfound.cli.verify import verify_command, verify_stack_command

app = typer.Typer(
    name="jaxfound",
    help="The compute foundation for large models in JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("train")(train_command)
app.command("launch", context_settings=WORDS_LAST)(launch_command)
app.command("generate")(generate_command)
app.command("serve")(serve_command)
app.command("convert")(convert_command)
app.command("evaluate")(evaluate_command)
app.command("precision")(precision_command)
app.command("report")(report_command)
app.command("curves")(curves_command)
app.command("plan")(plan_command)
app.command("verify")(verify_command)
app.command("verify-stack")(verify_stack_command)
app.command("schedule")(schedule_command)
app.command("model")(model_command)
app.command("config")(config_command)
app.command("probe")(probe_command)
app.command("replay")(replay_command)
app.command("goodput")(goodput_command)
app.command("doctor")(doctor_command)
app.add_typer(data_app, name="data")
app.add_typer(ckpt_app, name="ckpt")
app.add_typer(bench_app, name="bench")
app.add_typer(logs_app, name="logs")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line on `args` (sys.argv's by default) and exit with its code."""
    from jaxfound.resources.logs import configure_logging
    from jaxfound.resources.platform import default_to_cpu

    default_to_cpu()
    configure_logging("WARNING")
    args = list(sys.argv[1:] if args is None else args)
    try:
        if args[:1] == ["train"]:
            args[1:] = native_args(args[1:])
        if args[:1] == ["launch"]:
            args[1:] = native_launch_args(args[1:])
        app(args)
    except refusals() as error:
        typer.echo(f"error: {error}", err=True)
        end_job_because(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def end_job_because(error: Exception) -> None:
    """End a process of a job with the code that says what `error` means to its agent."""
    from jaxfound.resources.launch.place import COORDINATOR

    if COORDINATOR not in os.environ:
        return
    from jaxfound.resources.launch.join import leave_because

    leave_because(error, is_refusal=True)


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors that say what is wrong; evaluated only when something was raised."""
    named: list[type[Exception]] = []
    # Rooms that were never imported cannot have raised.
    for module, name in (
        ("jaxfound.config.schema", "ConfigError"),
        ("jaxfound.data.errors", "DataError"),
        ("jaxfound.parallelism.legal", "PlanError"),
        ("jaxfound.parallelism.pipeline.schedule", "ScheduleError"),
        ("jaxfound.models.weights.errors", "WeightsError"),
        ("jaxfound.training.events", "TrainingError"),
        ("jaxfound.resources.checkpoint.errors", "CheckpointError"),
        ("jaxfound.resources.control", "PeerError"),
        ("jaxfound.serving.loadgen", "TargetError"),
        ("pallas_kernels.registry", "KernelError"),
    ):
        if module in sys.modules:
            named.append(getattr(sys.modules[module], name))
    return tuple(named)


if __name__ == "__main__":
    main()
