"""What fp8 costs a run, a layer and an operation at a time, and the rules that keep the loss."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxfound.config.layer_formats import MOST_SEGMENTS
from jaxfound.config.precision import PrecisionConfig
from jaxfound.config.run import RunConfig
from jaxfound.config.schema import ConfigError
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.resources.topology import Device
from jaxfound.training.gap import Rise, rise_of
from jaxfound.training.operand_numbers import OperandNumbers
from jaxfound.training.precision_bench import Bench, operands_of, prepared
from jaxfound.training.rule_list import (
    By,
    Unit,
    fewest_kept,
    operations_of,
    rules_keeping,
    units_of,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """The loss with some products in fp8, beside that with none.

    Attributes:
        name: pattern of what is in fp8.
        rise: of the loss.
    """

    name: str
    rise: Rise


# Named, and asked by path and number of a layer which products are in fp8.
type Tried = Callable[[str, Callable[[str, int], bool]], Trial]


@dataclass(frozen=True)
class PrecisionReport:
    """What fp8 costs on a text.

    Attributes:
        step: training steps that the weights have seen.
        seq_len: most tokens of a piece that are predicted.
        num_tokens: tokens that were predicted.
        device: kind of device.
        compute: the format that fp8 is compared with.
        loss: in that format, nats a token.
        all_fp8: every layer in fp8.
        layers: one layer in fp8, the dearest first.
        operations: one operation of all layers of a stack in fp8, the dearest first.
        products: one operation of one layer in fp8, the dearest first, of the dearest layers.
        rules: keep the rise within `max_drop`, the upper end of its interval too.
        rise: of the loss under them.
        max_drop: nats a token.
        operands: numbers of every operand of every layer's linear operations, in order.
    """

    step: int
    seq_len: int
    num_tokens: int
    device: str
    compute: str
    loss: float
    all_fp8: Trial
    layers: tuple[Trial, ...]
    operations: tuple[Trial, ...]
    products: tuple[Trial, ...]
    rules: PrecisionConfig
    rise: Rise
    max_drop: float
    operands: tuple[OperandNumbers, ...]


def examine(
    cfg: RunConfig,
    there: RunDirectory,
    *,
    max_drop: float,
    by: By = "layers",
    detailed: int = 1,
    step: int | None = None,
    min_tokens: int | None = None,
    devices: Sequence[Device] | None = None,
) -> PrecisionReport:
    """Return what fp8 costs a run's weights on `cfg.data.source`, and the rules that keep the loss.

    Args:
        cfg: the run's config; the formats that its rules say are left aside.
        there: the folder of the run that has the weights.
        max_drop: how much higher the loss may be than in the compute format, nats a token.
        by: what rules name.
        detailed: how many of the dearest layers are tried an operation at a time.
        step: which checkpoint; the newest intact one by default.
        min_tokens: whole documents are read until they hold this many; None reads all.
        devices: every device of the job by default.

    Raises:
        ConfigError, PlanError, DataError: what cannot be done, before any weight is read.
        CheckpointError: if there are no weights, they are damaged, or of another model.
    """
    if by == "layers" and cfg.parallel.pipeline > 1:
        raise ConfigError(
            f"parallel.pipeline={cfg.parallel.pipeline}: rules cannot name layers in a pipeline, "
            "whose stages run one program. Rank operations: --by operations"
        )
    devices = jax.devices() if devices is None else devices
    bench, found = prepared(cfg, there, step=step, min_tokens=min_tokens, devices=devices)
    plain = bench.nats(bench.choice(lambda path, n: False))

    tried = make_tried(bench, plain)
    ranked = {each: rank(units_of(bench.stacks, each), tried) for each in ("layers", "operations")}
    dearest = [unit for unit, _ in ranked["layers"][:detailed]]
    products = rank(operations_of(dearest, bench.stacks), tried)
    rules, rise = fitting(bench, ranked[by], tried, max_drop=max_drop)
    return PrecisionReport(
        step=found,
        seq_len=bench.rows.seq_len,
        num_tokens=bench.rows.num_tokens,
        device=devices[0].device_kind,
        compute=cfg.precision.compute,
        loss=float(plain.sum()) / bench.rows.num_tokens,
        all_fp8=tried("*", lambda path, n: True),
        layers=tuple(trial for _, trial in ranked["layers"]),
        operations=tuple(trial for _, trial in ranked["operations"]),
        products=tuple(trial for _, trial in products),
        rules=rules,
        rise=rise,
        max_drop=max_drop,
        operands=tuple(operands_of(cfg, bench)),
    )


def make_tried(bench: Bench, plain: np.ndarray) -> Tried:
    """Return what reads the text with some products in fp8.

    Args:
        bench: weights and text.
        plain: the loss of each piece with none in fp8, nats [P].
    """

    def tried(name: str, is_fp8: Callable[[str, int], bool]) -> Trial:
        rise = rise_of(bench.nats(bench.choice(is_fp8)) - plain, bench.rows)
        log.info("precision.tried", extra={"fp8": name, "rise": rise.loss_increase})
        return Trial(name, rise)

    return tried


def rank(units: Sequence[Unit], tried: Tried) -> list[tuple[Unit, Trial]]:
    """Return units with the loss when only they are in fp8, the dearest first.

    A loss that is no number comes before all others.
    """
    found = [(unit, tried(unit.pattern, unit.holds)) for unit in units]

    def cost(entry: tuple[Unit, Trial]) -> float:
        rise = entry[1].rise.loss_increase
        return rise if np.isfinite(rise) else np.inf

    return sorted(found, key=cost, reverse=True)


def fitting(
    bench: Bench,
    ranked: Sequence[tuple[Unit, Trial]],
    tried: Tried,
    *,
    max_drop: float,
) -> tuple[PrecisionConfig, Rise]:
    """Return rules that keep as few of the dearest units from fp8 as the bound allows.

    The rules that are returned are the ones whose loss was measured.
    """

    def keeping(count: int) -> tuple[PrecisionConfig, Rise]:
        rules = rules_keeping(
            [unit for unit, _ in ranked[:count]],
            bench.stacks,
            compute=bench.frame.execution.precision.compute,
            most_segments=MOST_SEGMENTS,
        )
        name = f"all but {count}"
        return rules, tried(name, lambda path, n: rules.format_of(path, n) == "fp8").rise

    return fewest_kept(len(ranked), keeping, lambda found: found[1].high <= max_drop)
