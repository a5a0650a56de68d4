"""The whole of what was asked: one frozen tree, and the checks that span its sections."""

from typing import Literal

from pydantic import model_validator

from jaxfound.config.model import ModelConfig
from jaxfound.config.parallel import ParallelConfig
from jaxfound.config.precision import PrecisionConfig
from jaxfound.config.schema import Section, key
from jaxfound.config.serve import ServeConfig
from jaxfound.config.train import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    TrainConfig,
    WatchConfig,
)

FORMAT_VERSION = 1


class RunConfig(Section):
    """One run: model, mesh, precision, data, optimizer, steps, checkpoints, watch."""

    format_version: Literal[1] = key(FORMAT_VERSION, "version of this file's layout")
    name: str = key(
        "run", "the run's folder under runs_dir", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
    )
    runs_dir: str = key("runs", "folder of all runs", min_length=1)
    seed: int = key(0, "of initial weights and of the data's order", ge=0, lt=2**31)
    preset: str = key("", "name of the model preset that `model` started from")
    model: ModelConfig = key(..., "what a checkpoint stores")
    parallel: ParallelConfig = key(ParallelConfig(), "what this cluster does")
    precision: PrecisionConfig = key(PrecisionConfig(), "number formats")
    data: DataConfig = key(DataConfig(), "text and tokens")
    optimizer: OptimizerConfig = key(OptimizerConfig(), "update rule and schedule")
    train: TrainConfig = key(..., "steps and batch")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), "saving")
    watch: WatchConfig = key(WatchConfig(), "hangs and stragglers")
    serve: ServeConfig = key(ServeConfig(), "the server")

    @model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        check_batch_divides(self)
        check_scan_divides(self)
        check_schedule_fits(self)
        check_lengths_fit(self)
        check_stages_fit_rules(self)
        return self


def check_batch_divides(cfg: RunConfig) -> None:
    """Every micro-batch has the same number of rows."""
    rows, pieces = cfg.train.batch_size, cfg.parallel.num_microbatches
    if rows % pieces:
        raise ValueError(
            f"train.batch_size={rows} rows cannot be cut into parallel.num_microbatches={pieces} "
            f"equal micro-batches: {rows} % {pieces} = {rows % pieces}. "
            f"Use num_microbatches in {divisors(rows)}"
        )


def check_scan_divides(cfg: RunConfig) -> None:
    """A scan step holds between one layer and all of them."""
    step = cfg.parallel.layers_per_scan_step
    if step != "all" and not 1 <= step <= cfg.model.num_layers:
        raise ValueError(
            f"parallel.layers_per_scan_step={step} is not between 1 and "
            f"model.num_layers={cfg.model.num_layers}; use `all` for no scan"
        )


def check_schedule_fits(cfg: RunConfig) -> None:
    """Warm-up and final decay fit into the run."""
    warm, decay, steps = cfg.optimizer.warmup_steps, cfg.optimizer.decay_steps, cfg.train.steps
    if warm > steps:
        raise ValueError(f"optimizer.warmup_steps={warm} is more than train.steps={steps}")
    if cfg.optimizer.schedule == "wsd" and warm + decay > steps:
        raise ValueError(
            f"optimizer.warmup_steps={warm} + decay_steps={decay} is more than train.steps={steps}"
        )


def check_lengths_fit(cfg: RunConfig) -> None:
    """A row is no longer than the model is meant for."""
    if cfg.train.seq_len > cfg.model.max_positions:
        raise ValueError(
            f"train.seq_len={cfg.train.seq_len} is longer than "
            f"model.max_positions={cfg.model.max_positions}: shorten the rows, or raise "
            "max_positions and choose a rope.scaling"
        )


def check_stages_fit_rules(cfg: RunConfig) -> None:
    """In a pipeline every stage runs one program, so that no rule names layers."""
    named = [rule.pattern for rule in cfg.precision.rules if rule.layers is not None]
    if named and cfg.parallel.pipeline > 1:
        raise ValueError(
            f"precision.rules: pattern {named[0]!r} names layers by number, and with "
            f"parallel.pipeline={cfg.parallel.pipeline} all stages run one program. Give a format "
            "to operations of every layer, e.g. layers.ffn.*, or set parallel.pipeline=1"
        )
    if cfg.train.non_finite == "demote" and cfg.parallel.pipeline > 1:
        raise ValueError(
            f"train.non_finite=demote takes layers out of fp8, and with parallel.pipeline="
            f"{cfg.parallel.pipeline} all stages run one program. Use train.non_finite=stop or skip"
        )


def divisors(n: int) -> list[int]:
    """Return the divisors of `n`, smallest first."""
    return [d for d in range(1, n + 1) if n % d == 0]
