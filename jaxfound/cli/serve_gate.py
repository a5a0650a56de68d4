"""The gate before a run is served in another precision: shown to lose little, or refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.config.precision import PrecisionConfig

# Of the text that the gate reads: enough for an interval, minutes on a CPU.
MIN_TOKENS = 4000
SEQ_LEN = 512


def switched(model: Path, overrides: Sequence[str]) -> "PrecisionConfig | None":
    """Return the precision that overrides ask for, if it is not the model's own.

    Raises:
        CheckpointError, ConfigError, WeightsError: the model or an override cannot be read.
    """
    if not any(word.startswith("precision") for word in overrides):
        return None
    from jaxfound.serving.open_model import planned_config

    own, asked = planned_config(model).precision, planned_config(model, overrides).precision
    return None if asked == own else asked


def pass_gate(
    model: Path, precision: "PrecisionConfig", *, data: str, max_drop: float, step: int | None
) -> None:
    """Compare a precision with the run's own on a text, as `jaxfound evaluate --max-drop` does.

    Args:
        model: a run's folder.
        precision: that is asked for.
        data: the text.
        max_drop: most that the loss may rise, nats a token, the whole 95 % interval.
        step: which checkpoint.

    Raises:
        ConfigError: the model is no run, or the precision is not shown to be within `max_drop`.
    """
    from jaxfound.cli.evaluate import config_of, gate_line
    from jaxfound.config.schema import ConfigError
    from jaxfound.resources.run_directory import RunDirectory
    from jaxfound.training.compare import compare

    if not RunDirectory(model).config.exists():
        raise ConfigError(
            f"{model} is served in its own precision only: another one has to pass a gate, which "
            f"reads runs. `jaxfound convert {model} RUN` makes one"
        )
    open_console().print(f"the gate of the new precision reads {data} …", markup=False)
    cfg = config_of(model, [], data=data, seq_len=None)[1]
    limit = min(SEQ_LEN, cfg.model.max_positions)
    there, cfg = config_of(model, [], data=data, seq_len=limit)
    found = compare(
        cfg, there, precision=cfg.precision, versus=precision, step=step, min_tokens=MIN_TOKENS
    )
    assert found.gap is not None
    verdict = found.gap.verdict(max_drop)
    line = gate_line(found.gap, max_drop, verdict=verdict)
    if verdict != "passed":
        raise ConfigError(f"{line}. Serve without the override, or see `jaxfound evaluate`")
    open_console().print(line, markup=False)
